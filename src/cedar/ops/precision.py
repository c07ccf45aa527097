"""The type that statistics, softmaxes and sums are computed in."""

import torch
from torch import Tensor

__all__ = ["widen"]


def widen(x: Tensor) -> Tensor:
    """``x`` in float32, or unchanged where it is float64 already (gradient checks run in it)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
