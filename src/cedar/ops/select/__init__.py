"""select: which entries and which blocks a query keeps (sections 5 and 6).

Ties go to the lowest number, so a selection is a function of the scores alone.
"""

from typing import Protocol

from torch import Tensor

__all__ = ["SelectBest", "SelectBlocks", "SelectEntries"]


class SelectEntries(Protocol):
    """``select_entries(scores [T, S], k, visible [T] | None) -> int64 [T, k]``.

    Column numbers of the ``k`` largest scores above −∞, ascending, padded with −1 at the end.
    With ``visible``, only so many columns of each row exist; what lies behind is never read.
    """

    def __call__(self, scores_TS: Tensor, k: int, visible_T: Tensor | None = None) -> Tensor: ...


class SelectBlocks(Protocol):
    """``select_blocks(scores [T, S], visible [T], block, k) -> int64 [T, k]``.

    Blocks of ``block`` consecutive columns scored by their maximum; the block of the newest
    visible column (``visible − 1``) is always kept, blocks without a score above −∞ never are.
    Ascending block numbers, padded with −1.
    """

    def __call__(self, scores_TS: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor: ...


class SelectBest(Protocol):
    """``select_best(best [T, M], visible [T], block, k) -> int64 [T, k]``.

    `SelectBlocks` from the blocks' maxima: only the ``⌈visible / block⌉`` first columns exist.
    """

    def __call__(self, best_TM: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor: ...
