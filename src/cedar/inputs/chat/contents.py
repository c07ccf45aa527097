"""The shapes of messages, input items and content blocks in the three APIs."""

from cedar.inputs.chat.record import Either, Items, Object, Record, Refused, Tagged
from cedar.inputs.chat.shape import Anything, Choice, Flag, Text

__all__ = ["CHAT_MESSAGES", "INPUT_ITEMS", "MESSAGES", "SYSTEM_BLOCKS", "TASKS"]

TASKS = ("action", "query", "authority", "domain", "title", "read_url")
"""Quick tasks that a user message of Chat Completions may carry in ``task``."""

# Fields that steer caching or billing elsewhere; here the prefix cache is always on.
_CACHING = {"cache_control": Anything(), "prompt_cache_breakpoint": Anything()}
_DETAIL = Choice(("low", "high", "original", "auto"))
_NO_FILES = "is not offered. Put the file's text into the message."
_NO_AUDIO = "is not offered: the model reads text and images."

# --- Chat Completions ---------------------------------------------------------------------

_CHAT_TEXT = Record({"text": Text(), **_CACHING}, required=("text",))
_CHAT_IMAGE = Record(
    {
        "image_url": Either(
            (Text(1), Record({"url": Text(1), "detail": _DETAIL}, required=("url",)))
        ),
        **_CACHING,
    },
    required=("image_url",),
)
_NO_PARTS = {"file": _NO_FILES, "input_audio": _NO_AUDIO, "video_url": _NO_AUDIO}
_CHAT_PARTS = Either(
    (
        Text(),
        Items(Tagged("type", {"text": _CHAT_TEXT, "image_url": _CHAT_IMAGE}, refused=_NO_PARTS)),
    )
)
_CHAT_REFUSAL = Record({"refusal": Text()}, required=("refusal",))
_CHAT_CALL = Tagged(
    "type",
    {
        "function": Record(
            {
                "id": Text(),
                "index": Anything(),
                "namespace": Text(1),
                "function": Record(
                    {
                        "name": Text(1),
                        "namespace": Text(1),
                        "arguments": Either((Text(), Object())),
                    },
                    required=("name",),
                ),
            },
            required=("id", "function"),
        )
    },
    default="function",
    refused={"custom": 'is not offered. Use "function" with one string parameter.'},
)
_SYSTEM = Record({"content": _CHAT_PARTS}, required=("content",))
_NO_FUNCTION_CALL = Refused('is the old form and not offered. Use "tool_calls".')

CHAT_MESSAGES = Items(
    Tagged(
        "role",
        {
            "system": _SYSTEM,
            "developer": _SYSTEM,
            "user": Record(
                {"content": _CHAT_PARTS, "task": Choice(TASKS)},
                required=("content",),
            ),
            "assistant": Record(
                {
                    "content": Either(
                        (
                            Text(),
                            Items(Tagged("type", {"text": _CHAT_TEXT, "refusal": _CHAT_REFUSAL})),
                        )
                    ),
                    "reasoning_content": Text(),
                    "reasoning": Text(),
                    "refusal": Text(),
                    "tool_calls": Items(_CHAT_CALL),
                    "prefix": Flag(),
                    "function_call": _NO_FUNCTION_CALL,
                    "audio": Refused(_NO_AUDIO),
                    "annotations": Anything(),
                },
            ),
            "tool": Record(
                {"content": _CHAT_PARTS, "tool_call_id": Text()},
                required=("content", "tool_call_id"),
            ),
            "latest_reminder": Record({"content": Text()}, required=("content",)),
        },
        refused={"function": 'is the old form and not offered. Use the role "tool".'},
    ),
    fewest=1,
)

# --- Responses ----------------------------------------------------------------------------

_INPUT_TEXT = Record({"text": Text(), **_CACHING}, required=("text",))
_OUTPUT_TEXT = Record(
    {"text": Text(), "annotations": Anything(), "logprobs": Anything()}, required=("text",)
)
_INPUT_IMAGE = Record(
    {
        "image_url": Text(1),
        "detail": _DETAIL,
        "file_id": Refused("is not offered: no files are kept. Use image_url with a data URL."),
        **_CACHING,
    },
)
_NO_INPUTS = {"input_file": _NO_FILES, "input_audio": _NO_AUDIO}
_INPUT_PARTS = Either(
    (
        Text(),
        Items(
            Tagged(
                "type",
                {
                    "input_text": _INPUT_TEXT,
                    "output_text": _OUTPUT_TEXT,
                    "input_image": _INPUT_IMAGE,
                    "refusal": _CHAT_REFUSAL,
                },
                refused=_NO_INPUTS,
            )
        ),
    )
)
_OUTPUTS = Either(
    (
        Text(),
        Items(
            Tagged(
                "type",
                {"input_text": _INPUT_TEXT, "input_image": _INPUT_IMAGE},
                refused=_NO_INPUTS,
            )
        ),
    )
)
_ITEM = {"id": Text(), "status": Text()}
_NOT_KEPT = "is not offered: no responses are kept. Send the whole conversation as input."
_NO_SERVER_TOOLS = "is not offered: tools run at the client. Declare a function."

INPUT_ITEMS = Items(
    Tagged(
        "type",
        {
            "message": Record(
                {
                    "role": Choice(("user", "assistant", "system", "developer")),
                    "content": _INPUT_PARTS,
                    "phase": Anything(),
                    **_ITEM,
                },
                required=("role", "content"),
            ),
            "reasoning": Record(
                {
                    "summary": Items(Anything()),
                    "content": Items(
                        Tagged("type", {"reasoning_text": Record({"text": Text()}, ("text",))})
                    ),
                    "encrypted_content": Text(),
                    **_ITEM,
                }
            ),
            "function_call": Record(
                {
                    "call_id": Text(1),
                    "name": Text(1),
                    "namespace": Text(1),
                    "arguments": Text(),
                    **_ITEM,
                },
                required=("call_id", "name", "arguments"),
            ),
            "function_call_output": Record(
                {"call_id": Text(1), "output": _OUTPUTS, **_ITEM}, required=("call_id", "output")
            ),
            "custom_tool_call": Record(
                {"call_id": Text(1), "name": Text(1), "input": Text(), **_ITEM},
                required=("call_id", "name", "input"),
            ),
            "custom_tool_call_output": Record(
                {"call_id": Text(1), "output": _OUTPUTS, **_ITEM}, required=("call_id", "output")
            ),
        },
        default="message",
        refused={
            "item_reference": _NOT_KEPT,
            **{
                f"{name}_call{end}": _NO_SERVER_TOOLS
                for name in (
                    "apply_patch",
                    "code_interpreter",
                    "computer",
                    "file_search",
                    "image_generation",
                    "local_shell",
                    "mcp",
                    "shell",
                    "web_search",
                )
                for end in ("", "_output")
            },
        },
    ),
    fewest=1,
)

# --- Messages -----------------------------------------------------------------------------

_BLOCK_TEXT = Record({"text": Text(), "citations": Anything(), **_CACHING}, required=("text",))
_BLOCK_IMAGE = Record(
    {
        "source": Tagged(
            "type",
            {
                "base64": Record(
                    {"media_type": Text(1), "data": Text(1)}, required=("media_type", "data")
                ),
                "url": Record({"url": Text(1)}, required=("url",)),
            },
            refused={"file": "is not offered: no files are kept. Send the image as base64."},
        ),
        **_CACHING,
    },
    required=("source",),
)
_BLOCK_DOCUMENT = Record(
    {
        "source": Tagged(
            "type",
            {"text": Record({"data": Text(), "media_type": Text()}, required=("data",))},
            refused=dict.fromkeys(("base64", "url", "file", "content"), _NO_FILES),
        ),
        "title": Text(),
        **_CACHING,
    },
    required=("source",),
)
_RESULT_BLOCKS = {"text": _BLOCK_TEXT, "image": _BLOCK_IMAGE, "document": _BLOCK_DOCUMENT}
_NO_BLOCKS = {
    **dict.fromkeys(
        ("server_tool_use", "web_search_tool_result", "mcp_tool_use", "mcp_tool_result"),
        _NO_SERVER_TOOLS,
    ),
    "search_result": "is not offered. Send its text as a text block.",
    "container_upload": _NO_FILES,
}

SYSTEM_BLOCKS = Either((Text(), Items(Tagged("type", {"text": _BLOCK_TEXT}))))
MESSAGES = Items(
    Record(
        {
            "role": Choice(("user", "assistant", "system")),
            "content": Either(
                (
                    Text(),
                    Items(
                        Tagged(
                            "type",
                            {
                                **_RESULT_BLOCKS,
                                "thinking": Record(
                                    {"thinking": Text(), "signature": Text()},
                                    required=("thinking",),
                                ),
                                "redacted_thinking": Record({"data": Text()}),
                                "tool_use": Record(
                                    {
                                        "id": Text(1),
                                        "name": Text(1),
                                        "input": Object(),
                                        "caller": Anything(),
                                        **_CACHING,
                                    },
                                    required=("id", "name", "input"),
                                ),
                                "tool_result": Record(
                                    {
                                        "tool_use_id": Text(1),
                                        "content": Either(
                                            (Text(), Items(Tagged("type", _RESULT_BLOCKS)))
                                        ),
                                        **_CACHING,
                                    },
                                    required=("tool_use_id",),
                                ),
                            },
                            refused=_NO_BLOCKS,
                        )
                    ),
                )
            ),
        },
        required=("role", "content"),
    ),
    fewest=1,
)
