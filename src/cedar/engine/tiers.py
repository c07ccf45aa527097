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
    """Keeps the pages of finished sequences on disk and brings back those of a new prompt.

    Both happen between steps. A store that cannot be written is left alone from then on, with one
    warning; requests are served without it.
    """

    def __init__(
        self, index: PrefixIndex, allocator: PageAllocator, pages: PageBytes, disk: DiskTier
    ) -> None:
        self._index, self._allocator = index, allocator
        self._pages, self._disk = pages, disk
        self._writes = not disk.read_only
        self._saved: set[bytes] = set()

    def load(self, request: Request) -> int:
        """Make pages of the prompt known that only the disk has; returns how many.

        It stops at the first page that neither has, and where no page is free that could be taken
        without evicting a prefix.
        """
        size = self._index.page_tokens
        # One token is left to run.
        tokens = request.tokens[: (len(request.tokens) - 1) // size * size]
        hashes = [entry for entry in request.image_hashes if entry[0] < len(tokens)]
        loaded = 0
        pages: list[int] = []
        for number, key in enumerate(self._index.keys(tokens, hashes)):
            if key in self._index:
                pages.append(0)  # known already; the index keeps its own page
                continue
            if not self._allocator.free:
                break
            payload = self._disk.get(key)
            if payload is None:
                break
            (page,) = self._allocator.allocate(1)
            self._pages.write_page(page, payload)
            pages.append(page)
            stop = (number + 1) * size
            own = [entry for entry in hashes if entry[0] < stop]
            self._index.insert(tokens[:stop], own, pages)
            self._allocator.release([page])  # the index holds it now
            self._saved.add(key)
            loaded += 1
        return loaded

    def save(self, sequence: Sequence, stored: int) -> None:
        """Put the full pages of a sequence's first ``stored`` tokens on disk, durably.

        The sequence has ended, so that the index holds them."""
        if not self._writes:
            return
        tokens = sequence.slice(0, stored)
        hashes = [entry for entry in sequence.request.image_hashes if entry[0] < len(tokens)]
        found = self._index.match((*tokens, 0), hashes)
        try:
            fresh = [
                (key, page)
                for key, page in zip(found.keys, found.pages, strict=True)
                if key not in self._saved
            ]
            for key, page in fresh:
                self._disk.put(key, self._pages.read_page(page))
                self._saved.add(key)
            if fresh:
                self._disk.flush()
        except CapacityError as error:
            _LOG.warning("Prefixes are not kept on disk from here on: %s", error)
            self._writes = False
        finally:
            self._allocator.release(found.pages)

    def close(self) -> None:
        """Let another process write to the store."""
        try:
            self._disk.close()
        except CapacityError as error:
            _LOG.warning("The last prefixes were not kept on disk: %s", error)
