"""Casting between floating point and block formats, exactly.

Every function works on the last dimension (and, for two-dimensional blocks, the last two) of a
tensor of any leading shape. Arithmetic is float32 whatever the input type, as in section 8.
"""

from typing import Any

import torch
from torch import Tensor

from cedar.quant.format import BlockFormat, Element, Scale
from cedar.quant.tensor import QuantTensor, from_blocks, to_blocks

__all__ = ["fake_quantize", "quantize"]


def quantize(x: Tensor, fmt: BlockFormat) -> QuantTensor:
    """Quantise ``x [..., n]`` (``[..., m, n]`` for two-dimensional blocks) to ``fmt``.

    The scale of a block comes from its largest magnitude (section 8): a power of two rounded up
    (E8M0), or the nearest E4M3 number. Elements are rounded to nearest even and clamped.
    NaN and infinity have no code: the caller has to keep them out.
    """
    blocks = to_blocks(x.detach().to(torch.float32), fmt)
    stored, factor = _scales_of(blocks, fmt)
    normal = (blocks / factor).clamp(-fmt.largest, fmt.largest)
    scale = stored.squeeze(-1).squeeze(-2) if fmt.rows > 1 else stored.squeeze(-1)
    if fmt.element is Element.E4M3:
        codes = from_blocks(normal, fmt, x.shape).to(torch.float8_e4m3fn)
        return QuantTensor(codes, scale, fmt)
    return QuantTensor(_pack(_e2m1_codes(from_blocks(normal, fmt, x.shape))), scale, fmt)


def fake_quantize(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Quantise and dequantise ``x``, in its own type; the gradient passes straight through."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _rounded(x, fmt)
    value: Tensor = _StraightThrough.apply(x, fmt)  # type: ignore[no-untyped-call]
    return value


def _rounded(x: Tensor, fmt: BlockFormat) -> Tensor:
    blocks = to_blocks(x.to(torch.float32), fmt)
    _, factor = _scales_of(blocks, fmt)
    normal = (blocks / factor).clamp(-fmt.largest, fmt.largest)
    if fmt.element is Element.E4M3:
        rounded = normal.to(torch.float8_e4m3fn).to(torch.float32)
    else:
        rounded = _round_to_e2m1(normal)
    return from_blocks(rounded * factor, fmt, x.shape).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: BlockFormat) -> Tensor:
        return _rounded(x, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _scales_of(blocks: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """The scales of blocked values as stored and as float32 factors; block dimensions of size 1."""
    dims = (-3, -1) if fmt.rows > 1 else (-1,)
    amax = blocks.abs().amax(dims, keepdim=True).clamp_min(fmt.amax_floor)
    ratio = amax / fmt.largest
    if fmt.scale is Scale.E4M3:
        # Above 448 the cast must saturate on every device, so clamp first.
        stored = ratio.clamp_max(448.0).to(torch.float8_e4m3fn)
        return stored, stored.to(torch.float32)
    # 2^ceil(log2 ratio) from the bits: adding all ones below the exponent carries into it unless
    # the mantissa is zero already. The floor keeps the ratio out of the denormals.
    exponent = (ratio.view(torch.int32) + 0x7FFFFF) >> 23
    return exponent.to(torch.uint8), (exponent << 23).view(torch.float32)


def _e2m1_codes(x: Tensor) -> Tensor:
    """Codes 0..15 of values already within [-6, 6], rounded to nearest even."""
    a = x.abs()
    code = (
        (a > 0.25).to(torch.uint8)
        + (a >= 0.75).to(torch.uint8)
        + (a > 1.25).to(torch.uint8)
        + (a >= 1.75).to(torch.uint8)
        + (a > 2.5).to(torch.uint8)
        + (a >= 3.5).to(torch.uint8)
        + (a > 5.0).to(torch.uint8)
    )
    return code + 8 * torch.signbit(x).to(torch.uint8)


def _round_to_e2m1(x: Tensor) -> Tensor:
    """The same rounding without the codes: round half to even on each binade's own grid."""
    a = x.abs()
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    return torch.copysign((a / step).round() * step, x)


def _pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte: element 2k in the low nibble of byte k, 2k + 1 in the high one."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
