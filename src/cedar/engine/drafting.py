"""When to draft, and how many of the drafted tokens to verify."""

import logging
from collections.abc import Sequence

from cedar.engine.draft_plan import StepProfile, plan_lengths
from cedar.engine.runner_protocol import RunnerProtocol
from cedar.engine.sampler import Sampler
from cedar.engine.speculate import KeyedDraft

__all__ = ["Drafter"]

_LOG = logging.getLogger(__name__)
_WEIGHT = 0.2  # of the newest time in the running mean
_PERIOD = 16


class Drafter:
    """Drafts with the runner's draft head and learns what a step of so many tokens takes.

    most: drafts of one sequence at most. profile: measured step times; without one they are
    learned from the steps themselves: every draft is verified until some are known and once in 16
    times from then on, so that a slow moment does not count for ever. If none is worth verifying,
    15 steps go by without drafting. How many are verified changes the speed, never the tokens.
    """

    def __init__(
        self, runner: RunnerProtocol, most: int, profile: StepProfile | None = None
    ) -> None:
        self._runner = runner
        self._most = most
        self._profile = profile
        self._seconds: dict[int, float] = {}
        self._learns = profile is None
        self._count = 0
        self._rest = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step that only decoded took so long."""
        if not self._learns or seconds <= 0:
            return
        before = self._seconds.get(tokens, seconds)
        self._seconds[tokens] = (1 - _WEIGHT) * before + _WEIGHT * seconds
        self._profile = StepProfile(list(self._seconds.items()))

    def propose(
        self, slots: Sequence[int], first: Sequence[int], samplers: Sequence[Sampler]
    ) -> list[tuple[int, ...]]:
        """Drafts worth verifying after each sequence's newest token, possibly none."""
        nothing: list[tuple[int, ...]] = [() for _ in slots]
        if not slots or self._most < 1:
            return nothing
        if self._rest > 0:
            self._rest -= 1
            return nothing
        try:
            proposal = self._runner.draft(slots, first, KeyedDraft(samplers))
        except Exception:  # texts go on without drafts
            _LOG.exception("drafting failed and is off from here on")
            self._most = 0
            return nothing
        tokens = proposal.tokens_NB[:, : self._most].tolist()
        confidence = proposal.confidence_NB[:, : self._most].double().sigmoid().tolist()
        explores = self._learns and self._count % _PERIOD == 0
        self._count += 1
        profile = _free if explores or self._profile is None else self._profile
        lengths = plan_lengths(confidence, profile)
        if self._learns and not any(lengths):
            self._rest = _PERIOD - 1
            self._count = 0  # and then verify everything once
        return [tuple(own[:length]) for own, length in zip(tokens, lengths, strict=True)]


def _free(tokens: int) -> float:
    """Steps per second while nothing is known: as if tokens cost nothing."""
    return 1.0
