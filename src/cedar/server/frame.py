"""Around every request: an id, one line in the log, and an answer even to faults of ours."""

import logging
import re
import secrets
import time
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedar.errors import CedarError
from cedar.server.errors import ApiError, ClientGone, as_api_error, error_response
from cedar.server.faults import internal_error, report
from cedar.server.metrics import Metrics

__all__ = ["ErrorAnswers", "RequestFrame", "request_id"]

_LOG = logging.getLogger("cedar.server")
_GIVEN_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GONE = 499


def request_id(scope: Scope) -> str:
    """The id of the request that `RequestFrame` chose."""
    id: str = scope["state"]["request_id"]
    return id


class RequestFrame:
    """Gives every request an id, which the response has in X-Request-Id, counts and logs it.

    An id that the client sent is kept. The log has the route, not the path, which is the client's
    text. paths: those that have no part that a client may choose.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if _GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = id
        start, status = time.monotonic(), _GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            path = scope["path"]
            usual = path if path in self._paths else "other"
            route: str = getattr(scope.get("route"), "path", None) or usual
            method = scope["method"] if scope["method"].isalpha() else "?"
            self._metrics.answered(route, status)
            took = time.monotonic() - start
            _LOG.info("%s %s %s %d %.3f s", id, method, route, status, took)


class ErrorAnswers:
    """Answers whatever an endpoint raises, in the form of its API.

    It stands inside the headers for other origins, so that a web page can read errors, too.
    retry_after: seconds that a client should wait if there was no room for its request.
    """

    def __init__(self, app: ASGIApp, retry_after: int) -> None:
        self._app, self._retry_after = app, retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientGone:
            return
        except ApiError as refused:
            error = refused
        except CedarError as refused:
            error = as_api_error(refused, retry_after=self._retry_after)
        except Exception as fault:
            report(fault, request_id(scope))
            error = internal_error(request_id(scope))
        else:
            return
        if not started:
            await error_response(scope["path"], error)(scope, receive, send)
