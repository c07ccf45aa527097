"""Who holds which page: a pool of equal pages with reference counts, in plain integers."""

from collections import Counter
from collections.abc import Iterable

from cedar.errors import CapacityError

__all__ = ["PageAllocator"]


class PageAllocator:
    """Pages ``0 .. num_pages - 1``; each is free or held by one or more holders.

    Every call changes all that it names or nothing. Naming a page that is free is a fault of
    the caller and raises ``ValueError``; running out of pages raises `CapacityError`.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise CapacityError(
                f"num_pages is {num_pages}; expected at least 1. Give the cache more memory."
            )
        self.num_pages = num_pages
        self._references = [0] * num_pages
        # A stack: the page freed last is used next, its memory is the likeliest to be warm.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages that somebody holds."""
        return self.num_pages - len(self._free)

    def refcount(self, page: int) -> int:
        """Number of holders of a page; 0 if it is free."""
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not in this pool of {self.num_pages}")
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free pages, each with the caller as its one holder.

        Raises `CapacityError`, and takes none, if fewer are free.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            raise CapacityError(
                f"{count} pages were asked for but {len(self._free)} of {self.num_pages} are "
                "free. Evict cached prefixes, preempt a request or enlarge the pool."
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one holder to each page; a page named twice gets two."""
        pages = tuple(pages)
        for page in pages:
            if self.refcount(page) == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each page; those without any are free again."""
        pages = tuple(pages)
        for page, times in Counter(pages).items():
            if times > self.refcount(page):
                raise ValueError(
                    f"page {page} is released {times} times but has {self._references[page]} "
                    "holders"
                )
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless free pages and held pages make up the pool."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is free twice")
        for page, references in enumerate(self._references):
            if references < 0:
                raise AssertionError(f"page {page} has {references} holders")
            if (references == 0) != (page in free):
                where = "is" if page in free else "is not"
                raise AssertionError(f"page {page} has {references} holders and {where} free")
        if len(self._references) != self.num_pages:
            raise AssertionError("the pool changed its size")
