"""latent: norm, rotation and cast of cache rows and queries as one operation (sections 2, 3, 8)."""

from typing import NamedTuple, Protocol

from torch import Tensor

from cedar.ops.kv_write import RowWrite
from cedar.quant import BlockFormat

__all__ = ["Append", "InPlace", "Latent", "LatentWrite", "Latents"]


class Latent(Protocol):
    """``latent(x [T, ..., W], weight [W] | None, eps, (cos, sin) [T, r/2], fmt | None, ...)``.

    ``[T, ..., W]``: `cedar.ops.norm.RmsNorm` (with a weight), `cedar.ops.rope.Rotate`,
    `cedar.ops.cast.Cast` (with a format), one after the other, each rounded to the type of ``x``.
    Bytes: ``2 W`` values a row.
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


class InPlace(NamedTuple):
    """Rows ``x [T, ..., W]`` that `Latent` replaces. Bytes: ``2 W`` values a row, or ``2 r`` where
    they are only rotated."""

    x: Tensor
    weight: Tensor | None
    rotary: tuple[Tensor, Tensor]
    format: BlockFormat | None = None
    inverse: bool = False


class Append(NamedTuple):
    """Rows that `LatentWrite` puts into a cache; their number may be negative: not written.
    Bytes: ``W`` values and a packed row each."""

    write: RowWrite
    weight: Tensor | None
    rotary: tuple[Tensor, Tensor]


class Latents(Protocol):
    """``latents(jobs, eps)``: several of both kinds, in one launch where there is a kernel.

    No job may read what another one writes. Without gradients.
    """

    def __call__(self, jobs: tuple[InPlace | Append, ...], eps: float) -> None: ...
