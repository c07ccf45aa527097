"""Visits sorted by expert on the device, rows in that order, and sums over a token's visits.

A visit is one token at one of its experts, numbered as in ``[T, A]``. Every expert owns a stretch
of rows whose length is a multiple of `PAD`; rows without a visit hold zeros, so that sums over an
expert's rows need no mask. No size is read on the host, and the order is the same in every run.

Bytes: ``16 T A`` for the order; `gather_rows` and `sum_visits` ``4 T A D`` each. FLOP: ``T A D``.
"""

# mypy: ignore-errors

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "PAD",
    "VisitPlan",
    "ceil_div",
    "gather_rows",
    "plan_visits",
    "power_of_two",
    "sum_visits",
]

PAD = 64
_CHUNK = 128  # visits that one program ranks
_COUNTS = 1024  # chunks that one step of a prefix sum takes


@dataclass(frozen=True, slots=True)
class VisitPlan:
    """Where visits are.

    source_R: int32, a row's visit, -1 for none; rows at and beyond ``first_E1[E]`` mean nothing.
    place_V: int32, a visit's row. first_E1: int32 ``[E + 1]``, an expert's first row.
    tile_M3: int32, of a tile of rows its expert, its first row, and how many rows from there on
    are the expert's; 0 marks an idle tile.
    """

    source_R: Tensor
    place_V: Tensor
    first_E1: Tensor
    tile_M3: Tensor


def ceil_div(a: int, b: int) -> int:
    """Triton's own takes a hundred times as long, and a pass asks dozens of times."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least one that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def plan_visits(experts_TA: Tensor, num_experts: int, per_tile: int) -> VisitPlan:
    """Three launches: count, prefix sums and tiles, places."""
    chosen = experts_TA.contiguous()
    visits, device = chosen.numel(), chosen.device
    used = min(visits, num_experts)  # experts that may have visits
    rows = ceil_div(visits + (PAD - 1) * used, PAD) * PAD
    tiles = rows // per_tile + used
    chunks = ceil_div(visits, _CHUNK)
    bins = power_of_two(num_experts + 1)
    before = torch.empty((num_experts, chunks), dtype=torch.int32, device=device)
    load = torch.zeros(num_experts, dtype=torch.int32, device=device)
    source_R = torch.empty(rows, dtype=torch.int32, device=device)
    place_V = torch.empty(visits, dtype=torch.int32, device=device)
    first_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_M3 = torch.empty((tiles, 3), dtype=torch.int32, device=device)
    _count[(chunks,)](
        chosen, before, load, visits, num_experts, chunks, BINS=bins, CHUNK=_CHUNK, num_warps=4
    )
    _arrange[(num_experts + 1,)](
        before, load, source_R, first_E1, tile_M3, num_experts, chunks, tiles,
        BINS=bins, COUNTS=_COUNTS, PER_TILE=per_tile, PAD=PAD, num_warps=4,
    )  # fmt: skip
    _place[(chunks,)](chosen, before, source_R, place_V, visits, chunks, CHUNK=_CHUNK, num_warps=4)
    return VisitPlan(source_R, place_V, first_E1, tile_M3)


def gather_rows(x_TD: Tensor, plan: VisitPlan, active: int) -> Tensor:
    """``[R, D]`` bfloat16: the token of every row; zeros where a row has no visit."""
    dim, rows = x_TD.shape[1], len(plan.source_R)
    out = torch.empty((rows, dim), dtype=torch.bfloat16, device=x_TD.device)
    width = min(power_of_two(dim), 512)
    _gather[(rows // 16, ceil_div(dim, width))](
        x_TD, plan.source_R, plan.first_E1, out, dim, len(plan.first_E1) - 1,
        ACTIVE=active, ROWS=16, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def sum_visits(
    rows_RD: Tensor, plan: VisitPlan, active: int, more_TD: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``[T, D]``: each token's rows in the order of its choices, float32 sums, ``more_TD`` last."""
    tokens, dim = len(plan.place_V) // active, rows_RD.shape[1]
    out = torch.empty((tokens, dim), dtype=dtype, device=rows_RD.device)
    width = min(power_of_two(dim), 512)
    _sum[(ceil_div(tokens, 8), ceil_div(dim, width))](
        rows_RD, plan.place_V, more_TD, out, tokens, dim,
        ACTIVE=active, MORE=more_TD is not None, TOKENS=8, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["visits", "chunks"])
def _count(
    experts_V, before, load, visits, num_experts, chunks, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Visits of each expert in a chunk, and in all."""
    chunk = tl.program_id(0)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts_V + v, mask=v < visits, other=num_experts).to(tl.int32)
    bins = tl.arange(0, BINS)
    here = tl.histogram(expert, BINS)
    known = bins < num_experts
    tl.store(before + bins.to(tl.int64) * chunks + chunk, here, mask=known)
    # Integers: their sum does not depend on the order of the programs.
    tl.atomic_add(load + bins, here, mask=known & (here > 0), sem="relaxed")


@triton.jit(do_not_specialize=["chunks", "tiles"])
def _arrange(
    before, load, source_R, first_E1, tile_M3, num_experts, chunks, tiles,
    BINS: tl.constexpr, COUNTS: tl.constexpr, PER_TILE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One expert: its first row, the first row of each chunk's visits there, its tiles."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    loads = tl.load(load + bins, mask=bins < num_experts, other=0)
    padded = (loads + PAD - 1) // PAD * PAD
    needed = (padded + PER_TILE - 1) // PER_TILE
    earlier = bins < expert
    first = tl.sum(tl.where(earlier, padded, 0), 0)
    tile = tl.sum(tl.where(earlier, needed, 0), 0)
    tl.store(first_E1 + expert, first)
    lane = tl.arange(0, PAD)
    if expert == num_experts:
        for start in range(tile, tiles, PAD):
            tl.store(tile_M3 + (start + lane) * 3 + 2, 0, mask=start + lane < tiles)
        return
    count = tl.sum(tl.where(bins == expert, loads, 0), 0)
    rows = (count + PAD - 1) // PAD * PAD
    own = (rows + PER_TILE - 1) // PER_TILE
    for start in range(0, own, PAD):
        t = start + lane
        at = tile_M3 + (tile + t) * 3
        tl.store(at, expert + t * 0, mask=t < own)
        tl.store(at + 1, first + t * PER_TILE, mask=t < own)
        tl.store(at + 2, rows - t * PER_TILE, mask=t < own)
    tl.store(source_R + first + count + lane, -1, mask=count + lane < rows)
    line = before + expert.to(tl.int64) * chunks
    seen = first
    for start in range(0, chunks, COUNTS):
        chunk = start + tl.arange(0, COUNTS)
        here = tl.load(line + chunk, mask=chunk < chunks, other=0)
        tl.store(line + chunk, seen + tl.cumsum(here, 0) - here, mask=chunk < chunks)
        seen += tl.sum(here, 0)


@triton.jit(do_not_specialize=["visits", "chunks"])
def _place(experts_V, before, source_R, place_V, visits, chunks, CHUNK: tl.constexpr):
    """The row of every visit of a chunk: behind earlier ones of the same expert."""
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    v = chunk * CHUNK + lane
    known = v < visits
    expert = tl.load(experts_V + v, mask=known, other=-1).to(tl.int32)
    also = tl.load(experts_V + v, mask=known, other=-1).to(tl.int32)
    same = (expert[:, None] == also[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(same.to(tl.int32), 1)
    place = tl.load(before + expert.to(tl.int64) * chunks + chunk, mask=known, other=0) + rank
    tl.store(place_V + v, place, mask=known)
    tl.store(source_R + place, v, mask=known)


@triton.jit
def _gather(
    x, source_R, first_E1, out, dim, num_experts,
    ACTIVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    if row >= tl.load(first_E1 + num_experts):
        return
    r = row + tl.arange(0, ROWS)
    source = tl.load(source_R + r)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (d < dim)[None, :]
    token = (source // ACTIVE).to(tl.int64)[:, None]
    values = tl.load(x + token * dim + d[None, :], mask=inside & (source >= 0)[:, None], other=0.0)
    tl.store(out + r.to(tl.int64)[:, None] * dim + d[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _sum(
    rows, place_V, more, out, tokens, dim,
    ACTIVE: tl.constexpr, MORE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    known = token < tokens
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = known[:, None] & (d < dim)[None, :]
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for a in tl.static_range(ACTIVE):
        place = tl.load(place_V + token * ACTIVE + a, mask=known, other=0).to(tl.int64)
        total += tl.load(rows + place[:, None] * dim + d[None, :], mask=inside, other=0.0)
    at = token.to(tl.int64)[:, None] * dim + d[None, :]
    if MORE:
        total += tl.load(more + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)
