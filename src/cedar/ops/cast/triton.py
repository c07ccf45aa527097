"""The round trip through a block format in one launch, bit for bit that of `cedar.quant`.

Shapes: ``[..., n]`` to ``[..., n]``. Bytes: read and write once, ``2 n`` values a row. FLOP: none
to speak of. Bound by memory, or by the launch. A program takes one or more whole blocks of values.

What other kernels need to quantise is here too: block scales and codes as device functions. Where
PyTorch divides, they divide with correct rounding; nothing is fused into multiply-adds.
"""

# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.cast import reference as plain
from cedar.ops.dependent_launch import dependent, hand_over
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, BlockFormat

__all__ = ["KINDS", "block_scales", "cast", "e2m1_codes", "normalised", "round_trip", "unsupported"]

KINDS = {FP8_ROW.name: 0, FP4_MAIN.name: 1, FP4_ROW.name: 2}  # as the device functions count them
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_VALUES = 1024  # of a program


@triton.jit
def block_scales(x, KIND: tl.constexpr):
    """Scale bytes and float32 factors ``[R]`` of blocks ``x [R, cols]``; no NaN, no infinity."""
    LARGEST: tl.constexpr = 448.0 if KIND == 0 else 6.0
    FLOOR: tl.constexpr = 1e-4 if KIND == 0 else (6 * 2.0**-9 if KIND == 1 else 6 * 2.0**-126)
    largest = tl.maximum(tl.max(tl.abs(x), 1), FLOOR)
    ratio = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    if KIND == 1:
        stored = tl.minimum(ratio, 448.0).to(tl.float8e4nv)
        return stored.to(tl.uint8, bitcast=True), stored.to(tl.float32)
    exponent = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    return exponent.to(tl.uint8), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def normalised(x, factor, KIND: tl.constexpr):
    """``x / factor`` of each block within the range of the codes."""
    LARGEST: tl.constexpr = 448.0 if KIND == 0 else 6.0
    if KIND == 1:
        x = tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape))
    else:
        # A power of two, and so is its inverse: multiplying rounds (or does not) as dividing does.
        inverse = (254 << 23) - factor.to(tl.int32, bitcast=True)
        x = x * inverse.to(tl.float32, bitcast=True)[:, None]
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def e2m1_codes(x):
    """Codes 0 to 15 (int32) of values within [-6, 6], rounded to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code + ((bits >> 28) & 8)


@triton.jit
def _e2m1_values(x):
    """The values of `e2m1_codes`, the sign of zero kept."""
    code = e2m1_codes(x)
    size = code & 7
    small = size.to(tl.float32) * 0.5
    value = tl.where(size < 5, small, tl.where(size == 5, 3.0, tl.where(size == 6, 4.0, 6.0)))
    bits = value.to(tl.int32, bitcast=True) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_trip(x, KIND: tl.constexpr):
    """float32 blocks ``[R, cols]`` quantised and dequantised."""
    _, factor = block_scales(x, KIND)
    x = normalised(x, factor, KIND)
    x = x.to(tl.float8e4nv).to(tl.float32) if KIND == 0 else _e2m1_values(x)
    return x * factor[:, None]


@triton.jit
def _cast(
    x, out, blocks,
    KIND: tl.constexpr, COLS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * COLS + tl.arange(0, COLS)[None, :]
    inside = (block < blocks)[:, None]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, round_trip(values, KIND), mask=inside)


def unsupported(x: Tensor, fmt: BlockFormat) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if fmt.name not in KINDS:
        return f"format {fmt.name}"
    if x.dtype not in _FLOATS:
        return f"values in {x.dtype}"
    if not x.dim() or x.shape[-1] % fmt.cols:
        return f"rows that are no multiple of {fmt.cols} wide"
    return None


def cast(x: Tensor, fmt: BlockFormat) -> Tensor:
    """`cedar.ops.cast.Cast`; inputs it cannot take go to the reference."""
    if unsupported(x, fmt) is not None:
        return plain.cast(x, fmt)
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, fmt)
    return _launch(x, fmt)


def _launch(x: Tensor, fmt: BlockFormat) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        blocks = x.numel() // fmt.cols
        each = _VALUES // fmt.cols
        programs = triton.cdiv(blocks, each)
        _cast[(programs,)](
            x, out, blocks, KIND=KINDS[fmt.name], COLS=fmt.cols, BLOCKS=each, num_warps=2,
            enable_fp_fusion=False, **dependent(x.device, programs),
        )  # fmt: skip
    return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: BlockFormat) -> Tensor:
        return _launch(x, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
