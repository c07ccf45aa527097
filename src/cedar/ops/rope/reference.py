"""Rotation and the frequency tables behind it."""

import math

import torch
from torch import Tensor

from cedar.ops.precision import widen

__all__ = ["frequencies", "rotary_tables", "rotate", "yarn_frequencies"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    r = 2 * cos.shape[-1]
    passed, turned = x.split((x.shape[-1] - r, r), dim=-1)
    pairs = widen(turned).unflatten(-1, (-1, 2))
    shape = (cos.shape[0], *([1] * (x.dim() - 2)), cos.shape[-1])
    c, s = cos.to(pairs.dtype).view(shape), sin.to(pairs.dtype).view(shape)
    if inverse:
        s = -s
    even, odd = pairs.unbind(-1)
    out = torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)
    return torch.cat((passed, out.to(x.dtype)), dim=-1)


def rotary_tables(
    positions_T: Tensor, frequencies: Tensor, back: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    behind = torch.tensor(back, device=positions_T.device).unsqueeze(1)
    angles = (positions_T - behind).to(torch.float32).unsqueeze(2) * frequencies.unsqueeze(1)
    return angles.cos(), angles.sin()


def frequencies(dim: int, base: float) -> Tensor:
    """``base^(-2k/dim)`` for the ``dim / 2`` pairs, float32."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / base**exponent


def yarn_frequencies(
    dim: int, base: float, *, original: int, factor: float, beta_fast: float, beta_slow: float
) -> Tensor:
    """YaRN: slow pairs are slowed down by ``factor``, fast ones kept, a ramp between."""

    def pair_with(turns: float) -> float:
        # The (real-valued) pair that turns this often over the original length.
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with(beta_fast)), 0)
    high = min(math.ceil(pair_with(beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    plain = frequencies(dim, base)
    return plain / factor * (1.0 - keep) + plain * keep
