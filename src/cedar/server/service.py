"""What the endpoints share, and the steps that those that generate have in common."""

import logging
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from starlette.requests import ClientDisconnect, Request

from cedar.inputs.chat import ChatProtocol, ChatRequest, ImageRef
from cedar.server.door import Door
from cedar.server.errors import ClientGone
from cedar.server.metrics import Metrics
from cedar.server.protocols import EngineLike, Prompt
from cedar.server.relay import Relay
from cedar.server.settings import ServerSettings
from cedar.server.streaming import EventStream

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Service", "body_of", "fitting", "new_id", "notes_header"]

_LOG = logging.getLogger("cedar.server.text")
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)
_MOST_NAMES = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """The parts of one server.

    pictures: the images of a request, fetched and opened within the limits; blocks. decoding: how
    many requests may do that at a time, as each may hold some hundred megabytes while it does.
    """

    engine: EngineLike
    settings: ServerSettings
    protocol: ChatProtocol
    metrics: Metrics
    door: Door
    pictures: Callable[[Sequence[ImageRef]], "list[Image]"]
    decoding: CapacityLimiter

    async def prompt(self, parsed: ChatRequest) -> Prompt:
        """The tokens of a request, its images fetched, opened and put in their places."""
        if not parsed.images:
            return Prompt(tokens=parsed.tokens)

        def prepare() -> Prompt:
            return self.engine.place(parsed.tokens, self.pictures(parsed.images))

        return await to_thread.run_sync(prepare, limiter=self.decoding)

    def relay(self) -> Relay:
        """For the engine requests of one HTTP request."""
        return Relay(self.engine, most=self.settings.buffered_outputs)

    def stream(
        self, chunks: AsyncGenerator[bytes, None], relay: Relay, headers: Mapping[str, str]
    ) -> EventStream:
        """The response that sends these chunks, which come of the relay, and closes it."""
        return EventStream(
            chunks,
            stall_seconds=self.settings.stall_seconds,
            ping_seconds=self.settings.ping_seconds,
            close=relay.close,
            headers=headers,
        )

    def transcript(self, id: str) -> "Transcript":
        """For the log, if the operator wants texts there."""
        return Transcript(id, wanted=self.settings.log_text)


class Transcript:
    """Logs the texts of one request, each in one line, or does nothing at all."""

    def __init__(self, id: str, *, wanted: bool) -> None:
        self._id, self._wanted = id, wanted
        self._parts: dict[int, list[str]] = {}

    def prompt(self, text: str) -> None:
        """What was asked."""
        if self._wanted:
            _LOG.info("%s prompt: %r", self._id, text)

    def answer(self, number: int, text: str, *, last: bool) -> None:
        """A piece of an answer; the last one writes all of it."""
        if self._wanted:
            parts = self._parts.setdefault(number, [])
            parts.append(text)
            if last:
                _LOG.info("%s answer %d: %r", self._id, number, "".join(parts))


async def body_of(request: Request) -> bytes:
    """The body; `ClientGone` if it never comes."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientGone("the client left within the body") from None


def fitting(engine: EngineLike, prompt_tokens: int, asked: int | None) -> int:
    """How many tokens an answer may have: what was asked for, within the model's and cache's room.

    At least one, so that a prompt that leaves no room is refused by the engine, which says why.
    """
    room = engine.info.room - prompt_tokens
    return max(room if asked is None else min(asked, room), 1)


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(16)


def notes_header(ignored: Iterable[str]) -> dict[str, str]:
    """The header that names fields without effect.

    Names inside of objects may be the client's own, so that their characters, length and number
    are bounded here.
    """
    names = list(dict.fromkeys(_UNSAFE.sub("?", name)[:100] for name in ignored))
    if not names:
        return {}
    shown = names[:_MOST_NAMES] + (["..."] if len(names) > _MOST_NAMES else [])
    return {"X-Cedar-Ignored": ", ".join(shown)}
