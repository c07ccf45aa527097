"""The router and what the experts' products need from it, in one launch for few tokens.

Some programs multiply tokens with the router's weights, others cast the tokens to FP8 per 32 in the
order that the products read. Of the former the last to arrive take a token each: they wait until
all sums are there and decide, wait for one another and put the visits into tiles. Every program
that is waited for finds a place, since those that wait are fewer than a device runs at once.
Results are those of `cedar.ops.route.triton.router` and `cedar.ops.experts.prepare.prepare`,
bit for bit.

Bytes: ``2 D (E + 3 T)``, and ``4 T E D / 256`` in between. FLOP: ``2 T E D``.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from cedar.ops.dependent_launch import dependent
from cedar.ops.experts.prepare import LIFT, STEPS, Tiles, cast_part, num_tiles
from cedar.ops.route import Gating, Routing
from cedar.ops.route.triton import PART, SCORES, decide, part_sums

__all__ = ["COUNTERS", "MOST", "dispatch", "takes"]

COUNTERS = 2
MOST = 8  # tokens; with 32 the time is no shorter than that of the launches it replaces
_ROWS = 64  # of the router's weights


def takes(x_TD: Tensor, gating: Gating) -> bool:
    """Whether inputs that the router's kernel takes are few enough for this launch."""
    tokens, dim = x_TD.shape
    return tokens <= MOST and tokens <= _programs(dim, len(gating.weight_ED))


def dispatch(
    x_TD: Tensor,
    gating: Gating,
    real_T: Tensor | None,
    counters: Tensor,
    per_tile: int,
    order: int,
) -> tuple[Routing, Tensor, Tiles]:
    """Routing; ``x`` through FP8, ordered, times 2^63; the tiles of all visits.

    counters: int32, `COUNTERS` of them, the first zero; so it is after.
    """
    tokens, dim = x_TD.shape
    count, active = len(gating.weight_ED), gating.active
    visits = tokens * active
    tiles = num_tiles(visits, count, per_tile)
    x, bias = x_TD.contiguous(), gating.bias.to(torch.float32)
    if bias.stride(-1) != 1:
        bias = bias.contiguous()
    wide = {"dtype": torch.float32, "device": x.device}
    whole = {"dtype": torch.int32, "device": x.device}
    splits = triton.cdiv(dim, PART)
    sums = torch.empty((splits, tokens, count), **wide)
    routing = Routing(
        torch.empty((tokens, active), dtype=torch.int64, device=x.device),
        torch.empty((tokens, active), **wide),
        torch.empty((tokens, count), **wide),
    )
    ordered = torch.empty_like(x)
    source_R, expert_M = torch.empty(tiles * per_tile, **whole), torch.empty(tiles, **whole)
    programs = _programs(dim, count)
    per_row = triton.cdiv(dim, 128 * STEPS)
    one = bias.dim() == 1 or len(bias) == 1
    _dispatch[(programs + tokens * per_row,)](
        x, gating.weight_ED.contiguous(), sums, bias, real_T, *routing, ordered, source_R,
        expert_M, counters, tokens, count, 0 if one else bias.stride(0), float(gating.temp),
        float(gating.route_scale), programs, per_row, tiles,
        DIM=dim, PART=PART, SPLITS=splits, ROWS=_ROWS,
        TOKENS=max(triton.next_power_of_2(tokens), 16), STEP=64, ACTIVE=active,
        WIDTH=triton.next_power_of_2(count), CHOSEN=triton.next_power_of_2(active),
        SCORES=SCORES[gating.score_func], NORMALIZE=gating.normalize,
        PER_TILE=per_tile, VISITS=max(triton.next_power_of_2(visits), 16),
        BINS=triton.next_power_of_2(count + 1),
        FILL=triton.next_power_of_2(triton.cdiv(tiles * per_tile, programs)),
        VALUES=128 * STEPS, ORDER=order, LIFT=LIFT, ALONE=tokens == 1,
        TOGETHER=_COMPILED and tokens > 1,
        num_warps=4, num_stages=4, enable_fp_fusion=False, **dependent(x.device),
    )  # fmt: skip
    return routing, ordered, Tiles(source_R, expert_M)


def _programs(dim: int, count: int) -> int:
    """That multiply."""
    return triton.cdiv(count, _ROWS) * triton.cdiv(dim, PART)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _dispatch(
    x, weight, sums, bias, real, experts, weights, scores, ordered, source_R, expert_M, counters,
    tokens, count, bias_stride, temp, route_scale, programs, per_row, tiles,
    DIM: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, STEP: tl.constexpr, ACTIVE: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, SCORES: tl.constexpr, NORMALIZE: tl.constexpr,
    PER_TILE: tl.constexpr, VISITS: tl.constexpr, BINS: tl.constexpr, FILL: tl.constexpr,
    VALUES: tl.constexpr, ORDER: tl.constexpr, LIFT: tl.constexpr,
    ALONE: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The next launch is not let in early: it would find the first cache small, where this one has
    # its shared memory (measured: 87 instead of 63 us for the whole mixture of one token).
    if PDL:
        gdc_wait()
    program = tl.program_id(0)
    if program >= programs:
        cast_part(x, ordered, program - programs, per_row, DIM, VALUES, ORDER, LIFT)
        return
    # What stays of the tiles if no visit comes there.
    at = program * FILL + tl.arange(0, FILL)
    tl.store(source_R + at, tl.full((FILL,), -1, tl.int32), mask=at < tiles * PER_TILE)
    tl.store(expert_M + at, tl.zeros((FILL,), tl.int32) + count, mask=at < tiles)
    if program == 0:
        tl.store(counters + 1, 0)
    part_sums(
        x, weight, sums, tokens, count, program // SPLITS, program % SPLITS, 0,
        DIM, PART, 1, ROWS, TOKENS, STEP,
    )  # fmt: skip
    tl.debug_barrier()
    turn = tl.atomic_add(counters, 1) - (programs - tokens)
    if TOGETHER:
        if turn < 0:
            return
        while tl.atomic_add(counters, 0) < programs:
            pass
        first, stop = turn, turn + 1
    else:
        if turn < tokens - 1:
            return
        first, stop = 0, tokens
    tl.debug_barrier()
    for token in range(first, stop):
        chosen = decide(
            sums, bias, real, experts, weights, scores, token, tokens, count, bias_stride, temp,
            route_scale, SPLITS, ACTIVE, WIDTH, CHOSEN, SCORES, NORMALIZE,
        )  # fmt: skip
        if ALONE:
            # A tile for each visit.
            valid = tl.arange(0, CHOSEN) < ACTIVE
            lower = valid[None, :] & (chosen[None, :] < chosen[:, None])
            tile = tl.sum(lower.to(tl.int32), 1)
            tl.store(expert_M + tile, chosen, mask=valid)
            tl.store(source_R + tile * PER_TILE, tl.arange(0, CHOSEN), mask=valid)
    if not ALONE:
        tl.debug_barrier()
        if TOGETHER:
            decided = tl.atomic_add(counters + 1, 1) + 1
            while decided < tokens:
                decided = tl.atomic_add(counters + 1, 0)
        tl.debug_barrier()
        for token in range(first, stop):
            _place(
                experts, source_R, expert_M, token, tokens * ACTIVE, count,
                ACTIVE, CHOSEN, PER_TILE, VISITS, BINS,
            )  # fmt: skip
    if stop == tokens:
        tl.store(counters, 0)


@triton.jit
def _place(
    experts_V, source_R, expert_M, token, visits, count,
    ACTIVE: tl.constexpr, CHOSEN: tl.constexpr, PER_TILE: tl.constexpr, VISITS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """A token's visits in tiles: by expert, then by number."""
    u, bins = tl.arange(0, VISITS), tl.arange(0, BINS)
    other = tl.load(experts_V + u, mask=u < visits, other=count, cache_modifier=".cg").to(tl.int32)
    needed = (tl.histogram(other, BINS) + PER_TILE - 1) // PER_TILE
    a = tl.arange(0, CHOSEN)
    v = token * ACTIVE + a
    expert = tl.load(experts_V + v, mask=a < ACTIVE, other=0, cache_modifier=".cg").to(tl.int32)
    before = (other[None, :] == expert[:, None]) & (u[None, :] < v[:, None])
    place = tl.sum(before.to(tl.int32), 1)
    tile = tl.sum(tl.where(bins[None, :] < expert[:, None], needed[None, :], 0), 1)
    tile += place // PER_TILE
    place = place % PER_TILE
    tl.store(source_R + tile * PER_TILE + place, v, mask=a < ACTIVE)
    tl.store(expert_M + tile, expert, mask=(a < ACTIVE) & (place == 0))


_COMPILED = isinstance(_dispatch, triton.JITFunction)  # or run by Triton's interpreter
