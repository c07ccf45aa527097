"""cast: the round trip of a tensor through a block format, with a straight-through gradient."""

from typing import Protocol

from torch import Tensor

from cedar.quant import BlockFormat

__all__ = ["Cast"]


class Cast(Protocol):
    """``cast(x [..., n], fmt) -> [..., n]`` in the type of ``x``: quantised and dequantised."""

    def __call__(self, x: Tensor, fmt: BlockFormat) -> Tensor: ...
