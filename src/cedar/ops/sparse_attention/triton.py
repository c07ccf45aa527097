"""Sparse attention that reads packed rows in place: FP4 main KV, FP8 windows, or plain values.

One program is one query, up to 64 heads and one share of the slots. Rows are gathered by their
physical numbers, dequantised in registers into two tiles (even and odd channels), and used twice:
transposed for the scores, as they are for the output. Two accumulators of half the width stay in
registers; one of the full width does not fit.

Shapes: q ``[T, N, H]``, up to two sources of ``K`` slots each, out ``[T, N, H]``.
Bytes, released sizes: ``T x (128 x 528 + 512 x 288 + 2 x 2NH)`` = T x 346 KB; FLOP:
``T x 4 N K H`` over all K slots = T x 83.9 M. Above some 190 FLOP a byte: bound by the tensor cores
from a few dozen queries on, by latency below that.

Few queries are split: several programs share the slots of a query and leave maximum, sum and
unnormalised output in float32; `_combine` joins them. The sink enters at the very end, so that the
rounded exponentials are measured from the scores' own maximum.

Numbers: operands are in q's type (packed rows are exact in bfloat16 and wider), the exponentials
are rounded to it before they meet the values, sums are float32.
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.packed import row_width
from cedar.ops.sparse_attention import PackedRows, Rows, Source
from cedar.ops.sparse_attention import reference as plain
from cedar.ops.triton_unpack import (
    MAIN_SHRINK,
    WINDOW_SHRINK,
    fp4_tile,
    fp8_tile,
    value_tile,
)
from cedar.quant import FP4_MAIN, FP8_ROW

try:  # Gluon is young and cannot be interpreted; without it the portable kernel does everything
    from cedar.ops.sparse_attention import hopper
except Exception:
    hopper = None

__all__ = ["sparse_attention", "unsupported"]

NONE, VALUES, FP8, FP4 = range(4)
_SHRINK = (0, 0, WINDOW_SHRINK, MAIN_SHRINK)
_LOG2E = 1.4426950408889634
_WIDEST = 512
_PROGRAMS = 132  # multiprocessors of an H200
_MOST_BY_HAND = 1536  # slots whose numbers fit in what is left of shared memory
_FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


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
    q, out, part, stats, sink,
    near, near_slots, near_stride, near_slot_stride, near_width,
    far, far_slots, far_stride, far_slot_stride, far_width,
    q_stride_T, q_stride_N, scale, tiles_per_split,
    N: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, SHARES: tl.constexpr,
    NEAR_SHRINK: tl.constexpr, FAR_SHRINK: tl.constexpr, DTYPE: tl.constexpr,
    FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    head_ok = head < N
    precision: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"

    offset_q = t * q_stride_T + head.to(tl.int64) * q_stride_N
    q_even, q_odd = value_tile(q, offset_q, head_ok, H, PAIRS, DTYPE, FAST)

    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc_even = tl.zeros((HEADS, PAIRS), tl.float32)
    acc_odd = tl.zeros((HEADS, PAIRS), tl.float32)
    lane = tl.arange(0, TILE)
    # Tiles are numbered through both sources; a split takes a run of them.
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
            top, total, acc_even, acc_odd = _step(
                q_even, q_odd, k_even, k_odd, filled, scale, top, total, acc_even, acc_odd,
                NEAR_SHRINK, DTYPE, precision,
            )  # fmt: skip
    if FAR != 0:
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
        row = (t * N + head) * H
        _store(
            out, acc_even * factor[:, None], acc_odd * factor[:, None], row, head_ok, H, PAIRS,
            DTYPE, FAST,
        )  # fmt: skip
    else:
        row = (t * tl.num_programs(2) + split) * N + head
        tl.store(stats + 2 * row, top, mask=head_ok)
        tl.store(stats + 2 * row + 1, total, mask=head_ok)
        _store(part, acc_even, acc_odd, row * H, head_ok, H, PAIRS, tl.float32, FAST)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    out, part, stats, sink, splits, N: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr,
    SLOTS: tl.constexpr, DTYPE: tl.constexpr,
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
    found = tl.sum(shares * weights[:, None], 0) * factor
    tl.store(out + (t * N + head) * H + col, found.to(DTYPE), mask=col < H)


_COMPILED = isinstance(_attend, triton.JITFunction)  # or run by Triton's interpreter


def unsupported(q_TNH: Tensor, sources: tuple[Source, ...]) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    width = q_TNH.shape[2]
    if q_TNH.dtype not in _FLOATS:
        return f"queries in {q_TNH.dtype}"
    if width % 32 or width > _WIDEST:
        return f"head width {width}: expected a multiple of 32 up to {_WIDEST}"
    if q_TNH.stride(2) != 1:
        return "queries with a strided last dimension"
    if len(sources) > 2:
        return f"{len(sources)} sources of rows: expected at most 2"
    for source in sources:
        if isinstance(source, PackedRows):
            if source.format not in (FP4_MAIN, FP8_ROW):
                return f"rows in {source.format.name}"
            if row_width(source.raw_RB.shape[1], source.format) != width:
                return "packed rows of another width"
            if source.raw_RB.stride(1) != 1:
                return "packed rows with a strided last dimension"
        elif source.rows_RH.dtype not in _FLOATS or source.rows_RH.stride(1) != 1:
            return f"rows in {source.rows_RH.dtype} or with a strided last dimension"
    tensors = [q_TNH, *(s.rows_RH for s in sources if isinstance(s, Rows))]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient is wanted"
    return None


def sparse_attention(
    q_TNH: Tensor, sources: tuple[Source, ...], sink_N: Tensor, scale: float
) -> Tensor:
    """`cedar.ops.sparse_attention.SparseAttention`; inputs it cannot take go to the reference."""
    if unsupported(q_TNH, sources) is not None or (
        torch.is_grad_enabled() and sink_N.requires_grad
    ):
        return plain.sparse_attention(q_TNH, sources, sink_N, scale)
    out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    if out.numel():
        launch(q_TNH, sources, sink_N, scale, out)
    return out


def launch(
    q_TNH: Tensor,
    sources: tuple[Source, ...],
    sink_N: Tensor,
    scale: float,
    out: Tensor,
    *,
    tile: int | None = None,
    splits: int | None = None,
    stages: int = 2,
    warps: int | None = None,
    by_hand: bool | None = None,
    overlap: bool = False,
) -> None:
    """Run the kernels; ``tile`` slots at a time, a query's slots over ``splits`` programs.

    by_hand: use the kernel of `cedar.ops.sparse_attention.hopper`; by default where it fits.
    """
    count, heads, width = q_TNH.shape
    pairs = triton.next_power_of_2(width // 2)
    per_program = min(64, max(16, triton.next_power_of_2(heads)))
    head_blocks = triton.cdiv(heads, per_program)
    fast = q_TNH.dtype is torch.bfloat16 and _COMPILED
    near, far = (_argument(s, q_TNH.dtype, fast) for s in _two(sources))
    fast = fast and near.fast and far.fast
    if by_hand is None:
        by_hand = fast and _fits_hopper(q_TNH, sources)
    if by_hand:
        per_program = 64
        head_blocks = heads // 64
        if tile is None:
            tile = 128 if 2 * count * head_blocks > _PROGRAMS else 64
    if tile is None:
        tile = 16 if q_TNH.dtype is torch.float32 else 32
    tiles = triton.cdiv(near.width, tile) + triton.cdiv(far.width, tile)
    if splits is None:
        splits = max(1, min(_PROGRAMS // (count * head_blocks), tiles))
    per_split = max(1, triton.cdiv(tiles, splits))
    splits = max(1, triton.cdiv(tiles, per_split))
    if splits > 1:
        part = torch.empty((count, splits, heads, width), device=out.device)
        stats = torch.empty((count, splits, heads, 2), device=out.device)
    else:
        part = stats = sink_N
    if by_hand:
        window, main = near.or_nothing_of(far), far.or_nothing_of(near)
        hopper.attend[(count, head_blocks, splits)](
            q_TNH, out, part, stats, sink_N, *window, *main, q_TNH.stride(0), q_TNH.stride(1),
            scale * _LOG2E, per_split, N=heads, TILE=tile,
            # The tile after the last is asked for too: it is empty.
            NEAR_TILES=triton.next_power_of_2(max(1, triton.cdiv(near.width, tile))),
            FAR_TILES=triton.next_power_of_2(triton.cdiv(far.width, tile) + 1),
            SHARES=splits > 1, OVERLAP=overlap, num_warps=8,
        )  # fmt: skip
        if splits > 1:
            combine(out, part, stats, sink_N)
        return
    dtype = _FLOATS[q_TNH.dtype]
    if warps is None:
        warps = 8 if pairs * per_program >= 64 * 256 else 4
    _attend[(count, head_blocks, splits)](
        q_TNH, out, part, stats, sink_N, *near.pointers(fast), *far.pointers(fast),
        q_TNH.stride(0), q_TNH.stride(1), scale * _LOG2E, per_split,
        N=heads, H=width, PAIRS=pairs, HEADS=per_program, TILE=tile, NEAR=near.kind,
        FAR=far.kind, SHARES=splits > 1, NEAR_SHRINK=_SHRINK[near.kind],
        FAR_SHRINK=_SHRINK[far.kind], DTYPE=dtype, FAST=fast, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    if splits > 1:
        combine(out, part, stats, sink_N)


def combine(out: Tensor, part: Tensor, stats: Tensor, sink_N: Tensor) -> None:
    """Join ``part [T, splits, N, H]`` with its maxima (binary) and sums, ``stats [..., 2]``."""
    count, splits, heads, width = part.shape
    _combine[(count, heads)](
        out, part, stats, sink_N, splits, N=heads, H=width, WIDE=triton.next_power_of_2(width),
        SLOTS=triton.next_power_of_2(splits), DTYPE=_FLOATS[out.dtype],
        num_warps=4,
    )  # fmt: skip


def _fits_hopper(q_TNH: Tensor, sources: tuple[Source, ...]) -> bool:
    """Whether the hand-written kernel takes these inputs: its one shape, rows of whole words."""
    if hopper is None or q_TNH.shape[1] % 64 or q_TNH.shape[2] != 512 or not q_TNH.is_cuda:
        return False
    near, far = _two(sources)
    if not isinstance(near, PackedRows) or near.format is not FP8_ROW:
        return False
    if far is not None and not (isinstance(far, PackedRows) and far.format is FP4_MAIN):
        return False
    if sum(s.slots_TK.shape[1] for s in (near, far) if s is not None) > _MOST_BY_HAND:
        return False
    held = [s.raw_RB for s in (near, far) if s is not None]
    whole = all(r.stride(0) % 16 == 0 and r.data_ptr() % 16 == 0 for r in held)
    return whole and torch.cuda.get_device_capability(q_TNH.device) == (9, 0)


def _two(sources: tuple[Source, ...]) -> tuple[Source | None, Source | None]:
    """Window first, main KV second; a missing one is None. Empty sources count as missing."""
    held = [s for s in sources if s.slots_TK.shape[1] and _storage(s).shape[0]]
    return (held[0] if held else None), (held[1] if len(held) > 1 else None)


def _storage(source: Source) -> Tensor:
    return source.raw_RB if isinstance(source, PackedRows) else source.rows_RH


class _Argument(NamedTuple):
    """A source as the kernel takes it; strides in elements."""

    kind: int
    fast: bool
    rows: Tensor | None = None
    slots: Tensor | None = None
    stride: int = 0
    slot_stride: int = 0
    width: int = 0

    def or_nothing_of(self, other: "_Argument") -> tuple:
        """The arguments; for a missing source no slots of any rows at hand."""
        held = self if self.rows is not None else other._replace(width=0)
        return held[2:]

    def pointers(self, fast: bool) -> tuple:
        rows = self.rows.view(torch.int16) if fast and self.kind == FP8 else self.rows
        return rows, self.slots, self.stride, self.slot_stride, self.width


def _argument(source: Source | None, dtype: torch.dtype, fast: bool) -> _Argument:
    if source is None:
        return _Argument(NONE, fast)
    rows, slots = _storage(source), source.slots_TK
    if slots.stride(1) != 1:
        slots = slots.contiguous()
    if isinstance(source, Rows):
        kind, fast = VALUES, fast and rows.dtype is dtype
    elif source.format is FP4_MAIN:
        kind = FP4
    else:
        kind = FP8
        even = rows.stride(0) % 2 == 0 and rows.shape[1] % 2 == 0 and rows.data_ptr() % 2 == 0
        fast = fast and even
    return _Argument(kind, fast, rows, slots, rows.stride(0), slots.stride(0), slots.shape[1])
