"""The asynchronous face of the engine: many clients, one worker thread that runs the core."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from cedar.engine.assemble import EngineConfig, build_core
from cedar.engine.build import LoadedModel
from cedar.engine.core import EngineCore
from cedar.engine.images import ImageInput
from cedar.engine.limits import EngineLimits, sampling_of
from cedar.engine.output import Output
from cedar.engine.request import Request
from cedar.engine.sampler import SamplingParams, TokenMask
from cedar.engine.stats import EngineStats
from cedar.errors import RequestError
from cedar.inputs.images import ImageSettings
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["Engine", "EngineConfig", "EngineCore"]

_LOG = logging.getLogger(__name__)


class Engine:
    """Serves requests from one event loop; the model runs in one thread beside it.

    Use it as ``async with Engine(loaded) as engine``. All methods belong to the event loop in
    which it is used first; only the worker thread touches the core.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        self._begin(build_core(loaded, config or EngineConfig()))

    @classmethod
    def around(cls, core: EngineCore) -> "Engine":
        """An engine that runs a core which exists already."""
        engine = cls.__new__(cls)
        engine._begin(core)
        return engine

    def _begin(self, core: EngineCore) -> None:
        self._core = core
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._fault: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._queues: dict[str, asyncio.Queue[Output]] = {}
        self._open: dict[str, int] = {}  # samples of a request that have not ended
        self._streamed: set[str] = set()
        self._stats = core.stats()

    # --- what clients call ----------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once it is closed or stopped after a fault, and takes no request any more."""
        return self._fault is None and not self._closing

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._core.tokenizer

    @property
    def limits(self) -> EngineLimits:
        """What a request has to fit into."""
        return self._core.limits

    @property
    def image_settings(self) -> ImageSettings | None:
        """How pictures are cut for the model; None if it takes none."""
        return self._core.image_settings

    async def submit(
        self,
        prompt: Request | str | Sequence[int],
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        images: Sequence[ImageInput] = (),
        masks: Callable[[], TokenMask] | None = None,
        watch: bool = False,
    ) -> str:
        """Queue a request and return its id; `stream` gives what comes of it.

        The arguments are those of `EngineCore.request` and `EngineCore.submit`. ``masks`` is
        called in the engine's thread. Raises `RequestError` for whatever cannot be served, and
        `CapacityError` if too many requests wait.
        """
        loop = self._start()

        def add() -> str:
            request = prompt
            if not isinstance(request, Request):
                request = self._core.request(
                    request, params, id=id, priority=priority, timeout=timeout, images=images
                )
            self._core.submit(request, masks=masks, watch=watch)
            added.append(request.id)
            loop.call_soon_threadsafe(self._expect, request.id, sampling_of(request).n)
            return request.id

        added: list[str] = []
        try:
            return await self._call(add)
        except asyncio.CancelledError:  # the client is gone, so nobody would read it
            self._post(lambda: self._forget(added))
            raise

    async def stream(self, id: str) -> AsyncIterator[Output]:
        """Outputs of a request until all its samples have ended.

        A request has one stream. Leaving it early cancels the request.
        """
        if id not in self._queues:
            raise RequestError(f"request {id!r} is unknown here, or its stream has ended.")
        if id in self._streamed:
            raise RequestError(f"request {id!r} is streamed already; a request has one stream.")
        self._streamed.add(id)
        queue = self._queues[id]
        try:
            while id in self._open or not queue.empty():
                output = await queue.get()
                if output.finish_reason is not None:
                    self._ended(id)
                yield output
        finally:
            if self._open.pop(id, 0):
                self._post(lambda: self._core.cancel(id))
            self._queues.pop(id, None)
            self._streamed.discard(id)

    async def cancel(self, id: str) -> bool:
        """End a request now; False if it is not running (any more)."""
        self._start()
        return await self._call(lambda: self._core.cancel(id))

    def stats(self) -> EngineStats:
        """Figures as they were after the last step."""
        return self._stats

    async def close(self) -> None:
        """Cancel everything and end the worker thread. Calling it again does nothing."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        else:
            self._core.close()

    async def __aenter__(self) -> "Engine":
        self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- between the event loop and the worker --------------------------------------------

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RequestError("this engine serves another event loop; build one for each loop.")
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._work, name="cedar-engine", daemon=True)
            self._thread.start()
        return loop

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the worker thread, between two steps."""
        loop = self._start()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def command() -> None:
            value, failure = None, None
            try:
                if self._fault is not None or self._closing:
                    raise RequestError(self._gone())
                value = function()
            except Exception as error:
                failure = error
            loop.call_soon_threadsafe(settle, value, failure)

        if not self._post(command):
            raise RequestError(self._gone())
        return await future

    def _post(self, command: Callable[[], Any]) -> bool:
        """Queue something for the worker; False if it has ended."""
        with self._wake:
            if self._closing or self._fault is not None:
                return False
            self._commands.append(command)
            self._wake.notify()
        return True

    def _gone(self) -> str:
        if self._fault is not None:
            return f"the engine has stopped after a fault ({self._fault!r}); build a new one."
        return "the engine is closed; build a new one."

    def _expect(self, id: str, samples: int) -> None:
        self._queues[id] = asyncio.Queue()
        self._open[id] = samples

    def _forget(self, ids: Sequence[str]) -> None:
        """In the worker: end requests that nobody will stream."""
        assert self._loop is not None
        for id in ids:
            self._core.cancel(id)
            self._loop.call_soon_threadsafe(self._queues.pop, id, None)
            self._loop.call_soon_threadsafe(self._open.pop, id, None)

    def _ended(self, id: str) -> None:
        if id in self._open:
            self._open[id] -= 1
            if not self._open[id]:
                del self._open[id]

    def _deliver(self, outputs: Sequence[Output], stats: EngineStats) -> None:
        self._stats = stats
        for output in outputs:
            queue = self._queues.get(output.id)
            if queue is not None:  # its stream may have been left
                queue.put_nowait(output)

    # --- the worker -----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(
                        lambda: self._closing or self._commands or self._core.has_work
                    )
                    if self._closing:
                        break
                    commands = list(self._commands)
                    self._commands.clear()
                for command in commands:
                    command()
                self._publish(self._core.step())
        except Exception as error:  # a fault of ours: nobody may wait for ever
            _LOG.exception("the engine's loop failed")
            with self._wake:
                self._fault = error
        with contextlib.suppress(RuntimeError):  # the event loop may be gone
            self._publish(self._core.close(self._fault))
        with self._wake:
            left = list(self._commands)
            self._commands.clear()
        for command in left:  # each answers that the engine has ended
            with contextlib.suppress(RuntimeError):
                command()

    def _publish(self, outputs: Sequence[Output]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outputs, self._core.stats())
