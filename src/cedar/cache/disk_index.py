"""Which record holds which key: the lmdb index of the disk store.

Two tables. ``pages`` maps a key to its location. ``places`` maps ``segment + key`` to
``(offset, size)``, so that dropping a segment finds its keys, and a restart finds where the
acknowledged part of a segment ends. Both change in one transaction.

lmdb has no checksums of its own and may crash on pages that rotted. So the file gets a seal, its
size and CRC-32, when the store is closed, which is checked when it is opened again. A process
that was killed leaves no seal; then only the walk through ``places`` stands in.
"""

import contextlib
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from cedar.cache.segments import TAG_BYTES, Location
from cedar.errors import BackendUnavailable, DataError

if TYPE_CHECKING:
    import lmdb

__all__ = ["MAX_KEY_BYTES", "DamagedIndex", "DiskIndex", "import_lmdb", "open_index"]

MAX_KEY_BYTES = 500  # lmdb allows 511, of which `places` needs 8
_LOCATION = struct.Struct(f"<QQQI{TAG_BYTES}s")
_PLACE = struct.Struct("<QQ")
_SEGMENT = struct.Struct(">Q")  # big-endian: lmdb sorts by bytes
_FIRST_MAP_BYTES = 64 << 20  # address space, not disk space; doubled when it is full

Result = TypeVar("Result")


class DamagedIndex(Exception):
    """The index cannot be opened, read or written; the text is lmdb's."""


class DiskIndex:
    """One process may write, any number may read. Every method raises `DamagedIndex`."""

    def __init__(self, directory: Path, *, read_only: bool) -> None:
        self.directory = directory
        self._read_only = read_only
        self._lmdb = import_lmdb()
        _check_seal(directory)
        try:
            self._env: lmdb.Environment = self._lmdb.open(
                str(directory),
                map_size=_FIRST_MAP_BYTES,
                max_dbs=2,
                readonly=read_only,
                create=not read_only,
            )
        except self._lmdb.Error as error:
            raise DamagedIndex(str(error)) from None
        try:
            if not read_only:
                (directory / "seal").unlink(missing_ok=True)
                self._pad()
                self._env.reader_check()  # readers that were killed must not pin old pages
            self._pages = self._env.open_db(b"pages", create=not read_only)
            self._places = self._env.open_db(b"places", create=not read_only)
            if not read_only:
                for segment in self.segments():  # tables that can be walked can be written
                    self.end(segment)
        except (self._lmdb.Error, DamagedIndex) as error:
            self._env.close()
            raise DamagedIndex(str(error)) from None

    @property
    def nbytes(self) -> int:
        """Bytes of the index's files."""
        return sum(path.stat().st_size for path in self.directory.iterdir())

    def __len__(self) -> int:
        """Number of keys."""

        def count(txn: "lmdb.Transaction") -> int:
            return txn.stat(self._pages)["entries"]

        return self._run(count)

    def get(self, key: bytes) -> Location | None:
        """Where a key's record is."""

        def find(txn: "lmdb.Transaction") -> Location | None:
            return self._location(txn, key)

        return self._run(find)

    def segments(self) -> list[int]:
        """The numbers of all segments that records lie in, ascending."""

        def walk(txn: "lmdb.Transaction") -> list[int]:
            numbers: list[int] = []
            cursor = txn.cursor(self._places)
            least = 0
            while cursor.set_range(_SEGMENT.pack(least)):
                (number,) = _SEGMENT.unpack_from(bytes(cursor.key()))
                if number < least:
                    raise DamagedIndex("its keys are out of order")
                numbers.append(number)
                least = number + 1
            return numbers

        return self._run(walk)

    def end(self, segment: int) -> int:
        """The offset behind the last acknowledged record of a segment."""

        def last(txn: "lmdb.Transaction") -> int:
            places = (_PLACE.unpack(place) for _, place in self._in_segment(txn, segment))
            return max((offset + size for offset, size in places), default=0)

        return self._run(last)

    def put(self, entries: Mapping[bytes, Location]) -> None:
        """Acknowledge records: all become visible at once, and durable."""

        def add(txn: "lmdb.Transaction") -> None:
            for key, at in entries.items():
                value = _LOCATION.pack(at.segment, at.offset, at.size, at.crc, at.tag)
                txn.put(key, value, db=self._pages)
                place = _PLACE.pack(at.offset, at.size)
                txn.put(_SEGMENT.pack(at.segment) + key, place, db=self._places)

        self._run(add, write=True)

    def forget(self, key: bytes) -> None:
        """Remove one key. Its place stays until its segment is dropped."""

        def delete(txn: "lmdb.Transaction") -> None:
            txn.delete(key, db=self._pages)

        self._run(delete, write=True)

    def forget_segment(self, segment: int) -> int:
        """Remove all keys whose records lie in a segment; returns how many."""

        def delete(txn: "lmdb.Transaction") -> int:
            removed = 0
            for key, _ in list(self._in_segment(txn, segment)):
                location = self._location(txn, key)
                if location is not None and location.segment == segment:
                    removed += txn.delete(key, db=self._pages)
                txn.delete(_SEGMENT.pack(segment) + key, db=self._places)
            return removed

        return self._run(delete, write=True)

    def close(self) -> None:
        """Close the environment; a writer seals the file for its next opening."""
        self._env.close()
        if self._read_only:
            return
        with contextlib.suppress(OSError):  # on a full disk there is no seal, as after a kill
            # Written aside and renamed, so that a seal is whole or absent.
            aside = self.directory / "seal.new"
            aside.write_text(_seal(self.directory))
            aside.replace(self.directory / "seal")

    def _location(self, txn: "lmdb.Transaction", key: bytes) -> Location | None:
        value = txn.get(key, db=self._pages)
        if value is None:
            return None
        segment, offset, size, crc, tag = _LOCATION.unpack(value)
        return Location(segment=segment, offset=offset, size=size, crc=crc, tag=tag)

    def _in_segment(self, txn: "lmdb.Transaction", segment: int) -> Iterator[tuple[bytes, bytes]]:
        prefix = _SEGMENT.pack(segment)
        cursor = txn.cursor(self._places)
        more, before = cursor.set_range(prefix), b""
        while more and (place := bytes(cursor.key())).startswith(prefix):
            if place <= before:  # a damaged tree may lead in a circle
                raise DamagedIndex("its keys are out of order")
            yield place[len(prefix) :], bytes(cursor.value())
            more, before = cursor.next(), place

    def _run(self, work: "Callable[[lmdb.Transaction], Result]", *, write: bool = False) -> Result:
        """Do ``work`` in one transaction, again after the map has grown."""
        while True:
            try:
                with self._env.begin(write=write) as txn:
                    return work(txn)
            except self._lmdb.MapFullError:
                self._env.set_mapsize(2 * self._env.info()["map_size"])
            except self._lmdb.MapResizedError:
                self._env.set_mapsize(0)  # the writer has grown it: adopt its size
            except (self._lmdb.Error, struct.error) as error:
                raise DamagedIndex(str(error)) from None

    def _pad(self) -> None:
        """Fill a truncated file with zeros: lmdb reports these, a missing page is a crash."""
        path = self.directory / "data.mdb"
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if path.stat().st_size < needed:
            os.truncate(path, needed)


def open_index(directory: Path, *, read_only: bool) -> tuple[DiskIndex, str | None]:
    """The index of a store, and what was wrong if it had to be replaced by an empty one.

    A reader replaces nothing: it raises `DataError`.
    """
    try:
        return DiskIndex(directory, read_only=read_only), None
    except DamagedIndex as error:
        if read_only:
            raise DataError(
                f"{directory.parent} is not a readable disk store: {error}. A process that writes "
                "must have opened it before."
            ) from None
        shutil.rmtree(directory)
        return DiskIndex(directory, read_only=False), str(error)


def _seal(directory: Path) -> str:
    """Size and checksum of the index file."""
    size = crc = 0
    with (directory / "data.mdb").open("rb") as file:
        while part := file.read(1 << 20):
            size += len(part)
            crc = zlib.crc32(part, crc)
    return f"{size} {crc:08x}"


def _check_seal(directory: Path) -> None:
    """Raise `DamagedIndex` if the index was closed in another state than it is in now."""
    try:
        sealed = (directory / "seal").read_bytes()
        # A writer that opens the store removes the seal before it changes anything.
        if sealed != _seal(directory).encode() and (directory / "seal").exists():
            raise DamagedIndex("its checksum is not that of when it was closed")
    except FileNotFoundError:
        return


def import_lmdb() -> ModuleType:
    """The package, or `BackendUnavailable` with the way to get it."""
    try:
        import lmdb
    except ImportError:
        raise BackendUnavailable(
            "The disk store needs the package lmdb, which is not installed. Install it with "
            "pip install 'cedar-lm[store]', or run without a disk store."
        ) from None
    return lmdb
