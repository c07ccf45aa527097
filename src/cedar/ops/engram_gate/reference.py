"""The Engram gate as written."""

import torch
from torch import Tensor

from cedar.ops.precision import widen

__all__ = ["engram_gate"]


def engram_gate(
    x_TCD: Tensor,
    keys_TCD: Tensor,
    value_TD: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    open_T: Tensor | None,
) -> Tensor:
    x, key = widen(x_TCD), widen(keys_TCD)
    rstd_x = torch.rsqrt(x.square().mean(-1) + eps)
    rstd_key = torch.rsqrt(key.square().mean(-1) + eps)
    weight = widen(q_weight) * widen(k_weight)
    u = (x * weight * key).sum(-1) * rstd_x * rstd_key * x.shape[-1] ** -0.5
    gate = torch.sigmoid(u.sign() * u.abs().clamp_min(1e-6).sqrt())
    if open_T is not None:
        gate = gate * open_T.unsqueeze(-1).to(gate.dtype)
    return (x + gate.unsqueeze(-1) * widen(value_TD).unsqueeze(-2)).to(x_TCD.dtype)
