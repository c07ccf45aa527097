"""engram_rows: look up and dequantise rows of an n-gram table (section 7)."""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["EngramRows"]


class EngramRows(Protocol):
    """``engram_rows(codes float8 [R, W], scale uint8 [R, W/32], ids int64 [...]) -> [..., W]``.

    The rows of a FP8_ROW table, dequantised to ``dtype``, on the device of ``ids``. Codes and
    scales may be parts of one packed row (any row stride), and may lie in page-locked host memory.
    Bytes: ``n W (1 + 1/32 + size of dtype)`` for ``n`` rows.
    """

    def __call__(self, codes: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor: ...
