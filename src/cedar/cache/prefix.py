"""The prefix index: pages of tokens that were computed before, found by their content.

A page is named by everything that its entries depend on: the model and the cache format (the
salt), all tokens from the start of the sequence to the page's end, and a hash of the pixels of
every image that begins there. Two different texts, models or images cannot share a name.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cedar.cache.pages import PageAllocator

__all__ = ["Match", "PrefixIndex", "PrefixStats"]

_DIGEST_BYTES = 32  # SHA-256

ImageHashes = Sequence[tuple[int, bytes]]
"""``(position of the image's first token, SHA-256 of its pixels)``, ascending positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A cached prefix: ``tokens`` tokens in ``pages``, whose names are ``keys``.

    The caller holds the pages and must release them.
    """

    pages: tuple[int, ...]
    tokens: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixStats:
    """Look-ups since the start. ``tokens`` of the ``asked`` prompt tokens were found."""

    hits: int
    misses: int
    tokens: int
    asked: int
    evicted: int


@dataclass(kw_only=True, slots=True)
class _Node:
    page: int
    parent: bytes | None
    children: int


class PrefixIndex:
    """Holds one reference to every page it knows, and gives up the least recently used ones.

    ``salt`` names the model, its weights and the cache format. ``on_evict(key, page)`` is called
    while the page still has its content, before it becomes free. ``max_snapshots`` bounds the
    objects kept by `attach`.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_tokens: int,
        salt: bytes,
        *,
        on_evict: Callable[[bytes, int], None] | None = None,
        max_snapshots: int = 16,
    ) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens is {page_tokens}; expected at least 1")
        self.allocator = allocator
        self.page_tokens = page_tokens
        self.on_evict = on_evict
        self.max_snapshots = max_snapshots
        head = struct.pack("<QQ", page_tokens, len(salt))
        self._root = hashlib.sha256(b"cedar prefix 1" + head + salt).digest()
        # From the least to the most recently used. A page is never used later than the pages
        # before it in its chain, so this order meets the leaves of a chain first.
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._snapshots: OrderedDict[bytes, object] = OrderedDict()
        self._hits = self._misses = self._tokens = self._asked = self._evicted = 0

    def __len__(self) -> int:
        """Number of pages known."""
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def page(self, key: bytes) -> int | None:
        """The page of that name; None if it is not known.

        Unlike `match` this neither counts as a look-up, nor makes the page recently used, nor
        retains it.
        """
        node = self._nodes.get(key)
        return None if node is None else node.page

    def keys(self, tokens: Sequence[int], image_hashes: ImageHashes = ()) -> tuple[bytes, ...]:
        """The names of all full pages of a sequence, known or not, for a tier below this one."""
        return tuple(self._chain(tokens, image_hashes, len(tokens) // self.page_tokens))

    def match(self, tokens: Sequence[int], image_hashes: ImageHashes = ()) -> Match:
        """The longest known chain of full pages, retained for the caller.

        It covers at most ``len(tokens) - 1`` tokens, so that one is left to run.
        """
        keys: list[bytes] = []
        for key in self._chain(tokens, image_hashes, max(len(tokens) - 1, 0) // self.page_tokens):
            if key not in self._nodes:
                break
            keys.append(key)
        pages = tuple(self._nodes[key].page for key in keys)
        self.allocator.retain(pages)
        self._touch(keys)
        found = len(keys) * self.page_tokens
        self._hits += bool(keys)
        self._misses += not keys
        self._tokens += found
        self._asked += len(tokens)
        return Match(pages=pages, tokens=found, keys=tuple(keys))

    def insert(
        self, tokens: Sequence[int], image_hashes: ImageHashes, pages: Sequence[int]
    ) -> tuple[bytes, ...]:
        """Make the full pages of a sequence known; returns their names.

        ``pages`` are those of ``tokens`` in order; a last page that is not full is ignored. The
        index adds its own reference. A page that is known already stays as it is, and the
        caller's duplicate stays the caller's.
        """
        count = len(tokens) // self.page_tokens
        if len(pages) < count:
            raise ValueError(
                f"{len(tokens)} tokens fill {count} pages, but only {len(pages)} are given"
            )
        keys = tuple(self._chain(tokens, image_hashes, count))
        new = [(i, key) for i, key in enumerate(keys) if key not in self._nodes]
        self.allocator.retain([pages[i] for i, _ in new])
        for i, key in new:
            parent = keys[i - 1] if i else None
            self._nodes[key] = _Node(page=pages[i], parent=parent, children=0)
            if parent is not None:
                self._nodes[parent].children += 1
        self._touch(keys)
        return keys

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages that nobody else holds; returns how many.

        Least recently used first, and always the end of a chain before its beginning.
        """
        freed = 0
        for key in list(self._nodes):
            if freed >= count:
                break
            node = self._nodes[key]
            if node.children or self.allocator.refcount(node.page) > 1:
                continue
            if self.on_evict is not None:
                self.on_evict(key, node.page)
            self._remove(key)
            freed += 1
        self._evicted += freed
        return freed

    def evictable(self) -> int:
        """Number of pages that `evict` could free now."""
        held: set[bytes] = set()
        count = 0
        for key, node in self._nodes.items():
            if key in held or self.allocator.refcount(node.page) > 1:
                if node.parent is not None:
                    held.add(node.parent)
            else:
                count += 1
        return count

    def clear(self) -> None:
        """Forget everything, without `on_evict`; pages that others hold stay theirs."""
        self.allocator.release([node.page for node in self._nodes.values()])
        self._nodes.clear()
        self._snapshots.clear()

    def attach(self, key: bytes, snapshot: object) -> bool:
        """Keep an object with a known page, for example the window rings at its end.

        Only the ``max_snapshots`` most recently used ones are kept, and none longer than its
        page. Returns whether it was kept.
        """
        if key not in self._nodes or self.max_snapshots < 1:
            return False
        self._snapshots[key] = snapshot
        self._snapshots.move_to_end(key)
        while len(self._snapshots) > self.max_snapshots:
            self._snapshots.popitem(last=False)
        return True

    @property
    def num_snapshots(self) -> int:
        """Objects that are attached now."""
        return len(self._snapshots)

    def snapshot(self, key: bytes) -> object | None:
        """What was attached to a page; ``None`` if there is nothing any more."""
        if key not in self._snapshots:
            return None
        self._snapshots.move_to_end(key)
        return self._snapshots[key]

    def stats(self) -> PrefixStats:
        """Counts since the start."""
        return PrefixStats(
            hits=self._hits,
            misses=self._misses,
            tokens=self._tokens,
            asked=self._asked,
            evicted=self._evicted,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless chains, order, pages and snapshots fit together."""
        children = dict.fromkeys(self._nodes, 0)
        pages: set[int] = set()
        seen: set[bytes] = set()
        for key, node in self._nodes.items():
            if node.page in pages:
                raise AssertionError(f"page {node.page} has two names")
            if self.allocator.refcount(node.page) < 1:
                raise AssertionError(f"page {node.page} is known but free")
            if node.parent is not None:
                if node.parent not in children:
                    raise AssertionError(f"the page before page {node.page} is missing")
                if node.parent in seen:
                    raise AssertionError(f"page {node.page} outlives the page before it")
                children[node.parent] += 1
            pages.add(node.page)
            seen.add(key)
        for key, node in self._nodes.items():
            if node.children != children[key]:
                raise AssertionError(
                    f"page {node.page} counts {node.children} successors, has {children[key]}"
                )
        if not self._snapshots.keys() <= self._nodes.keys():
            raise AssertionError("a snapshot outlives its page")
        if len(self._snapshots) > max(self.max_snapshots, 0):
            raise AssertionError("more snapshots than allowed")

    def _chain(
        self, tokens: Sequence[int], image_hashes: ImageHashes, count: int
    ) -> Iterator[bytes]:
        """The names of the first ``count`` pages, one after the other."""
        _check_images(image_hashes, len(tokens))
        size = self.page_tokens
        pack = struct.Struct(f"<{size}q").pack
        key, image = self._root, 0
        for start in range(0, count * size, size):
            stop = start + size
            digest = hashlib.sha256(key)
            digest.update(pack(*tokens[start:stop]))
            while image < len(image_hashes) and image_hashes[image][0] < stop:
                position, pixels = image_hashes[image]
                digest.update(struct.pack("<Q", position - start) + pixels)
                image += 1
            key = digest.digest()
            yield key

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._nodes.move_to_end(key)

    def _remove(self, key: bytes) -> None:
        node = self._nodes.pop(key)
        self._snapshots.pop(key, None)
        if node.parent is not None:
            self._nodes[node.parent].children -= 1
        self.allocator.release([node.page])


def _check_images(image_hashes: ImageHashes, num_tokens: int) -> None:
    before = -1
    for position, pixels in image_hashes:
        if not before < position < num_tokens:
            raise ValueError(
                f"image at token {position}: expected ascending positions below {num_tokens}"
            )
        if len(pixels) != _DIGEST_BYTES:
            raise ValueError(
                f"image at token {position}: its hash has {len(pixels)} bytes, SHA-256 has "
                f"{_DIGEST_BYTES}"
            )
        before = position
