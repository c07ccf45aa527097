"""RMSNorm as written."""

import torch
from torch import Tensor

from cedar.ops.precision import widen

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = widen(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (widen(weight) * normed).to(x.dtype)
