"""Writing a checkpoint in the official layout, atomically and strictly."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cedar.checkpoint.check import check_files
from cedar.checkpoint.index import INDEX_NAME
from cedar.checkpoint.names import ITEM_BYTES, Storage, TensorSpec, Weight, as_storage, weights
from cedar.checkpoint.read import Checkpoint
from cedar.checkpoint.rows import Rows, file_rows, is_float, stored_chunks, tensor_rows
from cedar.config import ModelConfig
from cedar.errors import CheckpointError

DEFAULT_SHARD_BYTES = 8 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One official tensor that is to be written; ``chunks`` makes its payload when asked."""

    name: str
    spec: TensorSpec
    chunks: Callable[[], Iterator[Tensor]]


def save_checkpoint(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    storage: str,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write ``tensors`` (our names) as a checkpoint with ``config.json``, index and shards.

    A weight may be given as numbers or as codes with a ``.scale`` beside them; codes are written
    as they are, numbers are quantised where ``storage`` asks for it. Raises `CheckpointError`
    that lists every missing, unexpected and misshapen tensor before anything is written. Files
    appear under their names only when all of them are complete; the index comes last.
    """
    form = as_storage(storage)
    config = config.with_storage(form)
    problems = _tensor_problems(config, tensors)
    if problems:
        shown = problems[:50] + [f"... and {len(problems) - 50} more"] * (len(problems) > 50)
        head = f"{directory}: the tensors to be saved do not fit the configuration."
        raise CheckpointError("\n  ".join([head, *shown]))

    def rows_of(weight: Weight, number: int) -> Rows:
        fmt = weight.kind.block_format("fp8fp4")
        weight_tensor = tensors[weight.name]
        scale = tensors.get(weight.scale_name) if fmt is not None else None
        if len(weight.shape) > len(weight.stored_shape):
            weight_tensor = weight_tensor[number]
            scale = None if scale is None else scale[number]
        if scale is not None and scale.dtype is not torch.uint8:
            scale = scale.view(torch.uint8)
        return tensor_rows(weight.name, weight_tensor, scale, fmt)

    _write(Path(directory), config, _pieces(config, form, rows_of), max_shard_bytes)


def convert_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    storage: str,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the checkpoint ``source`` again, in ``storage``; weights stream block by block.

    Codes that need no change are copied bit for bit. Raises `CheckpointError` if the source does
    not fit its own ``config.json`` or ``directory`` already holds files.
    """
    form, root, target = as_storage(storage), Path(source), Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not empty; expected a new directory.")
    config = ModelConfig.from_file(root / "config.json")
    check_files(root, config).raise_if_bad()
    with Checkpoint.open(root) as checkpoint:
        held = checkpoint.storage
        # A file may lack tensors that nothing reads; the copy lacks them too.
        present = checkpoint.specs.keys()
        pieces = _pieces(
            config.with_storage(form), form, lambda w, n: file_rows(checkpoint, w, held, n)
        )
        scales = {p.name for p in pieces if p.name.endswith(".scale")}
        kept = [p for p in pieces if p.name in present or p.name in scales]
        _write(target, config.with_storage(form), kept, max_shard_bytes)


def _pieces(
    config: ModelConfig, storage: Storage, rows_of: Callable[[Weight, int], Rows]
) -> list[Piece]:
    pieces = []
    for weight in weights(config):
        spec, scale_spec = weight.specs(storage)
        scale_names = weight.official_names(weight.scale_name)
        for number, name in enumerate(weight.official_names(weight.name)):
            pieces.append(_piece(weight, number, name, spec, storage, rows_of, scales=False))
            if scale_spec is not None:
                scale = scale_names[number]
                pieces.append(
                    _piece(weight, number, scale, scale_spec, storage, rows_of, scales=True)
                )
    return pieces


def _piece(
    weight: Weight,
    number: int,
    name: str,
    spec: TensorSpec,
    storage: Storage,
    rows_of: Callable[[Weight, int], Rows],
    *,
    scales: bool,
) -> Piece:
    def chunks() -> Iterator[Tensor]:
        return stored_chunks(weight, rows_of(weight, number), storage, scales=scales)

    return Piece(name=name, spec=spec, chunks=chunks)


def _tensor_problems(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    problems = []
    known: set[str] = set()
    for weight in weights(config):
        known.add(weight.name)
        tensor, fmt = tensors.get(weight.name), weight.kind.block_format("fp8fp4")
        if tensor is None:
            problems.append(f"{weight.name}: missing")
            continue
        scale = tensors.get(weight.scale_name) if fmt is not None else None
        if fmt is None or scale is None:
            expected, scale_shape = weight.shape, None
            if not is_float(tensor):
                problems.append(f"{weight.name}: found {tensor.dtype} without a scale")
        else:
            known.add(weight.scale_name)
            spec, scale_spec = weight.specs("fp8fp4")
            stack = weight.shape[: len(weight.shape) - len(weight.stored_shape)]
            expected = (*stack, *spec.shape)
            scale_shape = (*stack, *(scale_spec.shape if scale_spec else ()))
            if tensor.element_size() != 1 or scale.element_size() != 1:
                found = f"{tensor.dtype} with {scale.dtype}"
                problems.append(f"{weight.name}: found {found}; expected codes with E8M0 bytes")
        if tuple(tensor.shape) != expected:
            found = f"found shape {list(tensor.shape)}"
            problems.append(f"{weight.name}: {found}; expected {list(expected)}")
        if scale is not None and scale_shape is not None and tuple(scale.shape) != scale_shape:
            found = f"found shape {list(scale.shape)}"
            problems.append(f"{weight.scale_name}: {found}; expected {list(scale_shape)}")
    problems += [f"{name}: unexpected" for name in tensors if name not in known]
    return problems


def _write(root: Path, config: ModelConfig, pieces: Sequence[Piece], max_shard_bytes: int) -> None:
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; expected at least 1")
    shards = _cut(pieces, max_shard_bytes)
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    weight_map = {p.name: name for name, shard in zip(names, shards, strict=True) for p in shard}
    total = sum(piece.spec.nbytes for piece in pieces)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    finished: list[tuple[Path, Path]] = []  # temporary file, final name

    def temporary(name: str) -> Path:
        path = root / f".{name}.{secrets.token_hex(4)}.tmp"
        finished.append((path, root / name))
        return path

    try:
        root.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            _write_shard(temporary(name), shard)
        for name, text in (
            ("config.json", config.nested_json()),
            (INDEX_NAME, json.dumps(index, indent=2) + "\n"),
        ):
            path = temporary(name)
            path.write_text(text, "utf-8")
            _sync(path)
        _publish(root, finished)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{root}: cannot be written ({reason}).") from error
    finally:
        for path, _ in finished:
            path.unlink(missing_ok=True)


def _publish(root: Path, finished: list[tuple[Path, Path]]) -> None:
    """Give complete files their names. Without its index an old checkpoint counts as broken, so
    a crash half way through cannot pass for either the old or the new one."""
    (root / INDEX_NAME).unlink(missing_ok=True)
    final = {name for _, name in finished}
    for stale in root.glob("model-*-of-*.safetensors"):
        if stale not in final:
            stale.unlink()
    for path, name in finished:
        path.replace(name)
    _sync(root)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cut(pieces: Sequence[Piece], limit: int) -> list[list[Piece]]:
    """Consecutive pieces per shard, at most ``limit`` bytes unless one alone is larger."""
    shards: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not shards or piece.spec.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(piece)
        room -= piece.spec.nbytes
    return shards


def _write_shard(path: Path, shard: Sequence[Piece]) -> None:
    # Wider types first: every tensor then starts at a multiple of its element size.
    ordered = sorted(shard, key=lambda piece: -ITEM_BYTES[piece.spec.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for piece in ordered:
        stop = at + piece.spec.nbytes
        header[piece.name] = {
            "dtype": piece.spec.dtype,
            "shape": list(piece.spec.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for piece in ordered:
            written = 0
            for chunk in piece.chunks():
                raw = chunk.contiguous().view(torch.uint8).reshape(-1).numpy()
                written += stream.write(raw.data)
            if written != piece.spec.nbytes:
                raise AssertionError(f"{piece.name}: {written} bytes written for {piece.spec}")
        stream.flush()
        os.fsync(stream.fileno())
