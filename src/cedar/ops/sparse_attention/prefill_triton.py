"""Sparse attention over plain rows with a backward pass, for prefill and training; any GPU.

One program is one query and up to 64 heads; it walks through the query's slots a tile at a time.
Rows and queries are held as two halves of their channels (``P`` each, the second one masked at
odd widths), so that no accumulator is wider than the registers allow and every channel count works.

Shapes: q, out ``[T, N, H]``, up to two sources of ``K`` slots each, ``log_sum [T, N]`` in binary
logarithms, sink included (+inf where a query sees nothing: all its exponentials are then zero).
Forward: FLOP ``T x 4 N K H``; bytes ``T x (2 K H + 4 N H)``, the rows from the L2 cache mostly.
Backward: FLOP ``T x 10 N K H`` (scores and their gradient again, then into q and twice into rows);
bytes ``T x (2 K H + 8 N H + 4 K H)``, the last term being float32 additions to the rows' gradient.

The gradient of a row comes from every query that names it: added atomically, in no fixed order, or
written to a place of its own and summed in order by `sum_kernel` (twice the traffic, same bits in
every run).

Numbers: as the plain implementation. Operands have q's type; exponentials are rounded to it before
they meet the values; sums are float32.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["backward_kernel", "delta_kernel", "forward_kernel", "sum_kernel"]


@triton.jit
def _half(base, offset_R, ok_R, FIRST: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    """Channels ``FIRST : FIRST + P`` of the rows at ``offset_R``, zero outside."""
    col = FIRST + tl.arange(0, P)
    inside = ok_R[:, None]
    if FIRST + P > H:
        inside = inside & (col < H)[None, :]
    return tl.load(base + offset_R[:, None] + col[None, :], mask=inside, other=0.0)


@triton.jit
def _slots(slots, place_K, width, stride):
    """Row offsets and filled flags of the slots ``place_K`` of one query."""
    slot = tl.load(slots + place_K, mask=place_K < width, other=-1).to(tl.int64)
    filled = slot >= 0
    return tl.where(filled, slot, 0), filled


@triton.jit
def _forward_tile(
    q0, q1, rows, slots, place_K, width, stride, scale, top, total, acc0, acc1,
    H: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the running softmax, in binary logarithms."""
    slot, filled = _slots(slots, place_K, width, stride)
    k0 = _half(rows, slot * stride, filled, 0, H, P).to(DTYPE)
    k1 = _half(rows, slot * stride, filled, P, H, P).to(DTYPE)
    scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION) * scale
    scores = tl.where(filled[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    p = p.to(DTYPE)
    acc0 = tl.dot(p, k0, acc0 * shrink[:, None], input_precision=PRECISION)
    acc1 = tl.dot(p, k1, acc1 * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc0, acc1


@triton.jit
def _store(base, offset_R, ok_R, value, FIRST: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    col = FIRST + tl.arange(0, P)
    inside = ok_R[:, None] & (col < H)[None, :]
    place = base + offset_R[:, None] + col[None, :]
    tl.store(place, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def forward_kernel(
    q, out, log_sum, sink,
    near, near_slots, near_stride, near_slot_stride, near_width,
    far, far_slots, far_stride, far_slot_stride, far_width,
    q_stride_T, q_stride_N, scale,
    N: tl.constexpr, H: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, SAVE: tl.constexpr,
    DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_ok = head < N
    precision: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    offset_q = t * q_stride_T + head.to(tl.int64) * q_stride_N
    q0 = _half(q, offset_q, head_ok, 0, H, P)
    q1 = _half(q, offset_q, head_ok, P, H, P)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc0 = tl.zeros((HEADS, P), tl.float32)
    acc1 = tl.zeros((HEADS, P), tl.float32)
    lane = tl.arange(0, TILE)
    if NEAR:
        for start in tl.range(0, near_width, TILE, num_stages=STAGES):
            top, total, acc0, acc1 = _forward_tile(
                q0, q1, near, near_slots + t * near_slot_stride, start + lane, near_width,
                near_stride, scale, top, total, acc0, acc1, H, P, DTYPE, precision,
            )  # fmt: skip
    if FAR:
        for start in tl.range(0, far_width, TILE, num_stages=STAGES):
            top, total, acc0, acc1 = _forward_tile(
                q0, q1, far, far_slots + t * far_slot_stride, start + lane, far_width,
                far_stride, scale, top, total, acc0, acc1, H, P, DTYPE, precision,
            )  # fmt: skip
    sinks = tl.load(sink + head, mask=head_ok, other=0.0).to(tl.float32) * 1.4426950408889634
    # The sink enters last: the exponentials are measured from the scores' own maximum.
    high = tl.maximum(top, sinks)
    high = tl.where(high == float("-inf"), 0.0, high)
    kept = tl.exp2(top - high)
    below = total * kept + tl.exp2(sinks - high)
    below = tl.where(below > 0, below, 1.0)
    factor = kept / below
    row = (t * N + head) * H
    _store(out, row, head_ok, acc0 * factor[:, None], 0, H, P)
    _store(out, row, head_ok, acc1 * factor[:, None], P, H, P)
    if SAVE:
        value = tl.where(top > float("-inf"), high + tl.log2(below), float("inf"))
        tl.store(log_sum + t * N + head, value, mask=head_ok)


@triton.jit
def delta_kernel(
    out, grad, delta, grad_stride_T, grad_stride_N,
    N: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """``delta [T, N]``: the inner product of output and its gradient, for every head."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, WIDTH)
    inside = (head < N)[:, None] & (col < H)[None, :]
    row = (t * N + head) * H
    o = tl.load(out + row[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    row = t * grad_stride_T + head.to(tl.int64) * grad_stride_N
    g = tl.load(grad + row[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + t * N + head, tl.sum(o * g, 1), mask=head < N)


@triton.jit
def _add(
    grad, offset_R, ok_R, value, FIRST: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    ATOMIC: tl.constexpr,
):  # fmt: skip
    """Into the rows' gradient; ``value [P, R]`` is transposed."""
    col = FIRST + tl.arange(0, P)
    inside = ok_R[None, :] & (col < H)[:, None]
    place = grad + offset_R[None, :] + col[:, None]
    if ATOMIC:
        tl.atomic_add(place, value, mask=inside, sem="relaxed")
    else:
        tl.store(place, value, mask=inside)


@triton.jit
def _backward_tile(
    q0, q1, g0, g1, log_sum, delta, scale, rows, slots, places, grad, place_K, width, stride,
    block, acc0, acc1,
    H: tl.constexpr, P: tl.constexpr, BLOCKS: tl.constexpr, ATOMIC: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, filled = _slots(slots, place_K, width, stride)
    k0 = _half(rows, slot * stride, filled, 0, H, P).to(DTYPE)
    k1 = _half(rows, slot * stride, filled, P, H, P).to(DTYPE)
    scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
    p = tl.exp2(scores * (scale * 1.4426950408889634) - log_sum[:, None])
    p = tl.where(filled[None, :], p, 0.0)
    ds = tl.dot(g0, tl.trans(k0), input_precision=PRECISION)
    ds = tl.dot(g1, tl.trans(k1), ds, input_precision=PRECISION)
    ds = (p * (ds - delta[:, None]) * scale).to(DTYPE)
    p = p.to(DTYPE)
    acc0 = tl.dot(ds, k0, acc0, input_precision=PRECISION)
    acc1 = tl.dot(ds, k1, acc1, input_precision=PRECISION)
    # A row is key and value. Channels first: the long side of the product.
    if ATOMIC:
        place = slot
    else:
        place = tl.load(places + place_K, mask=filled, other=0).to(tl.int64) * BLOCKS + block
    dk = tl.dot(tl.trans(g0), p, input_precision=PRECISION)
    dk = tl.dot(tl.trans(q0), ds, dk, input_precision=PRECISION)
    _add(grad, place * H, filled, dk, 0, H, P, ATOMIC)
    dk = tl.dot(tl.trans(g1), p, input_precision=PRECISION)
    dk = tl.dot(tl.trans(q1), ds, dk, input_precision=PRECISION)
    _add(grad, place * H, filled, dk, P, H, P, ATOMIC)
    return acc0, acc1


@triton.jit
def backward_kernel(
    q, grad_out, grad_q, log_sum, delta,
    near, near_slots, near_places, near_grad, near_stride, near_slot_stride, near_width,
    far, far_slots, far_places, far_grad, far_stride, far_slot_stride, far_width,
    q_stride_T, q_stride_N, grad_stride_T, grad_stride_N, scale, first,
    N: tl.constexpr, H: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, BLOCKS: tl.constexpr, ATOMIC: tl.constexpr,
    DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients into q and rows of the queries from ``first`` on.

    Atomic: ``near_grad`` and ``far_grad`` are float32 ``[R, H]``. Otherwise what slot ``k`` of
    query ``t`` and one of ``BLOCKS`` groups of heads add goes to its place in float32
    ``[places, BLOCKS, H]``, which `sum_kernel` sums.
    """
    t = tl.program_id(0).to(tl.int64) + first
    block = tl.program_id(1)
    head = block * HEADS + tl.arange(0, HEADS)
    head_ok = head < N
    precision: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    offset = t * q_stride_T + head.to(tl.int64) * q_stride_N
    q0 = _half(q, offset, head_ok, 0, H, P)
    q1 = _half(q, offset, head_ok, P, H, P)
    offset = t * grad_stride_T + head.to(tl.int64) * grad_stride_N
    g0 = _half(grad_out, offset, head_ok, 0, H, P)
    g1 = _half(grad_out, offset, head_ok, P, H, P)
    sums = tl.load(log_sum + t * N + head, mask=head_ok, other=float("inf"))
    deltas = tl.load(delta + t * N + head, mask=head_ok, other=0.0)
    acc0 = tl.zeros((HEADS, P), tl.float32)
    acc1 = tl.zeros((HEADS, P), tl.float32)
    lane = tl.arange(0, TILE)
    if NEAR:
        for start in tl.range(0, near_width, TILE, num_stages=STAGES):
            acc0, acc1 = _backward_tile(
                q0, q1, g0, g1, sums, deltas, scale, near, near_slots + t * near_slot_stride,
                near_places + (t - first) * near_width, near_grad, start + lane, near_width,
                near_stride, block, acc0, acc1, H, P, BLOCKS, ATOMIC, DTYPE, precision,
            )  # fmt: skip
    if FAR:
        for start in tl.range(0, far_width, TILE, num_stages=STAGES):
            acc0, acc1 = _backward_tile(
                q0, q1, g0, g1, sums, deltas, scale, far, far_slots + t * far_slot_stride,
                far_places + (t - first) * far_width, far_grad, start + lane, far_width,
                far_stride, block, acc0, acc1, H, P, BLOCKS, ATOMIC, DTYPE, precision,
            )  # fmt: skip
    row = (t * N + head) * H
    _store(grad_q, row, head_ok, acc0, 0, H, P)
    _store(grad_q, row, head_ok, acc1, P, H, P)


@triton.jit
def sum_kernel(
    part, bounds_R, grad, WIDTH: tl.constexpr, H: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """``grad [R, H]`` += the parts ``bounds[r] : bounds[r + 1]``, in their order."""
    r = tl.program_id(0).to(tl.int64)
    begin = tl.load(bounds_R + r).to(tl.int64) * BLOCKS
    end = tl.load(bounds_R + r + 1).to(tl.int64) * BLOCKS
    if begin < end:
        col = tl.arange(0, WIDTH)
        total = tl.load(grad + r * H + col, mask=col < H, other=0.0)
        for start in range(begin, end, TILE):
            line = start + tl.arange(0, TILE).to(tl.int64)
            inside = (line < end)[:, None] & (col < H)[None, :]
            total += tl.sum(tl.load(part + line[:, None] * H + col[None, :], inside, other=0.0), 0)
        tl.store(grad + r * H + col, total, mask=col < H)
