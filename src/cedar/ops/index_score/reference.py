"""Scores by matrix products."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.ops.index_score import PagedKeys, Scan
from cedar.ops.packed import page_rows, unpack_rows
from cedar.ops.precision import widen
from cedar.quant import FP4_ROW

__all__ = ["index_pool", "index_prefill", "index_scan", "index_score", "index_score_rows"]

_PRODUCTS = {"cpu": 2**23, "cuda": 2**28}  # of all heads that are held at a time


def index_score(q_TIJ: Tensor, w_TI: Tensor, keys_SJ: Tensor) -> Tensor:
    return _weigh(torch.matmul(q_TIJ, keys_SJ.transpose(0, 1)), w_TI)


def index_score_rows(q_TIJ: Tensor, w_TI: Tensor, keys_RJ: Tensor, rows_TM: Tensor) -> Tensor:
    return _weigh(torch.matmul(q_TIJ, F.embedding(rows_TM, keys_RJ).transpose(1, 2)), w_TI)


def index_prefill(
    q_TIJ: Tensor, w_TI: Tensor, keys_SJ: Tensor, visible_T: Tensor, *, block: int = 0
) -> Scan:
    held = _PRODUCTS.get(q_TIJ.device.type, 2**23)
    at_once = max(1, held // max(q_TIJ.shape[1] * len(keys_SJ), 1))
    parts = zip(q_TIJ.split(at_once), w_TI.split(at_once), strict=True)
    scores = torch.cat([index_score(q, w, keys_SJ) for q, w in parts])
    hidden = torch.arange(len(keys_SJ), device=scores.device) >= visible_T.unsqueeze(1)
    return _scan(scores.masked_fill(hidden, -torch.inf), block)


def index_scan(
    q_TIJ: Tensor,
    w_TI: Tensor,
    keys: PagedKeys,
    visible_T: Tensor,
    *,
    capacity: int,
    queries: int,
    block: int = 0,
) -> Scan:
    del queries  # how many tokens a sequence has only matters to kernels
    scores = q_TIJ.new_full((len(q_TIJ), capacity), -torch.inf)
    bounds = keys.first.tolist()
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        seen = int(visible_T[start:stop].max())
        pages = keys.table[n, : -(-seen // keys.raw.shape[1])].long()
        held = unpack_rows(keys.raw[pages].flatten(0, 1)[:seen], FP4_ROW, q_TIJ.dtype)
        found = index_score(q_TIJ[start:stop], w_TI[start:stop], held)
        hidden = torch.arange(seen, device=found.device) >= visible_T[start:stop].unsqueeze(1)
        scores[start:stop, :seen] = found.masked_fill(hidden, -torch.inf)
    return _scan(scores, block)


def index_pool(
    q_TIJ: Tensor,
    w_TI: Tensor,
    keys: PagedKeys,
    sequence_T: Tensor,
    visible_T: Tensor,
    blocks_TM: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    offsets = torch.arange(block, device=blocks_TM.device)
    entries = (blocks_TM.long().unsqueeze(2) * block + offsets).flatten(1)
    known = (entries >= 0) & (entries < visible_T.unsqueeze(1))
    entries = entries.where(known, 0)
    places = page_rows(keys.table, sequence_T.long().unsqueeze(1), entries, keys.raw.shape[1])
    unique, rows = torch.unique(places, return_inverse=True)
    held = unpack_rows(keys.raw.flatten(0, 1)[unique], FP4_ROW, q_TIJ.dtype)
    scores = index_score_rows(q_TIJ, w_TI, held, rows).masked_fill(~known, -torch.inf)
    return scores, _maxima(scores, block)


def _scan(scores_TS: Tensor, block: int) -> Scan:
    """With the maxima of blocks, and of eight of them."""
    if not block:
        return Scan(scores_TS)
    best = _maxima(scores_TS, block)
    return Scan(scores_TS, best, _maxima(best, 8), block)


def _maxima(scores_TS: Tensor, size: int) -> Tensor:
    """Of groups of ``size`` columns."""
    padded = F.pad(scores_TS, (0, -scores_TS.shape[1] % size), value=-torch.inf)
    return padded.unflatten(1, (-1, size)).amax(2)


def _weigh(dot_TIS: Tensor, w_TI: Tensor) -> Tensor:
    weighted = dot_TIS.relu() * w_TI.unsqueeze(-1)
    return widen(weighted).sum(1).to(dot_TIS.dtype)
