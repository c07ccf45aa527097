"""index_score: how relevant the indexer finds an entry (section 5).

``I = Σ_h w_h · relu(q_h · k)``; per-head products and their weighting in the input type, the
sum over heads in float32, the result in the input type.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = [
    "IndexPool",
    "IndexPrefill",
    "IndexScan",
    "IndexScore",
    "IndexScoreRows",
    "PagedKeys",
    "Scan",
]


class PagedKeys(NamedTuple):
    """Packed index keys of the sequences of a batch, where the cache holds them.

    raw: ``uint8 [pages, entries per page, bytes]`` (FP4_ROW rows, `cedar.ops.packed`); table:
    int32 ``[sequences, pages]``, the pages of each sequence in order (any number behind its last);
    first: int32 ``[sequences + 1]``, the first packed token of each sequence, then their count.
    """

    raw: Tensor
    table: Tensor
    first: Tensor


class Scan(NamedTuple):
    """Scores ``[T, capacity]`` of an `IndexScan` or `IndexPrefill`, and their maxima.

    best: ``[T, capacity / block]``, of blocks of ``block`` columns, and wide: of eight blocks each
    (both rounded up); None without a block.
    """

    scores_TS: Tensor
    best_TM: Tensor | None = None
    wide_TG: Tensor | None = None
    block: int = 0


class IndexScore(Protocol):
    """``index_score(q [T, I, J], w [T, I], keys [S, J]) -> [T, S]``: every query, every key."""

    def __call__(self, q_TIJ: Tensor, w_TI: Tensor, keys_SJ: Tensor) -> Tensor: ...


class IndexScoreRows(Protocol):
    """``index_score_rows(q [T, I, J], w [T, I], keys [R, J], rows [T, M]) -> [T, M]``.

    Each query scores only the keys whose rows it names; ``rows`` must be valid rows.
    """

    def __call__(self, q_TIJ: Tensor, w_TI: Tensor, keys_RJ: Tensor, rows_TM: Tensor) -> Tensor: ...


class IndexPrefill(Protocol):
    """``index_prefill(q [T, I, J], w [T, I], keys [S, J], visible [T], block) -> Scan``.

    `IndexScore` of one sequence's entries for many of its queries; −∞ from entry ``visible`` on,
    in the maxima too.
    """

    def __call__(
        self, q_TIJ: Tensor, w_TI: Tensor, keys_SJ: Tensor, visible_T: Tensor, *, block: int = 0
    ) -> Scan: ...


class IndexScan(Protocol):
    """``index_scan(q [T, I, J], w [T, I], keys, visible [T], ...) -> Scan``.

    `IndexScore` of every visible entry of each token's own sequence, straight from packed keys;
    −∞ from entry ``visible`` on as far as the sequence's newest token sees. What lies further
    behind is undefined: nobody may read it, and nobody pays for it. Maxima are those of blocks
    that begin before it.

    q: numbers that FP4_ROW can hold, as its cast leaves them. capacity: columns; at least the
    largest ``visible``. queries: most tokens of a sequence.
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
    ) -> Scan: ...


class IndexPool(Protocol):
    """``index_pool(q, w, keys, sequence [T], visible [T], blocks [T, M], block)``.

    ``[T, M · block]``: `IndexScore` of the entries of each query's own blocks (−1: none) of
    ``block`` entries, in their order; −∞ where there is no block or the entry is not visible.
    And ``[T, M]``: the maxima of the blocks.
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
    ) -> tuple[Tensor, Tensor]: ...
