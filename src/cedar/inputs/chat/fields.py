"""The fields of requests: what each endpoint knows, and what becomes of it.

`PARAMETERS` is the single source for checking bodies, for the tables in the docs and for the
request schemas of the server's API description.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cedar.inputs.chat.contents import CHAT_MESSAGES, INPUT_ITEMS, MESSAGES, SYSTEM_BLOCKS
from cedar.inputs.chat.record import Either, Items, Object, Record, Refused, Tagged
from cedar.inputs.chat.shape import Anything, Choice, Flag, Integer, Notes, Number, Shape, Text
from cedar.inputs.chat.tool_shapes import (
    BLOCK_CHOICE,
    BLOCK_TOOLS,
    CHAT_CHOICE,
    CHAT_TOOLS,
    RESPONSE_CHOICE,
    RESPONSE_TOOLS,
)
from cedar.inputs.chat.types import Api

__all__ = ["EFFORTS", "PARAMETERS", "SAMPLING", "Effect", "Parameter", "check_fields", "schema_of"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
"""Names of reasoning effort; "none" turns the reasoning off."""


class Effect(StrEnum):
    """What a known field does."""

    SUPPORTED = "supported"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A known field of a request body.

    shape: its values. effect: what they do. note: for the docs. required: must be there.
    quiet: values of an ignored field that need no mention, as they ask for nothing.
    """

    shape: Shape
    effect: Effect = Effect.SUPPORTED
    note: str = ""
    required: bool = False
    quiet: tuple[Any, ...] = ()


def _yes(shape: Shape, note: str = "", *, required: bool = False) -> Parameter:
    return Parameter(shape=shape, note=note, required=required)


def _no_effect(shape: Shape, note: str, *quiet: Any) -> Parameter:
    return Parameter(shape=shape, effect=Effect.IGNORED, note=note, quiet=quiet)


def _refused(note: str, *harmless: Any) -> Parameter:
    shape = Refused(f"is not offered. {note}", harmless)
    return Parameter(shape=shape, effect=Effect.REFUSED, note=note)


_EFFORT = Either((Choice(EFFORTS), Integer(1, 100)))
_LIMIT = Integer(1, 2**31 - 1)

SAMPLING: Mapping[str, Parameter] = {
    "temperature": _yes(Number(0, 100), "0 takes the most likely token; honoured while reasoning"),
    "top_p": _yes(Number(0, 1)),
    "top_k": _yes(Integer(-1, 2**31 - 1), "0 and -1 are off"),
    "min_p": _yes(Number(0, 1)),
    "repetition_penalty": _yes(Number(0, 100, above=True)),
    "presence_penalty": _yes(Number(-2, 2)),
    "frequency_penalty": _yes(Number(-2, 2)),
    "logit_bias": _yes(Object(Number(-100, 100)), "token id to what is added to its logit"),
    "seed": _yes(Integer(-(2**63), 2**63 - 1), "the same seed and request give the same text"),
    "stop_token_ids": _yes(Items(Integer(0, 2**31 - 1), 0, 64), "tokens that end the text"),
}
"""Sampling fields that all endpoints share."""

_MODEL = _yes(Text(1), "a name from /v1/models", required=True)
_STREAM = _yes(Flag(), "server-sent events")
_IDENTITY = "there are no accounts to tell apart"
_CACHING = "the prefix cache is always on"
_TIER = "there is one tier"
_METADATA = Object()

_CHAT_FORMAT = Tagged(
    "type",
    {
        "text": Record({}),
        "json_object": Record({}),
        "json_schema": Record(
            {
                "json_schema": Record(
                    {
                        "name": Text(),
                        "description": Text(),
                        "schema": Object(),
                        "strict": Flag(),
                    },
                    required=("schema",),
                )
            },
            required=("json_schema",),
        ),
        "regex": Record({"regex": Text(1)}, required=("regex",)),
    },
)
_CHAT: Mapping[str, Parameter] = {
    "model": _MODEL,
    "messages": _yes(CHAT_MESSAGES, "text, images, tool calls and results", required=True),
    "stream": _STREAM,
    "stream_options": _yes(
        Record({"include_usage": Flag(), "include_obfuscation": Flag()}),
        "include_usage adds a last chunk with the usage",
    ),
    "max_completion_tokens": _yes(_LIMIT, "reasoning included"),
    "max_tokens": _yes(_LIMIT, "the old name of max_completion_tokens"),
    **SAMPLING,
    "n": _yes(Integer(1, 128)),
    "stop": _yes(
        Either((Text(1), Items(Text(1), 0, 16))), "looked for in the answer, not in the reasoning"
    ),
    "logprobs": _yes(Flag()),
    "top_logprobs": _yes(Integer(0, 20)),
    "tools": _yes(CHAT_TOOLS, "functions, with namespaces"),
    "tool_choice": _yes(CHAT_CHOICE),
    "parallel_tool_calls": _yes(Flag(), "false: at most one call"),
    "response_format": _yes(_CHAT_FORMAT, "text, json_object, json_schema, regex; enforced"),
    "reasoning_effort": _yes(_EFFORT, "a name, or 1 to 100; none turns the reasoning off"),
    "thinking": _yes(
        Tagged(
            "type",
            {
                "enabled": Record({"budget_tokens": Integer(1)}),
                "adaptive": Record({}),
                "disabled": Record({}),
            },
        ),
        "reasoning on or off",
    ),
    "chat_template_kwargs": _yes(
        Record({"thinking": Flag(), "enable_thinking": Flag(), "reasoning_effort": _EFFORT}),
        "thinking, enable_thinking and reasoning_effort, as other servers take them",
    ),
    "user": _no_effect(Text(), _IDENTITY),
    "safety_identifier": _no_effect(Text(), _IDENTITY),
    "metadata": _no_effect(_METADATA, "nothing is stored", {}),
    "store": _no_effect(Flag(), "nothing is stored", False),
    "service_tier": _no_effect(Text(), _TIER, "auto", "default"),
    "prompt_cache_key": _no_effect(Text(), _CACHING),
    "prompt_cache_options": _no_effect(Object(), _CACHING),
    "prompt_cache_retention": _no_effect(Text(), _CACHING),
    "prediction": _no_effect(Object(), "the model drafts for itself"),
    "verbosity": _no_effect(Text(), "the model has no such setting", "medium"),
    "modalities": _refused("The model writes text.", ["text"]),
    "audio": _refused("The model writes text."),
    "functions": _refused("This is the old form; use tools."),
    "function_call": _refused("This is the old form; use tool_choice."),
    "web_search_options": _refused("Tools run at the client."),
    "moderation": _refused("Nothing is moderated."),
}

_TEXT_FORMAT = Tagged(
    "type",
    {
        "text": Record({}),
        "json_object": Record({}),
        "json_schema": Record(
            {"name": Text(), "description": Text(), "schema": Object(), "strict": Flag()},
            required=("schema",),
        ),
    },
)
_RESPONSES: Mapping[str, Parameter] = {
    "model": _MODEL,
    "input": _yes(Either((Text(), INPUT_ITEMS)), "text, images, calls, results, reasoning"),
    "instructions": _yes(Text(), "a system message before the input"),
    "stream": _STREAM,
    "stream_options": _no_effect(Object(), "no padding is added", {}),
    "max_output_tokens": _yes(_LIMIT, "reasoning included"),
    **SAMPLING,
    "top_logprobs": _yes(Integer(0, 20)),
    "include": _yes(Items(Text()), "message.output_text.logprobs"),
    "reasoning": _yes(
        Record({"effort": _EFFORT}), "effort: a name, or 1 to 100; none turns the reasoning off"
    ),
    "text": _yes(
        Record({"format": _TEXT_FORMAT}), "format: text, json_object, json_schema; enforced"
    ),
    "tools": _yes(RESPONSE_TOOLS, "functions, namespaces, apply_patch"),
    "tool_choice": _yes(RESPONSE_CHOICE),
    "parallel_tool_calls": _yes(Flag(), "false: at most one call"),
    "metadata": _yes(_METADATA, "sent back with the response"),
    "user": _no_effect(Text(), _IDENTITY),
    "safety_identifier": _no_effect(Text(), _IDENTITY),
    "store": _no_effect(Flag(), "nothing is stored", False),
    "service_tier": _no_effect(Text(), _TIER, "auto", "default"),
    "prompt_cache_key": _no_effect(Text(), _CACHING),
    "prompt_cache_options": _no_effect(Object(), _CACHING),
    "prompt_cache_retention": _no_effect(Text(), _CACHING),
    "truncation": _no_effect(Text(), "a prompt that does not fit is refused", "disabled"),
    "max_tool_calls": _no_effect(Integer(0), "it counts tools that a server runs"),
    "context_management": _no_effect(Anything(), "the context is what the client sends", []),
    "background": _refused("Requests run while the client waits.", False),
    "previous_response_id": _refused("No responses are kept; send the whole input."),
    "conversation": _refused("No conversations are kept; send the whole input."),
    "prompt": _refused("There are no prompt templates; send instructions and input."),
    "moderation": _refused("Nothing is moderated."),
}

_MESSAGES: Mapping[str, Parameter] = {
    "model": _MODEL,
    "messages": _yes(
        MESSAGES,
        "text, images, thinking, tool use and results; a last assistant message is continued",
        required=True,
    ),
    "system": _yes(SYSTEM_BLOCKS),
    "stream": _STREAM,
    "max_tokens": _yes(_LIMIT, "thinking included", required=True),
    **SAMPLING,
    "stop_sequences": _yes(Items(Text(1), 0, 16), "looked for in the answer, not in the thinking"),
    "thinking": _yes(
        Tagged(
            "type",
            {
                "enabled": Record({"budget_tokens": Integer(1), "display": Anything()}),
                "adaptive": Record({"display": Anything()}),
                "disabled": Record({}),
            },
        ),
        "on or off; budget_tokens and display have no effect, use output_config.effort",
    ),
    "output_config": _yes(
        Record(
            {
                "effort": _EFFORT,
                "format": Tagged(
                    "type", {"json_schema": Record({"schema": Object()}, required=("schema",))}
                ),
            }
        ),
        "effort: a name, or 1 to 100; format: json_schema, enforced",
    ),
    "tools": _yes(BLOCK_TOOLS, "tools that the client runs"),
    "tool_choice": _yes(BLOCK_CHOICE),
    "metadata": _no_effect(_METADATA, _IDENTITY, {}),
    "service_tier": _no_effect(Text(), _TIER, "auto", "standard_only"),
    "cache_control": _no_effect(Anything(), _CACHING),
    "inference_geo": _no_effect(Text(), "it runs here"),
    "speed": _no_effect(Text(), "there is one speed", "standard"),
    "diagnostics": _no_effect(Anything(), "there are none"),
    "context_management": _no_effect(Anything(), "the context is what the client sends", {}),
    "user_profile_id": _no_effect(Text(), _IDENTITY),
    "workspace_id": _no_effect(Text(), _IDENTITY),
    "betas": _no_effect(Anything(), "nothing is switched by it", []),
    "container": _refused("Tools run at the client."),
    "mcp_servers": _refused("Tools run at the client.", []),
}

PARAMETERS: Mapping[Api, Mapping[str, Parameter]] = {
    Api.CHAT: _CHAT,
    Api.RESPONSES: _RESPONSES,
    Api.MESSAGES: _MESSAGES,
}
"""Api -> field -> what is known about it."""


def check_fields(
    table: Mapping[str, Parameter], body: Mapping[str, Any], notes: Notes
) -> dict[str, Any]:
    """The body with checked values, without null fields; what has no effect goes to ``notes``.

    Raises `ProtocolError` for unknown fields, missing ones and wrong values.
    """
    found = _record(table).check(body, (), notes)
    for name, parameter in table.items():
        if parameter.effect is Effect.IGNORED and name in found:
            value = found.pop(name)
            if not any(value == one and type(value) is type(one) for one in parameter.quiet):
                notes.ignore((name,))
    return found


def schema_of(table: Mapping[str, Parameter]) -> dict[str, Any]:
    """The bodies that `check_fields` takes, as a JSON schema with the notes as descriptions."""
    found = _record(table).schema()
    for name, parameter in table.items():
        if parameter.note:
            found["properties"][name] |= {"description": f"{parameter.effect}: {parameter.note}"}
    return found


def _record(table: Mapping[str, Parameter]) -> Record:
    return Record(
        {name: parameter.shape for name, parameter in table.items()},
        required=tuple(name for name, parameter in table.items() if parameter.required),
        closed=True,
    )
