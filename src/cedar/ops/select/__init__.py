"""select: which entries and which blocks a query keeps (sections 5 and 6), and where they lie.

Ties go to the lowest number, so a selection is a function of the scores alone.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from cedar.ops.index_score import Scan

__all__ = [
    "Chosen",
    "Place",
    "PlaceEntries",
    "SelectBest",
    "SelectEntries",
    "SelectPool",
    "SelectScan",
]


class Place(NamedTuple):
    """Where the cache holds the entries of each query: the page tables of the sequences.

    table: int32 ``[sequences, pages]``; sequence: ``[T]``, the sequence of each query; per_page:
    entries of a page.
    """

    table: Tensor
    sequence_T: Tensor
    per_page: int


class Chosen(NamedTuple):
    """A selection of each query, ascending, padded with −1.

    entries: int64 ``[T, k]``; rows: int32 ``[T, k]``, where those lie (`PlaceEntries`), if asked
    for; blocks: int64 ``[T, M]``, the candidate blocks, if asked for.
    """

    entries_TK: Tensor
    rows_TK: Tensor | None
    blocks_TM: Tensor | None


class SelectEntries(Protocol):
    """``select_entries(scores [T, S], k, visible [T] | None) -> int64 [T, k]``.

    Column numbers of the ``k`` largest scores above −∞, ascending, padded with −1 at the end.
    With ``visible``, only so many columns of each row exist; what lies behind is never read.
    """

    def __call__(self, scores_TS: Tensor, k: int, visible_T: Tensor | None = None) -> Tensor: ...


class SelectBest(Protocol):
    """``select_best(best [T, M], visible [T], block, k) -> int64 [T, k]``.

    Blocks of ``block`` consecutive entries by the maximum of their scores. Only the
    ``⌈visible / block⌉`` first exist; that of the newest visible entry (``visible − 1``) is always
    kept, those without a score above −∞ never are. Ascending block numbers, padded with −1.
    """

    def __call__(self, best_TM: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor: ...


class PlaceEntries(Protocol):
    """``place(entries [T, k], where) -> int32 [T, k]``: the rows that hold these entries.

    Entry e of a sequence is row ``table[sequence, e // per_page] * per_page + e % per_page`` of its
    storage; −1 stays.
    """

    def __call__(self, entries_TK: Tensor, where: Place) -> Tensor: ...


class SelectScan(Protocol):
    """``select_scan(scan, visible [T], k, blocks, place) -> Chosen``: of a full layer's scan.

    `SelectEntries` of its scores; with ``blocks``, `SelectBest` of so many of its blocks, too;
    with ``place``, the rows of the entries.
    """

    def __call__(
        self,
        scan: Scan,
        visible_T: Tensor,
        k: int,
        *,
        blocks: int = 0,
        place: Place | None = None,
    ) -> Chosen: ...


class SelectPool(Protocol):
    """``select_pool(scores [T, M · block], best [T, M], blocks [T, M], block, k, place)``.

    `SelectEntries` of the scores of `cedar.ops.index_score.IndexPool`, as the numbers of the
    entries in their sequence: column c is entry ``blocks[c // block] * block + c % block``. The
    blocks are ascending and padded with −1; best: their maxima.
    """

    def __call__(
        self,
        scores_TC: Tensor,
        best_TM: Tensor,
        blocks_TM: Tensor,
        block: int,
        k: int,
        *,
        place: Place | None = None,
    ) -> Chosen: ...
