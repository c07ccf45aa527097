"""Multiplicative hashing of n-grams."""

import torch
from torch import Tensor

__all__ = ["engram_hash"]


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
