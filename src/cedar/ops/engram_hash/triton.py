"""Hashing of n-grams in one launch; at decode the look-back of all layers in the same one.

A program takes one token (of one layer) and all its columns, 24 at the released size. int64 as the
reference: products that wrap, a remainder that is never negative. Bytes: ``8 T (n + L (n-1) U)``.
Bound by the launch.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.engram_hash import History

__all__ = ["engram_hash", "engram_ids"]


@triton.jit
def _column_rows(mixed, primes, offsets, inside, column):
    """Table rows of mixed products ``[columns]``."""
    prime = tl.load(primes + column, mask=inside, other=1)
    rest = mixed % prime
    # The sign of a remainder is that of the number here, that of the prime in PyTorch.
    rest = tl.where(rest < 0, rest + prime, rest)
    return rest + tl.load(offsets + column, mask=inside, other=0)


@triton.jit
def _hash(
    lookback, multipliers, primes, offsets, out, stride,
    N: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mixed = tl.full((BLOCK,), 0, tl.int64)
    for k in tl.static_range(N):
        product = tl.load(lookback + token * stride + k) * tl.load(multipliers + k)
        # Column (order - 2) U + head mixes the products of the first `order` places.
        mixed ^= tl.where(column // U + 2 > k, product, 0)
    inside = column < (N - 1) * U
    rows = _column_rows(mixed, primes, offsets, inside, column)
    tl.store(out + token * ((N - 1) * U) + column, rows, mask=inside)


@triton.jit
def _ids(
    classes, ring, slot, position, multipliers, primes, offsets, out, tokens, pad,
    N: tl.constexpr, U: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    token = tl.program_id(0)
    layer = tl.program_id(1)
    own_slot = tl.load(slot + token).to(tl.int64)
    number = tl.load(position + token).to(tl.int64)
    known = tl.load(classes + token)
    if (own_slot >= 0) & (layer == 0):
        tl.store(ring + own_slot * R + number % R, known)
    held = ring + tl.maximum(own_slot, 0) * R
    column = tl.arange(0, BLOCK)
    mixed = tl.full((BLOCK,), 0, tl.int64)
    alive = (known >= 0) & (own_slot >= 0)
    for k in tl.static_range(N):
        if k > 0:
            # A token of this call, or one that the ring holds.
            near = tl.maximum(token - k, 0)
            here = tl.load(slot + near).to(tl.int64) == own_slot
            here &= tl.load(position + near).to(tl.int64) == number - k
            before = number >= k
            known = tl.load(classes + near, mask=here, other=0)
            known += tl.load(held + (number - k) % R, mask=before & (not here), other=0)
            alive &= before & (known >= 0)
        product = tl.where(alive, known, pad) * tl.load(multipliers + layer * N + k)
        mixed ^= tl.where(column // U + 2 > k, product, 0)
    COLUMNS: tl.constexpr = (N - 1) * U
    inside = column < COLUMNS
    rows = _column_rows(mixed, primes, offsets, inside, layer * COLUMNS + column)
    place = (layer * tokens + token).to(tl.int64) * COLUMNS + column
    tl.store(out + place, rows, mask=inside)


def engram_hash(
    lookback_TN: Tensor, multipliers_N: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """`cedar.ops.engram_hash.EngramHash`."""
    count, order = lookback_TN.shape
    if lookback_TN.stride(1) != 1:
        lookback_TN = lookback_TN.contiguous()
    out = lookback_TN.new_empty((count, primes.numel()))
    if count:
        _hash[(count,)](
            lookback_TN, multipliers_N.contiguous(), primes.contiguous(), offsets.contiguous(),
            out, lookback_TN.stride(0), N=order, U=primes.shape[1],
            BLOCK=triton.next_power_of_2(primes.numel()), num_warps=1,
            **dependent(out.device, count),
        )  # fmt: skip
    return out


def engram_ids(
    history: History, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int
) -> Tensor:
    """`cedar.ops.engram_hash.EngramIds`."""
    classes_T, ring, slot_T, position_T = history
    if not ring.is_contiguous():
        raise ValueError("the rings of a history have to be contiguous")
    layers, orders, heads = primes.shape
    count, columns = len(classes_T), orders * heads
    out = torch.empty((layers, count, columns), dtype=torch.int64, device=ring.device)
    if out.numel():
        _ids[(count, layers)](
            classes_T.contiguous(), ring, slot_T.contiguous(), position_T.contiguous(),
            multipliers.contiguous(), primes.contiguous(), offsets.contiguous(), out, count, pad,
            N=orders + 1, U=heads, R=ring.shape[1], BLOCK=triton.next_power_of_2(columns),
            num_warps=1, **dependent(out.device, count * layers),
        )  # fmt: skip
    return out
