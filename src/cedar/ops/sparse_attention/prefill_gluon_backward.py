"""Backward pass of `cedar.ops.sparse_attention.prefill_gluon`.

Queries and output gradients lie in shared memory one above the other. One product with a tile's
rows is the scores and their gradient; one product with the probabilities and their gradient,
transposed, is what the tile adds to the rows. That part leaves the registers while the tensor cores
run the next tile's scores: atomically, or to a place of its own.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy

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

__all__ = ["backward_kernel"]

BACK = gl.constexpr(32)  # slots a step takes

_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
# Eight warps one above the other: 128 rows (scores, then their gradient) or 512 channels.
_TALL = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 32, 16])
)
# A score and its gradient in one thread; half of the keys in each warp group.
_PAIR = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 1, 0], [8, 0, 0], [0, 8, 0]],
        lane_bases=[[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0], [0, 16, 0]],
        block_bases=[],
        shape=[64, 32, 2],
    )
)
_NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))


@gluon.jit
def _copy_tile(into, near, near_stride, far, far_stride, slots, tile, tiles, near_tiles):
    """Begin copying the rows of a tile, zeros for empty slots and after the last tile."""
    slot = slots.index(gl.minimum(tile, tiles - 1)).load(gl.SliceLayout(1, _COPY))
    slot = gl.where(tile < tiles, slot, -1)
    place, filled = rows_at(near, near_stride, far, far_stride, slot, tile < near_tiles, _COPY)
    async_copy.async_copy_global_to_shared(into, place, mask=filled)
    async_copy.commit_group()


@gluon.jit
def _add(
    slots, near_places, near_grad, far_places, far_grad, block, tile, near_tiles, dk,
    BLOCKS: gl.constexpr, ATOMIC: gl.constexpr,
):  # fmt: skip
    """Into the rows' gradient; ``dk [H, BACK]`` is transposed."""
    if tile < near_tiles:
        grad = near_grad
        places = near_places + tile * BACK
    else:
        grad = far_grad
        places = far_places + (tile - near_tiles) * BACK
    # Half of the rows at a time: their addresses take half of the registers.
    half: gl.constexpr = BACK // 2
    dk0, dk1 = gl.split(gl.permute(gl.reshape(dk, (WIDTH, 2, half)), (0, 2, 1)))
    _add_half(slots.slice(0, half, 0), places, grad, block, dk0, BLOCKS, ATOMIC)
    _add_half(slots.slice(half, half, 0), places + half, grad, block, dk1, BLOCKS, ATOMIC)


@gluon.jit
def _add_half(slots, places, grad, block, dk, BLOCKS: gl.constexpr, ATOMIC: gl.constexpr):
    layout: gl.constexpr = dk.type.layout
    slot = slots.load(gl.SliceLayout(0, layout))
    filled = slot >= 0
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))[:, None]
    if ATOMIC:
        row = gl.where(filled, slot, 0).to(gl.int64) * WIDTH
        gl.atomic_add(grad + row[None, :] + channel, dk, mask=filled[None, :], sem="relaxed")
    else:
        lane = gl.arange(0, BACK // 2, layout=gl.SliceLayout(0, layout))
        row = gl.load(places + lane, mask=filled, other=0).to(gl.int64) * BLOCKS + block
        gl.store(grad + (row * WIDTH)[None, :] + channel, dk, mask=filled[None, :])


@gluon.jit
def backward_kernel(
    q, grad_out, grad_q, log_sum, delta,
    near, near_slots, near_places, near_grad, near_stride, near_slot_stride, near_width,
    far, far_slots, far_places, far_grad, far_stride, far_slot_stride, far_width,
    q_stride_T, q_stride_N, grad_stride_T, grad_stride_N, scale, first,
    N: gl.constexpr, BLOCKS: gl.constexpr, ATOMIC: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Gradients into q and rows, as `prefill_triton.backward_kernel`.

    SLOTS: a power of two that holds all slots of a query, each source filled up to whole tiles.
    """
    one: gl.constexpr = gl.SliceLayout(2, _PAIR)
    qg_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * HEADS, WIDTH], SHARED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, BACK, WIDTH], SHARED)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * HEADS, BACK], _NARROW)
    flat_smem = gl.allocate_shared_memory(gl.int32, [SLOTS], PLAIN)
    f_smem = flat_smem._reinterpret(gl.int32, [SLOTS // BACK, BACK], PLAIN)
    near_tiles = (near_width + BACK - 1) // BACK
    tiles = near_tiles + (far_width + BACK - 1) // BACK
    item = gl.program_id(0)
    t = (item // BLOCKS).to(gl.int64) + first
    block = item % BLOCKS
    head0 = block * HEADS
    place, head_ok = heads_at(q, t, head0, q_stride_T, q_stride_N, N, _COPY)
    async_copy.async_copy_global_to_shared(qg_smem.slice(0, HEADS, 0), place, mask=head_ok)
    place, head_ok = heads_at(grad_out, t, head0, grad_stride_T, grad_stride_N, N, _COPY)
    async_copy.async_copy_global_to_shared(qg_smem.slice(HEADS, HEADS, 0), place, mask=head_ok)
    near_places += (t - first) * near_width
    far_places += (t - first) * far_width
    # All slots of the query; each source begins with a tile.
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    near_place = gl.arange(0, SLOTS, layout=flat)
    far_place = near_place - near_tiles * BACK
    in_far = (far_place >= 0) & (far_place < far_width)
    from_near = gl.load(near_slots + t * near_slot_stride + near_place, near_place < near_width, -1)
    from_far = gl.load(far_slots + t * far_slot_stride + far_place, in_far, -1)
    flat_smem.store(gl.where(in_far, from_far.to(gl.int32), from_near.to(gl.int32)))
    for ahead in gl.static_range(2):
        _copy_tile(
            k_smem.index(ahead), near, near_stride, far, far_stride, f_smem, ahead, tiles,
            near_tiles,
        )  # fmt: skip
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, one))
    row = t * N + head0
    sums = gl.load(log_sum + row + head, mask=head0 + head < N, other=float("inf"))
    deltas = gl.load(delta + row + head, mask=head0 + head < N, other=0.0)
    zero_s = gl.zeros((2 * HEADS, BACK), gl.float32, layout=_TALL)
    zero_k = gl.zeros((WIDTH, BACK), gl.float32, layout=_TALL)
    acc = gl.zeros((HEADS, WIDTH), gl.float32, layout=OUT)
    async_copy.wait_group(1)
    hopper.fence_async_shared()
    barrier()
    scores = hopper.warpgroup_mma(
        qg_smem, k_smem.index(0).permute((1, 0)), zero_s, use_acc=False, is_async=True
    )
    buf = item * 0
    for tile in range(tiles):
        sp = hopper.warpgroup_mma_wait(0, deps=[scores])
        pair = gl.permute(gl.reshape(sp, (2, HEADS, BACK)), (1, 2, 0))
        s, dp = gl.split(gl.convert_layout(pair, _PAIR))
        filled = f_smem.index(tile).load(gl.SliceLayout(0, one)) >= 0
        p = gl.exp2(s * (scale * 1.4426950408889634) - sums[:, None])
        p = gl.where(filled[None, :], p, 0.0)
        ds = p * (dp - deltas[:, None]) * scale
        p_smem.slice(0, HEADS, 0).store(ds.to(gl.bfloat16))
        p_smem.slice(HEADS, HEADS, 0).store(p.to(gl.bfloat16))
        hopper.fence_async_shared()
        barrier()
        rows = hopper.warpgroup_mma(
            qg_smem.permute((1, 0)), p_smem, zero_k, use_acc=False, is_async=True
        )
        queries = hopper.warpgroup_mma(
            p_smem.slice(0, HEADS, 0), k_smem.index(buf), acc, is_async=True
        )
        async_copy.wait_group(0)
        hopper.fence_async_shared()
        barrier()
        # After the last tile this multiplies zeros, or rows of before; nobody looks at it.
        scores = hopper.warpgroup_mma(
            qg_smem, k_smem.index(1 - buf).permute((1, 0)), zero_s, use_acc=False, is_async=True
        )
        dk, acc = hopper.warpgroup_mma_wait(1, deps=[rows, queries])
        barrier()
        _copy_tile(
            k_smem.index(buf), near, near_stride, far, far_stride, f_smem, tile + 2, tiles,
            near_tiles,
        )  # fmt: skip
        _add(
            f_smem.index(tile), near_places, near_grad, far_places, far_grad, block, tile,
            near_tiles, dk, BLOCKS, ATOMIC,
        )  # fmt: skip
        buf = 1 - buf
    hopper.warpgroup_mma_wait(0, deps=[scores])
    async_copy.wait_group(0)
    store_heads(grad_q, acc, row, head0, N)
