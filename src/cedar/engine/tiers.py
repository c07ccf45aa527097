"""The disk below the prefix cache: full pages go down, and come up when a prompt asks for them."""

import logging
from typing import Protocol

from cedar.cache.disk import DiskTier
from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import PrefixIndex
from cedar.engine.request import Request, Sequence
from cedar.errors import CapacityError

__all__ = ["PageBytes", "PrefixTier"]

_LOG = logging.getLogger(__name__)


class PageBytes(Protocol):
    """Reads and writes whole pages; the runner does."""

    def read_page(self, page: int) -> bytes: ...

    def write_page(self, page: int, payload: bytes) -> None: ...


class PrefixTier:
    """Keeps the pages of ended sequences on disk and brings back those of a new prompt.

    What leaves the index and is not on disk goes there too: pages of sequences that were preempted
    or failed, and those that the disk had to drop since they were written. What is on disk only
    the disk knows, so that nothing here grows, and a page that was dropped is written again.

    All of it happens between steps. A store that cannot be written is left alone from then on,
    with one warning; requests are served without it.
    """

    def __init__(
        self, index: PrefixIndex, allocator: PageAllocator, pages: PageBytes, disk: DiskTier
    ) -> None:
        self._index, self._allocator = index, allocator
        self._pages, self._disk = pages, disk
        self._writes = not disk.read_only
        index.on_evict = self._keep

    def load(self, request: Request, *, evict: bool = False) -> int:
        """Make pages of the prompt known that only the disk has; returns how many.

        It stops at the first page that neither has, and where no page is free. evict: make room
        by evicting the least recently used prefixes; right when the request is about to run, as
        what is brought up for one that waits long would be evicted for the next.
        """
        size = self._index.page_tokens
        # One token is left to run.
        tokens = request.tokens[: (len(request.tokens) - 1) // size * size]
        hashes = [entry for entry in request.image_hashes if entry[0] < len(tokens)]
        keys: list[bytes] = []
        pages: list[int | None] = []  # None: on disk alone
        for key in self._index.keys(tokens, hashes):
            page = self._index.page(key)
            if page is None and key not in self._disk:
                break
            keys.append(key)
            pages.append(page)
        known = [page for page in pages if page is not None]
        # Making room must not take the beginning of this very prompt.
        self._allocator.retain(known)
        missing = len(pages) - len(known) - self._allocator.free
        if evict and missing > 0:
            self._index.evict(missing)
        brought: list[int] = []
        whole: list[int] = []
        try:
            for key, page in zip(keys, pages, strict=True):
                if page is None:
                    page = self._bring(key)
                    if page is None:
                        break
                    brought.append(page)
                whole.append(page)
            if brought:
                stop = len(whole) * size
                own = [entry for entry in hashes if entry[0] < stop]
                self._index.insert(tokens[:stop], own, whole)
        finally:
            self._allocator.release([*known, *brought])  # the index holds them now
        return len(brought)

    def _bring(self, key: bytes) -> int | None:
        """A page with the content that the disk has; None if there is no room or no content."""
        payload = self._disk.get(key) if self._allocator.free else None
        if payload is None:
            return None
        (page,) = self._allocator.allocate(1)
        try:
            self._pages.write_page(page, payload)
        except BaseException:
            self._allocator.release([page])
            raise
        return page

    def save(self, sequence: Sequence) -> None:
        """Put the full pages of an ended sequence on disk, durably.

        Those are saved that the index knows, however the sequence ended. This is no look-up: it
        counts no hit and makes nothing recently used.
        """
        if not self._writes:
            return
        for key in self._index.keys(sequence.tokens, sequence.request.image_hashes):
            page = self._index.page(key)
            if page is None:
                break
            self._keep(key, page)
        if self._writes:
            try:
                self._disk.flush()  # what was evicted since the last time, too
            except CapacityError as error:
                self._give_up(error)

    def close(self) -> None:
        """Let another process write to the store; nothing is kept from now on."""
        self._writes = False
        try:
            self._disk.close()
        except CapacityError as error:
            _LOG.warning("The last prefixes were not kept on disk: %s", error)

    def _keep(self, key: bytes, page: int) -> None:
        """Put a page on disk unless it is there; safe after the next flush."""
        if not self._writes or key in self._disk:
            return
        try:
            self._disk.put(key, self._pages.read_page(page))
        except CapacityError as error:
            self._give_up(error)

    def _give_up(self, error: CapacityError) -> None:
        _LOG.warning("Prefixes are not kept on disk from here on: %s", error)
        self._writes = False
