"""index_score: how relevant the indexer finds an entry (section 5).

``I = Σ_h w_h · relu(q_h · k)``; per-head products and their weighting in the input type, the
sum over heads in float32, the result in the input type.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["IndexPool", "IndexScan", "IndexScore", "IndexScoreRows", "PagedKeys"]


class PagedKeys(NamedTuple):
    """Packed index keys of the sequences of a batch, where the cache holds them.

    raw: ``uint8 [pages, entries per page, bytes]`` (FP4_ROW rows, `cedar.ops.packed`); table:
    int32 ``[sequences, pages]``, the pages of each sequence in order (any number behind its last);
    first: int32 ``[sequences + 1]``, the first packed token of each sequence, then their count.
    """

    raw: Tensor
    table: Tensor
    first: Tensor


class IndexScore(Protocol):
    """``index_score(q [T, I, J], w [T, I], keys [S, J]) -> [T, S]``: every query, every key."""

    def __call__(self, q_TIJ: Tensor, w_TI: Tensor, keys_SJ: Tensor) -> Tensor: ...


class IndexScoreRows(Protocol):
    """``index_score_rows(q [T, I, J], w [T, I], keys [R, J], rows [T, M]) -> [T, M]``.

    Each query scores only the keys whose rows it names; ``rows`` must be valid rows.
    """

    def __call__(self, q_TIJ: Tensor, w_TI: Tensor, keys_RJ: Tensor, rows_TM: Tensor) -> Tensor: ...


class IndexScan(Protocol):
    """``index_scan(q [T, I, J], w [T, I], keys, visible [T], ...) -> (scores, best)``.

    Scores ``[T, capacity]``: `IndexScore` of every visible entry of each token's own sequence,
    straight from packed keys; −∞ from entry ``visible`` on as far as the sequence's newest token
    sees. What lies further behind is undefined: nobody may read it, and nobody pays for it. With
    ``block``, best ``[T, capacity / block]`` holds the maxima of blocks of so many columns, else
    it is None.

    capacity: columns; at least the largest ``visible``. queries: most tokens of a sequence.
    """

    def __call__(
        self,
        q_TIJ: Tensor,
        w_TI: Tensor,
        keys: PagedKeys,
        visible_T: Tensor,
        *,
        capacity: int,
        queries: int,
        block: int = 0,
    ) -> tuple[Tensor, Tensor | None]: ...


class IndexPool(Protocol):
    """``index_pool(q, w, keys, sequence [T], visible [T], blocks [T, M], block)``.

    ``[T, M · block]``: `IndexScore` of the entries of each query's own blocks (−1: none) of
    ``block`` entries, in their order; −∞ where there is no block or the entry is not visible.
    """

    def __call__(
        self,
        q_TIJ: Tensor,
        w_TI: Tensor,
        keys: PagedKeys,
        sequence_T: Tensor,
        visible_T: Tensor,
        blocks_TM: Tensor,
        block: int,
    ) -> Tensor: ...
