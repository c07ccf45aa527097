"""Multiplicative hashing of n-grams."""

import torch
from torch import Tensor

from cedar.ops.engram_hash import History

__all__ = ["engram_hash", "engram_ids"]


def engram_hash(
    lookback_TN: Tensor, multipliers_N: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    products = lookback_TN * multipliers_N
    mixed = products[:, 0]
    columns = []
    for order in range(2, products.shape[1] + 1):
        mixed = torch.bitwise_xor(mixed, products[:, order - 1])
        columns.append(mixed.unsqueeze(1) % primes[order - 2])
    return torch.cat(columns, dim=1) + offsets


def engram_ids(
    history: History, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int
) -> Tensor:
    classes_T, ring, slot_T, position_T = history
    real = slot_T >= 0
    slot, position = slot_T.long().clamp_min(0), position_T.long()
    ring[slot[real], position[real] % ring.shape[1]] = classes_T[real]
    # Every class that is looked back to is in the ring now, the new ones among them.
    seen = position.unsqueeze(1) - torch.arange(multipliers.shape[1], device=ring.device)
    past = (seen >= 0) & real.unsqueeze(1)
    known = torch.where(past, ring[slot.unsqueeze(1), seen % ring.shape[1]], -1)
    alive = (known >= 0).cumprod(1).bool()
    lookback = torch.where(alive, known, pad)
    return torch.stack(
        [engram_hash(lookback, *layer) for layer in zip(multipliers, primes, offsets, strict=True)]
    )
