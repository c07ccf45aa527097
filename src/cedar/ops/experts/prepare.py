"""What comes before and after the products of experts: tiles and cast inputs, then the sum.

`prepare` is one launch: programs for tiles find their visits by counting, the others cast tokens to
FP8 per 32 and write them in the order that the products read. No size is read on the host, and the
result is the same in every run. Bytes: ``4 T D`` and, a tile, ``8 T A``. FLOP: none to speak of.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.cast.triton import round_trip
from cedar.ops.dependent_launch import dependent, hand_over

__all__ = [
    "EIGHTHS",
    "FEW",
    "LIFT",
    "MANY",
    "STEPS",
    "Tiles",
    "cast_part",
    "combine",
    "num_tiles",
    "ordered_place",
    "prepare",
]

EIGHTHS, FEW, MANY = 0, 1, 2  # orders of the values of a row, see `ordered_place`
LIFT = 2.0**63  # inputs are so much too large, decoded weights so much too small
_COUNT_HERE = 8192  # visits; more are counted once, before, and not in every program
_CHUNK = 1024
STEPS = 8  # of 128 values, of a program that casts


@dataclass(frozen=True, slots=True)
class Tiles:
    """Visits sorted by expert and padded so that a tile of rows belongs to one expert.

    source_R: int32, a row's visit, its place in ``[T, A]``, or -1 (padding). expert_M: int32, the
    expert of a tile; the number of experts marks an idle one, whose rows mean nothing.
    """

    source_R: Tensor
    expert_M: Tensor


def num_tiles(visits: int, num_experts: int, per_tile: int) -> int:
    """As many as the worst case needs, so that no size is read from the device."""
    return visits // per_tile + min(visits, num_experts)


@triton.jit
def ordered_place(k, width, ORDER: tl.constexpr):
    """Where value ``k`` of a row goes.

    `EIGHTHS`: columns 0, 8, 16, ... first, then 1, 9, 17, ... Otherwise a step of 128 stays
    together, and the last seven bits of ``k`` are ``q q h b i j o``: ``q`` is a lane's block of 32,
    ``b j o`` a product of sixteen values, ``h q q i`` the place in it. `FEW` keeps the values of a
    lane together, `MANY` those of a product.
    """
    if ORDER == 0:
        return (k % 8) * (width // 8) + k // 8
    q, h, b = (k >> 5) & 3, (k >> 4) & 1, (k >> 3) & 1
    i, j, o = (k >> 2) & 1, (k >> 1) & 1, k & 1
    if ORDER == 1:
        place = (b << 6) | (j << 5) | (q << 3) | (o << 2) | (h << 1) | i
    else:
        place = (b << 6) | (j << 5) | (o << 4) | (h << 3) | (q << 1) | i
    return (k & -128) | place


def prepare(
    x_TD: Tensor, experts_TA: Tensor, num_experts: int, per_tile: int, order: int
) -> tuple[Tensor, Tiles]:
    """``x`` through FP8, ordered, times 2^63, and the tiles of all visits."""
    tokens, dim = x_TD.shape
    visits = experts_TA.numel()
    count = num_tiles(visits, num_experts, per_tile)
    x, chosen = x_TD.contiguous(), experts_TA.contiguous()
    ordered = torch.empty_like(x)
    source_R = torch.empty(count * per_tile, dtype=torch.int32, device=x.device)
    expert_M = torch.empty(count, dtype=torch.int32, device=x.device)
    loads: Any = None
    if visits > _COUNT_HERE:
        loads = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
        loads.scatter_add_(0, chosen.flatten(), loads.new_ones(1).expand(visits))
    per_row = triton.cdiv(dim, 128 * STEPS)
    _prepare[(count + tokens * per_row,)](
        x, ordered, chosen, loads, source_R, expert_M, count, visits, num_experts, per_row,
        DIM=dim, BINS=triton.next_power_of_2(num_experts + 1),
        PER_TILE=per_tile, WIDTH=triton.next_power_of_2(per_tile),
        CHUNK=min(triton.next_power_of_2(max(visits, 16)), _CHUNK),
        VALUES=128 * STEPS, ORDER=order, LIFT=LIFT, COUNTED=loads is not None, num_warps=4,
        **dependent(x.device),
    )  # fmt: skip
    return ordered, Tiles(source_R, expert_M)


def combine(down_VD: Tensor, shared_TD: Tensor | None, active: int, out: Tensor) -> Tensor:
    """``out [T, D]``: the sum of each token's visits in order, then its shared expert."""
    tokens, dim = out.shape
    width = min(triton.next_power_of_2(dim), 512)
    _combine[(tokens, triton.cdiv(dim, width))](
        down_VD, shared_TD, out, dim, ACTIVE=active, SHARED=shared_TD is not None, WIDTH=width,
        num_warps=2, **dependent(out.device),
    )  # fmt: skip
    return out


@triton.jit
def cast_part(
    x, ordered, part, per_row,
    DIM: tl.constexpr, VALUES: tl.constexpr, ORDER: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """A part of a row, one of ``per_row``, through FP8 per 32, in its order."""
    row = (part // per_row).to(tl.int64) * DIM
    k = (part % per_row) * VALUES + tl.arange(0, VALUES)
    values = tl.load(x + row + k, mask=k < DIM, other=0.0).to(tl.float32)
    values = tl.reshape(round_trip(tl.reshape(values, (VALUES // 32, 32)), 0), (VALUES,)) * LIFT
    if ORDER == 0:
        tl.store(ordered + row + ordered_place(k, DIM, ORDER), values, mask=k < DIM)
    else:
        # As `ordered_place` has it, but whole vectors at once.
        bits = tl.reshape(values, (VALUES // 128, 4, 2, 2, 2, 2, 2))
        if ORDER == 1:
            bits = tl.permute(bits, (0, 3, 5, 1, 6, 2, 4))
        else:
            bits = tl.permute(bits, (0, 3, 5, 6, 2, 1, 4))
        tl.store(ordered + row + k, tl.reshape(bits, (VALUES,)), mask=k < DIM)


@triton.jit(do_not_specialize=["tiles", "visits"])
def _prepare(
    x, ordered, experts_V, loads, source_R, expert_M, tiles, visits, num_experts, per_row,
    DIM: tl.constexpr, BINS: tl.constexpr, PER_TILE: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, VALUES: tl.constexpr, ORDER: tl.constexpr, LIFT: tl.constexpr,
    COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    program = tl.program_id(0)
    if program >= tiles:
        cast_part(x, ordered, program - tiles, per_row, DIM, VALUES, ORDER, LIFT)
        return
    bins = tl.arange(0, BINS)
    if COUNTED:
        load = tl.load(loads + bins, mask=bins < num_experts, other=0)
    else:
        load = tl.zeros((BINS,), tl.int32)
        for start in range(0, visits, CHUNK):
            v = start + tl.arange(0, CHUNK)
            expert = tl.load(experts_V + v, mask=v < visits, other=num_experts).to(tl.int32)
            load += tl.histogram(expert, BINS)
        load = tl.where(bins < num_experts, load, 0)
    needed = (load + PER_TILE - 1) // PER_TILE
    stop = tl.cumsum(needed, 0)
    own = tl.sum(((stop <= program) & (bins < num_experts)).to(tl.int32), 0)
    tl.store(expert_M + program, own)
    if own == num_experts:
        return
    # The tile takes the visits of its expert from this one on.
    first = (program - tl.sum(tl.where(bins == own, stop - needed, 0), 0)) * PER_TILE
    seen = tl.zeros((), tl.int32)
    for start in range(0, visits, CHUNK):
        v = start + tl.arange(0, CHUNK)
        expert = tl.load(experts_V + v, mask=v < visits, other=num_experts).to(tl.int32)
        mine = (expert == own).to(tl.int32)
        place = seen + tl.cumsum(mine, 0) - 1 - first
        here = (mine > 0) & (place >= 0) & (place < PER_TILE)
        tl.store(source_R + program * PER_TILE + place, v, mask=here)
        seen += tl.sum(mine, 0)
    j = tl.arange(0, WIDTH)
    tl.store(source_R + program * PER_TILE + j, -1, mask=(j < PER_TILE) & (first + j >= seen))


@triton.jit
def _combine(
    down, shared, out, dim,
    ACTIVE: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for a in tl.static_range(ACTIVE):
        row = down + (token * ACTIVE + a) * dim
        total += tl.load(row + d, mask=d < dim, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * dim + d, mask=d < dim, other=0.0).to(tl.float32)
    tl.store(out + token * dim + d, total, mask=d < dim)
