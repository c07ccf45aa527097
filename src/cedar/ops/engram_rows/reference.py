"""Gather, then dequantise."""

import torch
from torch import Tensor

from cedar.quant import FP8_ROW, QuantTensor

__all__ = ["engram_rows"]


def engram_rows(codes: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    # By way of bytes: not every device indexes float8.
    picked = codes.view(torch.uint8)[ids].view(torch.float8_e4m3fn)
    return QuantTensor(picked, scale[ids], FP8_ROW).dequantize(dtype)
