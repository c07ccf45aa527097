"""What the engine says about a request while it runs and when it ends."""

from dataclasses import dataclass, field

__all__ = ["Output", "TokenLogprob", "Usage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token's natural log probability, and the likeliest tokens at its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Figures of one sample so far; times are in seconds.

    cached_tokens: prompt tokens that came from the prefix cache when it was first admitted.
    drafted, accepted: draft tokens that were verified, and those of them that were right; also by
    their place in the draft block.
    steps: passes of the model that gave it tokens. seed: what would repeat it.
    prefill_seconds ends, and decode_seconds begins, with the first token.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_place: tuple[int, ...] = ()
    accepted_by_place: tuple[int, ...] = ()
    steps: int = 0
    preemptions: int = 0
    seed: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens after the first, over the time since the first."""
        later = self.generated_tokens - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else 0.0

    @property
    def accepted_per_step(self) -> float:
        """Tokens that a pass of the model gives; 1 without drafting."""
        return self.generated_tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What is new since the last output of the same sample.

    id: of the request; index: which of its ``n`` samples. text: new text that can no longer
    become part of a stop string; tokens: the new tokens, without one that ended the text.
    logprobs: one entry a token if they were asked for. prompt_logprobs: once, with the first
    output; None for the first prompt token. finish_reason: None while it runs, then "stop",
    "length", "cancelled", "deadline" or "error" (then ``error`` says what went wrong).
    stopped_by: the stop string that ended the text; None if none did (a stop token, say).

    selected: of watched requests, ascending: the first position of every entry that the last index
    source selected for the newest token that ran; each covers ``entry_tokens`` tokens. None where
    nothing is watched or ran.
    """

    id: str
    index: int
    text: str
    tokens: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    error: Exception | None = field(default=None, compare=False)
    stopped_by: str | None = None
    selected: tuple[int, ...] | None = None
    entry_tokens: int = 1
