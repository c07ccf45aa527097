"""Main KV as the model reads it: entries and index keys by their number within a sequence."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cedar.ops.sparse_attention import Rows

__all__ = ["FlatMain", "MainKV"]


class MainKV(Protocol):
    """Entries and index keys of one KV source, for the sequences of one batch."""

    @property
    def layer(self) -> int:
        """The KV source."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Finished entries of each sequence."""

    def select(self, entries_TK: Tensor) -> Rows:
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
