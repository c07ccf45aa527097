"""Selection by threshold, in linear time but for `torch.topk`."""

import torch
from torch import Tensor

__all__ = ["select_best", "select_blocks", "select_entries"]


def select_entries(scores_TS: Tensor, k: int, visible_T: Tensor | None = None) -> Tensor:
    if visible_T is not None:
        columns = torch.arange(scores_TS.shape[1], device=scores_TS.device)
        scores_TS = scores_TS.masked_fill(columns >= visible_T.unsqueeze(1), -torch.inf)
    rows, width = scores_TS.shape
    kept = min(k, width)
    out = torch.full((rows, k + 1), -1, dtype=torch.int64, device=scores_TS.device)
    if kept == 0:
        return out[:, :k]
    # torch.topk promises nothing about ties: take from it the k-th value only.
    threshold = scores_TS.topk(kept, dim=1).values[:, -1:]
    above = scores_TS > threshold
    level = (scores_TS == threshold) & (scores_TS > -torch.inf)
    room = kept - above.sum(1, keepdim=True)
    chosen = above | (level & (level.cumsum(1) <= room))
    # Column k is a bin for everything that is not chosen.
    target = torch.where(chosen, chosen.cumsum(1) - 1, k)
    numbers = torch.arange(width, device=scores_TS.device).expand(rows, width)
    return out.scatter_(1, target, numbers)[:, :k]


def select_blocks(scores_TS: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor:
    padded = torch.nn.functional.pad(scores_TS, (0, -scores_TS.shape[1] % block), value=-torch.inf)
    return _pinned(padded.unflatten(1, (-1, block)).amax(2), visible_T, block, k)


def select_best(best_TM: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor:
    columns = torch.arange(best_TM.shape[1], device=best_TM.device) * block
    behind = columns >= visible_T.unsqueeze(1)
    return _pinned(best_TM.masked_fill(behind, -torch.inf), visible_T, block, k)


def _pinned(best_TM: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor:
    """The best blocks, the one of the newest visible entry among them."""
    newest = (visible_T - 1).div(block, rounding_mode="floor").unsqueeze(1)
    pinned = torch.arange(best_TM.shape[1], device=best_TM.device) == newest
    return select_entries(best_TM.masked_fill(pinned, torch.inf), k)
