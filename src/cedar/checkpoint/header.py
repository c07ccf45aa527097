"""A strict parser of safetensors headers: nothing is trusted, nothing is unpickled.

A file is: 8 bytes of little-endian header length, that many bytes of JSON, then the payload.
Every byte of the payload must belong to exactly one tensor.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from cedar.checkpoint.names import ITEM_BYTES, TensorSpec
from cedar.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""

_FOREIGN = (
    (b"\x80", "a pickle", "Pickles can run code when read and are refused."),
    (b"PK\x03\x04", "a zip archive, probably of pickles", "Such archives are refused."),
    (b"version https://git-lfs", "a Git LFS pointer", "Fetch the file itself (git lfs pull)."),
    (b"GGUF", "a GGUF file", "Only safetensors files are read."),
    (b"\x93NUMPY", "a NumPy array file", "Only safetensors files are read."),
    (b"<", "a web page, it seems", "The download went wrong; fetch the file again."),
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: what it is and where its payload lies, in bytes from the start."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """The verified header of one safetensors file."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    size: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and verify the header of ``path``; the payload is not touched.

    Raises `CheckpointError` that names the file, the tensor, what was found, what was expected
    and what to do.
    """
    file = Path(path)
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(f"{file}: found no ordinary file; expected safetensors.")
        with file.open("rb") as stream:
            return _parse(file, stream)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{file}: cannot be read ({reason}). Check the path.") from None


def _parse(file: Path, stream: BinaryIO) -> Header:
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(32)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or start[8:9] != b"{":
        for magic, what, remedy in _FOREIGN:
            if start.startswith(magic):
                raise CheckpointError(f"{file}: found {what}; expected safetensors. {remedy}")
    if len(start) < 8:
        _bad(file, f"found {len(start)} bytes", "at least 8 for the header length")
    if not 2 <= length <= MAX_HEADER_BYTES:
        _bad(file, f"found a header length of {length}", f"2 to {MAX_HEADER_BYTES}")
    if 8 + length > size:
        _bad(file, f"found {size} bytes in all", f"{8 + length} for the header alone")
    stream.seek(8)
    raw = _json(file, stream.read(length))
    metadata = raw.pop("__metadata__", {})
    if not _is_text_map(metadata):
        _bad(file, "found __metadata__ that is no map of strings", "strings to strings")
    payload = 8 + length
    tensors = {name: _tensor(file, name, value, payload, size) for name, value in raw.items()}
    _check_layout(file, tensors, payload, size)
    return Header(file, tensors, metadata, size)


def _json(file: Path, text: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        _bad(file, f"found a header that is no valid JSON ({error})", "a JSON object")
    if not isinstance(raw, dict):
        _bad(file, f"found a header that is a JSON {type(raw).__name__}", "a JSON object")
    return raw


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hook for ``json.loads`` that refuses an object with the same key twice."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


def _tensor(file: Path, name: str, value: object, payload: int, size: int) -> StoredTensor:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _bad(file, "found another form of entry", "dtype, shape and data_offsets", name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _bad(file, f"found dtype {dtype!r}", f"one of {', '.join(ITEM_BYTES)}", name)
    if not _is_sizes(shape):
        _bad(file, f"found shape {shape!r}", "a list of sizes, none negative", name)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _bad(file, f"found data_offsets {offsets!r}", "[start, stop] with start <= stop", name)
    start, stop = offsets
    if payload + stop > size:
        found = f"found data_offsets up to {stop}"
        _bad(file, found, f"at most {size - payload}, the size of the payload", name)
    spec = TensorSpec(dtype, tuple(shape))
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != needed:
        _bad(file, f"found {stop - start} bytes", f"{needed} for {spec}", name)
    return StoredTensor(spec, payload + start, payload + stop)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in value
    )


def _check_layout(file: Path, tensors: Mapping[str, StoredTensor], begin: int, size: int) -> None:
    """Payloads must follow one another without a gap or an overlap, up to the end of the file."""
    at = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start < at:
            what = f"{at - tensor.start} bytes that belong to the tensor before"
            _bad(file, f"found {what}", f"data_offsets from {at - begin}", name)
        if tensor.start > at:
            what = f"a gap of {tensor.start - at} bytes before it"
            _bad(file, f"found {what}", f"data_offsets from {at - begin}", name)
        at = tensor.stop
    if at != size:
        _bad(file, f"found {size - at} bytes after the last tensor", "none")


def _bad(file: Path, found: str, expected: str, tensor: str | None = None) -> NoReturn:
    where = f"{file}: tensor {tensor[:200]!r}" if tensor is not None else str(file)
    remedy = "The file is damaged or not safetensors; get it again."
    raise CheckpointError(f"{where}: {found}; expected {expected}. {remedy}")
