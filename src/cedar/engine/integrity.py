"""What must hold of the scheduler's state between any two calls."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from cedar.engine.forks import Forks
from cedar.engine.pool import PagePool
from cedar.engine.request import RequestState, Sequence
from cedar.engine.steps import Item

__all__ = ["check_state"]


def check_state(
    pool: PagePool,
    sequences: Mapping[str, Sequence],
    running: Seq[Sequence],
    waiting: Seq[Sequence],
    in_flight: Mapping[Sequence, Item],
    forks: Forks,
    num_slots: int,
) -> None:
    """Raise ``AssertionError`` naming the first thing that is wrong."""
    everyone = [*running, *waiting]
    _require(len(set(everyone)) == len(everyone), "a sequence is queued twice")
    known = set(sequences.values())
    _require(known == set(everyone), "a sequence is known but not queued, or queued but unknown")
    for queue in (running, waiting):
        orders = [sequence.order for sequence in queue]
        _require(orders == sorted(orders), "a queue is out of order")
    for sequence in waiting:
        _check_waiting(sequence)
    for sequence in running:
        _check_running(pool, sequence, in_flight.get(sequence))
    _require(set(in_flight) <= set(running), "an item is in flight for a sequence without a slot")
    slots = [sequence.slot for sequence in running]
    _require(len(set(slots)) == len(slots), "two sequences have one slot")
    _require(
        all(slot is not None and 0 <= slot < num_slots for slot in slots), "a slot does not exist"
    )
    _check_pages(pool, running, in_flight, forks)


def _check_waiting(sequence: Sequence) -> None:
    name = repr(sequence.id)
    _require(sequence.state is RequestState.WAITING, f"{name} waits but is {sequence.state}")
    empty = sequence.slot is None and not sequence.pages and sequence.computed == 0
    _require(empty, f"{name} waits but holds pages or a slot")


def _check_running(pool: PagePool, sequence: Sequence, item: Item | None) -> None:
    name, computed, length = repr(sequence.id), sequence.computed, sequence.length
    if sequence.state is RequestState.DECODE:
        stored = computed in (length - 1, length)
    else:
        _require(sequence.state is RequestState.PREFILL, f"{name} runs but is {sequence.state}")
        stored = 0 <= computed < length
    _require(stored, f"{name} ({sequence.state}) has {computed} of {length} tokens stored")
    end = computed
    if item is not None:
        _require(item.start == computed, f"{name} runs from {item.start} but has {computed} stored")
        _require(item.count > 0, f"{name} has an empty item")
        end = item.stop
    covered = len(sequence.pages) * pool.page_tokens
    _require(covered >= end, f"the pages of {name} hold {covered} tokens, not {end}")


def _check_pages(
    pool: PagePool, running: Seq[Sequence], in_flight: Mapping[Sequence, Item], forks: Forks
) -> None:
    """Every holder is known, and a page that will be written has one holder only."""
    pool.allocator.check_integrity()
    if pool.index is not None:
        pool.index.check_integrity()
    holders = Counter(forks.held_pages)
    for sequence in running:
        _require(
            len(set(sequence.pages)) == len(sequence.pages), f"{sequence.id!r} has a page twice"
        )
        holders.update(sequence.pages)
    cached, unused = 0, 0
    for page in range(pool.num_pages):
        rest = pool.allocator.refcount(page) - holders[page]
        _require(rest in (0, 1), f"page {page}: {holders[page]} holders known, {rest} more counted")
        cached += rest
        unused += rest == 1 and not holders[page]
    indexed = len(pool.index) if pool.index is not None else 0
    _require(cached == indexed, f"{cached} pages are held by nobody, {indexed} are cached")
    if pool.index is not None:
        possible = pool.index.evictable()
        _require(possible == unused, f"of {unused} unused cached pages {possible} can be evicted")
    # Until a fork is copied, its source is held once more, and what both have in flight, done
    # once for both, ends in pages that both hold.
    copied = Counter(forks.held_pages)
    for sequence in running:
        item = in_flight.get(sequence)
        start = item.stop if item is not None and forks.concerns(sequence) else sequence.computed
        for page in sequence.pages[start // pool.page_tokens :]:
            times = pool.allocator.refcount(page) - copied[page]
            _require(times == 1, f"page {page}, which {sequence.id!r} writes, has {times} holders")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
