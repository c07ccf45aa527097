"""Copies that forks still owe: the last, partly filled page, and the slot."""

from dataclasses import dataclass

from cedar.cache.pages import PageAllocator
from cedar.engine.request import Sequence

__all__ = ["Fork", "Forks"]


@dataclass(frozen=True, slots=True)
class Fork:
    """``from_page`` is None if the child shares all pages, then ``to_page`` means nothing."""

    child: Sequence
    from_page: int | None
    to_page: int
    from_slot: int
    to_slot: int


class Forks:
    """Forks since the last plan. Their sources are held until the next one."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._pending: dict[Sequence, Fork] = {}

    @property
    def held_slots(self) -> set[int]:
        return {fork.from_slot for fork in self._pending.values()}

    @property
    def held_pages(self) -> list[int]:
        """One entry for each reference held."""
        return [f.from_page for f in self._pending.values() if f.from_page is not None]

    def concerns(self, sequence: Sequence) -> bool:
        """Whether a sequence is a side of a pending fork."""
        return sequence.slot in self.held_slots or sequence in self._pending

    def add(self, parent: Sequence, child: Sequence, from_page: int | None) -> None:
        """``child`` has its slot and pages; ``from_page`` is the parent's page to be copied."""
        if parent.slot is None or child.slot is None:
            raise ValueError("a fork needs two running sequences")
        from_slot = parent.slot
        # A child that was not copied to itself yet is not copied from either, but its source.
        if parent in self._pending:
            first = self._pending[parent]
            from_page, from_slot = first.from_page, first.from_slot
        if from_page is not None:
            self._allocator.retain([from_page])
        self._pending[child] = Fork(child, from_page, child.pages[-1], from_slot, child.slot)

    def forget(self, child: Sequence) -> None:
        """A child that ends before it was copied needs no copy."""
        fork = self._pending.pop(child, None)
        if fork is not None and fork.from_page is not None:
            self._allocator.release([fork.from_page])

    def take(self) -> list[Fork]:
        """All pending forks, whose sources are no longer held."""
        forks = list(self._pending.values())
        self._allocator.release(self.held_pages)
        self._pending.clear()
        return forks
