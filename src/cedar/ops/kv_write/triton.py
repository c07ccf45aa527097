"""Quantise and append cache rows in one launch, up to three formats and storages at once.

A program takes one row: block maxima, scales, codes, packed bytes at the place that the page table
or the ring says. Released sizes: a window row 1,024 bytes in and 528 out, an entry 1,024 and 288,
an index key 256 and 68. Bytes: ``n (2 W + B)``. Bound by the launch at decode, by memory in
prefill. Rounds bit for bit as `cedar.quant.quantize` does.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from cedar.ops.cast.triton import KINDS, block_scales, e2m1_codes, normalised
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write import reference as plain

__all__ = ["kv_write", "put_row", "unsupported"]

_MOST = 3  # writes of one launch
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def put_row(x, into, W: tl.constexpr, BLOCKS: tl.constexpr, COLS: tl.constexpr, KIND: tl.constexpr):
    """Pack ``x [BLOCKS, COLS]`` (float32, zero behind W values) to the row that begins at
    ``into``."""
    block = tl.arange(0, BLOCKS)
    scale, factor = block_scales(x, KIND)
    x = normalised(x, factor, KIND)
    inside = (block < W // COLS)[:, None]
    if KIND == 0:
        place = block[:, None] * COLS + tl.arange(0, COLS)[None, :]
        tl.store(into + place, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)
        tl.store(into + W + block, scale, mask=block < W // COLS)
    else:
        even, odd = tl.split(tl.reshape(e2m1_codes(x), (BLOCKS, COLS // 2, 2)))
        place = block[:, None] * (COLS // 2) + tl.arange(0, COLS // 2)[None, :]
        tl.store(into + place, (even | (odd << 4)).to(tl.uint8), mask=inside)
        tl.store(into + W // 2 + block, scale, mask=block < W // COLS)


@triton.jit
def row_place(raw, table, sequence, number, row, pages, PER: tl.constexpr, BYTES: tl.constexpr):
    """The first byte of a row's place, and whether it is written at all."""
    count = tl.load(number + row).to(tl.int64)
    written = count >= 0
    count = tl.where(written, count, 0)
    block = tl.load(sequence + row).to(tl.int64)
    if table is not None:
        block = tl.load(table + block * pages + count // PER).to(tl.int64)
    return raw + (block * PER + count % PER) * BYTES, written


@triton.jit
def _one(
    values, raw, table, sequence, number, row, pages, stride,
    W: tl.constexpr, PER: tl.constexpr, BYTES: tl.constexpr, KIND: tl.constexpr,
    COLS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    into, written = row_place(raw, table, sequence, number, row, pages, PER, BYTES)
    if written:
        here = tl.arange(0, BLOCKS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        x = tl.load(values + row.to(tl.int64) * stride + here, mask=here < W, other=0.0)
        put_row(x.to(tl.float32), into, W, BLOCKS, COLS, KIND)


@triton.jit
def _write(
    values0, raw0, table0, sequence0, number0, pages0, stride0, stop0,
    values1, raw1, table1, sequence1, number1, pages1, stride1, stop1,
    values2, raw2, table2, sequence2, number2, pages2, stride2,
    COUNT: tl.constexpr, SIZES0: tl.constexpr, SIZES1: tl.constexpr, SIZES2: tl.constexpr,
):  # fmt: skip
    """SIZES: W, PER, BYTES, KIND, COLS and BLOCKS of a write."""
    row = tl.program_id(0)
    if row < stop0:
        _one(
            values0, raw0, table0, sequence0, number0, row, pages0, stride0,
            SIZES0[0], SIZES0[1], SIZES0[2], SIZES0[3], SIZES0[4], SIZES0[5],
        )  # fmt: skip
    if COUNT > 1:  # noqa: SIM102 (one is decided when compiling)
        if (row >= stop0) & (row < stop1):
            _one(
                values1, raw1, table1, sequence1, number1, row - stop0, pages1, stride1,
                SIZES1[0], SIZES1[1], SIZES1[2], SIZES1[3], SIZES1[4], SIZES1[5],
            )  # fmt: skip
    if COUNT > 2:  # noqa: SIM102
        if row >= stop1:
            _one(
                values2, raw2, table2, sequence2, number2, row - stop1, pages2, stride2,
                SIZES2[0], SIZES2[1], SIZES2[2], SIZES2[3], SIZES2[4], SIZES2[5],
            )  # fmt: skip


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
    plain.kv_write(tuple(w for w in writes if unsupported(w) is not None))
    for first in range(0, len(ours), _MOST):
        _launch(ours[first : first + _MOST])


def _launch(writes: list[RowWrite]) -> None:
    arguments, sizes, stop = [], [], 0
    for write in (writes * _MOST)[:_MOST]:
        values = write.values if write.values.stride(1) == 1 else write.values.contiguous()
        count, width = values.shape
        stop += count
        pages = 0 if write.table is None else write.table.stride(0)
        arguments.append(
            [values, write.raw, write.table, write.sequence.contiguous(),
             write.number.contiguous(), pages, values.stride(0), stop]
        )  # fmt: skip
        blocks = width // write.format.cols
        sizes.append(
            (width, *write.raw.shape[1:], KINDS[write.format.name], write.format.cols,
             triton.next_power_of_2(blocks))
        )  # fmt: skip
    total = arguments[len(writes) - 1][-1]
    _write[(total,)](
        *arguments[0], *arguments[1], *arguments[2][:-1], COUNT=len(writes), SIZES0=sizes[0],
        SIZES1=sizes[1], SIZES2=sizes[2], num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
