"""The OpenAPI document, from the tables by which requests are read and our answers' schemas."""

from collections.abc import Mapping
from typing import Any

from cedar import __version__
from cedar.inputs.chat import Api
from cedar.server.answer_schemas import ANSWERS, ERROR, MESSAGES_ERROR, STREAMED_EVENT, STREAMS
from cedar.server.completion_request import completion_record
from cedar.server.errors import is_messages
from cedar.server.service import Service
from cedar.server.tokens import detokenize_record, tokenize_record

__all__ = ["describe"]

# Path -> method, operation, what it does, and the schema of its body.
_OPERATIONS: Mapping[str, tuple[str, str, str, str | None]] = {
    "/v1/chat/completions": (
        "post",
        "createChatCompletion",
        "Answer a conversation (OpenAI).",
        "ChatRequest",
    ),
    "/v1/responses": (
        "post",
        "createResponse",
        "Answer a conversation (OpenAI Responses); nothing is stored.",
        "ResponsesRequest",
    ),
    "/v1/messages": (
        "post",
        "createMessage",
        "Answer a conversation (Anthropic).",
        "MessagesRequest",
    ),
    "/v1/messages/count_tokens": (
        "post",
        "countMessageTokens",
        "How long the prompt would be (Anthropic).",
        "CountRequest",
    ),
    "/v1/completions": (
        "post",
        "createCompletion",
        "Continue plain text (OpenAI).",
        "CompletionRequest",
    ),
    "/tokenize": (
        "post",
        "tokenize",
        "Token ids of a text or a conversation (vLLM).",
        "TokenizeRequest",
    ),
    "/detokenize": ("post", "detokenize", "The text of token ids (vLLM).", "DetokenizeRequest"),
    "/tokenizer_info": ("get", "tokenizerInfo", "Special tokens (vLLM).", None),
    "/v1/models": ("get", "listModels", "What is served.", None),
    "/v1/models/{model}": ("get", "retrieveModel", "One served model.", None),
    "/health": ("get", "health", "Whether the engine works.", None),
    "/ready": ("get", "ready", "Whether requests are taken.", None),
    "/metrics": ("get", "metrics", "Figures for Prometheus.", None),
}
_OPEN = ("/health", "/ready", "/metrics")  # no key is asked for
_ERRORS: Mapping[int, str] = {
    400: "A field, or the body, is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The Host header names a host that this server does not answer for.",
    404: "The model is not served.",
    405: "The path does not take this method.",
    408: "The request took too long to arrive.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    429: "Too many requests, or a key's limit is reached; try again after Retry-After seconds.",
    431: "The headers are too long or too many.",
    500: "A fault of the server, which its log has under the request's id.",
    503: "The server ends, or its engine has stopped.",
}
_WITH_BODY = (413, 415, 429)


def describe(service: Service, *, keys: bool) -> dict[str, Any]:
    """The whole document. keys: whether the server asks for them."""
    schemas = _bodies(service) | {"Error": dict(ERROR), "MessagesError": dict(MESSAGES_ERROR)}
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
    paths: dict[str, Any] = {}
    for path, (method, name, summary, body) in _OPERATIONS.items():
        operation: dict[str, Any] = {
            "operationId": name,
            "summary": summary,
            "responses": _responses(path, body is not None, keys=keys),
        }
        if keys and path not in _OPEN:
            operation["security"] = [{"bearer": []}, {"header": []}]
        if body is not None:
            operation["requestBody"] = {"required": True, "content": _json(_ref(body))}
        if "{model}" in path:
            served = {"type": "string", "enum": list(service.settings.models)}
            parameter = {"name": "model", "in": "path", "required": True, "schema": served}
            operation["parameters"] = [parameter]
        paths[path] = {method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cedar", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _bodies(service: Service) -> dict[str, dict[str, Any]]:
    """The schemas of all bodies."""
    info, settings = service.engine.info, service.settings
    completion = completion_record(info.vocab_size, settings.max_choices)
    messages = service.protocol.schema(Api.MESSAGES)
    needed = [name for name in messages["required"] if name != "max_tokens"]
    text = tokenize_record().schema()
    found = {
        "ChatRequest": service.protocol.schema(Api.CHAT),
        "ResponsesRequest": service.protocol.schema(Api.RESPONSES),
        "MessagesRequest": messages,
        "CountRequest": messages | {"required": needed},
        "CompletionRequest": completion.schema(),
        "TokenizeTextRequest": text,
        "DetokenizeRequest": detokenize_record(info.vocab_size).schema(),
    }
    served = {"type": "string", "enum": list(settings.models)}
    for schema in found.values():
        optional = "model" not in schema["required"]
        model = {"anyOf": [served, {"type": "null"}]} if optional else served
        schema["properties"] = schema["properties"] | {"model": model}
    both = [_ref("TokenizeTextRequest"), _ref("ChatRequest")]
    return found | {"TokenizeRequest": {"anyOf": both}}


def _responses(path: str, has_body: bool, *, keys: bool) -> dict[str, Any]:
    error = _ref("MessagesError" if is_messages(path) else "Error")
    found = {"200": _success(path)}
    for status, text in _ERRORS.items():
        absent = (
            (status in _WITH_BODY and not has_body and not (path == "/ready" and status == 429))
            or (status == 404 and not has_body and path != "/v1/models/{model}")
            or (status == 401 and (not keys or path in _OPEN))
        )
        if not absent:
            headers = _header("X-Request-Id", "Names this request.")
            if status in (429, 503):
                headers |= _header("Retry-After", "Seconds.")
            found[str(status)] = {"description": text, "content": _json(error), "headers": headers}
    return found


def _success(path: str) -> dict[str, Any]:
    headers = _header("X-Request-Id", "Names this request.")
    if path == "/metrics":
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = _json(dict(ANSWERS[path]))
    if path in STREAMS:
        content["text/event-stream"] = {"schema": STREAMED_EVENT}
        headers |= _header("X-Cedar-Ignored", "Fields of the body that have no effect here.")
    return {"description": "Done.", "content": content, "headers": headers}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _header(name: str, text: str) -> dict[str, Any]:
    return {name: {"description": text, "schema": {"type": "string"}}}
