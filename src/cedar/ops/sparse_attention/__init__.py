"""sparse_attention: one softmax over window and global entries (section 3).

Letters: ``T`` queries, ``N`` heads, ``H`` head width, ``R`` stored rows, ``K`` slots.
"""

from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from cedar.quant import BlockFormat

__all__ = [
    "AttentionMass",
    "PackedRows",
    "RotatedAttention",
    "Rows",
    "Source",
    "SparseAttention",
]


class Rows(NamedTuple):
    """Key = value rows and, for every query, which of them it sees.

    rows ``[R, H]``; slots int64 ``[T, K]`` are row numbers, −1 for an empty slot. A row that is
    named twice counts twice.
    """

    rows_RH: Tensor
    slots_TK: Tensor


class PackedRows(NamedTuple):
    """The same over rows as a packed cache holds them (`cedar.ops.packed`), read in place.

    raw ``uint8 [R, B]``: all rows of a storage, whoever they belong to (any row stride); slots
    int32 or int64 ``[T, K]`` are row numbers in it, −1 for an empty slot.
    """

    raw_RB: Tensor
    slots_TK: Tensor
    format: BlockFormat


Source: TypeAlias = Rows | PackedRows


class SparseAttention(Protocol):
    """``sparse_attention(q [T, N, H], sources, sink [N], scale) -> [T, N, H]``.

    ``softmax`` over all filled slots of all ``sources`` together, with the head's sink logit in
    the denominator only; a query without any filled slot gives zeros. Scores and sums are
    float32. In bfloat16 the exponentials are rounded before they meet the values, relative to a
    running maximum over 64 slots at a time: that is the published kernels' rule, bit for bit.
    """

    def __call__(
        self, q_TNH: Tensor, sources: tuple[Source, ...], sink_N: Tensor, scale: float
    ) -> Tensor: ...


class RotatedAttention(Protocol):
    """``rotated_attention(q [T, N, H], sources, sink [N], scale, rotary) -> [T, N, H]``.

    `SparseAttention` between two rotations by ``rotary``, ``(cos [T, r/2], sin [T, r/2])``: q is
    rotated as in `cedar.ops.rope.Rotate`, the output is rotated back, each rounded to q's type.
    """

    def __call__(
        self,
        q_TNH: Tensor,
        sources: tuple[Source, ...],
        sink_N: Tensor,
        scale: float,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor: ...


class AttentionMass(Protocol):
    """``attention_mass(q [T, N, H], sources, sink [N], scale) -> float32 [T, K]``.

    The probabilities that the slots of the LAST source receive in the joint softmax of
    `SparseAttention`, summed over heads: the indexer's teacher. No gradient.
    """

    def __call__(
        self, q_TNH: Tensor, sources: tuple[Source, ...], sink_N: Tensor, scale: float
    ) -> Tensor: ...
