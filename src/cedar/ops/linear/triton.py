"""Products on packed FP8 weights for any sizes, and packed weights as bfloat16 for large products.

Rows of the weight are the long side of a tile and tokens the short one, so few tokens waste little.
Codes times power-of-two scales are exact in bfloat16. `cedar.ops.linear.hopper` does the same at
several times the speed on compute capability 9.0.

Bytes: those of the weight once for every ``TOKENS`` tokens, and x once for every tile of ``ROWS``
rows (from L2). FLOP: ``2 T in out``.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.quant import QuantTensor

__all__ = ["dense", "product"]


@triton.jit
def _factor(byte):
    """``2^(byte - 127)``; byte 0 stands for 2^-127, the one that is no normal float32."""
    wide = byte.to(tl.int32)
    return tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tile(
    weight, scale, row, col, rows, K: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Values ``[ROWS, COLS]`` of a weight, zeros outside of it."""
    inside = (row < rows)[:, None] & (col < K)[None, :]
    value = tl.load(weight + row.to(tl.int64)[:, None] * K + col[None, :], mask=inside, other=0.0)
    if FP8:
        PITCH: tl.constexpr = (K + 31) // 32
        byte = tl.load(
            scale + row[:, None] // 32 * PITCH + col[None, :] // 32, mask=inside, other=0
        )
        return (value.to(tl.float32) * _factor(byte)).to(DTYPE)
    return value.to(DTYPE)


@triton.jit
def _product(
    x, weight, scale, y, count, x_pitch, rows, per_group,
    K: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``y [T, rows]``; rows of the weight in groups of ``per_group`` with channels of their own."""
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    col = tl.arange(0, COLS)
    known = token < count
    line = x + token.to(tl.int64)[None, :] * x_pitch + group * K
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, K, COLS):
        at = start + col
        last = tl.minimum((group + 1) * per_group, rows)
        w = _tile(weight, scale, group * per_group + row, at, last, K, FP8, DTYPE)
        inside = known[None, :] & (at < K)[:, None]
        v = tl.load(line + at[:, None], mask=inside, other=0.0).to(DTYPE)
        acc = tl.dot(w, v, acc, input_precision="ieee")
    place = token.to(tl.int64)[None, :] * rows + group * per_group + row[:, None]
    inside = known[None, :] & (row < per_group)[:, None]
    tl.store(y + place, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _dense(code, scale, out, rows, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    value = _tile(code, scale, row, col, rows, K, True, out.dtype.element_ty)
    inside = (row < rows)[:, None] & (col < K)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * K + col[None, :], value, mask=inside)


def product(x: Tensor, weight: Tensor | QuantTensor, dtype: torch.dtype, groups: int = 1) -> Tensor:
    """``[T, out]`` in ``dtype`` of ``x [T, in]`` (``[T, groups · in]``) and ``weight [out, in]``.

    Codes are decoded to, and other weights rounded to, the type of x.
    """
    rows, width = weight.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty((len(x), rows), dtype=dtype, device=x.device)
    if not y.numel():
        return y
    fp8 = isinstance(weight, QuantTensor)
    held = (weight.codes, weight.scale) if fp8 else (weight.contiguous(), x)
    high = min(max(triton.next_power_of_2(rows // groups), 16), 64)
    tokens = min(max(triton.next_power_of_2(len(x)), 16), 64)
    grid = (triton.cdiv(rows // groups, high), groups, triton.cdiv(len(x), tokens))
    _product[grid](
        x, *held, y, len(x), x.stride(0), rows, rows // groups, K=width, FP8=fp8,
        DTYPE=_TL[x.dtype], ROWS=high, TOKENS=tokens,
        COLS=min(max(triton.next_power_of_2(width), 32), 64), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def dense(weight: QuantTensor, dtype: torch.dtype) -> Tensor:
    """``QuantTensor.dequantize`` of an FP8_BLOCK weight in one launch."""
    rows, width = weight.shape
    out = torch.empty((rows, width), dtype=dtype, device=weight.codes.device)
    if out.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(width, 128))
        _dense[grid](weight.codes, weight.scale, out, rows, K=width, ROWS=32, COLS=128, num_warps=4)
    return out


_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
