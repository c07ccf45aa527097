"""norm: RMSNorm with a float32 statistic."""

from typing import Protocol

from torch import Tensor

__all__ = ["RmsNorm"]


class RmsNorm(Protocol):
    """``rms_norm(x [..., D], weight [D], eps) -> [..., D]`` in the type of ``x``.

    ``weight · x · rsqrt(mean(x²) + eps)``, all in float32, rounded once (section 1). Bytes: ``2 D``
    values a row.
    """

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
