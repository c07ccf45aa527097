"""Casting between floating point and block formats, exactly.

Every function works on the last dimension (and, for two-dimensional blocks, the last two) of a
tensor of any leading shape. Arithmetic is float32 whatever the input type, as in section 8.
"""

import torch
from torch import Tensor

from cedar.quant.format import BlockFormat, Element, Scale
from cedar.quant.tensor import QuantTensor, block_scales, expand_scales

__all__ = ["fake_quantize", "quantize"]

_TINY_EXPONENT = -127  # E8M0 byte 0


def quantize(x: Tensor, fmt: BlockFormat) -> QuantTensor:
    """Quantise ``x [..., n]`` (``[..., m, n]`` for two-dimensional blocks) to ``fmt``.

    The scale of a block comes from its largest magnitude (section 8): a power of two rounded up
    (E8M0), or the nearest E4M3 number. Elements are rounded to nearest even and clamped.
    NaN and infinity have no code: the caller has to keep them out.
    """
    wide = x.detach().to(torch.float32)
    stored, scale = _scales_of(wide, fmt)
    normal = wide / expand_scales(scale, fmt, wide.shape)
    normal = normal.clamp(-fmt.largest, fmt.largest)
    if fmt.element is Element.E4M3:
        return QuantTensor(normal.to(torch.float8_e4m3fn), stored, fmt)
    return QuantTensor(_pack(_e2m1_codes(normal)), stored, fmt)


def fake_quantize(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Quantise and dequantise ``x``, in its own type; the gradient passes straight through."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    single = wide.to(torch.float32)
    _, scale = _scales_of(single, fmt)
    factor = expand_scales(scale, fmt, single.shape)
    normal = (single / factor).clamp(-fmt.largest, fmt.largest)
    if fmt.element is Element.E4M3:
        rounded = normal.to(torch.float8_e4m3fn).to(torch.float32)
    else:
        rounded = _round_to_e2m1(normal)
    value = (rounded * factor).to(x.dtype)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value
    # x + (value - x) would round; adding an exact zero that carries the gradient does not.
    return value + (x - x.detach())


def _scales_of(x: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """The scales of ``x`` as stored and as float32 factors, both ``[..., blocks]``."""
    amax = block_scales(x.abs(), fmt).clamp_min(fmt.amax_floor)
    ratio = amax / fmt.largest
    if fmt.scale is Scale.E4M3:
        # Above 448 the cast must saturate on every device, so clamp first.
        stored = ratio.clamp_max(448.0).to(torch.float8_e4m3fn)
        return stored, stored.to(torch.float32)
    # 2^ceil(log2 ratio), from the representation: frexp gives ratio = mantissa * 2^exponent with
    # mantissa in [1/2, 1), and only an exact power of two (mantissa 1/2) needs no rounding up.
    mantissa, exponent = torch.frexp(ratio)
    power = exponent - (mantissa == 0.5).to(exponent.dtype)
    power = power.clamp(_TINY_EXPONENT, 127)
    return (power + 127).to(torch.uint8), torch.ldexp(torch.ones_like(ratio), power)


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
