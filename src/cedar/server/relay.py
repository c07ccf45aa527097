"""Outputs of one HTTP request's engine requests, merged, with a bound on what may wait."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing

from cedar.errors import CedarError
from cedar.server.errors import ApiError, ClientGone, as_api_error
from cedar.server.protocols import EngineLike, Output

__all__ = ["EngineFault", "Relay", "raise_failure"]


class EngineFault(Exception):
    """The engine failed at a request through no fault of the client; the cause says how."""


class Relay:
    """Reads the streams of engine requests as they come, whatever the speed of the client.

    Outputs carry the place of their request: the number of `take` calls before its own. If more
    than ``most`` outputs wait, the reader is taken for dead: the requests are cancelled and
    `batches` raises `ClientGone`. Closing it cancels what still runs.
    """

    def __init__(self, engine: EngineLike, *, most: int) -> None:
        self._engine, self._most = engine, most
        self._waiting: deque[tuple[int, Output]] = deque()
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._open = 0
        self._overrun = False
        self._fault: Exception | None = None

    def take(self, id: str) -> None:
        """Read this request from now on."""
        self._open += 1
        self._tasks.append(asyncio.create_task(self._read(len(self._tasks), id)))

    async def first(self) -> None:
        """Wait for the first output; raises `ApiError` if a request has failed by then."""
        await self._wait()
        for _, output in self._waiting:
            raise_failure(output, self._engine)

    async def batches(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """Everything that is new, whenever something is."""
        while await self._wait():
            batch = list(self._waiting)
            self._waiting.clear()
            yield batch

    async def close(self) -> None:
        """Cancel what still runs."""
        if any(not task.done() for task in self._tasks):
            # A task that is cancelled before its first step never enters the engine's stream,
            # and only leaving that stream ends the request.
            await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self) -> bool:
        """Whether something is there; False when all has ended."""
        while not self._waiting:
            if self._overrun:
                raise ClientGone("too slow: the outputs that waited were too many")
            if self._fault is not None:
                raise EngineFault from self._fault
            if not self._open:
                return False
            self._news.clear()
            await self._news.wait()
        return True

    async def _read(self, place: int, id: str) -> None:
        try:
            async with aclosing(self._engine.stream(id)) as outputs:
                async for output in outputs:
                    if len(self._waiting) >= self._most:
                        self._overrun = True
                        self._waiting.clear()
                        break
                    self._waiting.append((place, output))
                    self._news.set()
        except Exception as error:
            self._fault = error
        finally:
            self._open -= 1
            self._news.set()


def raise_failure(output: Output, engine: EngineLike) -> None:
    """Raise what an output says went wrong: `ApiError`, or `EngineFault` for a fault of ours."""
    if output.finish_reason == "error":
        error = output.error
        if not engine.alive:
            raise ApiError(503, "The engine has stopped.", code="engine_stopped") from error
        if isinstance(error, CedarError):
            raise as_api_error(error) from error
        raise EngineFault from error
    if output.finish_reason in ("cancelled", "deadline"):
        raise ApiError(
            503, "The request was ended before its answer was complete.", code=output.finish_reason
        )
