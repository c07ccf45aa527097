"""Norm, rotation and cast of rows in one launch, and optionally their packed bytes in the cache.

A program takes one row of W channels (a head of a query, a window row, an index key). Rotation and
cast round bit for bit as the references do; a norm differs by the order of one sum. Bytes: ``2 W``
values a row read and written (a packed row instead if it is only stored). Bound by the launch at
decode, where it replaces three or four (norm, rotation, cast, append), by memory in prefill.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.cast.triton import KINDS, round_trip
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write.triton import put_row, row_place
from cedar.ops.kv_write.triton import unsupported as unsupported_write
from cedar.ops.latent import reference as plain
from cedar.quant import BlockFormat

__all__ = ["latent", "latent_write", "rotate", "unsupported"]

_FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _turned(
    x, row, heads, weight, cos, sin, stride, eps,
    W: tl.constexpr, PAIRS: tl.constexpr, TURNED: tl.constexpr, INVERSE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """A row as float32 ``[PAIRS, 2]``, normalised if there is a weight, rotated."""
    pair = tl.arange(0, PAIRS)
    place = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
    inside = place < W
    values = tl.load(x + row.to(tl.int64) * stride + place, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / W + eps)
        w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        values = (w * (values * scale)).to(DTYPE).to(tl.float32)
    even, odd = tl.split(values)
    first: tl.constexpr = W // 2 - TURNED
    turned = (pair >= first) & (pair < W // 2)
    angle = (row // heads).to(tl.int64) * TURNED + pair - first
    c = tl.load(cos + angle, mask=turned, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    new_even = tl.where(turned, (even * c - odd * s).to(DTYPE).to(tl.float32), even)
    new_odd = tl.where(turned, (even * s + odd * c).to(DTYPE).to(tl.float32), odd)
    return tl.join(new_even, new_odd)


@triton.jit
def _rows(
    x, out, heads, weight, cos, sin, stride, eps,
    W: tl.constexpr, PAIRS: tl.constexpr, TURNED: tl.constexpr, INVERSE: tl.constexpr,
    KIND: tl.constexpr, COLS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    values = _turned(x, row, heads, weight, cos, sin, stride, eps, W, PAIRS, TURNED, INVERSE, DTYPE)
    BLOCKS: tl.constexpr = PAIRS * 2 // COLS
    values = tl.reshape(values, (BLOCKS, COLS))
    if KIND >= 0:
        values = round_trip(values, KIND)
    place = tl.arange(0, BLOCKS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out + row.to(tl.int64) * W + place, values, mask=place < W)


@triton.jit
def _rows_into(
    x, raw, table, sequence, number, pages, weight, cos, sin, stride, eps,
    W: tl.constexpr, PAIRS: tl.constexpr, TURNED: tl.constexpr, PER: tl.constexpr,
    BYTES: tl.constexpr, KIND: tl.constexpr, COLS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    into, written = row_place(raw, table, sequence, number, row, pages, PER, BYTES)
    if written:
        values = _turned(x, row, 1, weight, cos, sin, stride, eps, W, PAIRS, TURNED, False, DTYPE)
        BLOCKS: tl.constexpr = PAIRS * 2 // COLS
        put_row(tl.reshape(values, (BLOCKS, COLS)), into, W, BLOCKS, COLS, KIND)


def unsupported(
    x: Tensor, weight: Tensor | None, rotary: tuple[Tensor, Tensor], fmt: BlockFormat | None
) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    width = x.shape[-1]
    if x.dtype not in _FLOATS:
        return f"values in {x.dtype}"
    if width % 2 or 2 * rotary[0].shape[-1] > width:
        return f"rows {width} wide with {rotary[0].shape[-1]} rotated pairs"
    if fmt is not None and (fmt.name not in KINDS or width % fmt.cols):
        return f"rows {width} wide in {fmt.name}"
    learned = (x,) if weight is None else (x, weight)
    if torch.is_grad_enabled() and any(v.requires_grad for v in learned):
        return "a gradient is wanted"
    return None


def latent(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    fmt: BlockFormat | None,
    inverse: bool = False,
) -> Tensor:
    """`cedar.ops.latent.Latent`; inputs it cannot take go to the reference."""
    if unsupported(x, weight, rotary, fmt) is not None:
        return plain.latent(x, weight, eps, rotary, fmt, inverse)
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    if x.numel():
        rows = x.numel() // width
        _rows[(rows,)](
            x, out, rows // x.shape[0], weight, *_angles(rotary), width, eps, W=width,
            PAIRS=_pairs(width, fmt), TURNED=rotary[0].shape[-1], INVERSE=inverse,
            KIND=-1 if fmt is None else KINDS[fmt.name], COLS=16 if fmt is None else fmt.cols,
            DTYPE=_FLOATS[x.dtype], num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """`cedar.ops.rope.Rotate` in one launch."""
    return latent(x, None, 0.0, (cos, sin), None, inverse)


def latent_write(
    write: RowWrite, weight: Tensor | None, eps: float, rotary: tuple[Tensor, Tensor]
) -> None:
    """`cedar.ops.latent.LatentWrite`; inputs it cannot take go to the reference."""
    x, fmt = write.values, write.format
    if unsupported(x, weight, rotary, fmt) or unsupported_write(write):
        plain.latent_write(write, weight, eps, rotary)
    elif len(x):
        x = x.contiguous()
        width = x.shape[1]
        _rows_into[(len(x),)](
            x, write.raw, write.table, write.sequence.contiguous(), write.number.contiguous(),
            0 if write.table is None else write.table.stride(0), weight, *_angles(rotary), width,
            eps, W=width, PAIRS=_pairs(width, fmt), TURNED=rotary[0].shape[-1],
            PER=write.raw.shape[1], BYTES=write.raw.shape[2], KIND=KINDS[fmt.name], COLS=fmt.cols,
            DTYPE=_FLOATS[x.dtype], num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def _pairs(width: int, fmt: BlockFormat | None) -> int:
    """Pairs of a row, padded to a power of two and to whole blocks."""
    return max(triton.next_power_of_2(width), 16 if fmt is None else fmt.cols) // 2


def _angles(rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rotary[0].contiguous(), rotary[1].contiguous()
