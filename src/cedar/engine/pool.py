"""Pages of sequences: taken from the free ones, then from the least used cached prefixes."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import Match, PrefixIndex
from cedar.engine.request import Sequence

__all__ = ["Hit", "LimitHit", "PagePool"]

LimitHit = Callable[[Sequence, Match], int]
"""How many tokens of a match a sequence may use; less than a page is rounded down."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Pages from the prefix cache and their names, held for whoever asked.

    match_tokens: what the cache has of the prompt; the hit may be shorter.
    """

    pages: tuple[int, ...] = ()
    tokens: int = 0
    keys: tuple[bytes, ...] = ()
    match_tokens: int = 0


class PagePool:
    """The allocator and the prefix index as one store of pages of ``page_tokens`` tokens."""

    def __init__(
        self,
        allocator: PageAllocator,
        index: PrefixIndex | None,
        page_tokens: int,
        limit_hit: LimitHit | None = None,
    ) -> None:
        self.allocator = allocator
        self.index = index
        self.page_tokens = page_tokens
        self._limit_hit = limit_hit

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def available(self) -> int:
        """Pages that `take` could give now."""
        return self.allocator.free + (self.index.evictable() if self.index is not None else 0)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages, or None, and then no cached prefix is lost either."""
        missing = count - self.allocator.free
        if missing > 0:
            if self.index is None or self.index.evictable() < missing:
                return None
            self.index.evict(missing)
        return self.allocator.allocate(count)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Let the pages of a sequence cover ``tokens`` tokens; False, and no change, if full."""
        missing = self.pages_for(tokens) - len(sequence.pages)
        if missing > 0:
            pages = self.take(missing)
            if pages is None:
                return False
            sequence.pages.extend(pages)
        return True

    def match(self, sequence: Sequence) -> Hit:
        """What is cached of a prompt, and held now.

        Only of the prompt, also when tokens were generated before a preemption: those go through
        the model again as they did the first time, so that the request continues as if it had
        never been preempted.
        """
        request = sequence.request
        if self.index is None or not request.reuse_prefix:
            return Hit()
        match = self.index.match(request.tokens, request.image_hashes)
        tokens = match.tokens
        if self._limit_hit is not None and tokens > 0:
            tokens = min(tokens, max(0, self._limit_hit(sequence, match)))
        kept = tokens // self.page_tokens
        self.allocator.release(match.pages[kept:])
        return Hit(match.pages[:kept], kept * self.page_tokens, match.keys[:kept], match.tokens)

    def remember(self, sequence: Sequence, *, leaving: bool) -> None:
        """Put the full pages of what is computed into the prefix cache.

        A page goes in only if the pages before it in the cache are the sequence's own, not equal
        ones of another. Else those could not be evicted, being followed by a page that is held,
        and a sequence that needs the whole pool would never get it. A sequence that is ``leaving``
        the pool may add what nobody but itself holds.

        Snapshots go to the pages that end where they were taken, as far as those are cached.
        """
        if self.index is None or sequence.computed < self.page_tokens:
            return
        tokens = sequence.slice(0, sequence.computed)
        hashes = [(at, digest) for at, digest in sequence.request.image_hashes if at < len(tokens)]
        keys = self.index.keys(tokens, hashes)
        count, own = sequence.cached_pages, True
        while count < len(keys):
            own = own and keys[count] not in self.index
            alone = leaving and self.allocator.refcount(sequence.pages[count]) == 1
            if not own and not alone:
                break
            count += 1
            if own:
                sequence.cached_pages = count
        self.index.insert(
            tokens[: count * self.page_tokens],
            [(at, digest) for at, digest in hashes if at < count * self.page_tokens],
            sequence.pages[:count],
        )
        for at, snapshot in list(sequence.snapshots.items()):
            place = at // self.page_tokens
            if place <= len(keys) and self.index.attach(keys[place - 1], snapshot):
                del sequence.snapshots[at]

    def could_place(
        self,
        hit: Hit,
        needed: int,
        running: Collection[Sequence],
        victims: Collection[Sequence],
    ) -> bool:
        """Whether ``needed`` pages besides a hit can be had if all victims gave up theirs.

        Everyone else who runs is left one page to grow: else the newcomer would soon be driven
        out again.
        """
        others = [sequence for sequence in running if sequence not in victims]
        gained = {page for sequence in victims for page in sequence.pages}
        gained.difference_update(hit.pages, *(sequence.pages for sequence in others))
        return self.available() + len(gained) >= needed + len(others)

    def release(self, pages: Iterable[int]) -> None:
        self.allocator.release(pages)
