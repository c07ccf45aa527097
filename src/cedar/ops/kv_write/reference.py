"""Quantise, then copy bytes."""

from torch import Tensor

from cedar.ops.kv_write import RowWrite
from cedar.ops.packed import pack_rows, page_rows

__all__ = ["kv_write", "places"]


def kv_write(writes: tuple[RowWrite, ...]) -> None:
    for write in writes:
        written = write.number >= 0
        packed = pack_rows(write.values[written], write.format)
        write.raw.view(-1, write.raw.shape[2])[places(write)[written]] = packed


def places(write: RowWrite) -> Tensor:
    """Rows of ``raw``, its blocks one after the other; any row where nothing is written."""
    per_block = write.raw.shape[1]
    number = write.number.long().clamp_min(0)
    sequence = write.sequence.long()
    if write.table is not None:
        return page_rows(write.table, sequence, number, per_block)
    return sequence * per_block + number % per_block
