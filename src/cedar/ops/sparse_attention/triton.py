"""Sparse attention that reads packed rows in place: FP4 main KV, FP8 windows, or plain values.

Shapes: q ``[T, N, H]``, up to two sources of ``K`` slots each, out ``[T, N, H]``.
Bytes, released sizes: ``T x (128 x 528 + 512 x 288 + 2 x 2NH)`` = T x 346 KB; FLOP:
``T x 4 N K H`` over all K slots = T x 83.9 M. Above some 190 FLOP a byte: bound by the tensor cores
from a few dozen queries on, by latency below that.

For heads 512 wide on Hopper there are `shared_gluon` (decode of up to a quarter as many queries as
there are multiprocessors), `window_gluon` (decode of more) and `packed_gluon` (prefill, and
everything else); `packed_triton` does the rest. Few queries are split, and their shares joined by
`shared_gluon` itself, else in a second launch. The sink enters at the very end, so that the rounded
exponentials are measured from the scores' own maximum. Queries may be rotated as they are read and
the output rotated back before it is written.

Numbers: operands are in q's type (packed rows are exact in bfloat16 and wider), the exponentials
are rounded to it before they meet the values, sums are float32.
"""

# mypy: ignore-errors

import torch
import triton
from torch import Tensor

from cedar.ops.devices import is_hopper, multiprocessors
from cedar.ops.packed import row_width
from cedar.ops.rope.reference import rotate
from cedar.ops.sparse_attention import PackedRows, Rows, Source, packed_triton, prefill
from cedar.ops.sparse_attention import reference as plain
from cedar.ops.sparse_attention.packed_triton import FLOATS, LOG2E
from cedar.ops.sparse_attention.sources import (
    FP4,
    FP8,
    NONE,
    VALUES,
    Argument,
    argument,
    held,
    kind_of,
    unaligned,
)
from cedar.quant import FP4_MAIN, FP8_ROW

try:  # Gluon is young and cannot be interpreted; without it the portable kernel does everything
    from cedar.ops.sparse_attention import packed_gluon as hopper
    from cedar.ops.sparse_attention import shared_launch, window_gluon
except Exception:
    hopper = None

__all__ = ["AttentionKernels", "launch", "unsupported"]

_WIDEST = 512
_PROGRAMS = 132  # multiprocessors of an H200
_MOST_LISTED = 1536  # slots whose numbers fit beside everything else in shared memory
# What the two sources may hold for the kernel written for Hopper.
_BY_HAND = {
    (VALUES, NONE), (FP8, NONE), (FP4, NONE), (VALUES, VALUES), (VALUES, FP4), (FP8, FP4),
}  # fmt: skip


def unsupported(
    q_TNH: Tensor, sources: tuple[Source, ...], rotary: tuple[Tensor, Tensor] | None = None
) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    width = q_TNH.shape[2]
    if q_TNH.dtype not in FLOATS:
        return f"queries in {q_TNH.dtype}"
    if width % 32 or width > _WIDEST:
        return f"head width {width}: expected a multiple of 32 up to {_WIDEST}"
    if q_TNH.stride(2) != 1:
        return "queries with a strided last dimension"
    if len(sources) > 2:
        return f"{len(sources)} sources of rows: expected at most 2"
    if rotary is not None and 2 * rotary[0].shape[1] > width:
        return f"{2 * rotary[0].shape[1]} rotated channels of {width}"
    for source in sources:
        if isinstance(source, PackedRows):
            if source.format not in (FP4_MAIN, FP8_ROW):
                return f"rows in {source.format.name}"
            if row_width(source.raw_RB.shape[1], source.format) != width:
                return "packed rows of another width"
            if source.raw_RB.stride(1) != 1:
                return "packed rows with a strided last dimension"
        elif source.rows_RH.dtype not in FLOATS or source.rows_RH.stride(1) != 1:
            return f"rows in {source.rows_RH.dtype} or with a strided last dimension"
    tensors = [q_TNH, *(s.rows_RH for s in sources if isinstance(s, Rows))]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient is wanted"
    return None


class AttentionKernels:
    """Both operations. Holds counters (`cedar.ops.sparse_attention.shared_launch.Counters`), so
    launches that may overlap need instances of their own.
    """

    def __init__(self) -> None:
        self._counters = None if hopper is None else shared_launch.Counters()

    def sparse_attention(
        self, q_TNH: Tensor, sources: tuple[Source, ...], sink_N: Tensor, scale: float
    ) -> Tensor:
        """`cedar.ops.sparse_attention.SparseAttention`; the reference takes what no kernel can."""
        if _learned(q_TNH, sources, sink_N):
            return prefill.sparse_attention(q_TNH, sources, sink_N, scale)
        if unsupported(q_TNH, sources) is not None:
            return plain.sparse_attention(q_TNH, sources, sink_N, scale)
        out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        if out.numel():
            launch(q_TNH, sources, sink_N, scale, out, counters=self._counters)
        return out

    def rotated_attention(
        self,
        q_TNH: Tensor,
        sources: tuple[Source, ...],
        sink_N: Tensor,
        scale: float,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """`cedar.ops.sparse_attention.RotatedAttention`; the same, around it the plain rotation."""
        learned = _learned(q_TNH, sources, sink_N)
        if learned or unsupported(q_TNH, sources, rotary) is not None:
            o = self.sparse_attention(rotate(q_TNH, *rotary), sources, sink_N, scale)
            return rotate(o, *rotary, inverse=True)
        out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        if out.numel():
            launch(q_TNH, sources, sink_N, scale, out, rotary, counters=self._counters)
        return out


def launch(
    q_TNH: Tensor,
    sources: tuple[Source, ...],
    sink_N: Tensor,
    scale: float,
    out: Tensor,
    rotary: tuple[Tensor, Tensor] | None = None,
    *,
    tile: int | None = None,
    splits: int | None = None,
    stages: int = 2,
    warps: int | None = None,
    by_hand: bool | None = None,
    counters: "shared_launch.Counters | None" = None,
) -> None:
    """Run the kernels; ``tile`` slots at a time, a query's slots over ``splits`` programs.

    by_hand: use the kernels written for Hopper; by default where they fit. counters: programs that
    share a query may wait for each other; without, a second launch joins what they found. The other
    options are for measurements.
    """
    near, far = held(sources)
    if by_hand is None:
        by_hand = _fits_hopper(q_TNH, near, far, rotary)
    if not by_hand:
        packed_triton.launch(
            q_TNH, near, far, sink_N, scale, out, rotary, tile, splits, stages, warps
        )
        return
    if kind_of(near) == FP4:
        near, far = None, near
    first, second = (argument(s, q_TNH.dtype, True) for s in (near, far))
    listed = first.width + second.width <= _MOST_LISTED and q_TNH.shape[1] % 64 == 0
    shares = 0
    if counters is not None:
        shares = shared_launch.splits_for(q_TNH, first, second, multiprocessors(q_TNH.device))
    if shares:
        shared_launch.launch(q_TNH, first, second, sink_N, scale, out, rotary, shares, counters)
    elif first.kind == FP8 and listed:
        _launch_window(q_TNH, first, second, sink_N, scale, out, rotary, tile, splits)
    else:
        _launch_packed(q_TNH, first, second, sink_N, scale, out, rotary)


def _launch_window(
    q_TNH: Tensor,
    near: Argument,
    far: Argument,
    sink_N: Tensor,
    scale: float,
    out: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    tile: int | None,
    splits: int | None,
) -> None:
    """The kernel for decode: a second launch joins the shares where there are several."""
    count, heads, width = q_TNH.shape
    programs = count * heads // 64
    if tile is None:
        tile = 128 if 2 * programs > _PROGRAMS else 64
    tiles = triton.cdiv(near.width, tile) + triton.cdiv(far.width, tile)
    if splits is None:
        splits = max(1, min(_PROGRAMS // programs, tiles))
    per_split = triton.cdiv(tiles, min(splits, tiles))
    splits = triton.cdiv(tiles, per_split)
    part = stats = None
    if splits > 1:
        part = torch.empty((count, splits, heads, width), device=out.device)
        stats = torch.empty((count, splits, heads, 2), device=out.device)
    cos, sin = (None, None) if rotary is None else (x.contiguous() for x in rotary)
    window_gluon.attend[(count, heads // 64, splits)](
        q_TNH, out, part, stats, sink_N, cos, sin, *near.or_nothing_of(far),
        *far.or_nothing_of(near), q_TNH.stride(0), q_TNH.stride(1), scale * LOG2E, per_split,
        N=heads, TILE=tile,
        NEAR_TILES=triton.next_power_of_2(triton.cdiv(near.width, tile)),
        # The tile after the last is asked for too: it is empty.
        FAR_TILES=triton.next_power_of_2(triton.cdiv(far.width, tile) + 1),
        SHARES=splits > 1, ROTARY=0 if rotary is None else 64, num_warps=8,
    )  # fmt: skip
    if splits > 1:
        packed_triton.combine(out, part, stats, sink_N, rotary)


def _launch_packed(
    q_TNH: Tensor,
    near: Argument,
    far: Argument,
    sink_N: Tensor,
    scale: float,
    out: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
) -> None:
    """The kernel for everything else, prefill above all: one launch, a query is never split."""
    count, heads, _ = q_TNH.shape
    blocks = triton.cdiv(heads, 64)
    items = count * blocks
    programs = min(multiprocessors(q_TNH.device), items)
    cos, sin = (None, None) if rotary is None else (x.contiguous() for x in rotary)
    hopper.attend[(programs,)](
        q_TNH, out, sink_N, cos, sin, *near.or_nothing_of(far), *far.or_nothing_of(near),
        q_TNH.stride(0), q_TNH.stride(1), scale * LOG2E, items, programs, N=heads, BLOCKS=blocks,
        NEAR=near.kind, FAR=far.kind, ROTARY=0 if rotary is None else 64, num_warps=4,
    )  # fmt: skip


def _learned(q_TNH: Tensor, sources: tuple[Source, ...], sink_N: Tensor) -> bool:
    """Whether a gradient is wanted."""
    if not torch.is_grad_enabled():
        return False
    rows = (s.rows_RH for s in sources if isinstance(s, Rows))
    return any(x.requires_grad for x in (q_TNH, sink_N, *rows))


def _fits_hopper(
    q_TNH: Tensor,
    near: Source | None,
    far: Source | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> bool:
    """Whether the hand-written kernel takes these inputs: its one width, rows of whole words."""
    if hopper is None or not q_TNH.is_cuda or q_TNH.dtype is not torch.bfloat16:
        return False
    if q_TNH.shape[2] != 512 or q_TNH.shape[1] <= 32 or unaligned(q_TNH):
        return False
    if rotary is not None and 2 * rotary[0].shape[1] != 64:
        return False
    if (kind_of(near), kind_of(far)) not in _BY_HAND:
        return False
    for source in (near, far):
        if isinstance(source, PackedRows) and unaligned(source.raw_RB):
            return False
        if isinstance(source, Rows) and (
            source.rows_RH.dtype is not torch.bfloat16 or unaligned(source.rows_RH)
        ):
            return False
    return is_hopper(q_TNH.device)
