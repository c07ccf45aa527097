"""The server as a process: its socket, its signals, and how it ends."""

import asyncio
import errno
import logging
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from cedar.errors import BackendUnavailable
from cedar.server.app import service_of
from cedar.server.connection import uvicorn_settings

__all__ = ["AddressInUse", "DrainingServer", "open_socket"]

_LOG = logging.getLogger("cedar.server")
_SPARE_CONNECTIONS = 256  # beyond the requests that the door lets in: idle ones, and refusals


class AddressInUse(BackendUnavailable):
    """Another program listens at the address."""


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Clients that connect before the server runs wait. Raises `AddressInUse` if another program has
    the port, and `BackendUnavailable` for an address that this machine has not.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise BackendUnavailable(f"--host {host!r} names no address: {error}.") from None
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port {port} of {host} is in use, perhaps by another cedar serve. Choose another "
                "with --port, or end that program."
            ) from None
        raise BackendUnavailable(f"cannot listen at {host}, port {port}: {error}.") from None
    listener.setblocking(False)
    return listener


class DrainingServer(uvicorn.Server):
    """Ends in two steps.

    The first SIGTERM or Ctrl-C lets running requests finish, for ``drain_seconds`` at most, while
    new ones get 503; the second ends everything. close: ends the engine, and so what still runs.
    """

    def __init__(self, app: FastAPI, close: Callable[[], Awaitable[None]]) -> None:
        self._service, self._close = service_of(app), close
        self._end = math.inf
        connections = self._service.door.most + _SPARE_CONNECTIONS
        settings = uvicorn_settings()
        settings["limit_concurrency"] = max(settings["limit_concurrency"], connections)
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, timeout_graceful_shutdown=1, **settings
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        door = self._service.door
        if door.draining:
            self.should_exit = True
            return
        door.draining = True
        self._end = time.monotonic() + self._service.settings.drain_seconds
        name = signal.Signals(sig).name
        # Written later: a handler may interrupt the very lock that a log line needs.
        asyncio.get_event_loop().call_soon_threadsafe(
            _LOG.info, "%s: ending, %d requests still run", name, door.inside
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the engine first, so that streams that still run can say so."""
        await self._close()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now; called ten times a second."""
        door = self._service.door
        over = door.draining and (not door.inside or time.monotonic() >= self._end)
        return await super().on_tick(counter) or over
