"""linear: ``y = x Wᵀ (+ b)`` with a weight in floating point or in a block format."""

from typing import Protocol

from torch import Tensor

from cedar.quant import QuantTensor

__all__ = ["LinearOp"]


class LinearOp(Protocol):
    """``linear(x [..., in], weight [out, in], bias [out] | None) -> [..., out]``.

    The product accumulates in float32 and is rounded once to the type of ``x``. Quantising the
    input is the caller's business: which products do it is part of the architecture (section 8).
    """

    def __call__(
        self, x: Tensor, weight: Tensor | QuantTensor, bias: Tensor | None = None
    ) -> Tensor: ...
