"""The three operations, one after the other."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from cedar.ops.cast.reference import cast
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write.reference import kv_write
from cedar.ops.latent import Append, InPlace
from cedar.ops.norm.reference import rms_norm
from cedar.ops.rope.reference import rotate
from cedar.quant import BlockFormat

__all__ = ["latent", "latent_write", "latents"]

_PLAIN: Any = SimpleNamespace(cast=cast, rms_norm=rms_norm, rotate=rotate)


def latent(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    fmt: BlockFormat | None,
    inverse: bool = False,
    *,
    parts: Any = _PLAIN,
) -> Tensor:
    if weight is not None:
        x = parts.rms_norm(x, weight, eps)
    x = parts.rotate(x, *rotary, inverse)
    return x if fmt is None else parts.cast(x, fmt)


def latent_write(
    write: RowWrite, weight: Tensor | None, eps: float, rotary: tuple[Tensor, Tensor]
) -> None:
    kv_write((write._replace(values=latent(write.values, weight, eps, rotary, None)),))


def latents(jobs: tuple[InPlace | Append, ...], eps: float) -> None:
    for job in jobs:
        if isinstance(job, Append):
            latent_write(job.write, job.weight, eps, job.rotary)
        else:
            job.x.copy_(latent(job.x, job.weight, eps, job.rotary, job.format, job.inverse))
