"""Main KV as the model reads it: entries and index keys by their number within a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from cedar.ops.index_score import PagedKeys
from cedar.ops.sparse_attention import PackedRows, Rows, Source
from cedar.quant import FP4_MAIN

__all__ = ["FlatMain", "FloatMain", "KVArrays", "MainKV", "PackedMain"]


class FloatMain(Protocol):
    """Entries and index keys of one KV source, for the sequences of one batch, as numbers."""

    @property
    def layer(self) -> int:
        """The KV source."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Finished entries of each sequence."""

    def select(self, entries_TK: Tensor) -> Source:
        """Entries (−1 absent) of each packed token's own sequence, ready for attention."""

    def keys(self, sequence: int, stop: int) -> Tensor:
        """Index keys ``[stop, J]`` of a sequence's first entries."""

    def keys_at(self, sequence: int, entries_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[R, J]`` and the rows ``[T, M]`` in them of these entries (−1: any row)."""


@dataclass(frozen=True, slots=True)
class FlatMain:
    """Everything in one floating-point storage; sequence n begins at row ``first[n]``."""

    layer: int
    rows_RH: Tensor
    keys_RJ: Tensor
    first: tuple[int, ...]
    counts: tuple[int, ...]
    first_T: Tensor  # first row of each packed token's sequence

    @classmethod
    def of(
        cls,
        layer: int,
        rows_RH: Tensor,
        keys_RJ: Tensor,
        ranges: list[tuple[int, int]],
        sequence_T: Tensor,
    ) -> "FlatMain":
        """From ``(first row, entries)`` of each sequence of a batch."""
        first = tuple(row for row, _ in ranges)
        first_T = torch.tensor(first, device=rows_RH.device)[sequence_T]
        return cls(layer, rows_RH, keys_RJ, first, tuple(n for _, n in ranges), first_T)

    def select(self, entries_TK: Tensor) -> Rows:
        slots = torch.where(entries_TK >= 0, entries_TK + self.first_T.unsqueeze(1), -1)
        return Rows(self.rows_RH, slots)

    def keys(self, sequence: int, stop: int) -> Tensor:
        first = self.first[sequence]
        return self.keys_RJ[first : first + stop]

    def keys_at(self, sequence: int, entries_TM: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys_RJ, entries_TM.clamp_min(0) + self.first[sequence]


@dataclass(frozen=True, slots=True)
class PackedMain:
    """Pages of packed rows, for kernels that read them where they are.

    entries: ``uint8 [pages, entries per page, bytes]``; keys: the same of index keys, with the
    page table of the batch's sequences. queries: packed tokens of one sequence, at most. capacity:
    entries that the longest sequence can have.
    """

    layer: int
    entries_PEB: Tensor
    keys: PagedKeys
    sequence_T: Tensor  # of each packed token, a row of the page table
    queries: int
    capacity: int

    @property
    def per_page(self) -> int:
        """Entries of a page."""
        return self.entries_PEB.shape[1]

    def rows(self, rows_TK: Tensor) -> PackedRows:
        """Rows of the storage (−1 absent), ready for attention."""
        return PackedRows(self.entries_PEB.flatten(0, 1), rows_TK, FP4_MAIN)


MainKV: TypeAlias = FloatMain | PackedMain


class KVArrays(NamedTuple):
    """What a packed cache holds, by layer, for passes whose places only the device knows.

    rings: window rows ``uint8 [slots, ring, bytes]``; residues: values and gates of unfinished
    groups ``[slots, ring, 2, H]``; entries, keys: as in `PackedMain`; history: Engram classes
    int64 ``[slots, ring]``. Position p of a slot lies at ``p % ring`` of each ring. table: int32
    ``[slots, pages]``, each slot's pages in order.
    """

    rings: Mapping[int, Tensor]
    residues: Mapping[int, Tensor]
    entries: Mapping[int, Tensor]
    keys: Mapping[int, Tensor]
    history: Tensor
    table: Tensor
