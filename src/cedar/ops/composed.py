"""Fused operations as what they are made of.

A kernel may do in one launch what is several operations here. Each function takes the operations
it is composed of (an `Ops`, or anything with these attributes), so that a model with one of them
exchanged still means what it says.
"""

from typing import Protocol

import torch
from torch import Tensor

from cedar.ops.cast import Cast
from cedar.ops.linear import LinearOp
from cedar.ops.linear.rows import pad_rows
from cedar.ops.mhc import MhcCoefficients, MhcCollapse, MhcExpand, MhcMix, MhcParameters
from cedar.ops.norm import RmsNorm
from cedar.ops.precision import widen
from cedar.ops.rope import Rotate
from cedar.ops.sparse_attention import Source, SparseAttention
from cedar.quant import BlockFormat, QuantTensor

__all__ = [
    "Parts",
    "latent",
    "mhc_step",
    "project",
    "project_groups",
    "rotated_attention",
    "wide_linear",
]


class Parts(Protocol):
    """The operations that fused ones are composed of."""

    cast: Cast
    linear: LinearOp
    rms_norm: RmsNorm
    rotate: Rotate
    mhc_coefficients: MhcCoefficients
    mhc_collapse: MhcCollapse
    mhc_expand: MhcExpand
    sparse_attention: SparseAttention


def latent(
    parts: Parts,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    fmt: BlockFormat | None,
    inverse: bool = False,
) -> Tensor:
    if weight is not None:
        x = parts.rms_norm(x, weight, eps)
    x = parts.rotate(x, *rotary, inverse)
    return x if fmt is None else parts.cast(x, fmt)


def project(
    parts: Parts,
    x: Tensor,
    weights: tuple[Tensor | QuantTensor, ...],
    *,
    input_format: BlockFormat | None,
    norm: tuple[Tensor, float] | None = None,
) -> tuple[Tensor, ...]:
    if norm is not None:
        x = parts.rms_norm(x, *norm)
    if input_format is not None:
        x = parts.cast(x, input_format)
    return tuple(parts.linear(x, weight) for weight in weights)


def project_groups(parts: Parts, o_TGK: Tensor, weight: Tensor | QuantTensor) -> Tensor:
    dtype, groups = o_TGK.dtype, o_TGK.shape[1]
    dense = weight.dequantize(dtype) if isinstance(weight, QuantTensor) else weight.to(dtype)
    out = torch.einsum("tgk,grk->tgr", pad_rows(o_TGK), dense.view(groups, -1, dense.shape[1]))
    return out[: len(o_TGK)].flatten(1)


def wide_linear(parts: Parts, x: Tensor, weight: Tensor) -> Tensor:
    return parts.linear(widen(x), weight)


def rotated_attention(
    parts: Parts,
    q_TNH: Tensor,
    sources: tuple[Source, ...],
    sink_N: Tensor,
    scale: float,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    o = parts.sparse_attention(parts.rotate(q_TNH, *rotary), sources, sink_N, scale)
    return parts.rotate(o, *rotary, True)


def mhc_step(
    parts: Parts,
    x_TCD: Tensor,
    update: tuple[Tensor, MhcMix] | None,
    pre_TC: Tensor,
    parameters: MhcParameters,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[Tensor, MhcMix, Tensor]:
    if update is not None:
        x_TCD = parts.mhc_expand(x_TCD, *update)
    mix = parts.mhc_coefficients(
        x_TCD, *parameters, norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters
    )
    h = parts.rms_norm(parts.mhc_collapse(x_TCD, pre_TC), norm_weight, norm_eps)
    return x_TCD, mix, h
