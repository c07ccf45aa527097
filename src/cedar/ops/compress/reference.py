"""Gated pooling."""

from torch import Tensor

__all__ = ["compress"]


def compress(kv_GRH: Tensor, gate_GRH: Tensor) -> Tensor:
    return (gate_GRH.softmax(1) * kv_GRH).sum(1)
