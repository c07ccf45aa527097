"""Products whose rows do not depend on how many there are."""

import torch.nn.functional as F
from torch import Tensor

__all__ = ["MIN_ROWS", "pad_rows", "product"]

# Fewer rows take other code in the CPU's matrix library, which sums in another order. From here on
# a row comes out the same whatever stands beside it, so batches and drafts change no token.
MIN_ROWS = 4


def pad_rows(x: Tensor) -> Tensor:
    """``x [T, ...]`` with zeros below, on a CPU and if it has few rows."""
    if x.device.type != "cpu" or not 0 < x.shape[0] < MIN_ROWS:
        return x
    below = [0, 0] * (x.dim() - 1) + [0, MIN_ROWS - x.shape[0]]
    return F.pad(x, below)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., n] weightᵀ + bias``."""
    if x.dim() != 2:
        flat = product(x.reshape(-1, x.shape[-1]), weight, bias)
        return flat.view(*x.shape[:-1], weight.shape[0])
    return F.linear(pad_rows(x), weight, bias)[: x.shape[0]]
