"""Which sequences run next, and where their tokens are stored. Plain integers, no tensors."""

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count

from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import PrefixIndex
from cedar.engine.batching import plan_items
from cedar.engine.checks import check_commit, check_settings
from cedar.engine.forks import Forks
from cedar.engine.integrity import check_state
from cedar.engine.pool import Hit, LimitHit, PagePool
from cedar.engine.request import Request, RequestState, Sequence
from cedar.engine.steps import Admission, Item, ItemKind, StepPlan
from cedar.errors import CapacityError, RequestError

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching over a pool of pages and a number of slots.

    Every sequence has a fixed rank: its arrival, moved ahead by ``aging_seconds`` for each level
    of priority. So a request of a higher level passes those that arrived within that time before
    it, and no request can be passed for ever. Pages and slots go to the best ranks; a sequence
    whose next token finds no page takes those of the worst. The best-ranked sequence is never
    preempted and fits into the pool alone (`add` sees to that), so something always advances.

    A preempted sequence gives its pages back, full ones by way of the prefix cache, waits at its
    rank and later computes again what is gone: same prompt, same generated tokens.

    page_tokens: tokens of a page. num_slots: sequences that run at a time. token_budget: tokens
    of a step; at least ``num_slots``, so that everything that runs advances in every step.
    max_waiting: requests that may queue. limit_hit: may shorten a hit of the prefix cache.
    batch_invariant: prompts are cut as if they ran alone; a step may exceed its tokens then.
    Misuse by the caller (not by a request) raises ``ValueError``.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        prefix_index: PrefixIndex | None,
        *,
        page_tokens: int,
        num_slots: int,
        token_budget: int,
        max_waiting: int,
        aging_seconds: float = 10.0,
        limit_hit: LimitHit | None = None,
        batch_invariant: bool = False,
    ) -> None:
        check_settings(page_tokens, num_slots, token_budget, max_waiting, aging_seconds)
        self.num_slots = num_slots
        self.token_budget = token_budget
        self.max_waiting = max_waiting
        self.aging_seconds = aging_seconds
        self._batch_invariant = batch_invariant
        self._pool = PagePool(allocator, prefix_index, page_tokens, limit_hit)
        self._forks = Forks(allocator)
        self._sequences: dict[str, Sequence] = {}
        # Both by rank, best first.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._in_flight: dict[Sequence, Item] = {}
        self._numbers = count()
        # The head of the queue that found too few pages, how many there were, and who ran.
        self._blocked: tuple[Sequence, int, int] | None = None

    # --- the life of a request ------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def used_slots(self) -> set[int]:
        """Those that somebody runs in, and those that the next plan may still copy from."""
        running = {sequence.slot for sequence in self._running if sequence.slot is not None}
        return running | self._forks.held_slots

    def sequences(self) -> tuple[Sequence, ...]:
        """All that have not ended, best rank first: the running ones, then the waiting ones."""
        return (*self._running, *self._waiting)

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises `RequestError` for an id in use, `CapacityError` for a full queue and for a request
        that could not end even if it had the whole pool.
        """
        self._check_new(request.id)
        prompt, new = len(request.tokens), request.params.max_tokens
        needed, pool = self._pool.pages_for(prompt + new), self._pool
        if needed > pool.num_pages:
            raise CapacityError(
                f"request {request.id!r}: {prompt} prompt tokens and max_tokens = {new} need "
                f"{needed} pages of {pool.page_tokens} tokens, but the pool has {pool.num_pages}. "
                "Shorten the prompt, lower max_tokens or enlarge the pool."
            )
        if len(self._waiting) >= self.max_waiting:
            raise CapacityError(
                f"request {request.id!r}: {len(self._waiting)} requests wait already, and "
                f"max_waiting is {self.max_waiting}. Try again later or raise max_waiting."
            )
        rank = request.arrival - request.priority * self.aging_seconds
        return self._enqueue(Sequence(request, (rank, next(self._numbers))))

    def cancel(self, id: str) -> Sequence | None:
        """End a request at any moment; None if there is none of that id.

        What is in flight is given up: its commit is ignored.
        """
        sequence = self._sequences.get(id)
        if sequence is not None:
            self.finish(sequence, "cancelled")
        return sequence

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence; its full pages stay in the prefix cache. Twice is as good as once."""
        if sequence.state is RequestState.FINISHED:
            return
        self._check_mine(sequence)
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._drop(sequence)
        self._in_flight.pop(sequence, None)
        del self._sequences[sequence.id]
        sequence.state = RequestState.FINISHED
        sequence.finish_reason = reason
        sequence.drafts = ()

    def fork(self, sequence: Sequence, id: str) -> Sequence:
        """Another sequence with the same past, which shares all full pages.

        Between the execution of an item (no VERIFY) and its commit, the child has the item in
        flight too, to be committed with a token of its own. If there is no slot or page for it,
        it waits (``slot`` is None, nothing to commit) and comes to this point by itself. The copy
        of the last page and of the slot are part of the next plan.
        """
        self._check_mine(sequence)
        self._check_new(id)
        item = self._in_flight.get(sequence)
        if item is not None and item.kind is ItemKind.VERIFY:
            raise ValueError(f"{sequence.id!r} verifies drafts; fork it after its commit")
        order = (sequence.order[0], next(self._numbers))
        child = Sequence(replace(sequence.request, id=id), order, list(sequence.generated))
        slot = self._free_slot()
        ready = sequence.state is RequestState.DECODE if item is None else item.wants_logits
        if slot is None or not ready:
            return self._enqueue(child)
        stored = sequence.computed if item is None else item.stop
        full, rest = divmod(stored, self._pool.page_tokens)
        last = self._pool.take(1) if rest else []
        if last is None:
            return self._enqueue(child)
        shared = sequence.pages[:full]
        self._pool.allocator.retain(shared)
        child.pages = [*shared, *last]
        child.slot, child.computed, child.state = slot, sequence.computed, sequence.state
        child.hit_tokens, child.hit_keys = sequence.hit_tokens, sequence.hit_keys
        child.match_tokens = sequence.match_tokens
        child.cached_pages = min(sequence.cached_pages, full)
        self._forks.add(sequence, child, sequence.pages[full] if rest else None)
        if item is not None:
            self._in_flight[child] = replace(item, sequence=child)
        self._sequences[id] = child
        insort(self._running, child, key=_rank)
        return child

    def commit(self, sequence: Sequence, new_tokens: Seq[int], computed: int) -> None:
        """Record what the item of a sequence gave.

        new_tokens: sampled, none unless the item wants logits; after VERIFY the accepted drafts
        and one more. computed: tokens that are stored now, rejected drafts not among them: all of
        the item's, or ``start + len(new_tokens)`` after VERIFY. A text that ends without its last
        token (end of text) may leave that out and must be finished before the next step.
        """
        if sequence.state is RequestState.FINISHED:
            return
        self._check_mine(sequence)
        item = self._in_flight.get(sequence)
        if item is None:
            raise ValueError(f"{sequence.id!r} has nothing in flight")
        check_commit(item, tuple(new_tokens), computed)
        del self._in_flight[sequence]
        sequence.generated.extend(new_tokens)
        sequence.computed = computed
        sequence.drafts = ()
        if item.wants_logits:
            sequence.state = RequestState.DECODE
        if item.kind is ItemKind.PREFILL and item.is_last_chunk:
            self._remember(sequence, leaving=False)  # others may have the same prompt

    # --- one step -------------------------------------------------------------------------------

    def step(self, now: float) -> StepPlan:
        """Decide what to run next. Everything of the last plan must be committed or finished."""
        if self._in_flight:
            names = ", ".join(repr(sequence.id) for sequence in self._in_flight)
            raise ValueError(f"not committed since the last step: {names}")
        for sequence in self._running:
            if sequence.computed >= sequence.length:
                raise ValueError(f"{sequence.id!r} was given no token to run and was not finished")
            if len(sequence.generated) >= sequence.request.params.max_tokens:
                raise ValueError(f"{sequence.id!r} has reached max_tokens and was not finished")
        expired = self._expire(now)
        forks = self._forks.take()
        preempted: list[Sequence] = []
        self._grow_decoding(preempted)
        admitted = self._admit(preempted)
        items = plan_items(
            self._pool, self._running, self.token_budget, batch_invariant=self._batch_invariant
        )
        self._in_flight = {item.sequence: item for item in items}
        alive = [fork for fork in forks if fork.child.slot == fork.to_slot]
        return StepPlan(
            items=tuple(items),
            copies=tuple((f.from_page, f.to_page) for f in alive if f.from_page is not None),
            slot_copies=tuple((f.from_slot, f.to_slot) for f in alive),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            expired=tuple(expired),
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if anything leaks, is shared that must not be, or is lost.

        Holds at any time, as long as nobody but the scheduler and its index holds pages.
        """
        check_state(
            self._pool,
            self._sequences,
            self._running,
            self._waiting,
            self._in_flight,
            self._forks,
            self.num_slots,
        )

    def _expire(self, now: float) -> list[Sequence]:
        late = [
            sequence
            for sequence in self.sequences()
            if sequence.request.deadline is not None and sequence.request.deadline <= now
        ]
        for sequence in late:
            self.finish(sequence, "deadline")
        return late

    def _grow_decoding(self, preempted: list[Sequence]) -> None:
        """A page for the next token of everyone who generates, best rank first."""
        for sequence in list(self._running):
            if sequence.state is not RequestState.DECODE:
                continue
            while not self._pool.grow(sequence, sequence.length):
                # The worst has not been served yet, or is this one.
                worst = self._running[-1]
                self._preempt(worst, preempted)
                if worst is sequence:
                    break

    def _admit(self, preempted: list[Sequence]) -> list[Admission]:
        """Start waiting sequences by rank; the first that does not fit holds up all behind it."""
        admitted = []
        for head in list(self._waiting):
            if head in preempted:
                break
            admission = self._place(head, preempted)
            if admission is None:
                break
            admitted.append(admission)
        return admitted

    def _place(self, head: Sequence, preempted: list[Sequence]) -> Admission | None:
        # Only a higher level of priority drives out what runs; arrival alone does not.
        victims = [
            sequence
            for sequence in reversed(self._running)
            if sequence.order > head.order and sequence.request.priority < head.request.priority
        ]
        if self._free_slot() is None and not victims:
            return None
        state = (head, self._pool.available(), len(self._running))
        if not victims and self._blocked == state:
            return None  # nothing changed since it did not fit
        hit = self._pool.match(head)
        needed = self._pool.pages_for(head.length) - len(hit.pages)
        if not self._pool.could_place(hit, needed, self._running, victims):
            self._pool.release(hit.pages)
            self._blocked = state
            return None
        # A spare page for everyone who runs: else the newcomer would soon be driven out again.
        while self._free_slot() is None or self._pool.available() < needed + len(self._running):
            self._preempt(victims.pop(0), preempted)
        return self._start(head, hit, needed)

    def _start(self, head: Sequence, hit: Hit, needed: int) -> Admission:
        pages, slot = self._pool.take(needed), self._free_slot()
        if pages is None or slot is None:
            raise AssertionError("pages or a slot went missing between check and use")
        self._blocked = None
        self._waiting.remove(head)
        insort(self._running, head, key=_rank)
        head.pages = [*hit.pages, *pages]
        head.slot, head.state = slot, RequestState.PREFILL
        head.computed = head.hit_tokens = hit.tokens
        head.hit_keys, head.match_tokens = hit.keys, hit.match_tokens
        head.cached_pages = len(hit.pages)
        return Admission(head, slot, hit.tokens, hit.keys[-1] if hit.keys else None)

    # --- pieces ---------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence, preempted: list[Sequence]) -> None:
        self._running.remove(sequence)
        self._drop(sequence)
        sequence.state = RequestState.WAITING
        sequence.drafts = ()
        sequence.preemptions += 1
        insort(self._waiting, sequence, key=_rank)
        preempted.append(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Take pages and slot from a sequence."""
        self._forks.forget(sequence)
        self._remember(sequence, leaving=True)
        sequence.snapshots.clear()
        self._pool.release(sequence.pages)
        sequence.pages = []
        sequence.cached_pages = 0
        sequence.computed = 0
        sequence.slot = None

    def _remember(self, sequence: Sequence, *, leaving: bool) -> None:
        self._pool.remember(sequence, leaving=leaving)
        for other in self._running:  # what it shares with forks is theirs in the cache too
            shared = 0
            for own, page in zip(sequence.pages, other.pages, strict=False):
                if own != page or shared == sequence.cached_pages:
                    break
                shared += 1
            other.cached_pages = max(other.cached_pages, shared)

    def _enqueue(self, sequence: Sequence) -> Sequence:
        self._sequences[sequence.id] = sequence
        insort(self._waiting, sequence, key=_rank)
        return sequence

    def _free_slot(self) -> int | None:
        taken = self.used_slots
        return next((slot for slot in range(self.num_slots) if slot not in taken), None)

    def _check_new(self, id: str) -> None:
        if id in self._sequences:
            raise RequestError(
                f"request {id!r}: the id is in use by a request that has not ended. "
                "Give every request its own."
            )

    def _check_mine(self, sequence: Sequence) -> None:
        if self._sequences.get(sequence.id) is not sequence:
            raise ValueError(f"{sequence.id!r} is not a sequence of this scheduler")


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
