"""Visits of experts sorted into tiles, in plain PyTorch: what `prepare` must find."""

import torch
from torch import Tensor

from cedar.ops.experts.prepare import Tiles, num_tiles

__all__ = ["tile_visits"]


def tile_visits(experts_TA: Tensor, num_experts: int, per_tile: int) -> Tiles:
    """The tiles of visits sorted by expert; experts: int64 ``[T, A]``."""
    visits = experts_TA.numel()
    count = num_tiles(visits, num_experts, per_tile)
    flat = experts_TA.flatten()
    order = flat.argsort(stable=True)
    load = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    load = load.scatter_add(0, flat, torch.ones_like(flat))
    tiles = (load + per_tile - 1) // per_tile
    stop, begin = tiles.cumsum(0), load.cumsum(0) - load
    chosen = flat[order]
    place = torch.arange(visits, device=flat.device) - begin[chosen]
    row = (stop - tiles)[chosen] * per_tile + place
    source_R = torch.full((count * per_tile,), -1, dtype=torch.int32, device=flat.device)
    source_R = source_R.scatter(0, row, order.to(torch.int32))
    tile = torch.arange(count, device=flat.device)
    expert_M = torch.searchsorted(stop, tile, right=True).to(torch.int32)
    return Tiles(source_R, expert_M)
