"""Figures of a running engine: rates, cache hits, acceptance, bytes held."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cedar.engine.draft_plan import AcceptanceStats
from cedar.engine.limits import EngineLimits

__all__ = ["EngineStats", "Meter"]

_RECENT_STEPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot. Counts run from the start of the engine, times are in seconds.

    finished: samples by their finish reason. prompt_tokens: of admitted samples, of which
    cached_tokens were found in the prefix cache. snapshots: of the encoder's windows, held with
    it; snapshot_hits: prefix hits that went on from one. computed_tokens: tokens that the model
    ran, drafts included. drafted and accepted: by place in the draft block; accepted_length:
    tokens that a pass with drafting gives to a sequence. tokens_per_second: generated tokens over
    the last steps; busy_seconds: time spent in steps.
    pages_used: held by sequences or by the prefix cache; bytes_held: those pages and the slots
    of running sequences; bytes_reserved: everything that the pools and slots take.
    """

    waiting: int
    running: int
    finished: Mapping[str, int]
    steps: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    accepted_length: float
    busy_seconds: float
    tokens_per_second: float
    pages_used: int
    pages_total: int
    bytes_held: int
    bytes_reserved: int
    snapshots: int = 0
    snapshot_hits: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By place in the block: accepted over verified drafts, also behind a rejected one."""
        return tuple(
            right / tried for right, tried in zip(self.accepted, self.drafted, strict=True) if tried
        )


@dataclass(slots=True)
class Meter:
    """Adds up what the steps of an engine did. drawn: tokens of the step that is going on."""

    finished: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    snapshot_hits: int = 0
    drawn: int = 0
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    busy_seconds: float = 0.0
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def step(self, seconds: float) -> None:
        """A step has ended and took so long."""
        self.steps += 1
        self.busy_seconds += seconds
        self.generated_tokens += self.drawn
        self._recent.append((seconds, self.drawn))
        self.drawn = 0

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def stats(
        self,
        *,
        waiting: int,
        running: int,
        snapshots: int,
        pages_used: int,
        bytes_reserved: int,
        limits: EngineLimits,
    ) -> EngineStats:
        """A snapshot, with what others know."""
        return EngineStats(
            waiting=waiting,
            running=running,
            finished=dict(self.finished),
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            drafted=tuple(self.acceptance.verified),
            accepted=tuple(self.acceptance.accepted),
            accepted_length=self.acceptance.accepted_length,
            busy_seconds=self.busy_seconds,
            tokens_per_second=self.tokens_per_second,
            pages_used=pages_used,
            pages_total=limits.num_pages,
            bytes_held=pages_used * limits.page_bytes + running * limits.slot_bytes,
            bytes_reserved=bytes_reserved,
            snapshots=snapshots,
            snapshot_hits=self.snapshot_hits,
        )

    @property
    def tokens_per_second(self) -> float:
        """Over the last steps that gave a token."""
        seconds = sum(each for each, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds > 0 else 0.0
