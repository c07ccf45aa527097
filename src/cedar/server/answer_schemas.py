"""JSON schemas of what the server answers; requests are described by what reads them."""

from collections.abc import Mapping
from typing import Any

__all__ = ["ANSWERS", "ERROR", "MESSAGES_ERROR", "STREAMED_EVENT", "STREAMS"]

Schema = Mapping[str, Any]


def _object(optional: tuple[str, ...] = (), /, **properties: Schema) -> dict[str, Any]:
    needed = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": needed}


def _list(items: Schema) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _maybe(schema: Schema) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _one(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_ANY: Schema = {"type": "object"}

ERROR: Schema = _object(
    error=_object(message=_TEXT, type=_TEXT, param=_maybe(_TEXT), code=_maybe(_TEXT))
)
"""Of every path but those of the Messages API."""
MESSAGES_ERROR: Schema = _object(type=_one("error"), error=_object(type=_TEXT, message=_TEXT))

_USAGE = _object(
    ("prompt_tokens_details", "completion_tokens_details"),
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
    completion_tokens_details=_ANY,
)
_CHAT = _object(
    id=_TEXT,
    object=_one("chat.completion"),
    created=_COUNT,
    model=_TEXT,
    choices=_list(
        _object(index=_COUNT, message=_object(role=_one("assistant")), finish_reason=_TEXT)
    ),
    usage=_USAGE,
)
_COMPLETION = _object(
    id=_TEXT,
    object=_one("text_completion"),
    created=_COUNT,
    model=_TEXT,
    choices=_list(
        _object(
            index=_COUNT,
            text=_TEXT,
            finish_reason=_one("stop", "length"),
            logprobs=_maybe(
                _object(
                    tokens=_list(_TEXT),
                    token_logprobs=_list(_maybe(_NUMBER)),
                    top_logprobs=_list(_maybe({"type": "object", "additionalProperties": _NUMBER})),
                    text_offset=_list(_COUNT),
                )
            ),
        )
    ),
    usage=_USAGE,
)
_RESPONSE = _object(
    id=_TEXT, object=_one("response"), status=_TEXT, model=_TEXT, output=_list(_ANY)
)
_MESSAGE = _object(
    id=_TEXT,
    type=_one("message"),
    role=_one("assistant"),
    model=_TEXT,
    content=_list(_object(type=_TEXT)),
    stop_reason=_TEXT,
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
)
_MODEL = _object(
    id=_TEXT,
    object=_one("model"),
    type=_one("model"),
    created=_COUNT,
    created_at=_TEXT,
    owned_by=_TEXT,
    display_name=_TEXT,
    lifecycle=_one("active"),
    max_input_tokens=_COUNT,
    max_tokens=_COUNT,
    max_model_len=_COUNT,
    accepts_images=_FLAG,
)

ANSWERS: Mapping[str, Schema] = {
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _RESPONSE,
    "/v1/messages": _MESSAGE,
    "/v1/messages/count_tokens": _object(input_tokens=_COUNT),
    "/v1/completions": _COMPLETION,
    "/tokenize": _object(
        count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_maybe(_list(_TEXT))
    ),
    "/detokenize": _object(prompt=_TEXT),
    "/tokenizer_info": _object(
        tokenizer_class=_TEXT,
        bos_token=_TEXT,
        eos_token=_TEXT,
        model_max_length=_COUNT,
        vocab_size=_COUNT,
        add_bos_token=_FLAG,
        chat_template={"type": "null"},
    ),
    "/v1/models": _object(
        object=_one("list"), data=_list(_MODEL), has_more=_FLAG, first_id=_TEXT, last_id=_TEXT
    ),
    "/v1/models/{model}": _MODEL,
    "/health": _object(status=_one("ok")),
    "/ready": _object(status=_one("ready"), requests=_COUNT),
}
"""Path -> the JSON of a success."""

STREAMED_EVENT: Schema = _object(("event",), event=_TEXT, data=_TEXT)
"""One server-sent event; its data is JSON, or ``[DONE]`` at the end of OpenAI's streams."""

STREAMS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")
"""Paths that answer with server-sent events if the request says ``stream``."""
