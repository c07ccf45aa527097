"""How many drafts to verify, and how many were accepted. Plain numbers, no torch."""

import bisect
import itertools
from collections.abc import Callable, Sequence

__all__ = ["AcceptanceStats", "StepProfile", "plan_lengths", "survival"]


def survival(confidences: Sequence[float]) -> list[float]:
    """``a_j = Π_{i ≤ j} c_i``: the chance that draft j is reached and accepted.

    confidences: probabilities, that is, the sigmoid of the draft head's raw output.
    """
    wrong = next((c for c in confidences if not 0.0 <= c <= 1.0), None)
    if wrong is not None:
        raise ValueError(f"a confidence is {wrong}; expected a probability, 0 to 1")
    return list(itertools.accumulate(confidences, lambda a, c: a * c))


def plan_lengths(
    confidences: Sequence[Sequence[float]], sps: Callable[[int], float]
) -> tuple[int, ...]:
    """How many drafts of each request to verify in the next step.

    confidences: for every running request those of its drafts, in order, possibly none. sps: steps
    per second of a step with so many tokens, as measured; each request runs one token besides its
    drafts. 0 says that so many do not fit.

    Expected tokens per second are ``τ · sps(B)``: τ counts one token per request plus the survival
    of every admitted draft, B the tokens run. Drafts are admitted in the order of their survival
    while that product grows, and the first that does not make it grow ends it. A later draft might;
    but its survival depends on the tokens before it, and a length that depends on what was drafted
    beyond it would favour some texts over others.
    """
    # A request's survivals never rise, so this order takes its drafts first to last.
    offers = sorted(
        (-a, j, request)
        for request, own in enumerate(confidences)
        for j, a in enumerate(survival(own))
    )
    lengths = [0] * len(confidences)
    tokens, batch = float(len(confidences)), len(confidences)
    best = tokens * sps(batch) if batch else 0.0
    for negative, _, request in offers:
        rate = (tokens - negative) * sps(batch + 1)
        if rate <= best:
            break
        tokens, batch, best = tokens - negative, batch + 1, rate
        lengths[request] += 1
    return tuple(lengths)


class StepProfile:
    """Steps per second by the number of tokens in a step, from measured times.

    points: (tokens, seconds) pairs, at least one. Between points seconds are linear; below the
    first they are the first's, beyond the last they grow in proportion. A larger step counts as no
    faster than a smaller one, so noise cannot make drafts look free.
    """

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        if not points or any(tokens < 1 or not seconds > 0 for tokens, seconds in points):
            raise ValueError(f"the profile is {list(points)}; expected (tokens, seconds) above 0")
        ordered = sorted(points)
        self._tokens = [tokens for tokens, _ in ordered]
        self._seconds = list(itertools.accumulate((s for _, s in ordered), max))

    def seconds(self, tokens: int) -> float:
        """Time of one step with so many tokens."""
        if tokens <= self._tokens[0]:
            return self._seconds[0]
        if tokens >= self._tokens[-1]:
            return self._seconds[-1] * tokens / self._tokens[-1]
        right = bisect.bisect_right(self._tokens, tokens)
        low, high = self._tokens[right - 1], self._tokens[right]
        share = (tokens - low) / (high - low)
        return self._seconds[right - 1] * (1 - share) + self._seconds[right] * share

    def __call__(self, tokens: int) -> float:
        return 1.0 / self.seconds(tokens)


class AcceptanceStats:
    """Counts of verified and accepted drafts by their place in the block."""

    def __init__(self) -> None:
        self.verified: list[int] = []
        """Drafts that ran through the model at each place, also behind a rejected one."""
        self.accepted: list[int] = []
        self.steps = 0
        """Verifications, also those without drafts."""

    def record(self, verified: int, accepted: int) -> None:
        """One verification of so many drafts."""
        if not 0 <= accepted <= verified:
            raise ValueError(f"{accepted} of {verified} drafts accepted")
        self.steps += 1
        missing = verified - len(self.verified)
        self.verified += [0] * missing
        self.accepted += [0] * missing
        for j in range(verified):
            self.verified[j] += 1
            self.accepted[j] += j < accepted

    def merge(self, other: "AcceptanceStats") -> None:
        """Add another's counts."""
        for mine, theirs in ((self.verified, other.verified), (self.accepted, other.accepted)):
            mine[:] = [a + b for a, b in itertools.zip_longest(mine, theirs, fillvalue=0)]
        self.steps += other.steps

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of verified drafts that were accepted, by place."""
        return tuple(a / v for a, v in zip(self.accepted, self.verified, strict=True))

    @property
    def accepted_length(self) -> float:
        """Tokens a verification yields on average: the accepted drafts and one more."""
        return 1.0 + sum(self.accepted) / self.steps if self.steps else 0.0
