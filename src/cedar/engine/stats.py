"""Figures of a running engine: rates, cache hits, acceptance, bytes held."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cedar.engine.draft_plan import AcceptanceStats

__all__ = ["EngineStats", "Meter"]

_RECENT_STEPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot. Counts run from the start of the engine, times are in seconds.

    finished: samples by their finish reason. prompt_tokens: of admitted samples, of which
    cached_tokens were found in the prefix cache. computed_tokens: tokens that the model ran,
    drafts included. drafted and accepted: by place in the draft block; accepted_length: tokens
    that a pass with drafting gives to a sequence. tokens_per_second:
    generated tokens over the last steps; busy_seconds: time spent in steps.
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
    """Adds up what the steps of an engine did."""

    finished: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    busy_seconds: float = 0.0
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def step(self, seconds: float, generated: int) -> None:
        """One step took so long and gave so many tokens."""
        self.steps += 1
        self.busy_seconds += seconds
        self.generated_tokens += generated
        self._recent.append((seconds, generated))

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    @property
    def tokens_per_second(self) -> float:
        """Over the last steps that gave a token."""
        seconds = sum(each for each, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds > 0 else 0.0
