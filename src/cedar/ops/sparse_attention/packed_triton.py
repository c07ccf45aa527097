"""The portable kernels behind `cedar.ops.sparse_attention.triton`: any CUDA device, any width.

One program is one query, up to 64 heads and one share of the slots. Rows are gathered by their
physical numbers, dequantised in registers into two tiles (even and odd channels), and used twice:
transposed for the scores, as they are for the output. Two accumulators of half the width stay in
registers; one of the full width does not fit. Exponentials are rounded to q's type measured from
the maximum so far, so what a tile holds shows in last bits: tiles of two sources of values are
those of the plain implementation, 64 slots of one after the other (`JOINED`).

Few queries are split: several programs share the slots of a query and leave maximum, sum and
unnormalised output in float32; `_combine` joins them.

Shapes, bytes and FLOP: as `cedar.ops.sparse_attention.triton`.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.sparse_attention import Source
from cedar.ops.sparse_attention.sources import VALUES, argument
from cedar.ops.triton_unpack import (
    MAIN_SHRINK,
    WINDOW_SHRINK,
    fp4_tile,
    fp8_tile,
    value_tile,
)

__all__ = ["FLOATS", "LOG2E", "combine", "launch"]

LOG2E = 1.4426950408889634
FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
_SHRINK = (0, 0, WINDOW_SHRINK, MAIN_SHRINK)
_PROGRAMS = 132  # multiprocessors of an H200


@triton.jit
def _tile(
    base, slots, place_K, stop, stride, KIND: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr,
    DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Even channels, odd channels and filled flags of the slots ``place_K`` of one query."""
    slot = tl.load(slots + place_K, mask=place_K < stop, other=-1).to(tl.int64)
    filled = slot >= 0
    offset = tl.where(filled, slot, 0) * stride
    if KIND == 3:
        even, odd = fp4_tile(base, offset, filled, H, PAIRS, DTYPE, FAST)
    elif KIND == 2:
        even, odd = fp8_tile(base, offset, filled, H, PAIRS, DTYPE, FAST)
    else:
        even, odd = value_tile(base, offset, filled, H, PAIRS, DTYPE, FAST)
    return even, odd, filled


@triton.jit
def _step(
    q_even, q_odd, k_even, k_odd, filled, scale, top, total, acc_even, acc_odd,
    SHRINK: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the running softmax; ``SHRINK``: binary digits by which the rows are too small.

    The scale makes up for it in the scores, larger exponentials make up for it in the output.
    """
    scores = tl.dot(q_even, tl.trans(k_even), input_precision=PRECISION)
    scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=PRECISION)
    scores = scores * (scale * 2.0**SHRINK)
    scores = tl.where(filled[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - (base - SHRINK)[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1) * (2.0**-SHRINK)
    p = p.to(DTYPE)
    acc_even = acc_even * shrink[:, None]
    acc_odd = acc_odd * shrink[:, None]
    acc_even = tl.dot(p, k_even, acc_even, input_precision=PRECISION)
    acc_odd = tl.dot(p, k_odd, acc_odd, input_precision=PRECISION)
    return new_top, total, acc_even, acc_odd


@triton.jit
def _angles(cos, sin, t, H: tl.constexpr, PAIRS: tl.constexpr, TURNED: tl.constexpr):
    """Cosines and sines of a query for pairs of channels, and which pairs are the last."""
    pair = tl.arange(0, PAIRS)
    turned = (pair >= H // 2 - TURNED) & (pair < H // 2)
    place = t * TURNED + pair - (H // 2 - TURNED)
    c = tl.load(cos + place, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + place, mask=turned, other=0.0).to(tl.float32)
    return c, s, turned


@triton.jit
def _turn(even, odd, c, s, turned, DTYPE: tl.constexpr):
    """Pairs times exp(i angle) where ``turned``, rounded once."""
    x, y = even.to(tl.float32), odd.to(tl.float32)
    new_even = tl.where(turned, (x * c - y * s).to(DTYPE), even)
    new_odd = tl.where(turned, (x * s + y * c).to(DTYPE), odd)
    return new_even, new_odd


@triton.jit
def _finish(top, total, sink):
    """What the unnormalised output is multiplied with; all in binary logarithms."""
    high = tl.maximum(top, sink)
    high = tl.where(high == float("-inf"), 0.0, high)
    kept = tl.exp2(top - high)
    below = total * kept + tl.exp2(sink - high)
    return tl.where(below > 0, kept / below, 0.0)


@triton.jit
def _store(
    out, even, odd, offset_N, head_ok, H: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Even and odd channels back in one row; the inverse of `value_tile`."""
    if WHOLE:
        col = tl.arange(0, 2 * PAIRS)
        both = tl.interleave(even.to(DTYPE), odd.to(DTYPE))
        inside = head_ok[:, None] & (col < H)[None, :]
        tl.store(out + offset_N[:, None] + col[None, :], both, mask=inside)
    else:
        col = tl.arange(0, PAIRS)
        inside = head_ok[:, None] & (col < H // 2)[None, :]
        place = out + offset_N[:, None] + 2 * col[None, :]
        tl.store(place, even.to(DTYPE), mask=inside)
        tl.store(place + 1, odd.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["tiles_per_split"])
def _attend(
    q, out, part, stats, sink, cos, sin,
    near, near_slots, near_stride, near_slot_stride, near_width,
    far, far_slots, far_stride, far_slot_stride, far_width,
    q_stride_T, q_stride_N, scale, tiles_per_split,
    N: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, JOINED: tl.constexpr,
    SHARES: tl.constexpr, NEAR_SHRINK: tl.constexpr, FAR_SHRINK: tl.constexpr, DTYPE: tl.constexpr,
    FAST: tl.constexpr, STAGES: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    head_ok = head < N
    precision: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"

    offset_q = t * q_stride_T + head.to(tl.int64) * q_stride_N
    q_even, q_odd = value_tile(q, offset_q, head_ok, H, PAIRS, DTYPE, FAST)
    if TURNED:
        c, s, turned = _angles(cos, sin, t, H, PAIRS, TURNED)
        q_even, q_odd = _turn(q_even, q_odd, c[None, :], s[None, :], turned[None, :], DTYPE)

    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc_even = tl.zeros((HEADS, PAIRS), tl.float32)
    acc_odd = tl.zeros((HEADS, PAIRS), tl.float32)
    lane = tl.arange(0, TILE)
    # Tiles are numbered through both sources; a split takes a run of them.
    if JOINED:
        near_tiles = tl.cdiv(near_width + far_width, TILE)
        far_tiles = 0
    else:
        near_tiles = tl.cdiv(near_width, TILE)
        far_tiles = tl.cdiv(far_width, TILE)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, near_tiles + far_tiles)
    if NEAR != 0:
        for tile in tl.range(first, tl.minimum(last, near_tiles), num_stages=STAGES):
            k_even, k_odd, filled = _tile(
                near, near_slots + t * near_slot_stride, tile * TILE + lane, near_width,
                near_stride, NEAR, H, PAIRS, DTYPE, FAST,
            )  # fmt: skip
            if JOINED:
                place = tile * TILE + lane - near_width
                even, odd, more = _tile(
                    far, far_slots + t * far_slot_stride, tl.where(place < 0, far_width, place),
                    far_width, far_stride, FAR, H, PAIRS, DTYPE, FAST,
                )  # fmt: skip
                k_even, k_odd, filled = k_even + even, k_odd + odd, filled | more
            top, total, acc_even, acc_odd = _step(
                q_even, q_odd, k_even, k_odd, filled, scale, top, total, acc_even, acc_odd,
                NEAR_SHRINK, DTYPE, precision,
            )  # fmt: skip
    if FAR != 0 and not JOINED:
        for tile in tl.range(
            tl.maximum(first - near_tiles, 0), last - near_tiles, num_stages=STAGES
        ):
            k_even, k_odd, filled = _tile(
                far, far_slots + t * far_slot_stride, tile * TILE + lane, far_width,
                far_stride, FAR, H, PAIRS, DTYPE, FAST,
            )  # fmt: skip
            top, total, acc_even, acc_odd = _step(
                q_even, q_odd, k_even, k_odd, filled, scale, top, total, acc_even, acc_odd,
                FAR_SHRINK, DTYPE, precision,
            )  # fmt: skip

    if not SHARES:
        sinks = tl.load(sink + head, mask=head_ok, other=0.0).to(tl.float32) * 1.4426950408889634
        factor = _finish(top, total, sinks)
        even, odd = (acc_even * factor[:, None]).to(DTYPE), (acc_odd * factor[:, None]).to(DTYPE)
        if TURNED:
            c, s, turned = _angles(cos, sin, t, H, PAIRS, TURNED)
            even, odd = _turn(even, odd, c[None, :], -s[None, :], turned[None, :], DTYPE)
        _store(out, even, odd, (t * N + head) * H, head_ok, H, PAIRS, DTYPE, FAST)
    else:
        row = (t * tl.num_programs(2) + split) * N + head
        tl.store(stats + 2 * row, top, mask=head_ok)
        tl.store(stats + 2 * row + 1, total, mask=head_ok)
        _store(part, acc_even, acc_odd, row * H, head_ok, H, PAIRS, tl.float32, FAST)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    out, part, stats, sink, cos, sin, splits, N: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr,
    SLOTS: tl.constexpr, DTYPE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Join the shares of one head of a query: a softmax over their maxima."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SLOTS)
    row = (t * splits + split) * N + head
    known = split < splits
    col = tl.arange(0, WIDE)
    inside = known[:, None] & (col < H)[None, :]
    shares = tl.load(part + row[:, None] * H + col[None, :], mask=inside, other=0.0)
    tops = tl.load(stats + 2 * row, mask=known, other=float("-inf"))
    sums = tl.load(stats + 2 * row + 1, mask=known, other=0.0)
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(sums * weights, 0)
    factor = _finish(top, total, tl.load(sink + head).to(tl.float32) * 1.4426950408889634)
    found = (tl.sum(shares * weights[:, None], 0) * factor).to(DTYPE)
    if TURNED:
        even, odd = tl.split(tl.reshape(found, (WIDE // 2, 2)))
        c, s, turned = _angles(cos, sin, t, H, WIDE // 2, TURNED)
        even, odd = _turn(even, odd, c, -s, turned, DTYPE)
        found = tl.interleave(even, odd)
    tl.store(out + (t * N + head) * H + col, found, mask=col < H)


def launch(
    q_TNH: Tensor,
    near: Source | None,
    far: Source | None,
    sink_N: Tensor,
    scale: float,
    out: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    tile: int | None,
    splits: int | None,
    stages: int,
    warps: int | None,
) -> None:
    """Run the kernels; for the options see `cedar.ops.sparse_attention.triton`."""
    count, heads, width = q_TNH.shape
    pairs = triton.next_power_of_2(width // 2)
    per_program = min(64, max(16, triton.next_power_of_2(heads)))
    head_blocks = triton.cdiv(heads, per_program)
    # Triton's interpreter knows no assembly.
    fast = q_TNH.dtype is torch.bfloat16 and isinstance(_attend, triton.JITFunction)
    first, second = (argument(s, q_TNH.dtype, fast) for s in (near, far))
    fast = fast and first.fast and second.fast
    values = first.kind == second.kind == VALUES
    if tile is None:
        small = pairs * per_program <= 64 * 64
        tile = 16 if q_TNH.dtype is torch.float32 else 64 if values and small else 32
    joined = values and first.width % tile != 0
    runs = (first.width + second.width,) if joined else (first.width, second.width)
    tiles = sum(triton.cdiv(width, tile) for width in runs)
    if splits is None:
        splits = max(1, min(_PROGRAMS // (count * head_blocks), tiles))
    per_split = max(1, triton.cdiv(tiles, splits))
    splits = max(1, triton.cdiv(tiles, per_split))
    part = stats = cos = sin = sink_N
    if splits > 1:
        part = torch.empty((count, splits, heads, width), device=out.device)
        stats = torch.empty((count, splits, heads, 2), device=out.device)
    if rotary is not None:
        cos, sin = (x.contiguous() for x in rotary)
    turned = 0 if rotary is None else cos.shape[1]
    dtype = FLOATS[q_TNH.dtype]
    if warps is None:
        warps = 8 if pairs * per_program >= 64 * 256 else 4
    # Products are rounded before they are added, as in the plain rotation.
    _attend[(count, head_blocks, splits)](
        q_TNH, out, part, stats, sink_N, cos, sin, *first.pointers(fast), *second.pointers(fast),
        q_TNH.stride(0), q_TNH.stride(1), scale * LOG2E, per_split,
        N=heads, H=width, PAIRS=pairs, HEADS=per_program, TILE=tile, NEAR=first.kind,
        FAR=second.kind, JOINED=joined, SHARES=splits > 1, NEAR_SHRINK=_SHRINK[first.kind],
        FAR_SHRINK=_SHRINK[second.kind], DTYPE=dtype, FAST=fast, STAGES=stages, TURNED=turned,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        combine(out, part, stats, sink_N, rotary)


def combine(
    out: Tensor,
    part: Tensor,
    stats: Tensor,
    sink_N: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
) -> None:
    """Join ``part [T, splits, N, H]`` with its maxima (binary) and sums, ``stats [..., 2]``."""
    count, splits, heads, width = part.shape
    cos, sin = (sink_N, sink_N) if rotary is None else (x.contiguous() for x in rotary)
    _combine[(count, heads)](
        out, part, stats, sink_N, cos, sin, splits, N=heads, H=width,
        WIDE=triton.next_power_of_2(width), SLOTS=triton.next_power_of_2(splits),
        DTYPE=FLOATS[out.dtype], TURNED=0 if rotary is None else cos.shape[1], num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
