"""An Engram table in page-locked host memory; the device reads its rows over the bus.

Which rows a step needs follows from its tokens alone, so they are fetched while the layers before
the Engram layer run: `PinnedTable.prefetch` at the start of the step, `PinnedTable.rows` where they
are used. Both only enqueue work and can be captured in a CUDA graph.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from cedar.ops.engram_rows import EngramRows
from cedar.quant import FP8_ROW

__all__ = ["PinnedTable", "SliceReader"]

_READ_ROWS = 1 << 20  # of a checkpoint at a time
_PORTABLE = 1  # cudaHostRegisterPortable


class SliceReader(Protocol):
    """What loading a table needs of a checkpoint."""

    def read_slice(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start <= row < stop`` of the tensor ``name``, on the CPU."""
        ...


class PinnedTable:
    """The rows of one Engram layer in host memory, packed: codes, then scales.

    264 bytes a row at the released width of 256, read from where they lie: nothing is copied on the
    host, and the device holds no part of the table. For the CPU it is an ordinary table.
    """

    def __init__(
        self, shape: tuple[int, int], look_up: EngramRows, device: torch.device | str
    ) -> None:
        """Room for a table ``[rows, width]``, not filled yet.

        look_up: the operation that gathers and dequantises on ``device``, where the ids will be.
        """
        rows, width = shape
        packed = torch.empty((rows, FP8_ROW.bytes_per_row(width)), dtype=torch.uint8)
        if torch.device(device).type == "cuda" and rows:
            _lock_pages(self, packed)
        self._codes = packed[:, :width].view(torch.float8_e4m3fn)
        self._scale = packed[:, width:]
        self._look_up = look_up
        self._stream: torch.cuda.Stream | None = None
        self._fetched: tuple[Tensor, Tensor] | None = None  # ids and their rows

    @classmethod
    def load(
        cls,
        checkpoint: SliceReader,
        weight_name: str,
        scale_name: str,
        shape: tuple[int, int],
        look_up: EngramRows,
        device: torch.device | str,
    ) -> PinnedTable:
        """The table ``[rows, width]`` of a checkpoint. `CheckpointError` for damaged rows."""
        table = cls(shape, look_up, device)
        for start in range(0, shape[0], _READ_ROWS):
            stop = min(start + _READ_ROWS, shape[0])
            codes = checkpoint.read_slice(weight_name, start, stop)
            table.fill(start, codes, checkpoint.read_slice(scale_name, start, stop))
        return table

    def fill(self, start: int, codes: Tensor, scale: Tensor) -> None:
        """Write rows from ``start``: codes float8 ``[n, W]``, scale uint8 ``[n, W/32]``."""
        self._codes[start : start + len(codes)].copy_(codes)
        self._scale[start : start + len(scale)].copy_(scale)

    def prefetch(self, ids: Tensor) -> None:
        """Begin to fetch rows ``ids [...]`` beside what the current stream goes on to do.

        The next `rows` has to be of the same tensor; in a capture it has to follow.
        """
        if ids.device.type != "cuda":
            return
        if self._stream is None:
            # Before the layers' kernels, whose blocks leave little room once they are there.
            self._stream = torch.cuda.Stream(ids.device, priority=-1)
        # Also keeps new rows out of memory that the current stream still reads older ones from.
        self._stream.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(self._stream):
            self._fetched = ids, self._gather(ids)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids [...]`` (int64) of the table as bfloat16 ``[..., W]``, on the ids' device."""
        if self._fetched is None:
            return self._gather(ids)
        assert self._stream is not None
        (expected, found), self._fetched = self._fetched, None
        torch.cuda.current_stream(ids.device).wait_stream(self._stream)
        return found if expected is ids else self._gather(ids)

    def _gather(self, ids: Tensor) -> Tensor:
        return self._look_up(self._codes, self._scale, ids, torch.bfloat16)


def _lock_pages(owner: PinnedTable, memory: Tensor) -> None:
    """Page-lock memory for all devices as long as its owner lives."""
    # PyTorch's own pinned allocator rounds up to a power of two: of a table, up to half is wasted.
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr())
