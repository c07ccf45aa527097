"""Sources of rows as the forward kernels take them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cedar.ops.sparse_attention import PackedRows, Rows, Source
from cedar.quant import FP4_MAIN

__all__ = ["FP4", "FP8", "NONE", "VALUES", "Argument", "argument", "held", "kind_of", "unaligned"]

NONE, VALUES, FP8, FP4 = range(4)


class Argument(NamedTuple):
    """A source, or none; strides in elements, ``stride`` between rows. ``fast``: in whole words."""

    kind: int
    fast: bool
    rows: Tensor | None = None
    slots: Tensor | None = None
    stride: int = 0
    slot_stride: int = 0
    width: int = 0

    def or_nothing_of(self, other: "Argument") -> tuple[Any, ...]:
        """The arguments; for a missing source no slots of any rows at hand."""
        given = self if self.rows is not None else other._replace(width=0)
        return given[2:]

    def pointers(self, fast: bool) -> tuple[Any, ...]:
        """The arguments, with FP8 rows as pairs of bytes if ``fast``."""
        pairs = fast and self.kind == FP8 and self.rows is not None
        return (self.rows.view(torch.int16) if pairs else self.rows, *self[3:])  # type: ignore[union-attr]


def argument(source: Source | None, dtype: torch.dtype, fast: bool) -> Argument:
    kind = kind_of(source)
    if source is None:
        return Argument(kind, fast)
    rows, slots = _storage(source), source.slots_TK
    if slots.stride(1) != 1:
        slots = slots.contiguous()
    if kind == VALUES:
        fast = fast and rows.dtype is dtype
    elif kind == FP8:
        even = rows.stride(0) % 2 == 0 and rows.shape[1] % 2 == 0 and rows.data_ptr() % 2 == 0
        fast = fast and even
    return Argument(kind, fast, rows, slots, rows.stride(0), slots.stride(0), slots.shape[1])


def kind_of(source: Source | None) -> int:
    if source is None:
        return NONE
    if isinstance(source, Rows):
        return VALUES
    return FP4 if source.format is FP4_MAIN else FP8


def held(sources: tuple[Source, ...]) -> tuple[Source | None, Source | None]:
    """Window first, main KV second; a missing one is None. Empty sources count as missing."""
    first, second, *_ = [
        *(s for s in sources if s.slots_TK.shape[1] and _storage(s).shape[0]),
        None,
        None,
    ]
    return first, second


def unaligned(x: Tensor) -> bool:
    """Whether rows may begin elsewhere than at multiples of 16 bytes, as far as Triton knows."""
    return x.data_ptr() % 16 != 0 or any(stride % 16 for stride in x.stride()[:-1])


def _storage(source: Source) -> Tensor:
    return source.raw_RB if isinstance(source, PackedRows) else source.rows_RH
