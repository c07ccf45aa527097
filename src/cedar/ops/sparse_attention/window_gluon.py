"""Sparse attention over FP8 windows and FP4 rows on Hopper, for heads 512 wide: decode.

Same mathematics as `cedar.ops.sparse_attention.packed_triton`; what that leaves to the compiler is
fixed here. All warps unpack, 64 or 128 rows at a time, then all multiply:

* two warpgroups share a tile of ``TILE`` slots: half of the slots each for the scores, half of
  the channels each for the output, so no product is computed twice;
* queries, dequantised rows and probabilities are operands in shared memory, only accumulators and
  the raw bytes of the next tile are in registers;
* a lane holds 8 packed bytes and one scale, and writes 16 bytes to each of the two channel tiles.

Shared memory at TILE 128: queries 64 KB, rows 128 KB, probabilities 16 KB of 227 KB. Per row and
multiprocessor: 32 cycles of tensor cores, about 14 of unpacking.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cedar.ops.sparse_attention.packed_gluon_rows import (
    ROTARY_WIDTH,
    column_halves,
    columns_joined,
    normaliser,
    rotate_pairs,
)
from cedar.ops.triton_unpack import (
    FP4_LIFT,
    FP8_LIFT,
    FP8_TO_BF16,
    MAIN_SHRINK,
    WINDOW_SHRINK,
)

__all__ = ["attend"]

_MAIN = gl.constexpr(MAIN_SHRINK)
_WINDOW = gl.constexpr(WINDOW_SHRINK)
# A warp takes a row at a time, a lane 8 bytes of it; words, because a value that is carried
# through a loop occupies a register for each of its elements.
_WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0]))
_WORDS_4 = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
_BY_2 = gl.constexpr(gl.BlockedLayout([1, 1, 2], [1, 32, 1], [8, 1, 1], [2, 1, 0]))
_BY_8 = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 16, 2], [8, 1, 1], [2, 1, 0]))
_PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))

_FP4_WORDS = gl.constexpr(
    """
    {
    .reg .b32 a, b, m;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    and.b32 m, a, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 $0, m, $5;
    and.b32 m, b, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 $1, m, $5;
    and.b32 m, a, 0x00F000F0;
    mul.lo.u32 m, m, 0x0104;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 $2, m, $5;
    and.b32 m, b, 0x00F000F0;
    mul.lo.u32 m, m, 0x0104;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 $3, m, $5;
    }
    """
)


@gluon.jit
def _all_slots(slots, width, TILES: gl.constexpr, TILE: gl.constexpr):
    """All slots of a source, −1 behind the last: ``[TILES x TILE]``."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    place = gl.arange(0, TILES * TILE, layout=FLAT)
    return gl.load(slots + place, mask=place < width, other=-1).to(gl.int32)


@gluon.jit
def _load(base, slot, stride, column, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """``[64, COUNT]`` elements from ``column`` on of the rows in 64 slots; zeros where empty."""
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT))
    lane = base + column + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    offset = slot.to(gl.int64) * stride
    return gl.load(
        gl.expand_dims(lane, 0) + gl.expand_dims(offset, 1),
        mask=gl.expand_dims(slot >= 0, 1),
        other=0,
    )


@gluon.jit
def _load_main(base, slots, stride):
    """Codes as words ``[64, 64]`` and scales ``[64, 32]`` of 64 FP4 rows."""
    slot = slots.load(gl.SliceLayout(1, _WORDS))
    codes = _load(base.to(gl.pointer_type(gl.int32)), slot, stride // 4, 0, 64, _WORDS)
    return codes, _load(base, slot, stride, 256, 32, gl.SliceLayout(2, _BY_2))


@gluon.jit
def _load_window(base, slots, stride):
    """Codes as words ``[64, 128]`` and scales ``[64, 16]`` of 64 FP8 rows."""
    slot = slots.load(gl.SliceLayout(1, _WORDS_4))
    codes = _load(base.to(gl.pointer_type(gl.int32)), slot, stride // 4, 0, 128, _WORDS_4)
    return codes, _load(base, slot, stride, 512, 16, gl.SliceLayout(2, _BY_8))


@gluon.jit
def _unpack_main(codes, scales, even, odd):
    """Write the channel tiles ``[64, 256]`` of FP4 rows, 2^-MAIN_SHRINK of their values."""
    factor = scales.to(gl.float8e4nv, bitcast=True).to(gl.float32) * FP4_LIFT
    # The upper half of a float32 is the bfloat16, exactly so here; once for either value.
    bits = factor.to(gl.int32, bitcast=True)
    bits = bits | (bits >> 16)
    wide = gl.expand_dims(bits, 2) | gl.zeros([64, 32, 2], gl.int32, _BY_2)
    wide = gl.convert_layout(gl.reshape(wide, [64, 64]), _WORDS)
    even0, even1, odd0, odd1 = gl.inline_asm_elementwise(
        _FP4_WORDS,
        "=r,=r,=r,=r,r,r",
        [codes, wide],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    even.store(gl.reshape(gl.join(even0, even1), [64, 128]))
    odd.store(gl.reshape(gl.join(odd0, odd1), [64, 128]))


@gluon.jit
def _unpack_window(codes, scales, even, odd):
    """The same of FP8 rows, 2^-WINDOW_SHRINK of their values."""
    bits = gl.minimum(scales.to(gl.int32) + FP8_LIFT, 254) << 7
    bits = bits | (bits << 16)
    wide = gl.expand_dims(bits, 2) | gl.zeros([64, 16, 8], gl.int32, _BY_8)
    wide = gl.convert_layout(gl.reshape(wide, [64, 128]), _WORDS_4)
    low, high = gl.inline_asm_elementwise(
        FP8_TO_BF16,
        "=r,=r,r,r",
        [codes, wide],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    even.store(low)
    odd.store(high)


@gluon.jit
def _probabilities(
    q_evens, q_odds, k_evens, k_odds, p_buffers, only, slots, scale, top, total,
    TILE: gl.constexpr, SHRINK: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Scores of the rows in shared memory; exponentials to shared memory, the rest returned."""
    q_even, q_odd = q_evens.index(only), q_odds.index(only)
    k_even, k_odd = k_evens.index(only), k_odds.index(only)
    fence_async_shared()
    scores = gl.zeros([64, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(q_even, k_even.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(q_odd, k_odd.permute((1, 0)), scores, is_async=True)
    filled = slots.load(gl.SliceLayout(0, SCORES)) >= 0
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = scores * (scale * 2.0**SHRINK)
    scores = gl.where(gl.expand_dims(filled, 0), scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(scores - gl.expand_dims(base - SHRINK, 1))
    shrink = gl.exp2(top - base)
    p_buffers.index(only).store(p.to(gl.bfloat16))
    fence_async_shared()
    total = total * shrink + gl.sum(p, 1) * (2.0**-SHRINK)
    return new_top, total, shrink


@gluon.jit
def _accumulate(
    p_buffers, k_evens, k_odds, only, shrink, acc_even, acc_odd, TILE: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Add probabilities times rows."""
    p = p_buffers.index(only)
    k_even, k_odd = k_evens.index(only), k_odds.index(only)
    less = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OUT)), 1)
    acc_even, acc_odd = acc_even * less, acc_odd * less
    for half in gl.static_range(TILE // 64):
        part = p.slice(half * 64, 64, dim=1)
        even, odd = k_even.slice(half * 64, 64), k_odd.slice(half * 64, 64)
        acc_even = warpgroup_mma(part, even, acc_even, is_async=True)
        acc_odd = warpgroup_mma(part, odd, acc_odd, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc_even, acc_odd])


@gluon.jit
def _turned(even, odd, cos, sin, t, BACK: gl.constexpr):
    """bfloat16 pairs of a query, up to the last; those that have an angle rotated, or back."""
    LAYOUT: gl.constexpr = even.type.layout
    COUNT: gl.constexpr = even.shape[1]
    place = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT)) - (COUNT - ROTARY_WIDTH // 2)
    turned = place >= 0
    angle = t.to(gl.int32) * (ROTARY_WIDTH // 2) + place
    c = gl.load(cos + angle, mask=turned, other=1.0).to(gl.float32)
    s = gl.load(sin + angle, mask=turned, other=0.0).to(gl.float32)
    if BACK:
        s = -s
    new_even, new_odd = rotate_pairs(even, odd, c[None, :], s[None, :])
    even = gl.where(turned[None, :], new_even, even)
    odd = gl.where(turned[None, :], new_odd, odd)
    return even, odd


@gluon.jit(
    do_not_specialize=[
        "near_slot_stride", "near_width", "far_slot_stride", "far_width", "tiles_per_split",
    ]
)  # fmt: skip
def attend(
    q, out, part, stats, sink, cos, sin, near, near_slots, near_stride, near_slot_stride,
    near_width, far, far_slots, far_stride, far_slot_stride, far_width, q_stride_T, q_stride_N,
    scale, tiles_per_split, N: gl.constexpr, TILE: gl.constexpr, NEAR_TILES: gl.constexpr,
    FAR_TILES: gl.constexpr, SHARES: gl.constexpr, ROTARY: gl.constexpr,
):  # fmt: skip
    """Program (t, n, s): query t, heads from 64 n on, the s-th run of tiles. SHARES: of several
    runs, so leave a share to combine. ``NEAR_TILES``, ``FAR_TILES``: at least so many as the
    sources have, of the second one more."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, TILE // 2, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 128, 16]
    )
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    t = gl.program_id(0).to(gl.int64)
    first_head = gl.program_id(1) * 64
    split = gl.program_id(2)

    q_even = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], SHARED)
    q_odd = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], SHARED)
    k_even = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, 256], SHARED)
    k_odd = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, 256], SHARED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [1, 64, TILE], SHARED)
    LIST: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    near_flat = gl.allocate_shared_memory(gl.int32, [NEAR_TILES * TILE], LIST)
    far_flat = gl.allocate_shared_memory(gl.int32, [FAR_TILES * TILE], LIST)
    near_held = near_flat._reinterpret(gl.int32, [NEAR_TILES, TILE], LIST)
    far_held = far_flat._reinterpret(gl.int32, [FAR_TILES, TILE], LIST)
    even_pairs = k_even._reinterpret(gl.int32, [1, TILE, 128], _PAIRS).index(0)
    odd_pairs = k_odd._reinterpret(gl.int32, [1, TILE, 128], _PAIRS).index(0)

    # Tiles are numbered through both sources; a split takes a run of them. Everything that needs
    # nothing else is asked for first.
    near_tiles = gl.cdiv(near_width, TILE)
    first = split * tiles_per_split
    last = gl.minimum(first + tiles_per_split, near_tiles + gl.cdiv(far_width, TILE))
    far_first = gl.maximum(first - near_tiles, 0)
    near_slot = _all_slots(near_slots + t * near_slot_stride, near_width, NEAR_TILES, TILE)
    far_slot = _all_slots(far_slots + t * far_slot_stride, far_width, FAR_TILES, TILE)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, WHOLE))
    col = gl.arange(0, 512, layout=gl.SliceLayout(0, WHOLE))
    offset = t * q_stride_T + (first_head + head).to(gl.int64) * q_stride_N
    rows = gl.load(q + gl.expand_dims(offset, 1) + gl.expand_dims(col, 0))
    near_flat.store(near_slot)
    far_flat.store(far_slot)
    codes0, scales0 = _load_main(far, far_held.index(far_first).slice(0, 64), far_stride)
    low, high = gl.split(gl.reshape(rows, [64, 256, 2]))
    if ROTARY:
        # Only the second half of the channels has any to rotate; the rest are other registers.
        low0, low1 = column_halves(low)
        high0, high1 = column_halves(high)
        low1, high1 = _turned(low1, high1, cos, sin, t, False)
        low, high = columns_joined(low0, low1), columns_joined(high0, high1)
    q_even.index(0).store(low)
    q_odd.index(0).store(high)

    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc_even = gl.zeros([64, 256], gl.float32, OUT)
    acc_odd = gl.zeros([64, 256], gl.float32, OUT)
    for tile in range(first, gl.minimum(last, near_tiles)):
        only = tile >> 30
        for half in gl.static_range(TILE // 64):
            codes, scales = _load_window(
                near, near_held.index(tile).slice(half * 64, 64), near_stride
            )
            _unpack_window(
                codes, scales, even_pairs.slice(half * 64, 64), odd_pairs.slice(half * 64, 64)
            )
        top, total, shrink = _probabilities(
            q_even, q_odd, k_even, k_odd, p_shared, only, near_held.index(tile), scale, top,
            total, TILE, _WINDOW, SCORES,
        )  # fmt: skip
        acc_even, acc_odd = _accumulate(
            p_shared, k_even, k_odd, only, shrink, acc_even, acc_odd, TILE, OUT
        )
    if TILE == 128:
        codes1, scales1 = _load_main(far, far_held.index(far_first).slice(64, 64), far_stride)
    for tile in range(far_first, last - near_tiles):
        # Always the first and only buffer; but the compiler does not know, and so computes operand
        # descriptors where they are used instead of keeping all of them in registers.
        only = tile >> 30
        after = far_held.index(tile + 1)
        _unpack_main(codes0, scales0, even_pairs.slice(0, 64), odd_pairs.slice(0, 64))
        # The next tile's bytes arrive while this one is multiplied.
        codes0, scales0 = _load_main(far, after.slice(0, 64), far_stride)
        if TILE == 128:
            _unpack_main(codes1, scales1, even_pairs.slice(64, 64), odd_pairs.slice(64, 64))
            codes1, scales1 = _load_main(far, after.slice(64, 64), far_stride)
        top, total, shrink = _probabilities(
            q_even, q_odd, k_even, k_odd, p_shared, only, far_held.index(tile), scale, top,
            total, TILE, _MAIN, SCORES,
        )  # fmt: skip
        acc_even, acc_odd = _accumulate(
            p_shared, k_even, k_odd, only, shrink, acc_even, acc_odd, TILE, OUT
        )
    head_top = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    if SHARES:
        row = (t * gl.num_programs(2) + split) * N
        gl.store(stats + 2 * (row + head_top), top)
        gl.store(stats + 2 * (row + head_top) + 1, total)
        joined = gl.join(acc_even, acc_odd)
        target = part + (row + first_head) * 512
    else:
        sinks = gl.load(sink + head_top).to(gl.float32) * 1.4426950408889634
        factor = gl.convert_layout(normaliser(top, total, sinks), gl.SliceLayout(1, OUT))[:, None]
        even, odd = (acc_even * factor).to(gl.bfloat16), (acc_odd * factor).to(gl.bfloat16)
        if ROTARY:
            even, odd = _turned(even, odd, cos, sin, t, True)
        joined = gl.join(even, odd)
        target = out + (t * N + first_head) * 512
    both = gl.reshape(joined, [64, 512])
    LAYOUT: gl.constexpr = both.type.layout
    head_out = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    col_out = gl.arange(0, 512, layout=gl.SliceLayout(0, LAYOUT))
    place = gl.expand_dims(head_out * 512, 1) + gl.expand_dims(col_out, 0)
    gl.store(target + place, both)
