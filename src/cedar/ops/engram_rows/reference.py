"""Gather, then dequantise."""

import torch
from torch import Tensor

from cedar.quant import FP8_ROW, QuantTensor

__all__ = ["engram_rows"]


def engram_rows(codes: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    where = ids.to(codes.device)
    # By way of bytes: not every device indexes float8.
    picked = codes.view(torch.uint8)[where].view(torch.float8_e4m3fn)
    return QuantTensor(picked, scale[where], FP8_ROW).dequantize(dtype).to(ids.device)
