"""A sublayer boundary in DeepSeek V4's order, which two libraries follow; what it should give.

V4 collapses with the coefficients that it just computed, ours with those before: the same work.
"""

from typing import Any

import torch
from benchmarks.ops.measure import relative_error
from torch import Tensor

from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc import reference as plain
from cedar.ops.norm.reference import rms_norm

__all__ = ["FEW", "Boundary", "boundary_error", "boundary_gradients"]

Boundary = tuple[Tensor, tuple[Tensor, MhcMix], Tensor, MhcParameters, Tensor]
FEW = 64  # tokens that are compared with float64


def boundary_error(
    case: Boundary, found: tuple[Tensor, MhcMix, Tensor], settings: dict[str, Any]
) -> float:
    """Of new streams, coefficients and input against float64; ``pre`` is no output there."""
    x, (y, mix), _, p, weight = case
    wide = MhcMix(*(v[:FEW].double() for v in mix))
    wanted = plain.mhc_expand(x[:FEW].double(), y[:FEW].double(), wide)
    next_mix = plain.mhc_coefficients(wanted, *p, **settings)
    h = rms_norm(plain.mhc_collapse(wanted, next_mix.pre_TC), weight, settings["norm_eps"])
    pairs = [
        (found[0], wanted), (found[1].post_TC.flatten(1), next_mix.post_TC),
        (found[1].comb_TCC, next_mix.comb_TCC), (found[2], h),
    ]  # fmt: skip
    return max(relative_error(a[:FEW], b) for a, b in pairs)


def boundary_gradients(
    values: tuple[Tensor, ...], grads: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Float64 gradients of ``x, y, fn, base, scale, weight`` from those of new streams and input.

    The sublayer's own coefficients update the streams here: x to h, then x and y to x'.
    """
    wide = tuple(v.detach().double().requires_grad_() for v in values)
    x, y, fn, base, scale, weight = wide
    with torch.enable_grad():
        mix = plain.mhc_coefficients(x, fn, base, scale, **settings)
        h = rms_norm(plain.mhc_collapse(x, mix.pre_TC), weight, settings["norm_eps"])
        outputs = plain.mhc_expand(x, y, mix), h
    return torch.autograd.grad(outputs, wide, [g.double() for g in grads])
