"""latent: norm, rotation and cast of cache rows and queries as one operation (sections 2, 3, 8)."""

from typing import Protocol

from torch import Tensor

from cedar.ops.kv_write import RowWrite
from cedar.quant import BlockFormat

__all__ = ["Latent", "LatentWrite"]


class Latent(Protocol):
    """``latent(x [T, ..., W], weight [W] | None, eps, (cos, sin) [T, r/2], fmt | None, ...)``.

    ``[T, ..., W]``: `cedar.ops.norm.RmsNorm` (with a weight), `cedar.ops.rope.Rotate`,
    `cedar.ops.cast.Cast` (with a format), one after the other, each rounded to the type of ``x``.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        rotary: tuple[Tensor, Tensor],
        fmt: BlockFormat | None,
        inverse: bool = False,
    ) -> Tensor: ...


class LatentWrite(Protocol):
    """The same of the values ``[T, W]`` of a write, which end up packed where it says."""

    def __call__(
        self, write: RowWrite, weight: Tensor | None, eps: float, rotary: tuple[Tensor, Tensor]
    ) -> None: ...
