"""Dequantise, then multiply.

Codes times power-of-two scales are exact in bfloat16, so nothing is lost on the way.
"""

from torch import Tensor

from cedar.ops.linear.rows import product
from cedar.quant import QuantTensor

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor | QuantTensor, bias: Tensor | None = None) -> Tensor:
    dense = weight.dequantize(x.dtype) if isinstance(weight, QuantTensor) else weight.to(x.dtype)
    return product(x, dense, None if bias is None else bias.to(x.dtype))
