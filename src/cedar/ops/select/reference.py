"""Selection by threshold, in linear time but for `torch.topk`."""

import torch
from torch import Tensor

from cedar.ops.index_score import Scan
from cedar.ops.packed import page_rows
from cedar.ops.select import Chosen, Place

__all__ = [
    "place",
    "select_best",
    "select_entries",
    "select_pool",
    "select_scan",
]


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


def select_best(best_TM: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor:
    blocks = torch.arange(best_TM.shape[1], device=best_TM.device)
    newest = (visible_T - 1).div(block, rounding_mode="floor").unsqueeze(1)
    exists = best_TM.masked_fill(blocks > newest, -torch.inf)
    return select_entries(exists.masked_fill(blocks == newest, torch.inf), k)


def place(entries_TK: Tensor, where: Place) -> Tensor:
    table, sequence_T, per_page = where
    rows = page_rows(table, sequence_T.long().unsqueeze(1), entries_TK.clamp_min(0), per_page)
    return rows.where(entries_TK >= 0, -1).to(torch.int32)


def select_scan(
    scan: Scan, visible_T: Tensor, k: int, *, blocks: int = 0, place: Place | None = None
) -> Chosen:
    entries = select_entries(scan.scores_TS, k, visible_T)
    kept = None
    if blocks:
        if scan.best_TM is None:
            raise ValueError("blocks are selected by their maxima: scan with a block")
        kept = select_best(scan.best_TM, visible_T, scan.block, blocks)
    return Chosen(entries, _rows(entries, place), kept)


def select_pool(
    scores_TC: Tensor,
    best_TM: Tensor,
    blocks_TM: Tensor,
    block: int,
    k: int,
    *,
    place: Place | None = None,
) -> Chosen:
    del best_TM  # only kernels save work by them
    columns = select_entries(scores_TC, k)
    there = columns.clamp_min(0)
    entries = blocks_TM.gather(1, there // block) * block + there % block
    entries = entries.where(columns >= 0, -1)
    return Chosen(entries, _rows(entries, place), None)


def _rows(entries_TK: Tensor, where: Place | None) -> Tensor | None:
    return None if where is None else place(entries_TK, where)
