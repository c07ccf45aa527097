"""Dequantise, then multiply.

Codes times power-of-two scales are exact in bfloat16, so nothing is lost on the way.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cedar.ops.cast.reference import cast
from cedar.ops.linear.rows import pad_rows, product
from cedar.ops.norm.reference import rms_norm
from cedar.ops.precision import widen
from cedar.quant import BlockFormat, QuantTensor

__all__ = ["linear", "project", "project_groups", "project_output", "wide_linear"]


def linear(x: Tensor, weight: Tensor | QuantTensor, bias: Tensor | None = None) -> Tensor:
    return product(x, _dense(weight, x.dtype), None if bias is None else bias.to(x.dtype))


def project_groups(o_TGK: Tensor, weight: Tensor | QuantTensor) -> Tensor:
    dense = _dense(weight, o_TGK.dtype)
    dense = dense.view(o_TGK.shape[1], -1, dense.shape[1])
    return torch.einsum("tgk,grk->tgr", pad_rows(o_TGK), dense)[: len(o_TGK)].flatten(1)


_PLAIN: Any = SimpleNamespace(
    cast=cast, linear=linear, rms_norm=rms_norm, project_groups=project_groups
)


def project(
    x: Tensor,
    weights: tuple[Tensor | QuantTensor, ...],
    *,
    input_format: BlockFormat | None,
    norm: tuple[Tensor, float] | None = None,
    parts: Any = _PLAIN,
) -> tuple[Tensor, ...]:
    if norm is not None:
        x = parts.rms_norm(x, *norm)
    if input_format is not None:
        x = parts.cast(x, input_format)
    return tuple(parts.linear(x, weight) for weight in weights)


def project_output(
    o_TGK: Tensor,
    first: Tensor | QuantTensor,
    second: Tensor | QuantTensor,
    *,
    input_format: BlockFormat | None,
    parts: Any = _PLAIN,
) -> Tensor:
    grouped = parts.project_groups(o_TGK, first)
    (out,) = project(grouped, (second,), input_format=input_format, parts=parts)
    return out


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    return linear(widen(x), weight)


def _dense(weight: Tensor | QuantTensor, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, QuantTensor) else weight.to(dtype)
