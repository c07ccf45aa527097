"""Gated pooling."""

import torch
from torch import Tensor

from cedar.ops.compress import Residues
from cedar.ops.norm.reference import rms_norm

__all__ = ["compress", "compress_ring"]


def compress(kv_GRH: Tensor, gate_GRH: Tensor) -> Tensor:
    return (gate_GRH.softmax(1) * kv_GRH).sum(1)


def compress_ring(
    residues: Residues,
    ratio: int,
    dtype: torch.dtype,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    kv_TH, gate_TH, ring, slot_T, position_T = residues
    real = slot_T >= 0
    slot = slot_T[real].long()
    place = position_T[real].long() % ring.shape[1]
    ring[slot, place] = torch.stack((kv_TH[real], gate_TH[real]), dim=1).to(ring.dtype)
    # Every row that a group needs is in the ring now, the new ones among them.
    ends = (position_T[real] + 1) % ratio == 0
    back = torch.arange(1 - ratio, 1, device=ring.device)
    members = (position_T[real].long()[ends].unsqueeze(1) + back) % ring.shape[1]
    rows = ring[slot[ends].unsqueeze(1), members]
    pooled = compress(rows[:, :, 0], rows[:, :, 1]).to(dtype)
    out = torch.zeros(kv_TH.shape, dtype=dtype, device=kv_TH.device)
    out[real.nonzero().squeeze(1)[ends]] = (
        pooled if weight is None else rms_norm(pooled, weight, eps)
    )
    return out
