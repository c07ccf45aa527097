"""Quantise and append cache rows in one launch, up to three formats and storages at once.

A program takes about a thousand values of whole rows: block maxima, scales, codes, packed bytes at
the places that the page table or the ring says. Released sizes: a window row 1,024 bytes in and 528
out, an entry 1,024 and 288, an index key 256 and 68. Bytes: ``n (2 W + B)``. Bound by the launch
at decode, by memory in prefill. Rounds bit for bit as `cedar.quant.quantize` does.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from cedar.ops.cast.triton import KINDS, block_scales, e2m1_codes, normalised
from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write import reference as plain

__all__ = ["kv_write", "put_rows", "row_places", "unsupported"]

_MOST = 3  # writes of one launch
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_VALUES = 1024  # of a program


@triton.jit
def row_places(
    table, sequence, number, row, live,
    PAGES: tl.constexpr, PER: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """The first byte (from the storage's) of rows' places, and whether they are written at all."""
    count = tl.load(number + row, mask=live, other=-1).to(tl.int64)
    written = count >= 0
    count = tl.where(written, count, 0)
    block = tl.load(sequence + row, mask=written, other=0).to(tl.int64)
    if table is not None:
        block = tl.load(table + block * PAGES + count // PER, mask=written, other=0).to(tl.int64)
    return (block * PER + count % PER) * BYTES, written


@triton.jit
def put_rows(
    x, raw, first, written,
    W: tl.constexpr, BLOCKS: tl.constexpr, COLS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Pack rows and store them.

    x ``[rows x BLOCKS, COLS]`` is float32 and zero behind the W values of a row; ``first`` and
    ``written`` (`row_places`) are there for every block.
    """
    block = tl.arange(0, x.shape[0]) % BLOCKS
    scale, factor = block_scales(x, KIND)
    x = normalised(x, factor, KIND)
    inside = written & (block < W // COLS)
    if KIND == 0:
        place = (first + block * COLS)[:, None] + tl.arange(0, COLS)[None, :]
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(raw + place, codes, mask=inside[:, None])
        tl.store(raw + first + W + block, scale, mask=inside)
    else:
        even, odd = tl.split(tl.reshape(e2m1_codes(x), (x.shape[0], COLS // 2, 2)))
        place = (first + block * (COLS // 2))[:, None] + tl.arange(0, COLS // 2)[None, :]
        tl.store(raw + place, (even | (odd << 4)).to(tl.uint8), mask=inside[:, None])
        tl.store(raw + first + W // 2 + block, scale, mask=inside)


@triton.jit
def _some(values, raw, table, sequence, number, rows, part, SHAPE: tl.constexpr):
    """Rows of one write. SHAPE: see `_shape`."""
    W: tl.constexpr = SHAPE[0]
    PER: tl.constexpr = SHAPE[1]
    BYTES: tl.constexpr = SHAPE[2]
    KIND: tl.constexpr = SHAPE[3]
    COLS: tl.constexpr = SHAPE[4]
    BLOCKS: tl.constexpr = SHAPE[5]
    ROWS: tl.constexpr = SHAPE[6]
    block = tl.arange(0, ROWS * BLOCKS)
    row = part * ROWS + block // BLOCKS
    live = row < rows
    first, written = row_places(table, sequence, number, row, live, SHAPE[7], PER, BYTES)
    channel = (block % BLOCKS * COLS)[:, None] + tl.arange(0, COLS)[None, :]
    here = row.to(tl.int64)[:, None] * SHAPE[8] + channel
    x = tl.load(values + here, mask=written[:, None] & (channel < W), other=0.0)
    put_rows(x.to(tl.float32), raw, first, written, W, BLOCKS, COLS, KIND)


@triton.jit
def _write(
    values0, raw0, table0, sequence0, number0, rows0,
    values1, raw1, table1, sequence1, number1, rows1,
    values2, raw2, table2, sequence2, number2, rows2,
    COUNT: tl.constexpr, SHAPE0: tl.constexpr, SHAPE1: tl.constexpr, SHAPE2: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    part = tl.program_id(0)
    stop = tl.cdiv(rows0, SHAPE0[6])
    if part < stop:
        _some(values0, raw0, table0, sequence0, number0, rows0, part, SHAPE0)
    if COUNT > 1:
        begin = stop
        stop += tl.cdiv(rows1, SHAPE1[6])
        if (part >= begin) & (part < stop):
            _some(values1, raw1, table1, sequence1, number1, rows1, part - begin, SHAPE1)
    if COUNT > 2:  # noqa: SIM102 (one is decided when compiling)
        if part >= stop:
            _some(values2, raw2, table2, sequence2, number2, rows2, part - stop, SHAPE2)


def unsupported(write: RowWrite) -> str | None:
    """Why the kernel cannot take this write; None if it can."""
    fmt, width = write.format, write.values.shape[1]
    if fmt.name not in KINDS:
        return f"format {fmt.name}"
    if write.values.dtype not in _FLOATS:
        return f"values in {write.values.dtype}"
    if width % fmt.cols:
        return f"rows {width} wide: expected a multiple of {fmt.cols}"
    if not write.raw.is_contiguous() or write.raw.shape[2] != fmt.bytes_per_row(width):
        return "a storage that is not contiguous rows of the format"
    return None


def kv_write(writes: tuple[RowWrite, ...]) -> None:
    """`cedar.ops.kv_write.KvWrite`; writes it cannot take go to the reference."""
    ours = [write for write in writes if unsupported(write) is None and len(write.values)]
    others = tuple(write for write in writes if unsupported(write) is not None)
    if others:
        plain.kv_write(others)
    for first in range(0, len(ours), _MOST):
        _launch(ours[first : first + _MOST])


def _launch(writes: list[RowWrite]) -> None:
    arguments, shapes, programs = [], [], 0
    for write in writes:
        if write.values.stride(1) != 1:
            write = write._replace(values=write.values.contiguous())
        shapes.append(_shape(write))
        programs += -(-len(write.values) // shapes[-1][6])
        arguments += [
            write.values, write.raw, write.table, write.sequence.contiguous(),
            write.number.contiguous(), len(write.values),
        ]  # fmt: skip
    missing = _MOST - len(writes)
    shapes += shapes[:1] * missing
    _write[(programs,)](
        *arguments, *[None] * (6 * missing), COUNT=len(writes), SHAPE0=shapes[0],
        SHAPE1=shapes[1], SHAPE2=shapes[2], num_warps=4, enable_fp_fusion=False,
        **dependent(writes[0].raw.device, programs),
    )  # fmt: skip


def _shape(write: RowWrite) -> tuple[int, ...]:
    """What a kernel is compiled for: W, rows and bytes of a place, kind, blocks, rows, strides."""
    width, fmt = write.values.shape[1], write.format
    blocks = triton.next_power_of_2(width // fmt.cols)
    return (
        width, write.raw.shape[1], write.raw.shape[2], KINDS[fmt.name], fmt.cols, blocks,
        max(_VALUES // (blocks * fmt.cols), 1),
        0 if write.table is None else write.table.stride(0), write.values.stride(0),
    )  # fmt: skip
