"""The shapes of tool declarations and tool choices in the three APIs."""

from cedar.inputs.chat.record import Either, Items, Object, Record, Tagged
from cedar.inputs.chat.shape import Anything, Choice, Flag, Shape, Text

__all__ = [
    "BLOCK_CHOICE",
    "BLOCK_TOOLS",
    "CHAT_CHOICE",
    "CHAT_TOOLS",
    "RESPONSE_CHOICE",
    "RESPONSE_TOOLS",
    "WEB_SEARCHES",
]

_NO_SERVER_TOOLS = "is not offered: tools run at the client. Declare a function."
_FUNCTION: dict[str, Shape] = {
    "name": Text(1),
    "description": Text(),
    "parameters": Object(),
    "strict": Flag(),
}
_NAMESPACE = Either((Text(1), Record({"name": Text(1), "description": Text()}, ("name",))))

CHAT_TOOLS = Items(
    Tagged(
        "type",
        {
            "function": Record(
                {
                    "function": Record({**_FUNCTION, "namespace": _NAMESPACE}, required=("name",)),
                    "namespace": _NAMESPACE,
                    "cache_control": Anything(),
                },
                required=("function",),
            )
        },
        refused={"custom": 'is not offered. Use "function" with one string parameter.'},
    )
)
_MODES = Choice(("auto", "none", "required"))
CHAT_CHOICE = Either(
    (
        _MODES,
        Tagged(
            "type",
            {
                "function": Record(
                    {"function": Record({"name": Text(1), "namespace": Text(1)}, ("name",))},
                    required=("function",),
                ),
                "allowed_tools": Record(
                    {
                        "allowed_tools": Record(
                            {
                                "mode": Choice(("auto", "required")),
                                "tools": Items(
                                    Record(
                                        {
                                            "type": Choice(("function",)),
                                            "function": Record({"name": Text(1)}, ("name",)),
                                        },
                                        required=("function",),
                                    ),
                                    fewest=1,
                                ),
                            },
                            required=("mode", "tools"),
                        )
                    },
                    required=("allowed_tools",),
                ),
            },
            refused={"custom": 'is not offered. Use "function".'},
        ),
    )
)

WEB_SEARCHES = ("web_search", "web_search_2025_08_26", "web_search_preview")
"""Tools of Responses that are dropped, and named among what is ignored."""

_RESPONSE_FUNCTION = Record(_FUNCTION, required=("name",))
RESPONSE_TOOLS = Items(
    Tagged(
        "type",
        {
            "function": _RESPONSE_FUNCTION,
            "namespace": Record(
                {
                    "name": Text(1),
                    "description": Text(),
                    "tools": Items(Tagged("type", {"function": _RESPONSE_FUNCTION}), fewest=1),
                },
                required=("name", "tools"),
            ),
            "custom": Record(
                {
                    "name": Choice(("apply_patch",)),
                    "description": Text(),
                    "format": Anything(),
                },
                required=("name",),
            ),
            **{
                name: Record(
                    {
                        "filters": Anything(),
                        "search_context_size": Anything(),
                        "user_location": Anything(),
                        "external_web_access": Anything(),
                    }
                )
                for name in WEB_SEARCHES
            },
        },
        refused=dict.fromkeys(
            (
                "apply_patch",
                "code_interpreter",
                "computer_use_preview",
                "file_search",
                "image_generation",
                "local_shell",
                "mcp",
                "shell",
            ),
            _NO_SERVER_TOOLS,
        ),
    )
)
RESPONSE_CHOICE = Either(
    (
        _MODES,
        Tagged(
            "type",
            {
                "function": Record({"name": Text(1)}, required=("name",)),
                "custom": Record({"name": Choice(("apply_patch",))}, required=("name",)),
                "allowed_tools": Record(
                    {
                        "mode": Choice(("auto", "required")),
                        "tools": Items(
                            Record(
                                {"type": Choice(("function",)), "name": Text(1)}, required=("name",)
                            ),
                            fewest=1,
                        ),
                    },
                    required=("mode", "tools"),
                ),
            },
        ),
    )
)

BLOCK_TOOLS = Items(
    Tagged(
        "type",
        {
            "custom": Record(
                {
                    "name": Text(1),
                    "description": Text(),
                    "input_schema": Object(),
                    "strict": Flag(),
                    "cache_control": Anything(),
                },
                required=("name", "input_schema"),
            )
        },
        default="custom",
    )
)
_ONE_CALL: dict[str, Shape] = {"disable_parallel_tool_use": Flag()}
BLOCK_CHOICE = Tagged(
    "type",
    {
        "auto": Record(_ONE_CALL),
        "any": Record(_ONE_CALL),
        "tool": Record({"name": Text(1), **_ONE_CALL}, required=("name",)),
        "none": Record({}),
    },
)
