"""Sparse attention over packed rows or values on Hopper, for heads 512 wide: the engine's prefill.

A program works on one query and 64 heads at a time, with three groups of warps, and stays:

* one group unpacks: it holds the raw bytes of the next 64 rows in registers, writes them as
  bfloat16 to one of two tiles in shared memory, and rotates the queries on their way there;
* two groups multiply. Each computes all scores of a tile for itself and half of the channels of
  the output, so nothing passes between them: their exponentials stay in registers, as operands of
  the second product.

Cycles of a multiprocessor for 64 rows: tensor cores 3072 (2048 if the scores were shared), shared
memory as many (scores 2048, output 512, unpacking 512); some 5400 were seen on an H200. Both groups
wait for the same tiles and so take exponentials at the same time. Taking turns was slower: the
second group then frees a tile so late that the next one arrives late, too.

Shared memory: queries 64 KB, two tiles of 64 KB. Shapes, bytes and FLOP: as
`cedar.ops.sparse_attention.triton`, with H = 512.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from cedar.ops.sparse_attention.packed_gluon_rows import (
    ROTARY_WIDTH,
    column_halves,
    columns_joined,
    copy_queries,
    copy_values,
    load_raw,
    load_turned,
    normaliser,
    rotate_pairs,
    slots_of,
    turn_queries,
    unpack_main,
    unpack_window,
)
from cedar.ops.sparse_attention.prefill_gluon import HEADS, PLAIN, SHARED, WIDTH, barrier
from cedar.ops.triton_unpack import MAIN_SHRINK, WINDOW_SHRINK

__all__ = ["TILE", "attend"]

TILE = gl.constexpr(64)  # slots a step takes
_HALF = gl.constexpr(256)  # channels of one group of warps
_COPYING = gl.constexpr(128)  # threads that unpack and copy
_MAIN = gl.constexpr(float(MAIN_SHRINK))
_WINDOW = gl.constexpr(float(WINDOW_SHRINK))

_SCORE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
_OUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
_P = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_OUT, k_width=2))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
# 8 bytes of a bfloat16 row in one thread: four threads store a sector.
_STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)


@gluon.jit
def _first_head(item, BLOCKS: gl.constexpr):
    """The first head of an item's group. The last term is zero, which the compiler does not know:

    it would else keep all addresses in registers from one item to the next.
    """
    return (item % BLOCKS) * HEADS + (item >> 30)


@gluon.jit
def _gather(
    q, cos, sin, near, near_slots, near_stride: gl.constexpr, near_slot_stride, near_width,
    far, far_slots, far_stride: gl.constexpr, far_slot_stride, far_width,
    q_stride_T, q_stride_N: gl.constexpr, items, step,
    q_smem, k_smem, slot_smem, q_full, q_empty, k_full, k_empty,
    N: gl.constexpr, BLOCKS: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
    ROTARY: gl.constexpr,
):  # fmt: skip
    """The unpacking warps: queries and tiles, each as soon as its place is free."""
    near_tiles = (near_width + TILE - 1) // TILE
    tiles = near_tiles + (far_width + TILE - 1) // TILE
    words = k_smem._reinterpret(gl.int32, [2, TILE, _HALF], _WORDS)
    item = gl.program_id(0)
    q_phase = item * 0
    count = item * 0  # tiles of all items so far
    # Two tiles ahead: numbers; one tile ahead: bytes.
    slot = slots_of(
        near_slots, near_slot_stride, near_width, far_slots, far_slot_stride, far_width,
        item // BLOCKS, item < items, 0, near_tiles,
    )  # fmt: skip
    next_item, next_tile = item, item * 0 + 1
    if next_tile == tiles:
        next_item, next_tile = item + step, next_tile * 0
    next_slot = slots_of(
        near_slots, near_slot_stride, near_width, far_slots, far_slot_stride, far_width,
        next_item // BLOCKS, next_item < items, next_tile, near_tiles,
    )  # fmt: skip
    raw, scales = load_raw(near, near_stride, far, far_stride, slot, near_tiles > 0, NEAR, FAR)
    while item < items:
        t = (item // BLOCKS).to(gl.int64)
        heads = q + t * q_stride_T
        mbarrier.wait(q_empty, q_phase ^ 1)
        first_head = _first_head(item, BLOCKS)
        if ROTARY:
            x, c, s = load_turned(heads, first_head, q_stride_N, cos, sin, t, N)
        copy_queries(heads, q_smem.index(0), first_head, q_stride_N, N, ROTARY)
        async_copy.mbarrier_arrive(q_full, increment_count=False)
        if ROTARY:
            turn_queries(x, c, s, q_smem.index(0))
            hopper.fence_async_shared()
        barrier()
        mbarrier.arrive(q_full, count=1)
        q_phase ^= 1
        for tile in range(tiles):
            buf = count & 1
            mbarrier.wait(k_empty.index(buf), ((count >> 1) & 1) ^ 1)
            slot_smem.index(buf).store(slot)
            tile_words = words.index(buf)
            if tile < near_tiles:
                if NEAR == 1:
                    copy_values(near, near_stride, slot, k_smem.index(buf))
                elif NEAR == 2:
                    unpack_window(raw, scales, tile_words.slice(0, 128, dim=1))
                    raw, scales = load_raw(
                        near, near_stride, far, far_stride, slot, True, NEAR, FAR, SECOND=True
                    )
                    unpack_window(raw, scales, tile_words.slice(128, 128, dim=1))
            elif FAR == 1:
                copy_values(far, far_stride, slot, k_smem.index(buf))
            else:
                unpack_main(raw, scales, tile_words)
            slot = next_slot
            raw, scales = load_raw(
                near, near_stride, far, far_stride, slot, next_tile < near_tiles, NEAR, FAR
            )
            hopper.fence_async_shared()
            barrier()
            mbarrier.arrive(k_full.index(buf), count=1)
            count += 1
            next_tile += 1
            if next_tile == tiles:
                next_item, next_tile = next_item + step, next_tile * 0
            next_slot = slots_of(
                near_slots, near_slot_stride, near_width, far_slots, far_slot_stride, far_width,
                next_item // BLOCKS, next_item < items, next_tile, near_tiles,
            )  # fmt: skip
        item += step


@gluon.jit
def _digits(in_near, NEAR: gl.constexpr, FAR: gl.constexpr):
    """Binary digits by which the rows of a tile are too small."""
    near: gl.constexpr = _WINDOW if NEAR == 2 else 0.0
    far: gl.constexpr = _MAIN if FAR == 3 else 0.0
    return gl.where(in_near, near, far)


@gluon.jit
def _softmax(s, slots, scale, digits, top, total, acc):
    """One tile of the running softmax, whose rows are 2^-digits of their values.

    The scale makes up for it in the scores, larger exponentials make up for it in the output.
    """
    filled = slots.load(gl.SliceLayout(0, _SCORE)) >= 0
    s = gl.where(filled[None, :], s * (scale * gl.exp2(digits)), float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s - (base - digits)[:, None])
    shrink = gl.exp2(top - base)
    total = total * shrink + gl.sum(p, 1) * gl.exp2(-digits)
    p = gl.convert_layout(p.to(gl.bfloat16), _P)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, _OUT))[:, None]
    return new_top, total, acc, p


@gluon.jit
def _turned_back(y, cos, sin, t, LAYOUT: gl.constexpr):
    """bfloat16 ``[rows, 256]``, the last channels: those that were rotated are rotated back."""
    first, second = column_halves(y)
    third, turned = column_halves(second)
    even, odd = gl.split(gl.reshape(turned, [y.shape[0], ROTARY_WIDTH // 2, 2]))
    pair = gl.arange(0, ROTARY_WIDTH // 2, layout=gl.SliceLayout(0, even.type.layout))
    angle = t.to(gl.int32) * (ROTARY_WIDTH // 2) + pair
    c = gl.load(cos + angle).to(gl.float32)
    s = gl.load(sin + angle).to(gl.float32)
    even, odd = rotate_pairs(even, odd, c[None, :], -s[None, :])
    turned = gl.reshape(gl.join(even, odd), [y.shape[0], ROTARY_WIDTH])
    whole = columns_joined(first, columns_joined(third, turned))
    return gl.convert_layout(whole, LAYOUT)


@gluon.jit
def _multiply(
    out, sink, cos, sin, near_width, far_width, scale, items, step,
    q_smem, k_smem, slot_smem, q_full, q_empty, k_full, k_empty,
    N: gl.constexpr, BLOCKS: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
    ROTARY: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """A group of multiplying warps: the channels ``FIRST : FIRST + 256`` of the output."""
    near_tiles = (near_width + TILE - 1) // TILE
    tiles = near_tiles + (far_width + TILE - 1) // TILE
    item = gl.program_id(0)
    zero = gl.zeros([HEADS, TILE], gl.float32, _SCORE)
    q_phase = item * 0
    count = item * 0  # tiles of all items so far
    while item < items:
        top = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORE))
        total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORE))
        acc = gl.zeros([HEADS, _HALF], gl.float32, _OUT)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        mbarrier.wait(k_full.index(count & 1), (count >> 1) & 1)
        hopper.fence_async_shared()
        scores = hopper.warpgroup_mma(
            q_smem.index(item >> 30), k_smem.index(count & 1).permute((1, 0)), zero, use_acc=False,
            is_async=True,
        )  # fmt: skip
        for tile in range(tiles - 1):
            # Always the first and only place; but the compiler does not know, and so computes
            # descriptors where they are used instead of keeping all of them in registers.
            only = tile >> 30
            buf = count & 1
            s = hopper.warpgroup_mma_wait(0, deps=[scores])
            digits = _digits(tile < near_tiles, NEAR, FAR)
            top, total, acc, p = _softmax(s, slot_smem.index(buf), scale, digits, top, total, acc)
            running = hopper.warpgroup_mma(
                p, k_smem.index(buf).slice(FIRST, _HALF, dim=1), acc, is_async=True
            )
            count += 1
            mbarrier.wait(k_full.index(1 - buf), (count >> 1) & 1)
            hopper.fence_async_shared()
            scores = hopper.warpgroup_mma(
                q_smem.index(only), k_smem.index(1 - buf).permute((1, 0)), zero, use_acc=False,
                is_async=True,
            )  # fmt: skip
            acc = hopper.warpgroup_mma_wait(1, deps=[running])
            barrier()
            mbarrier.arrive(k_empty.index(buf), count=1)
        # The last tile; the queries' place is free from its scores on.
        buf = count & 1
        s = hopper.warpgroup_mma_wait(0, deps=[scores])
        barrier()
        mbarrier.arrive(q_empty, count=1)
        digits = _digits(tiles - 1 < near_tiles, NEAR, FAR)
        top, total, acc, p = _softmax(s, slot_smem.index(buf), scale, digits, top, total, acc)
        running = hopper.warpgroup_mma(
            p, k_smem.index(buf).slice(FIRST, _HALF, dim=1), acc, is_async=True
        )
        acc = hopper.warpgroup_mma_wait(0, deps=[running])
        count += 1
        barrier()
        mbarrier.arrive(k_empty.index(buf), count=1)
        first = _first_head(item, BLOCKS)
        t = (item // BLOCKS).to(gl.int64)
        head = first + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _SCORE))
        sinks = gl.load(sink + head, mask=head < N, other=0.0).to(gl.float32)
        factor = normaliser(top, total, sinks * 1.4426950408889634)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, _OUT))
        y = gl.convert_layout((acc * factor[:, None]).to(gl.bfloat16), _STORE)
        if ROTARY and FIRST:
            y = _turned_back(y, cos, sin, t, _STORE)
        head = first + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _STORE))
        col = gl.arange(0, _HALF, layout=gl.SliceLayout(0, _STORE))
        place = out + ((t * N + head) * WIDTH + FIRST)[:, None] + col[None, :]
        gl.store(place, y, mask=(head < N)[:, None])
        item += step


@gluon.jit(
    do_not_specialize=[
        "near_slot_stride", "near_width", "far_slot_stride", "far_width", "items", "step",
    ]
)  # fmt: skip
def attend(
    q, out, sink, cos, sin,
    near, near_slots, near_stride: gl.constexpr, near_slot_stride, near_width,
    far, far_slots, far_stride: gl.constexpr, far_slot_stride, far_width,
    q_stride_T, q_stride_N: gl.constexpr, scale, items, step,
    N: gl.constexpr, BLOCKS: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
    ROTARY: gl.constexpr,
):  # fmt: skip
    """An item is a query and one of its groups of 64 heads; a program takes every ``step``-th.

    NEAR, FAR: what the sources hold: nothing or bfloat16 values (0, 1), FP8 rows (2, the first
    only), FP4 rows (3, the second only). A pair of barriers says of every place in shared memory
    that it is full, or free.
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, WIDTH], SHARED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, WIDTH], SHARED)
    slot_smem = gl.allocate_shared_memory(gl.int32, [2, TILE], PLAIN)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=_COPYING + 1)  # the copies of every thread, and what it wrote
    mbarrier.init(q_empty, count=2)
    for buf in gl.static_range(2):
        mbarrier.init(k_full.index(buf), count=1)
        mbarrier.init(k_empty.index(buf), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, sink, cos, sin, near_width, far_width, scale, items, step,
                    q_smem, k_smem, slot_smem, q_full, q_empty, k_full, k_empty, N, BLOCKS,
                    NEAR, FAR, ROTARY, 0,
                ),
            ),
            (
                _multiply,
                (
                    out, sink, cos, sin, near_width, far_width, scale, items, step,
                    q_smem, k_smem, slot_smem, q_full, q_empty, k_full, k_empty, N, BLOCKS,
                    NEAR, FAR, ROTARY, 256,
                ),
            ),
            (
                _gather,
                (
                    q, cos, sin, near, near_slots, near_stride, near_slot_stride, near_width,
                    far, far_slots, far_stride, far_slot_stride, far_width,
                    q_stride_T, q_stride_N, items, step,
                    q_smem, k_smem, slot_smem, q_full, q_empty, k_full, k_empty,
                    N, BLOCKS, NEAR, FAR, ROTARY,
                ),
            ),
        ],
        [4, 4],
        [208, 88],
    )  # fmt: skip
