"""Weights as a stream of row blocks, whatever form they are stored or held in.

The unit of loading, saving and converting: a function that gives rows ``start`` to ``stop`` of
one official weight, either as numbers or as codes with their scales. No more than one block is
in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cedar.checkpoint.names import Storage, Weight
from cedar.checkpoint.read import Checkpoint
from cedar.errors import CheckpointError
from cedar.quant import BlockFormat, Element, QuantTensor, quantize

Rows = Callable[[int, int], Tensor | QuantTensor]
"""Rows ``start <= row < stop`` of a weight ``[rows, ...]``."""

_BLOCK_ELEMENTS = 2**24
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cut dimension 0 into blocks of moderate size that never split a block of 32 rows."""
    width = max(1, torch.Size(shape[1:]).numel())
    step = max(32, _BLOCK_ELEMENTS // width // 32 * 32)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def is_float(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers rather than codes of a block format."""
    return tensor.dtype in _FLOATS


def file_rows(checkpoint: Checkpoint, weight: Weight, storage: Storage, number: int = 0) -> Rows:
    """Rows of a stored weight (of expert ``number``, for routed experts)."""
    name = weight.official_names(weight.name)[number]
    fmt = weight.kind.block_format(storage)
    if fmt is None:
        return lambda start, stop: _finite(
            checkpoint.read_slice(name, start, stop), f"{checkpoint.file_of(name)}: tensor {name!r}"
        )
    scale_name = weight.official_names(weight.scale_name)[number]

    def quantised(start: int, stop: int) -> QuantTensor:
        codes = checkpoint.read_slice(name, start, stop)
        if fmt.element is Element.E2M1:
            codes = codes.view(torch.uint8)
        first, last = start // fmt.rows, -(-stop // fmt.rows)
        return QuantTensor(codes, checkpoint.read_slice(scale_name, first, last), fmt)

    return quantised


def tensor_rows(name: str, weight: Tensor, scale: Tensor | None, fmt: BlockFormat | None) -> Rows:
    """Rows of a weight in memory: numbers, or codes of ``fmt`` with their scales."""
    if scale is None or fmt is None:
        return lambda start, stop: _finite(weight[start:stop].detach().cpu(), f"{name!r}")

    is_e4m3 = fmt.element is Element.E4M3

    def quantised(start: int, stop: int) -> QuantTensor:
        first, last = start // fmt.rows, -(-stop // fmt.rows)
        codes, part = weight[start:stop].detach().cpu(), scale[first:last].detach().cpu()
        if bool((part == 255).any()) or (is_e4m3 and bool(torch.isnan(codes.float()).any())):
            raise CheckpointError(
                f"{name!r}: found codes or scales that are NaN; expected numbers. "
                "The weights are damaged."
            )
        return QuantTensor(codes, part, fmt)

    return quantised


def as_numbers(rows: Tensor | QuantTensor, dtype: torch.dtype) -> Tensor:
    """Rows as floating-point numbers, rounded once to ``dtype``."""
    return rows.dequantize(dtype) if isinstance(rows, QuantTensor) else rows.to(dtype)


def as_codes(rows: Tensor | QuantTensor, fmt: BlockFormat) -> QuantTensor:
    """Rows as codes of ``fmt``; codes that are there already are kept bit for bit."""
    if isinstance(rows, QuantTensor):
        return rows
    return quantize(rows.to(torch.float32), fmt)


def stored_chunks(
    weight: Weight, rows: Rows, storage: Storage, *, scales: bool
) -> Iterator[Tensor]:
    """The payload of an official tensor in ``storage``, block by block.

    With ``scales`` it is the payload of the ``.scale`` tensor.
    """
    fmt = weight.kind.block_format(storage)
    for start, stop in row_blocks(weight.stored_shape):
        block = rows(start, stop)
        if fmt is None:
            dtype = torch.float32 if weight.specs(storage)[0].dtype == "F32" else torch.bfloat16
            yield _finite(as_numbers(block, dtype), f"{weight.name!r} as {dtype}")
        else:
            coded = as_codes(block, fmt)
            yield coded.scale if scales else coded.codes


def _finite(values: Tensor, what: str) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(
            f"{what}: found a value that is NaN or infinite; expected finite numbers. "
            "The weights are damaged or training diverged."
        )
    return values
