"""uvicorn's HTTP/1.1 connections with limits on what comes before and after a request.

uvicorn bounds the bytes of headers (with h11, not with httptools) but not their time, and waits
without end for the rest of a body that was refused. `uvicorn_settings` is what a server should be
started with.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from cedar.server.errors import ApiError, error_body

__all__ = ["Connection", "uvicorn_settings"]

# Above the middleware's own limit, so that all but floods are answered in the API's form by it.
HEAD_BYTES = 64 << 10
CONNECTIONS = 500


def uvicorn_settings() -> dict[str, Any]:
    """Keyword arguments for ``uvicorn.Config``.

    Connections as below; no websockets; no access log, since its lines have paths and queries of
    users; at most `CONNECTIONS` at once (503 beyond).
    """
    return {
        "http": Connection,
        "ws": "none",
        "h11_max_incomplete_event_size": HEAD_BYTES,
        "timeout_keep_alive": 5,
        "limit_concurrency": CONNECTIONS,
        "access_log": False,
        "server_header": False,
    }


class Connection(H11Protocol):
    """A connection that does not wait for ever.

    head_seconds: from the first byte of a request (of the first one, from the connection) until its
    headers are complete; 408. linger_seconds: from the end of a response until the rest of the
    request has come; what comes is dropped, because closing at once would lose the response.
    """

    head_seconds = 20.0
    linger_seconds = 5.0

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for = ""
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait("")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch(idle="head")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(idle="")  # uvicorn's own timer closes idle connections

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is not HTTP, and for heads that are too long."""
        limit = self.config.h11_max_incomplete_event_size or HEAD_BYTES
        if len(self.conn.trailing_data[0]) > limit:
            self._refuse(ApiError(431, "The headers are too long.", code="headers_too_large"))
        else:
            self._refuse(ApiError(400, "The request is not valid HTTP.", code="invalid_http"))

    def _watch(self, idle: str) -> None:
        if self.transport.is_closing():
            self._wait("")
        elif self._refused:
            self._wait("end")
        elif self.conn.their_state is h11.IDLE:
            self._wait(idle)
        elif self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._wait("end")
        else:
            self._wait("")

    def _wait(self, what: str) -> None:
        """Bound the wait for "head" or "end" from now on, unless it is bounded already."""
        if what == self._waits_for:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waits_for = what
        if what:
            seconds = self.head_seconds if what == "head" else self.linger_seconds
            self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self.transport.is_closing():
            return
        if self._waits_for == "head" and self.conn.trailing_data[0]:
            self._refuse(
                ApiError(
                    408,
                    f"The headers did not arrive within {self.head_seconds:g} seconds.",
                    code="head_timeout",
                )
            )
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application; the connection is of no further use."""
        running = self.cycle is not None and not self.cycle.response_complete
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # within a response: it cannot be answered otherwise
            return
        path = self.scope["path"] if running else ""
        body = json.dumps(error_body(path, error)).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(
            status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status]
        )
        self.transport.write(
            self.conn.send(response)
            + self.conn.send(h11.Data(data=body))
            + self.conn.send(h11.EndOfMessage())
        )
        if running:  # the application may not answer any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._watch(idle="")
