"""Forward pass of `cedar.ops.sparse_attention.prefill_gluon`.

Four more warps do nothing but gather, so that no fence between what the computing warps write to
shared memory and what the tensor cores read comes behind copies in flight; a version whose
computing warps copied took 1.4 times as long on an H200. Programs stay and take every ``step``-th
query, so rows of the next query arrive while the output of the last one leaves.

The 64 x 512 accumulator is half of all registers, one half of the columns in each warp group;
scores are split over keys between the groups, so probabilities pass through shared memory. While
the output of one tile accumulates, the scores of the next are already queued.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from cedar.ops.sparse_attention.prefill_gluon import (
    HEADS,
    OUT,
    PLAIN,
    SHARED,
    WIDTH,
    barrier,
    heads_at,
    rows_at,
    store_heads,
)

__all__ = ["forward_kernel"]

TILE = gl.constexpr(64)  # slots a step takes

_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_SCORE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
)
# What both warp groups know of a row, side by side in the threads that hold the row.
_HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)


@gluon.jit
def _slots(
    near_slots, near_slot_stride, near_width, far_slots, far_slot_stride, far_width,
    item, items, tile, near_tiles, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Row numbers of a tile, -1 outside; the second source begins with a tile."""
    t = (item // BLOCKS).to(gl.int64)
    lane = gl.arange(0, TILE, layout=gl.SliceLayout(1, _COPY))
    if tile < near_tiles:
        place = near_slots + t * near_slot_stride + tile * TILE
        left = near_width - tile * TILE
    else:
        place = far_slots + t * far_slot_stride + (tile - near_tiles) * TILE
        left = far_width - (tile - near_tiles) * TILE
    left = gl.where(item < items, left, 0)
    return gl.load(place + lane, mask=lane < left, other=-1).to(gl.int32)


@gluon.jit
def _gather(
    q, near, near_slots, near_stride, near_slot_stride, near_width,
    far, far_slots, far_stride, far_slot_stride, far_width,
    q_stride_T, q_stride_N, items, step,
    q_smem, k_smem, slot_smem, q_full, q_empty, k_full, k_empty,
    N: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The copying warps: queries and tiles, each as soon as its place is free."""
    near_tiles = (near_width + TILE - 1) // TILE
    tiles = near_tiles + (far_width + TILE - 1) // TILE
    item = gl.program_id(0)
    q_phase = item * 0
    count = item * 0  # tiles of all queries so far
    slot = _slots(
        near_slots, near_slot_stride, near_width, far_slots, far_slot_stride, far_width,
        item, items, 0, near_tiles, BLOCKS,
    )  # fmt: skip
    while item < items:
        mbarrier.wait(q_empty, q_phase ^ 1)
        t = (item // BLOCKS).to(gl.int64)
        place, head_ok = heads_at(q, t, (item % BLOCKS) * HEADS, q_stride_T, q_stride_N, N, _COPY)
        async_copy.async_copy_global_to_shared(q_smem, place, mask=head_ok)
        async_copy.mbarrier_arrive(q_full, increment_count=False)
        q_phase ^= 1
        for tile in range(tiles):
            buf = count & 1
            mbarrier.wait(k_empty.index(buf), ((count >> 1) & 1) ^ 1)
            slot_smem.index(buf).store(slot)
            place, filled = rows_at(
                near, near_stride, far, far_stride, slot, tile < near_tiles, _COPY
            )
            async_copy.async_copy_global_to_shared(k_smem.index(buf), place, mask=filled)
            # The copies of every thread, and what it wrote itself.
            async_copy.mbarrier_arrive(k_full.index(buf), increment_count=False)
            mbarrier.arrive(k_full.index(buf), count=1)
            count += 1
            next_tile = tile + 1
            next_item = item
            if next_tile == tiles:
                next_tile = next_tile * 0
                next_item = item + step
            slot = _slots(
                near_slots, near_slot_stride, near_width, far_slots, far_slot_stride, far_width,
                next_item, items, next_tile, near_tiles, BLOCKS,
            )  # fmt: skip
        item += step
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _thread_sums(p):
    """Sums over what a thread holds of each row: nothing is exchanged."""
    wide = gl.reshape(p, (HEADS, 2, TILE // 16, 4, 2))
    return gl.sum(gl.sum(wide, 4), 2)


@gluon.jit
def _softmax_step(s, slots, scale, top, sums, acc, p_smem):
    """One tile of the running softmax; the probabilities go to shared memory."""
    filled = slots.load(gl.SliceLayout(0, _SCORE)) >= 0
    s = gl.where(filled[None, :], s * scale, float("-inf"))
    halves = gl.convert_layout(gl.max(gl.reshape(s, (HEADS, 2, TILE // 2)), 2), _HALVES)
    new_top = gl.maximum(top, gl.convert_layout(gl.max(halves, 1), top.type.layout))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s - base[:, None])
    shrink = gl.exp2(top - base)
    spread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout))
    sums = sums * gl.convert_layout(shrink, spread)[:, None, None] + _thread_sums(p)
    p_smem.store(p.to(gl.bfloat16))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    hopper.fence_async_shared()
    barrier()
    return new_top, sums, acc


@gluon.jit
def _scores(q_smem, k_smem, zero):
    return hopper.warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _attend(
    out, log_sum, sink, near_width, far_width, scale, items, step,
    q_smem, k_smem, p_smem, slot_smem, q_full, q_empty, k_full, k_empty,
    N: gl.constexpr, BLOCKS: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    """The computing warps."""
    tiles = (near_width + TILE - 1) // TILE + (far_width + TILE - 1) // TILE
    item = gl.program_id(0)
    zero = gl.zeros((HEADS, TILE), gl.float32, layout=_SCORE)
    q_phase = item * 0
    count = item * 0  # tiles of all queries so far
    while item < items:
        top = gl.full((HEADS,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, _SCORE))
        sums = _thread_sums(zero)
        acc = gl.zeros((HEADS, WIDTH), gl.float32, layout=OUT)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        mbarrier.wait(k_full.index(count & 1), (count >> 1) & 1)
        hopper.fence_async_shared()
        scores = _scores(q_smem, k_smem.index(count & 1), zero)
        for _ in range(tiles - 1):
            buf = count & 1
            s = hopper.warpgroup_mma_wait(0, deps=[scores])
            top, sums, acc = _softmax_step(s, slot_smem.index(buf), scale, top, sums, acc, p_smem)
            running = hopper.warpgroup_mma(p_smem, k_smem.index(buf), acc, is_async=True)
            count += 1
            mbarrier.wait(k_full.index(1 - buf), (count >> 1) & 1)
            hopper.fence_async_shared()
            scores = _scores(q_smem, k_smem.index(1 - buf), zero)
            acc = hopper.warpgroup_mma_wait(1, deps=[running])
            mbarrier.arrive(k_empty.index(buf), count=1)
        # The last tile; the queries' place is free from its scores on.
        buf = count & 1
        s = hopper.warpgroup_mma_wait(0, deps=[scores])
        top, sums, acc = _softmax_step(s, slot_smem.index(buf), scale, top, sums, acc, p_smem)
        mbarrier.arrive(q_empty, count=1)
        running = hopper.warpgroup_mma(p_smem, k_smem.index(buf), acc, is_async=True)
        count += 1
        acc = hopper.warpgroup_mma_wait(0, deps=[running])
        mbarrier.arrive(k_empty.index(buf), count=1)
        # The sink enters last: the exponentials are measured from the scores' own maximum.
        first = (item % BLOCKS) * HEADS
        row = (item // BLOCKS).to(gl.int64) * N + first
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _SCORE))
        head_ok = first + head < N
        sinks = gl.load(sink + first + head, mask=head_ok, other=0.0).to(gl.float32)
        sinks = sinks * 1.4426950408889634
        total = gl.sum(gl.convert_layout(gl.sum(sums, 2), _HALVES), 1)
        total = gl.convert_layout(total, gl.SliceLayout(1, _SCORE))
        high = gl.maximum(top, sinks)
        high = gl.where(high == float("-inf"), 0.0, high)
        kept = gl.exp2(top - high)
        below = total * kept + gl.exp2(sinks - high)
        below = gl.where(below > 0, below, 1.0)
        if SAVE:
            value = gl.where(top > float("-inf"), high + gl.log2(below), float("inf"))
            gl.store(log_sum + row + head, value, mask=head_ok)
        factor = gl.convert_layout(kept / below, gl.SliceLayout(1, OUT))
        store_heads(out, acc * factor[:, None], row, first, N)
        item += step


@gluon.jit
def forward_kernel(
    q, out, log_sum, sink,
    near, near_slots, near_stride, near_slot_stride, near_width,
    far, far_slots, far_stride, far_slot_stride, far_width,
    q_stride_T, q_stride_N, scale, items, step,
    N: gl.constexpr, BLOCKS: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    """As `prefill_triton.forward_kernel`; an item is a query and one of its groups of 64 heads.

    A pair of barriers says of every place in shared memory that it is full, or free.
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [HEADS, WIDTH], SHARED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, WIDTH], SHARED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [HEADS, TILE], SHARED)
    slot_smem = gl.allocate_shared_memory(gl.int32, [2, TILE], PLAIN)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=128)  # one arrival a copying thread
    mbarrier.init(q_empty, count=1)
    for buf in gl.static_range(2):
        mbarrier.init(k_full.index(buf), count=129)
        mbarrier.init(k_empty.index(buf), count=1)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    out, log_sum, sink, near_width, far_width, scale, items, step,
                    q_smem, k_smem, p_smem, slot_smem, q_full, q_empty, k_full, k_empty,
                    N, BLOCKS, SAVE,
                ),
            ),
            (
                _gather,
                (
                    q, near, near_slots, near_stride, near_slot_stride, near_width,
                    far, far_slots, far_stride, far_slot_stride, far_width,
                    q_stride_T, q_stride_N, items, step,
                    q_smem, k_smem, slot_smem, q_full, q_empty, k_full, k_empty, N, BLOCKS,
                ),
            ),
        ],
        [4],
        [56],
    )  # fmt: skip
