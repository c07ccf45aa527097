"""Rows that kernels read and write in whole vectors."""

import torch
from torch import Tensor

__all__ = ["aligned_rows"]


def aligned_rows(count: int, width: int, like: Tensor) -> Tensor:
    """Undefined ``[count, width]`` of ``like``'s type; rows lie a multiple of 16 elements apart.

    Kernels are compiled once for such rows, whatever the width; otherwise again for every case of
    strides that are and are not multiples of 16.
    """
    held = torch.empty((count, -(-width // 16) * 16), dtype=like.dtype, device=like.device)
    return held[:, :width]
