"""compress: pool the tokens of a group into one latent (section 4)."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Compress", "CompressRing", "Residues"]


class Compress(Protocol):
    """``compress(kv [G, ρ, H], gate [G, ρ, H]) -> [G, H]``.

    Per channel: the softmax of the gates over the group's tokens weighs their values.
    """

    def __call__(self, kv_GRH: Tensor, gate_GRH: Tensor) -> Tensor: ...


class Residues(NamedTuple):
    """Compressor rows of new tokens and the rings that hold those of unfinished groups.

    kv, gate: float32 ``[T, H]``. ring: float32 ``[slots, R, 2, H]``, the rows of a sequence's
    position ``p`` at place ``p % R``. slot, position: int32 or int64 ``[T]``; a negative slot is
    padding. Tokens of one sequence stand side by side, positions ascending, and there are at most
    ``R - ρ + 1`` of them, so that no place that is read is written.
    """

    kv: Tensor
    gate: Tensor
    ring: Tensor
    slot: Tensor
    position: Tensor


class CompressRing(Protocol):
    """``compress_ring(residues, ratio, dtype, weight [H] | None, eps) -> [T, H]``.

    Puts every token's rows into its ring. A token that finishes a group of ``ratio`` (its position
    is the group's last) gets the group pooled as `Compress` does and rounded to ``dtype``, with a
    weight normalised after that (`cedar.ops.norm.RmsNorm`); the others get zeros. Bytes:
    ``T H (16 + size of dtype) + 8 H (ratio - 1)`` for a group that began in an earlier call.
    """

    def __call__(
        self,
        residues: Residues,
        ratio: int,
        dtype: torch.dtype,
        weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor: ...
