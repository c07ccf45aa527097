"""Who may come in: keys, drains and overload are decided here, before a body is read."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cedar.server.errors import ApiError
from cedar.server.keys import Key, KeyBudget, Lease
from cedar.server.protocols import EngineLike
from cedar.server.settings import ServerSettings
from cedar.server.streaming import EventStream

__all__ = ["Door", "Visit", "visited"]


class Door:
    """Counts the requests that generate, and refuses those that cannot be taken.

    At most as many are inside as the engine can run and queue, so that those beyond are refused
    without any work (`most`). draining: nobody comes in any more.
    """

    def __init__(self, engine: EngineLike, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self.most = engine.info.max_running + engine.info.max_waiting
        self._budget = KeyBudget()
        self.inside = 0
        self.draining = False

    def check(self) -> None:
        """Raises `ApiError` 503 while the server ends, 429 if it is full."""
        later = {"Retry-After": str(self._settings.retry_after)}
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", headers=later)
        if not self._engine.alive:
            raise ApiError(503, "The engine has stopped.", code="engine_stopped", headers=later)
        if self.inside >= self.most:
            raise ApiError(
                429,
                f"The server is full: {self.inside} requests run or wait. Try again later.",
                code="overloaded",
                headers=later,
            )

    def enter(self, id: str, key: Key | None = None) -> "Visit":
        """Come in, unless `check` or the limits of the key refuse; id: of the HTTP request."""
        self.check()
        visit = Visit(self, id, None if key is None else self._budget.enter(key))
        self.inside += 1
        return visit


class Visit:
    """One request that came in, by its request id."""

    def __init__(self, door: Door, id: str, lease: Lease | None) -> None:
        self.id = id
        self._door: Door | None = door
        self._lease = lease

    def used(self, tokens: int) -> None:
        """The request has cost so many tokens more, prompt or generated."""
        if self._lease is not None:
            self._lease.spend(tokens)

    def leave(self) -> None:
        """The request has ended; may be called more than once."""
        if self._door is not None:
            self._door.inside -= 1
            self._door = None
        if self._lease is not None:
            self._lease.leave()


Handler = Callable[[Request, Visit], Awaitable[Response]]


def visited(door: Callable[[Request], Visit], handler: Handler) -> Any:
    """An endpoint whose request counts as inside until its response, or stream, has ended."""

    async def endpoint(request: Request) -> Response:
        visit = door(request)
        try:
            response = await handler(request, visit)
        except BaseException:
            visit.leave()
            raise
        if isinstance(response, EventStream):
            response.on_end(visit.leave)
        else:
            visit.leave()
        return response

    return endpoint
