"""What the unpacking warps of `shared_gluon` do: packed rows from memory to shared memory.

A group of four warps asks for half of the rows of each tile before it unpacks any of them, so one
latency covers them all. Eight rows lie side by side in a warp, 16 bytes a load: what a thread
writes to swizzled memory meets no other thread's bank. Values come out 2^-MAIN_SHRINK or
2^-WINDOW_SHRINK times too small (`cedar.ops.triton_unpack`), channels in order.

Shapes: an FP8 row is 128 words of codes and 4 of scales (528 bytes), an FP4 row 64 and 8 (288);
either becomes 512 bfloat16, 1 KB. In ``[ROWS, WORDS]``, WORDS tells which: 128 for FP8, 64 for FP4.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from cedar.ops.sparse_attention.packed_gluon_rows import FP4_WORDS, FP8_WORDS
from cedar.ops.sparse_attention.prefill_gluon import WIDTH, barrier
from cedar.ops.triton_unpack import FP4_LIFT, FP8_LIFT, MAIN_SHRINK

__all__ = ["NEAR_ROWS", "halved_slots", "load_half", "most", "slots_from", "unpack_half"]

NEAR_ROWS = gl.constexpr(32)  # of the tile for the window, also where fewer are filled
_FP4_BELOW = gl.constexpr(127 + 126 - MAIN_SHRINK - 4)  # of a factor's exponent: 2^3 scales
_FP8_BELOW = gl.constexpr(118 + FP8_LIFT)  # 2^9 scales
_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Their constants, 4 and 0, come from a register as well: see `_four`.
_FP4 = gl.constexpr(FP4_WORDS.value.replace("shr.b32 h, $4, 4", "shr.b32 h, $4, $6"))
_FP8 = gl.constexpr(
    FP8_WORDS.value.replace("$2, 0, 0x1404", "$2, $4, 0x1505").replace(
        "$2, 0, 0x3424", "$2, $4, 0x3525"
    )
)


@gluon.constexpr_function
def _words_per_scale(words):
    """16 FP4 channels or 32 FP8 channels have a scale in common."""
    return 2 if words == 64 else 8


@gluon.constexpr_function
def _raw_layout(rows, words):
    """Codes ``[rows, words]``: 16 bytes a load, eight rows in a warp."""
    across = words * rows // (128 * 4)  # loads of a thread
    far = [[0, 16 << n] for n in range(5) if 16 << n < words]
    count = across.bit_length() - 1
    down = [[8 << n, 0] for n in range(2) if 8 << n < rows]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *far[:count]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        warp_bases=[*down, *far[count:]],
        block_bases=[],
        shape=[rows, words],
    )


@gluon.constexpr_function
def _split_layout(rows, words, per):
    """`_raw_layout` as ``[rows, words / per, per]``: ``per`` words have a scale in common."""

    def place(basis):
        return [basis[0], basis[1] // per, basis[1] % per]

    raw = _raw_layout(rows, words)
    return gl.DistributedLinearLayout(
        reg_bases=[place(b) for b in raw.reg_bases],
        lane_bases=[place(b) for b in raw.lane_bases],
        warp_bases=[place(b) for b in raw.warp_bases],
        block_bases=[],
        shape=[rows, words // per, per],
    )


@gluon.constexpr_function
def _scale_layout(rows, words, per):
    """Scales ``[rows, words / per / 4, 4]``, the bytes of words, in the threads that need them."""

    def place(basis):
        scale = basis[1] // per
        return [basis[0], scale // 4, scale % 4]

    def kept(bases):
        return [place(b) for b in bases if b[0] or b[1] >= per]

    raw = _raw_layout(rows, words)
    return gl.DistributedLinearLayout(
        reg_bases=kept(raw.reg_bases),
        lane_bases=[place(b) for b in raw.lane_bases],
        warp_bases=[place(b) for b in raw.warp_bases],
        block_bases=[],
        shape=[rows, words // per // 4, 4],
    )


@gluon.jit
def slots_from(slots, first, width, STEP: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Row numbers ``[ROWS]`` of the ``STEP`` slots from ``first`` on, -1 behind them."""
    lane = gl.arange(0, ROWS, layout=LAYOUT)
    inside = (lane < STEP) & (first + lane < width)
    return gl.load(slots + first + lane, mask=inside, other=-1).to(gl.int32)


@gluon.jit
def halved_slots(slots, first, width, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """The same of a window's tile: either half of it begins with half of the slots."""
    lane = gl.arange(0, NEAR_ROWS, layout=LAYOUT)
    own = lane % (NEAR_ROWS // 2)
    place = first + lane // (NEAR_ROWS // 2) * (STEP // 2) + own
    inside = (own < STEP // 2) & (place < width)
    return gl.load(slots + place, mask=inside, other=-1).to(gl.int32)


@gluon.jit
def _words_of(
    base, slot, stride: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Words ``FIRST : FIRST + COUNT`` of the rows; zeros of empty slots."""
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT))
    offset = gl.where(slot >= 0, slot, 0).to(gl.int64) * stride
    words = (base + offset).to(gl.pointer_type(gl.int32))
    word = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(words[:, None] + word[None, :], mask=(slot >= 0)[:, None], other=0)


@gluon.jit
def _load_rows(base, slot, stride: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """Codes ``[ROWS, WORDS]``, of 8 (FP4) or 4 (FP8) channels a word, and words of scales."""
    PER: gl.constexpr = _words_per_scale(WORDS)
    SCALES: gl.constexpr = gl.SliceLayout(2, _scale_layout(ROWS, WORDS, PER))
    codes = _words_of(base, slot, stride, 0, WORDS, _raw_layout(ROWS, WORDS))
    return codes, _words_of(base, slot, stride, WORDS, WORDS // PER // 4, SCALES)


@gluon.jit
def load_half(
    near, near_list, near_stride: gl.constexpr, near_width,
    far, far_list, far_stride: gl.constexpr, far_width,
    split, NUMBER: gl.constexpr, STEP: gl.constexpr, FAR: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Ask for half ``NUMBER`` (0 or 1) of every tile: codes and scales of the window, then tuples
    of those of the ``TILES`` tiles of ``FAR`` FP4 rows.

    STEP: window slots of a program. All slots are read first, for no row has to wait for another.
    """
    NEAR_PART: gl.constexpr = NEAR_ROWS // 2
    FAR_PART: gl.constexpr = FAR // 2
    NEAR_SLOTS: gl.constexpr = gl.SliceLayout(1, _raw_layout(NEAR_PART, 128))
    FAR_SLOTS: gl.constexpr = gl.SliceLayout(1, _raw_layout(FAR_PART, 64))
    place = split * STEP + NUMBER * (STEP // 2)
    near_slot = slots_from(near_list, place, near_width, STEP // 2, NEAR_PART, NEAR_SLOTS)
    far_slot = ()
    for n in gl.static_range(TILES):
        place = (split * TILES + n) * FAR + NUMBER * FAR_PART
        slot = slots_from(far_list, place, far_width, FAR_PART, FAR_PART, FAR_SLOTS)
        far_slot = far_slot + (slot,)
    near_codes, near_scales = _load_rows(near, near_slot, near_stride, NEAR_PART, 128)
    far_codes, far_scales = (), ()
    for n in gl.static_range(TILES):
        codes, scales = _load_rows(far, far_slot[n], far_stride, FAR_PART, 64)
        far_codes, far_scales = far_codes + (codes,), far_scales + (scales,)
    return near_codes, near_scales, far_codes, far_scales


@gluon.jit
def _four(held, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """Four, for each row, from shared memory: what needs it cannot be computed any earlier.

    The assembler would else unpack the first rows before it asks for the last.
    """
    return held.slice(0, ROWS).load(gl.SliceLayout(1, _raw_layout(ROWS, WORDS)))


@gluon.jit
def _factors(scales, four, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """float32 factors of blocks ``[ROWS, blocks]`` as bits, from words of scales."""
    PER: gl.constexpr = _words_per_scale(WORDS)
    LAYOUT: gl.constexpr = _scale_layout(ROWS, WORDS, PER)
    byte = 8 * gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    zero = gl.convert_layout(four - 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    bits = (scales[:, :, None] >> (byte[None, None, :] + zero[:, None, None])) & 0xFF
    if WORDS == 64:
        # Where float32 keeps them these bits are the scale x 2^-120; exact in bfloat16.
        factor = ((bits & 0x7F) << 20).to(gl.float32, bitcast=True) * 2.0**120 * (FP4_LIFT * 1.0)
        bits = factor.to(gl.int32, bitcast=True)
    else:
        bits = gl.minimum(bits + FP8_LIFT, 254) << 23
    return gl.reshape(bits, [ROWS, WORDS // PER])


@gluon.jit
def _spread(bits, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """The factor of every word, as bfloat16 in both halves."""
    PER: gl.constexpr = _words_per_scale(WORDS)
    SPLIT: gl.constexpr = _split_layout(ROWS, WORDS, PER)
    bits = gl.convert_layout(bits | (bits >> 16), gl.SliceLayout(2, SPLIT), assert_trivial=True)
    wide = bits[:, :, None] | gl.zeros([ROWS, WORDS // PER, PER], gl.int32, SPLIT)
    wide = gl.reshape(wide, [ROWS, WORDS])
    return gl.convert_layout(wide, _raw_layout(ROWS, WORDS), assert_trivial=True)


@gluon.jit
def _unpack(codes, scales, held, tile, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """Rows to ``tile``, words ``[ROWS, 256]`` of two bfloat16; back come those of `_factors`."""
    four = _four(held, ROWS, WORDS)
    bits = _factors(scales, four, ROWS, WORDS)
    wide = _spread(bits, ROWS, WORDS)
    four = four[:, None] | gl.zeros([ROWS, WORDS], gl.int32, _raw_layout(ROWS, WORDS))
    if WORDS == 64:
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            _FP4, "=&r,=&r,=&r,=&r,r,r,r", [codes, wide, four],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        both = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    else:
        w0, w1 = gl.inline_asm_elementwise(
            _FP8, "=&r,=&r,r,r,r", [codes, wide, four], dtype=(gl.int32, gl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
        both = gl.join(w0, w1)
    tile.store(gl.reshape(both, [ROWS, WIDTH // 2]))
    return bits


@gluon.jit
def _announce(full, NUMBER: gl.constexpr):
    """Let products read what this group of warps wrote: its half of a tile is there."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index(NUMBER), count=1)


@gluon.jit
def most(values, COUNT: gl.constexpr):
    """The largest of ``COUNT`` tensors, elementwise."""
    found = values[0]
    for n in gl.static_range(1, COUNT):
        found = gl.maximum(found, values[n])
    return found


@gluon.jit
def _largest(bits):
    """The exponent of the largest factor."""
    return gl.max(gl.reshape(bits, [bits.shape[0] * bits.shape[1]]), 0) >> 23


@gluon.jit
def unpack_half(
    near_codes, near_scales, far_codes, far_scales, held, near_tile, far_tiles, largest, full,
    NUMBER: gl.constexpr, FAR: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Unpack what `load_half` asked for, tile by tile; barrier n of ``full`` is for tile n.

    Barrier 3 is for ``largest[NUMBER]``: a power of two that no value of these rows exceeds, as
    its exponent.
    """
    NEAR_PART: gl.constexpr = NEAR_ROWS // 2
    FAR_PART: gl.constexpr = FAR // 2
    # As words before it is halved: what is reinterpreted has to lie in one piece.
    words = near_tile._reinterpret(gl.int32, [NEAR_ROWS, WIDTH // 2], _WORDS)
    tile = words.slice(NUMBER * NEAR_PART, NEAR_PART)
    near_bits = _unpack(near_codes, near_scales, held, tile, NEAR_PART, 128)
    _announce(full, 0)
    far_bits = ()
    for n in gl.static_range(TILES):
        words = far_tiles.index(n)._reinterpret(gl.int32, [FAR, WIDTH // 2], _WORDS)
        tile = words.slice(NUMBER * FAR_PART, FAR_PART)
        bits = _unpack(far_codes[n], far_scales[n], held, tile, FAR_PART, 64)
        far_bits = far_bits + (bits,)
        _announce(full, 1 + n)
    exponent = gl.maximum(
        _largest(near_bits) - _FP8_BELOW, _largest(most(far_bits, TILES)) - _FP4_BELOW
    )
    largest.index(NUMBER).store(gl.full([1], exponent, gl.int32, _ONE))
    barrier()
    mbarrier.arrive(full.index(3), count=1)
