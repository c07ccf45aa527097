"""Append-only segment files: records that know their own key, owner and checksum.

A record is ``header, key, payload``. The header (little-endian) is the magic ``CdrP``, the
version, the key's length, the payload's length, the owner's 16-byte tag and a CRC-32 of all
these, the key and the payload. A record that is read back differently in any bit is damaged.
"""

import fcntl
import os
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from cedar.errors import CapacityError

__all__ = [
    "TAG_BYTES",
    "DamagedRecord",
    "Location",
    "Payload",
    "SealedRecord",
    "SegmentFiles",
    "lock_directory",
    "seal",
]

Payload = bytes | bytearray | memoryview

TAG_BYTES = 16
_MAGIC = b"CdrP"
_VERSION = 1
_FIELDS = struct.Struct(f"<4sHHQ{TAG_BYTES}s")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CRC.size
_OPEN_FILES = 32


class DamagedRecord(Exception):
    """What is on disk is not what was written; the text says how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where a record lies, ``size`` bytes in all, and what it must look like."""

    segment: int
    offset: int
    size: int
    crc: int
    tag: bytes

    @property
    def stop(self) -> int:
        """The offset behind the record."""
        return self.offset + self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedRecord:
    """A record that is ready to be written."""

    head: bytes  # header and key
    payload: memoryview
    crc: int
    tag: bytes

    @property
    def size(self) -> int:
        return len(self.head) + self.payload.nbytes


def seal(key: bytes, payload: Payload, tag: bytes) -> SealedRecord:
    """The record of a contiguous payload, which is not copied."""
    view = memoryview(payload).cast("B")
    fields = _FIELDS.pack(_MAGIC, _VERSION, len(key), view.nbytes, tag)
    crc = zlib.crc32(view, zlib.crc32(fields + key))
    return SealedRecord(head=fields + _CRC.pack(crc) + key, payload=view, crc=crc, tag=tag)


class SegmentFiles:
    """The numbered files ``00000001.segment`` ... of one directory. Not thread-safe."""

    def __init__(self, directory: Path, *, read_only: bool) -> None:
        self.directory = directory
        self._flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._files: OrderedDict[int, int] = OrderedDict()
        self._dirty: set[int] = set()
        self._new_names = False

    def sizes(self) -> dict[int, int]:
        """Bytes of every segment file there is, ascending numbers."""
        found = (p for p in self.directory.glob("*.segment") if p.stem.isdecimal())
        return {int(path.stem): path.stat().st_size for path in sorted(found)}

    def write(self, record: SealedRecord, segment: int, offset: int) -> Location:
        """Put a record into a segment; raises ``OSError``. Durable only after `sync`."""
        if not self._path(segment).exists():
            self._close(segment)
            self._new_names = True
        file = self._open(segment, self._flags)
        self._dirty.add(segment)
        parts: list[memoryview] = [memoryview(record.head), record.payload]
        position = offset
        while parts:
            written = os.pwritev(file, parts, position)
            position += written
            while parts and written >= parts[0].nbytes:
                written -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][written:]
        return Location(
            segment=segment, offset=offset, size=record.size, crc=record.crc, tag=record.tag
        )

    def read(self, key: bytes, location: Location) -> bytes:
        """The payload of a record. Raises `DamagedRecord`, or ``OSError`` if it is not there."""
        file = self._open(location.segment, os.O_RDONLY if self._is_reader else os.O_RDWR)
        head_bytes = _HEADER_BYTES + len(key)
        if location.size < head_bytes or os.fstat(file).st_size < location.stop:
            raise DamagedRecord(f"the file ends before its {location.size} bytes do")
        head = _read_all(file, head_bytes, location.offset)
        payload = _read_all(file, location.size - head_bytes, location.offset + head_bytes)
        magic, version, key_bytes, payload_bytes, tag = _FIELDS.unpack_from(head)
        if (magic, version, key_bytes, payload_bytes, tag, head[_HEADER_BYTES:]) != (
            _MAGIC,
            _VERSION,
            len(key),
            len(payload),
            location.tag,
            key,
        ):
            raise DamagedRecord("its header is not the one that was written")
        crc = zlib.crc32(payload, zlib.crc32(head[: _FIELDS.size] + key))
        if not crc == location.crc == _CRC.unpack_from(head, _FIELDS.size)[0]:
            raise DamagedRecord(f"its checksum is {crc:08x}, {location.crc:08x} was written")
        return payload

    def truncate(self, segment: int, size: int) -> None:
        """Cut what lies behind ``size``: records that were never acknowledged."""
        os.ftruncate(self._open(segment, self._flags), size)

    def sync(self) -> None:
        """Make everything written so far survive a power failure; raises ``OSError``."""
        for segment in sorted(self._dirty):
            os.fdatasync(self._open(segment, os.O_RDWR))
        if self._new_names:
            sync_directory(self.directory)
        self._dirty.clear()
        self._new_names = False

    def remove(self, segment: int) -> None:
        """Delete a segment; it may be gone already."""
        self._dirty.discard(segment)
        self._close(segment)
        self._path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _close(self, segment: int) -> None:
        if segment in self._files:
            os.close(self._files.pop(segment))

    @property
    def _is_reader(self) -> bool:
        return self._flags == os.O_RDONLY

    def _path(self, segment: int) -> Path:
        return self.directory / f"{segment:08d}.segment"

    def _open(self, segment: int, flags: int) -> int:
        """The file of a segment, kept open. Reading must not create what is missing."""
        if segment in self._files:
            self._files.move_to_end(segment)
            return self._files[segment]
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        self._files[segment] = os.open(self._path(segment), flags | os.O_CLOEXEC, 0o644)
        return self._files[segment]


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power failure."""
    file = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def lock_directory(directory: Path) -> int:
    """Become the one process that writes; the kernel gives the lock back when it ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CapacityError(f"the disk store {directory} cannot be made: {error}.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise CapacityError(
            f"another writer has opened the disk store {directory}. Give this one its own "
            "directory, or open it with read_only=True."
        ) from None
    return file


def _read_all(file: int, size: int, offset: int) -> bytes:
    """``size`` bytes; one read returns at most 2 GiB. Raises `DamagedRecord` if the file ends."""
    payload = os.pread(file, size, offset)
    while len(payload) < size:
        more = os.pread(file, size - len(payload), offset + len(payload))
        if not more:
            raise DamagedRecord(f"the file ends after {len(payload)} of {size} bytes")
        payload += more
    return payload
