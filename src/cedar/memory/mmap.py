"""An Engram table that stays in its file; only the rows that are asked for are read."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import torch
from torch import Tensor

from cedar.quant import FP8_ROW, QuantTensor

__all__ = ["MappedTable", "RowReader"]


class RowReader(Protocol):
    """What the table needs of a checkpoint: rows of a stored tensor by number."""

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows ``[...]`` of the tensor ``name`` as ``[..., *rest]``, on the CPU."""
        ...


class MappedTable:
    """The rows of one Engram layer, read from a checkpoint file on demand.

    The most recently used rows are kept, dequantised to bfloat16. Not for concurrent use.
    """

    def __init__(
        self, checkpoint: RowReader, weight_name: str, scale_name: str, *, cache_rows: int = 65536
    ) -> None:
        """``cache_rows`` is the number of rows that are kept; 0 keeps none."""
        self._checkpoint = checkpoint
        self._weight_name = weight_name
        self._scale_name = scale_name
        self._cache_rows = cache_rows
        self._cache: OrderedDict[int, Tensor] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids [...]`` (int64) of the table as bfloat16 ``[..., head_dim]``, on its device.

        Raises `CheckpointError` for an id that the table does not have and for damaged rows.
        """
        unique, where = torch.unique(ids.to("cpu", torch.int64), return_inverse=True)
        numbers: list[int] = unique.tolist()
        absent = [number for number in numbers if number not in self._cache]
        fresh = dict(zip(absent, self._load(absent), strict=True)) if absent else {}
        self.hits += len(numbers) - len(absent)
        self.misses += len(absent)
        found = [self._cache[n] if n in self._cache else fresh[n] for n in numbers]
        self._keep(numbers, found)
        table = torch.stack(found) if found else self._load([0])[:0]
        return table[where].to(ids.device)

    def _load(self, numbers: list[int]) -> Tensor:
        wanted = torch.tensor(numbers, dtype=torch.int64)
        codes = self._checkpoint.read_rows(self._weight_name, wanted)
        scale = self._checkpoint.read_rows(self._scale_name, wanted)
        return QuantTensor(codes, scale, FP8_ROW).dequantize(torch.bfloat16)

    def _keep(self, numbers: list[int], rows: list[Tensor]) -> None:
        if not self._cache_rows:
            return
        for number, row in zip(numbers, rows, strict=True):
            # A copy of its own: a slice would keep the whole batch of rows alive.
            if number not in self._cache:
                self._cache[number] = row.clone()
            self._cache.move_to_end(number)
        while len(self._cache) > self._cache_rows:
            self._cache.popitem(last=False)
