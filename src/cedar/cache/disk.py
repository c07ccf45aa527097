"""The disk store: pages of main KV and index keys that outlive the process.

Payloads go to append-only segment files, their locations to an lmdb index. A page is
acknowledged by `DiskTier.flush`: first the segments are made durable, then one transaction
makes all its pages visible. A process killed at any moment therefore leaves acknowledged pages
and an unreachable rest, which the next writer cuts off. Nothing is returned unless length, key,
owner and checksum are those that were written; a page that fails is a miss and one warning.
"""

import hashlib
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from cedar.cache.disk_index import (
    MAX_KEY_BYTES,
    DamagedIndex,
    import_lmdb,
    open_index,
)
from cedar.cache.segments import (
    TAG_BYTES,
    DamagedRecord,
    Location,
    Payload,
    SegmentFiles,
    lock_directory,
    seal,
)
from cedar.errors import CapacityError

__all__ = ["DiskStats", "DiskTier"]

_LOG = logging.getLogger(__name__)
_LEAST_BYTES = 1 << 20
_LARGEST_SEGMENT = 256 << 20
_SEGMENTS = 16  # the cap is shared by so many segments: dropping one loses a sixteenth
_INDEX_BYTES_PER_PAGE = 256  # what a page that is not yet in the index will take there
_INDEX_RESERVE = 64 << 10  # copies that lmdb makes while it writes
_MOST_WARNINGS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskStats:
    """Contents, and what happened since this process opened the store.

    ``bytes`` are all files together, at most ``max_bytes``; ``rejected`` pages were found but
    damaged or foreign and count as misses too; ``dropped`` pages made room for newer ones.
    """

    pages: int
    bytes: int
    hits: int
    misses: int
    rejected: int
    written: int
    dropped: int


class DiskTier:
    """A store of byte strings under content-addressed keys, of at most ``max_bytes`` on disk.

    ``layout_tag`` names model and cache format; pages of another tag are never returned. One
    process writes at a time; with ``read_only`` any number of further processes may read while
    it does. All methods may be called from any thread.

    Raises `BackendUnavailable` without lmdb, `CapacityError` if another writer is open here or
    ``max_bytes`` is less than 1 MiB, `DataError` if there is nothing to read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int,
        layout_tag: bytes,
        read_only: bool = False,
    ) -> None:
        if max_bytes < _LEAST_BYTES:
            raise CapacityError(
                f"max_bytes of the disk store is {max_bytes:,}; expected at least {_LEAST_BYTES:,}."
            )
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._tag = hashlib.sha256(layout_tag).digest()[:TAG_BYTES]
        self._segment_bytes = min(_LARGEST_SEGMENT, max_bytes // _SEGMENTS)
        self._mutex = threading.RLock()
        self._closed = False
        self._warned: set[bytes] = set()
        self._pending: dict[bytes, Location] = {}
        self._hits = self._misses = self._rejected = self._written = self._dropped = 0
        self._files = SegmentFiles(self.directory, read_only=read_only)
        self._sizes: dict[int, int] = {}
        import_lmdb()  # before anything is made on disk
        self._lock_file = -1 if read_only else lock_directory(self.directory)
        try:
            self._index, fault = open_index(self.directory / "index", read_only=read_only)
            if fault:
                self._warn(b"index", f"index is damaged ({fault}); the store starts empty")
            if not read_only:
                self._recover()
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> "DiskTier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, key: bytes, payload: Payload) -> None:
        """Store a page; other processes see it, and it is safe, after the next `flush`.

        The same bytes under a known key cost nothing. Raises `CapacityError` if the page is
        larger than the store or the disk is full; the store stays usable.
        """
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key has {len(key)} bytes; expected 1 to {MAX_KEY_BYTES}")
        with self._mutex:
            self._check_writable()
            record = seal(key, payload, self._tag)
            known = self._find(key)
            mine = (record.size, record.crc, record.tag)
            if known and (known.size, known.crc, known.tag) == mine:
                return
            self._make_room(record.size)
            segment, offset = self._segment, self._sizes.get(self._segment, 0)
            try:
                location = self._files.write(record, segment, offset)
            except OSError as error:
                raise self._cannot_write(error) from None
            self._sizes[segment] = location.stop
            self._pending[key] = location
            self._written += 1

    def __contains__(self, key: bytes) -> bool:
        """Whether a page of this model and format is here: one look into the index.

        Nothing is read or counted, so a page that is here may still prove damaged. What is not
        here `put` would write.
        """
        with self._mutex:
            self._check_open()
            location = self._find(key)
            return location is not None and self._is_own(location)

    def get(self, key: bytes) -> bytes | None:
        """The payload of a page, or ``None``."""
        with self._mutex:
            self._check_open()
            payload = self._read(key)
            self._hits += payload is not None
            self._misses += payload is None
            return payload

    def flush(self) -> None:
        """Acknowledge every page put so far: durable, and visible to all processes at once."""
        with self._mutex:
            if not self._pending:
                return
            self._check_writable()
            pending, self._pending = self._pending, {}
            try:
                self._files.sync()
                self._index.put(pending)
            except (OSError, DamagedIndex) as error:
                # After a failed write-back the kernel may have lost any of them.
                self._segment = max(self._sizes) + 1
                raise self._cannot_write(error) from None

    def close(self) -> None:
        """Flush, and let another process write. Closing twice is fine."""
        with self._mutex:
            if self._closed:
                return
            try:
                self.flush()
            finally:
                self._closed = True
                self._index.close()
                self._files.close()
                self._unlock()

    def stats(self) -> DiskStats:
        """What is stored, and what happened."""
        with self._mutex:
            sizes = self._files.sizes() if self.read_only else self._sizes
            return DiskStats(
                pages=len(self._index) + sum(self._index.get(k) is None for k in self._pending),
                bytes=sum(sizes.values()) + self._index.nbytes,
                hits=self._hits,
                misses=self._misses,
                rejected=self._rejected,
                written=self._written,
                dropped=self._dropped,
            )

    def _find(self, key: bytes) -> Location | None:
        try:
            return self._pending.get(key) or self._index.get(key)
        except DamagedIndex as error:
            self._warn(b"index", f"index cannot be read ({error})")
            return None

    def _is_own(self, location: Location) -> bool:
        if location.tag != self._tag:
            self._warn(location.tag, "holds pages of another model or cache format")
        return location.tag == self._tag

    def _read(self, key: bytes) -> bytes | None:
        location = self._find(key)
        if location is None:
            return None
        if not self._is_own(location):
            self._rejected += 1
            return None
        try:
            return self._files.read(key, location)
        except (DamagedRecord, OSError) as error:
            if isinstance(error, FileNotFoundError) and self._find(key) != location:
                return None  # the writer dropped it between the two looks
            self._rejected += 1
            self._warn(
                key,
                f"page {key.hex()[:16]} in segment {location.segment} at {location.offset} is "
                f"damaged: {error}",
            )
            self._forget(key)
            return None

    def _forget(self, key: bytes) -> None:
        """Let a damaged page be written again."""
        if self.read_only:
            return
        self._pending.pop(key, None)
        try:
            self._index.forget(key)
        except DamagedIndex as error:
            self._warn(b"index", f"index cannot be written ({error})")

    def _warn(self, subject: bytes, text: str) -> None:
        """One warning for one subject."""
        if subject not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(subject)
            _LOG.warning("Disk store %s: %s. It counts as not cached.", self.directory, text)

    def _make_room(self, size: int) -> None:
        """Choose the segment for a record of ``size``, and drop the oldest ones for it."""
        current = self._sizes.get(self._segment, 0)
        if current and current + size > self._segment_bytes:
            self._segment += 1
        later = _INDEX_BYTES_PER_PAGE * (len(self._pending) + 1) + _INDEX_RESERVE
        room = self.max_bytes - self._index.nbytes - later
        if size > room:
            raise CapacityError(
                f"a page of {size:,} bytes does not fit into the disk store {self.directory}, "
                f"which has room for {max(room, 0):,} of max_bytes={self.max_bytes:,}. Raise it."
            )
        while sum(self._sizes.values()) + size > room:
            self._drop(min(self._sizes))

    def _drop(self, segment: int) -> None:
        """Forget a segment's pages, then delete its file: in this order for who still reads."""
        here = [key for key, at in self._pending.items() if at.segment == segment]
        for key in here:
            del self._pending[key]
        try:
            self._dropped += self._index.forget_segment(segment) + len(here)
        except DamagedIndex as error:
            raise self._cannot_write(error) from None
        self._files.remove(segment)
        del self._sizes[segment]
        if segment == self._segment:
            self._segment += 1

    def _cannot_write(self, error: Exception) -> CapacityError:
        return CapacityError(
            f"the disk store {self.directory} cannot be written: {error}. Pages since the last "
            "flush may be lost. Free disk space, delete a damaged store, or run without one."
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this disk store is closed")

    def _check_writable(self) -> None:
        if self._closed or self.read_only:
            raise ValueError(f"this disk store is {'closed' if self._closed else 'read-only'}")

    def _recover(self) -> None:
        """Bring files and index together again after a process that did not close."""
        found, known = self._files.sizes(), self._index.segments()
        for segment in sorted(found.keys() - set(known)):
            self._files.remove(segment)  # nothing in it was acknowledged
        missing = [segment for segment in known if segment not in found]
        lost = sum(self._index.forget_segment(segment) for segment in missing)
        if lost:
            self._warn(b"segments", f"{lost} pages are gone: segment files {missing} are missing")
        self._sizes = {segment: found[segment] for segment in known if segment in found}
        self._segment = max(known, default=1)
        if self._segment not in self._sizes:
            self._segment += bool(known)
            return
        end = self._index.end(self._segment)
        if found[self._segment] < end:  # truncated: its last pages are lost, begin a new one
            self._segment += 1
        else:
            self._files.truncate(self._segment, end)
            self._sizes[self._segment] = end

    def _unlock(self) -> None:
        if self._lock_file >= 0:
            os.close(self._lock_file)
