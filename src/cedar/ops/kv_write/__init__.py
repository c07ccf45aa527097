"""kv_write: quantise rows and put them where a packed cache holds them (section 8).

Letters: ``n`` rows of one write, ``W`` values of a row, ``B`` bytes of a packed row.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from cedar.quant import BlockFormat

__all__ = ["KvWrite", "RowWrite"]


class RowWrite(NamedTuple):
    """Rows of one format for one storage.

    values ``[n, W]``; raw ``uint8 [blocks, rows per block, B]``, contiguous. Row ``i`` is number
    ``number[i]`` of its sequence (negative: not written) and goes to place ``number % rows per
    block`` of a block: with a page ``table`` int32 ``[sequences, pages]`` that is page ``table[
    sequence[i], number // rows per block]``, without (None) it is ring ``sequence[i]`` itself.
    sequence and number: int32 or int64 ``[n]``. No two rows of a write may share a place.
    """

    values: Tensor
    raw: Tensor
    format: BlockFormat
    table: Tensor | None
    sequence: Tensor
    number: Tensor


class KvWrite(Protocol):
    """``kv_write(writes)``: packed rows (`cedar.ops.packed`) of all writes, in place.

    Rounds exactly as `cedar.quant.quantize`. Bytes: ``n (W x 2 + B)``.
    """

    def __call__(self, writes: tuple[RowWrite, ...]) -> None: ...
