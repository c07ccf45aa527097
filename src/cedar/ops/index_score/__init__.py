"""index_score: how relevant the indexer finds an entry (section 5).

``I = Σ_h w_h · relu(q_h · k)``; per-head products and their weighting in the input type, the
sum over heads in float32, the result in the input type.
"""

from typing import Protocol

from torch import Tensor

__all__ = ["IndexScore", "IndexScoreRows"]


class IndexScore(Protocol):
    """``index_score(q [T, I, J], w [T, I], keys [S, J]) -> [T, S]``: every query, every key."""

    def __call__(self, q_TIJ: Tensor, w_TI: Tensor, keys_SJ: Tensor) -> Tensor: ...


class IndexScoreRows(Protocol):
    """``index_score_rows(q [T, I, J], w [T, I], keys [R, J], rows [T, M]) -> [T, M]``.

    Each query scores only the keys whose rows it names; ``rows`` must be valid rows.
    """

    def __call__(self, q_TIJ: Tensor, w_TI: Tensor, keys_RJ: Tensor, rows_TM: Tensor) -> Tensor: ...
