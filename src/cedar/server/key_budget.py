"""How much each API key uses: requests at once, and tokens in a minute."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from cedar.server.errors import ApiError

__all__ = ["BudgetSpent", "Key", "KeyBudget", "Lease"]

WINDOW = 60.0  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Who a key belongs to. max_concurrent: requests at once; None is no limit, as for
    tokens_per_minute: prompt and generated tokens in any 60 seconds.
    """

    name: str
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None


class BudgetSpent(ApiError):
    """429: a key has used up what it may. retry_after: seconds, whole and at least 1."""

    def __init__(self, message: str, *, code: str, retry_after: float) -> None:
        self.retry_after = max(1, math.ceil(retry_after))
        super().__init__(429, message, code=code, headers={"Retry-After": str(self.retry_after)})


class Lease:
    """A request that counts against its key until `leave`; also a context manager."""

    def __init__(self, budget: "KeyBudget", key: Key) -> None:
        self._budget, self.key = budget, key
        self._left = False

    def spend(self, tokens: int) -> None:
        """The request has used so many tokens, prompt or generated, besides those told before."""
        self._budget.spend(self.key, tokens)

    def leave(self) -> None:
        """The request has ended; may be called more than once."""
        if not self._left:
            self._left = True
            self._budget._leave(self.key)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()


class KeyBudget:
    """What each key uses at the moment. For one thread, that of the event loop.

    Tokens are counted as they are used and a request is refused once those of the last minute have
    reached the limit: a request that has begun is never cut, so the last one may exceed it.
    clock: seconds, never going backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, int] = {}
        self._used: dict[str, deque[tuple[float, int]]] = {}  # (when, tokens), oldest first

    def enter(self, key: Key) -> Lease:
        """Count a request; `BudgetSpent` if its key has too many or has no tokens left."""
        running = self._running.get(key.name, 0)
        if key.max_concurrent is not None and running >= key.max_concurrent:
            raise BudgetSpent(
                f"This API key has {running} requests running; it may have {key.max_concurrent} "
                "at once.",
                code="key_concurrency",
                retry_after=1,
            )
        wait = self._seconds_until_free(key)
        if wait > 0:
            raise BudgetSpent(
                f"This API key has used the {key.tokens_per_minute} tokens that it may use in a "
                "minute.",
                code="key_tokens",
                retry_after=wait,
            )
        self._running[key.name] = running + 1
        return Lease(self, key)

    def spend(self, key: Key, tokens: int) -> None:
        """Count tokens of a key, at the present time."""
        if key.tokens_per_minute is None or tokens <= 0:
            return
        now, used = self._clock(), self._recent(key)
        # One entry a second is enough: the older tokens of it then count a moment longer.
        if used and math.floor(used[-1][0]) == math.floor(now):
            tokens += used.pop()[1]
        used.append((now, tokens))

    def used(self, key: Key) -> int:
        """Tokens of the last minute; 0 for a key without a limit of them."""
        return sum(tokens for _, tokens in self._recent(key))

    def running(self, key: Key) -> int:
        """Requests that have entered and not left."""
        return self._running.get(key.name, 0)

    def _recent(self, key: Key) -> deque[tuple[float, int]]:
        used = self._used.setdefault(key.name, deque())
        while used and used[0][0] + WINDOW <= self._clock():
            used.popleft()
        return used

    def _seconds_until_free(self, key: Key) -> float:
        limit = key.tokens_per_minute
        if limit is None:
            return 0.0
        total = self.used(key)
        wait = 0.0
        for when, tokens in self._recent(key):
            if total < limit:
                break
            total -= tokens
            wait = when + WINDOW - self._clock()
        return wait

    def _leave(self, key: Key) -> None:
        self._running[key.name] -= 1
