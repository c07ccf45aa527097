"""Stream mixing as written in section 1."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cedar.ops.linear.rows import product
from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.norm.reference import rms_norm
from cedar.ops.precision import widen

__all__ = ["mhc_coefficients", "mhc_collapse", "mhc_expand", "mhc_step", "split_mixes"]


def mhc_coefficients(
    x_TCD: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> MhcMix:
    flat = widen(x_TCD.flatten(-2))
    rstd = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    z = product(flat, fn.to(flat.dtype)) * rstd
    return split_mixes(
        z, base, scale, streams=x_TCD.shape[-2], hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters
    )


def split_mixes(
    z: Tensor, base: Tensor, scale: Tensor, *, streams: int, hc_eps: float, sinkhorn_iters: int
) -> MhcMix:
    """The three coefficients of projected rows ``z [..., (2+C)C]``."""
    m = streams
    pre = torch.sigmoid(z[..., :m] * scale[0] + base[:m]) + hc_eps
    post = 2 * torch.sigmoid(z[..., m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (z[..., 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m))
    comb = comb.softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return MhcMix(pre, post, comb)


def mhc_collapse(x_TCD: Tensor, pre_TC: Tensor) -> Tensor:
    x = widen(x_TCD)
    return (pre_TC.to(x.dtype).unsqueeze(-1) * x).sum(-2).to(x_TCD.dtype)


def mhc_expand(x_TCD: Tensor, y_TD: Tensor, mix: MhcMix) -> Tensor:
    x, y = widen(x_TCD), widen(y_TD)
    kept = torch.einsum("...ji,...jd->...id", mix.comb_TCC.to(x.dtype), x)
    added = mix.post_TC.to(x.dtype).unsqueeze(-1) * y.unsqueeze(-2)
    return (added + kept).to(x_TCD.dtype)


_PLAIN: Any = SimpleNamespace(
    mhc_coefficients=mhc_coefficients,
    mhc_collapse=mhc_collapse,
    mhc_expand=mhc_expand,
    rms_norm=rms_norm,
)


def mhc_step(
    x_TCD: Tensor,
    update: tuple[Tensor, MhcMix] | None,
    pre_TC: Tensor,
    parameters: MhcParameters,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    parts: Any = _PLAIN,
) -> tuple[Tensor, MhcMix, Tensor]:
    if update is not None:
        x_TCD = parts.mhc_expand(x_TCD, *update)
    mix = parts.mhc_coefficients(
        x_TCD, *parameters, norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters
    )
    return x_TCD, mix, parts.rms_norm(parts.mhc_collapse(x_TCD, pre_TC), norm_weight, norm_eps)
