"""Errors in the form of the API that was called.

Chat Completions, Completions and Responses: ``{"error": {"message", "type", "param", "code"}}``.
Messages: ``{"type": "error", "error": {"type", "message"}}``.
"""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from cedar.errors import CapacityError, CedarError
from cedar.inputs.chat import ProtocolError

__all__ = ["ApiError", "ClientGone", "as_api_error", "error_body", "error_response", "is_messages"]

# Status -> the type that OpenAI's and Anthropic's clients know it by.
_TYPES: Mapping[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    431: ("invalid_request_error", "request_too_large"),
    500: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
}


class ApiError(Exception):
    """An answer other than success.

    param: the field that is wrong, as a path into the body. code: a short name for programs.
    type: by default the one that the API has for the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.type, self.param, self.code = type, param, code
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The client has closed the connection; nobody is there to be answered."""


def as_api_error(error: CedarError, *, retry_after: int = 1) -> ApiError:
    """What a client is told about an error of its request: 400, or 429 if there is no room."""
    if isinstance(error, ProtocolError):
        return ApiError(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, CapacityError):
        return ApiError(
            429, str(error), code="overloaded", headers={"Retry-After": str(retry_after)}
        )
    return ApiError(400, str(error))


def is_messages(path: str) -> bool:
    """Whether a path belongs to the Messages API, whose errors have a form of their own."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The JSON of an error, as the API at this path has it."""
    usual, anthropic = _TYPES.get(error.status, _TYPES[500] if error.status >= 500 else _TYPES[400])
    if is_messages(path):
        message = error.message
        if error.param is not None and error.param not in message:
            message = f"{error.param}: {message}"
        kind = error.type or anthropic
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {
        "error": {
            "message": error.message,
            "type": error.type or usual,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(path: str, error: ApiError) -> JSONResponse:
    """The whole answer."""
    return JSONResponse(error_body(path, error), status_code=error.status, headers=error.headers)
