"""A request as it is handed in, and the running state the scheduler keeps of it."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from cedar.errors import RequestError

__all__ = ["Request", "RequestState", "Sequence"]


class Limits(Protocol):
    """What the scheduler must know of the sampling parameters."""

    @property
    def max_tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt and how to continue it.

    id: unique among the requests that have not ended.
    tokens: the prompt, at least one token.
    params: sampling parameters; the scheduler reads ``max_tokens`` only.
    priority: more is sooner; see `Scheduler` for what a step of it is worth.
    deadline, arrival: seconds of the clock whose time `Scheduler.step` is given.
    images: not looked at here. image_hashes: the first prompt position of every image and the
    SHA-256 of its pixels, by which the prefix cache tells images with equal tokens apart.
    reuse_prefix: False computes every prompt token (for scores of all of them).
    Raises `RequestError` for what cannot be served.
    """

    id: str
    tokens: tuple[int, ...]
    params: Limits
    priority: int = 0
    deadline: float | None = None
    arrival: float = 0.0
    images: tuple[Any, ...] = ()
    image_hashes: tuple[tuple[int, bytes], ...] = ()
    reuse_prefix: bool = True

    def __post_init__(self) -> None:
        if not self.tokens:
            raise RequestError(
                f"request {self.id!r}: tokens is empty; expected at least one token "
                "(the begin-of-text token)."
            )
        if self.params.max_tokens < 1:
            raise RequestError(
                f"request {self.id!r}: max_tokens is {self.params.max_tokens}; expected 1 or more."
            )
        if not math.isfinite(self.arrival):
            raise RequestError(
                f"request {self.id!r}: arrival is {self.arrival}; expected a finite time."
            )
        if self.deadline is not None and math.isnan(self.deadline):
            raise RequestError(f"request {self.id!r}: deadline is nan; expected a time or None.")
        before, last = -1, len(self.tokens) - 1
        for position, digest in self.image_hashes:
            if not before < position <= last:
                raise RequestError(
                    f"request {self.id!r}: image_hashes names position {position}; expected "
                    f"ascending positions of the prompt, {before + 1} to {last} here."
                )
            before = position
            if len(digest) != 32:
                raise RequestError(
                    f"request {self.id!r}: the image hash at position {position} has "
                    f"{len(digest)} bytes; expected the 32 of a SHA-256."
                )


class RequestState(StrEnum):
    """WAITING: holds neither pages nor a slot. PREFILL: known tokens are stored. DECODE: new
    tokens are generated.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way. Others may read everything and set `drafts`; the rest is the
    scheduler's.

    order: rank among all sequences, smallest first; never changes.
    generated: new tokens so far. computed: how many of `tokens` are stored.
    pages: in order of position; may reach beyond `computed`. slot: None while waiting.
    cached_pages: how many of the first pages are in the prefix cache, these very ones.
    drafts: tokens to verify in the next step, behind the last of `tokens`.
    hit_tokens: how many came from the prefix cache when it was last admitted, in pages named
    hit_keys. match_tokens: how many the cache had, of which it may have taken less.
    snapshots: by position, opaque; those not yet handed to the prefix cache.
    preemptions: how often it lost its pages. finish_reason: None until it ends.
    """

    request: Request
    order: tuple[float, int]
    generated: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    cached_pages: int = 0
    slot: int | None = None
    state: RequestState = RequestState.WAITING
    drafts: tuple[int, ...] = ()
    hit_tokens: int = 0
    hit_keys: tuple[bytes, ...] = ()
    match_tokens: int = 0
    snapshots: dict[int, object] = field(default_factory=dict)
    preemptions: int = 0
    finish_reason: str | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_length(self) -> int:
        return len(self.request.tokens)

    @property
    def length(self) -> int:
        """Tokens that are known: prompt and generated ones."""
        return len(self.request.tokens) + len(self.generated)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.request.tokens, *self.generated)

    def slice(self, start: int, stop: int) -> tuple[int, ...]:
        """``tokens[start:stop]`` without building the whole."""
        prompt = self.prompt_length
        if start >= prompt:
            return tuple(self.generated[start - prompt : stop - prompt])
        return self.tokens[start:stop] if stop > prompt else self.request.tokens[start:stop]
