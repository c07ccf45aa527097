"""Which files make up a checkpoint, and whether they agree with its index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from cedar.checkpoint.header import MAX_HEADER_BYTES, Header, read_header, unique_keys
from cedar.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
_SHARD_OF_SEVERAL = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


def collect_headers(path: str | os.PathLike[str]) -> tuple[list[Header], list[str]]:
    """The readable headers of a checkpoint, and everything that is wrong with its files.

    ``path`` is one safetensors file, or a directory with an index or with unsharded
    ``*.safetensors`` files. Raises `CheckpointError` only if there is nothing to read at all.
    """
    root = Path(path)
    if not root.is_dir():
        return [read_header(root)], []
    index = root / INDEX_NAME
    if index.exists():
        return _indexed(index)
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{root}: found no *.safetensors file; expected a checkpoint. Check the path."
        )
    for file in files:
        part = _SHARD_OF_SEVERAL.search(file.name)
        if part and int(part[2]) > 1:
            raise CheckpointError(
                f"{root}: found {file.name} but no {INDEX_NAME}; expected the index that lists "
                "all shards. The checkpoint is incomplete; get it again."
            )
    headers, problems = _read_all(files)
    owner: dict[str, Header] = {}
    for header in headers:
        for name in header.tensors:
            first = owner.setdefault(name, header)
            if first is not header:
                problems.append(f"{header.path}: tensor {name!r} is in {first.path.name} as well")
    return headers, problems


def _read_all(files: Iterable[Path]) -> tuple[list[Header], list[str]]:
    headers, problems = [], []
    for file in files:
        try:
            headers.append(read_header(file))
        except CheckpointError as error:
            problems.append(str(error))
    return headers, problems


def _indexed(index: Path) -> tuple[list[Header], list[str]]:
    weight_map, total = read_index(index)
    names = sorted(set(weight_map.values()))
    unsafe = [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]
    if unsafe:
        _bad(index, f"the file names {unsafe[:5]}", "plain names ending in .safetensors")
    headers, problems = _read_all(index.parent / name for name in names)
    by_file = {header.path.name: header for header in headers}
    for tensor, name in weight_map.items():
        if name in by_file and tensor not in by_file[name].tensors:
            problems.append(f"{index}: tensor {tensor!r} is not in {name}, where the index puts it")
    for header in headers:
        problems.extend(
            f"{header.path}: tensor {tensor!r} is not in the index under this file"
            for tensor in header.tensors
            if weight_map.get(tensor) != header.path.name
        )
    payload = sum(t.spec.nbytes for header in headers for t in header.tensors.values())
    if total is not None and total != payload and not problems:
        problems.append(f"{index}: found a total_size of {total}; expected {payload}")
    return headers, problems


def read_index(index: Path) -> tuple[dict[str, str], float | None]:
    """The map from tensor names to file names, and ``total_size`` if the index states it."""
    try:
        if index.stat().st_size > MAX_HEADER_BYTES:
            _bad(index, "more than 100 MB", "a smaller file")
        raw = json.loads(index.read_text("utf-8"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        _bad(index, f"no valid JSON ({error})", "an object with a weight_map")
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        _bad(index, "no weight_map from tensor names to file names", "one")
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int | float) else None


def _bad(index: Path, found: str, expected: str) -> NoReturn:
    raise CheckpointError(f"{index}: found {found}; expected {expected}. Get the index again.")
