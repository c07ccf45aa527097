"""Visits of experts, sorted and padded so that a tile of rows belongs to one expert."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tiles", "tile_visits", "visits_per_tile"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where every visit stands; all sizes are known without reading the device.

    source_R: a row's visit, its place in ``[T, A]``, -1 for padding. token_R: its token, or -1.
    expert_M: the expert of a tile; the number of experts marks an idle one. row_TA: a visit's row.
    """

    source_R: Tensor
    token_R: Tensor
    expert_M: Tensor
    row_TA: Tensor


def tile_visits(experts_TA: Tensor, num_experts: int, per_tile: int) -> Tiles:
    """Sort the visits by expert and pad every expert's rows to whole tiles.

    experts: int64 ``[T, A]``. There are as many tiles as the worst case needs.
    """
    visits = experts_TA.numel()
    num_tiles = visits // per_tile + min(visits, num_experts)
    flat = experts_TA.flatten()
    order = flat.argsort(stable=True)
    load = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    load = load.scatter_add(0, flat, torch.ones_like(flat))
    tiles = (load + per_tile - 1) // per_tile
    stop, begin = tiles.cumsum(0), load.cumsum(0) - load
    chosen = flat[order]
    place = torch.arange(visits, device=flat.device) - begin[chosen]
    row = (stop - tiles)[chosen] * per_tile + place
    source_R = torch.full((num_tiles * per_tile,), -1, dtype=torch.int32, device=flat.device)
    source_R = source_R.scatter(0, row, order.to(torch.int32))
    token_R = torch.where(source_R < 0, -1, source_R // experts_TA.shape[1])
    tile = torch.arange(num_tiles, device=flat.device)
    expert_M = torch.searchsorted(stop, tile, right=True).to(torch.int32)
    row_V = torch.empty_like(row).scatter(0, order, row)
    return Tiles(source_R, token_R, expert_M, row_V.view(experts_TA.shape))


def visits_per_tile(visits: int, num_experts: int) -> int:
    """Rows of a tile: about as many as an expert gets, a power of two from 16 to 128."""
    mean = max(visits // num_experts, 1)
    return min(max(1 << (mean - 1).bit_length(), 16), 128)
