"""Server-sent events, to readers that may be slow or gone."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cedar.inputs.chat import Event
from cedar.server.errors import ClientGone

__all__ = ["EventStream", "attended", "encode_events"]

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

PING = b": waiting\n\n"


def encode_events(events: Iterable[Event]) -> bytes:
    """Events as they go over the wire; the data of each is one line."""
    parts = []
    for name, data in events:
        if name is not None:
            parts.append(f"event: {name}\n")
        parts.append(f"data: {data}\n\n")
    return "".join(parts).encode()


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client leaves: then `ClientGone`.

    The body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client has left")
        return task.result()
    finally:
        await _ended(task, gone)


class EventStream(Response):
    """Sends what ``chunks`` gives, and ends with ``close`` as soon as the client leaves.

    A client that takes nothing for ``stall_seconds`` counts as gone. While there is nothing to
    send, a comment every ``ping_seconds`` keeps proxies from closing the connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        stall_seconds: float,
        ping_seconds: float,
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._chunks, self._close = chunks, close
        self._stall, self._ping = stall_seconds, ping_seconds
        self._endings: list[Callable[[], None]] = []
        quiet = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.init_headers({**quiet, **(headers or {})})

    def on_end(self, ending: Callable[[], None]) -> None:
        """Call this once the stream has ended, whatever happened."""
        self._endings.append(ending)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await attended(receive, self._send(send))
        except ClientGone as gone:
            # Nothing can be answered any more, and returning closes the connection.
            _LOG.debug("stream left: %s", gone)
        finally:
            await self._chunks.aclose()
            # Chunks that were never asked for have not begun, and so cannot close anything.
            await self._close()
            for ending in self._endings:
                ending()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._pass(send, start)
        following: asyncio.Task[bytes | None] | None = None
        try:
            while True:
                following = following or asyncio.create_task(_next(self._chunks))
                done, _ = await asyncio.wait({following}, timeout=self._ping)
                if not done:
                    await self._pass(send, _body(PING))
                    continue
                chunk = following.result()
                following = None
                if chunk is None:
                    break
                await self._pass(send, _body(chunk))
        finally:
            if following is not None:
                await _ended(following)
        await self._pass(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, send: Send, message: dict[str, Any]) -> None:
        try:
            # Not wait_for, which in Python 3.11 may swallow the cancellation of a client that left.
            async with asyncio.timeout(self._stall):
                await send(message)
        except TimeoutError:
            raise ClientGone("the client takes nothing any more") from None


def _body(chunk: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


async def _next(chunks: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(chunks, None)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait until they are over; what they raise was seen or is of no use."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
