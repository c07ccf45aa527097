"""What the unpacking warps of `packed_gluon` do: queries, packed rows and values to shared memory.

A thread holds 64 bytes of each of two rows, and eight rows lie side by side in a warp, so that
what it writes to swizzled memory meets no other thread's bank. Values come out
2^-MAIN_SHRINK or 2^-WINDOW_SHRINK times too small (`cedar.ops.triton_unpack`), channels in order.

Beside it what the other kernels for Hopper share: pairs rotated, halves of columns, `normaliser`.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from cedar.ops.sparse_attention.prefill_gluon import HEADS, WIDTH
from cedar.ops.triton_unpack import FP4_LIFT, FP8_LIFT

__all__ = [
    "FP4_WORDS", "FP8_WORDS", "ROTARY_WIDTH", "column_halves", "columns_joined", "copy_queries",
    "copy_values", "load_raw", "load_turned", "normaliser", "rotate_pairs", "slots_of",
    "turn_queries", "unpack_main", "unpack_window",
]  # fmt: skip

TILE = gl.constexpr(64)
ROTARY_WIDTH = gl.constexpr(64)  # the last channels, if any are rotated

# 64 rows of 64 words: a thread has 16 words of two rows.
_RAW = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [32, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 16], [0, 32]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
# The same words as 32 pairs, which share a scale.
_PAIRED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0], [32, 0, 0]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 8, 0], [0, 16, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[64, 32, 2],
    )
)
# The same pairs as eight groups of four, whose scales are the bytes of a word.
_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [32, 0, 0]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[64, 8, 4],
    )
)
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

_TURN = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))  # pairs of _COPY

# Byte k of a word holds channels 2k and 2k + 1: one nibble to each half of a register, then sign to
# bit 15 and magnitude to bits 8-6: value x 2^-126.
FP4_WORDS = gl.constexpr(
    """
    {
    .reg .b32 h, m;
    shr.b32 h, $4, 4;
    prmt.b32 m, $4, h, 0x4400;
    and.b32 m, m, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 $0, m, $5;
    prmt.b32 m, $4, h, 0x5511;
    and.b32 m, m, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 $1, m, $5;
    prmt.b32 m, $4, h, 0x6622;
    and.b32 m, m, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 $2, m, $5;
    prmt.b32 m, $4, h, 0x7733;
    and.b32 m, m, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 $3, m, $5;
    }
    """
)
# A byte to the upper half of each half of a register, its magnitude to bits 10-4: value x 2^-120.
FP8_WORDS = gl.constexpr(
    """
    {
    .reg .b32 m, n;
    prmt.b32 m, $2, 0, 0x1404;
    shr.u32 n, m, 4;
    and.b32 m, m, 0x80008000;
    lop3.b32 m, n, 0x07F007F0, m, 0xEA;
    mul.rn.bf16x2 $0, m, $3;
    prmt.b32 m, $2, 0, 0x3424;
    shr.u32 n, m, 4;
    and.b32 m, m, 0x80008000;
    lop3.b32 m, n, 0x07F007F0, m, 0xEA;
    mul.rn.bf16x2 $1, m, $3;
    }
    """
)
# Every product is rounded, as in the plain rotation.
_ROTATE = gl.constexpr(
    """
    {
    .reg .f32 a, b;
    mul.rn.f32 a, $2, $4;
    mul.rn.f32 b, $3, $5;
    sub.rn.f32 a, a, b;
    mul.rn.f32 b, $3, $4;
    mov.f32 $0, a;
    mul.rn.f32 a, $2, $5;
    add.rn.f32 $1, a, b;
    }
    """
)


@gluon.jit
def slots_of(
    near_slots, near_slot_stride, near_width, far_slots, far_slot_stride, far_width,
    t, exists, tile, near_tiles,
):  # fmt: skip
    """Row numbers of a tile of query ``t``, -1 outside; the second source begins with a tile."""
    lane = gl.arange(0, TILE, layout=gl.SliceLayout(1, _RAW))
    t = t.to(gl.int64)
    if tile < near_tiles:
        left = gl.where(exists, near_width - tile * TILE, 0)
        first = near_slots + t * near_slot_stride + tile * TILE
        slot = gl.load(first + lane, mask=lane < left, other=-1).to(gl.int32)
    else:
        left = gl.where(exists, far_width - (tile - near_tiles) * TILE, 0)
        start = far_slots + t * far_slot_stride + (tile - near_tiles) * TILE
        slot = gl.load(start + lane, mask=lane < left, other=-1).to(gl.int32)
    return slot


@gluon.jit
def load_raw(
    near, near_stride: gl.constexpr, far, far_stride: gl.constexpr, slot, in_near,
    NEAR: gl.constexpr, FAR: gl.constexpr, SECOND: gl.constexpr = False,
):  # fmt: skip
    """256 bytes of each of 64 rows as words ``[64, 64]``, and words ``[64, 8]`` with their scales.

    That is a whole FP4 row and its 32 scales, or half of an FP8 row; its 8 scales are two words,
    four times each. Values are not read here.
    """
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, _RAW))
    scale_word = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, _SCALES)))
    filled = slot >= 0
    if NEAR == 2:
        base = near if in_near else far
        stride = gl.where(in_near, near_stride, far_stride)
        scale_word = gl.where(in_near, 128 + scale_word // 4, 64 + scale_word)
        if SECOND:
            word += 64
            scale_word += 2
    else:
        base = far
        stride = far_stride
        scale_word += 64
        filled = filled & (in_near == 0)
    if FAR != 3:
        filled = filled & in_near
    offset = gl.where(filled, slot, 0).to(gl.int64) * stride
    words = (base + offset).to(gl.pointer_type(gl.int32))
    raw = gl.load(words[:, None] + word[None, :], mask=filled[:, None], other=0)
    words = gl.convert_layout(words, gl.SliceLayout(1, gl.SliceLayout(2, _SCALES)))
    filled = gl.convert_layout(filled, gl.SliceLayout(1, gl.SliceLayout(2, _SCALES)))
    scales = gl.load(words[:, None] + scale_word[None, :], mask=filled[:, None], other=0)
    return raw, scales


@gluon.jit
def _spread(bits):
    """float32 factors ``[64, 8, 4]``: as bfloat16, twice in a word, for either word of a pair."""
    bits = (bits & -65536) | (bits >> 16)
    bits = gl.convert_layout(gl.reshape(bits, [TILE, 32]), gl.SliceLayout(2, _PAIRED))
    wide = bits[:, :, None] | gl.zeros([TILE, 32, 2], gl.int32, _PAIRED)
    return gl.convert_layout(gl.reshape(wide, [TILE, 64]), _RAW)


@gluon.jit
def unpack_main(raw, scales, words):
    """FP4 rows to bfloat16 pairs ``words [64, 256]``."""
    byte = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, _SCALES)))
    bits = ((scales[:, :, None] >> (8 * byte)[None, None, :]) & 0x7F) << 20
    # Where float32 keeps them these bits are the scale x 2^-120; exact in bfloat16.
    factor = bits.to(gl.float32, bitcast=True) * 2.0**120 * (FP4_LIFT * 1.0)
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        FP4_WORDS,
        "=&r,=&r,=&r,=&r,r,r",
        [raw, _spread(factor.to(gl.int32, bitcast=True))],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    both = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    words.store(gl.reshape(both, [TILE, 256]))


@gluon.jit
def unpack_window(raw, scales, words):
    """Half of FP8 rows to bfloat16 pairs ``words [64, 128]``."""
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, _SCALES)))
    exponent = (scales >> (8 * (group % 4))[None, :]) & 0xFF
    bits = gl.minimum(exponent + FP8_LIFT, 254) << 23
    bits = bits[:, :, None] | gl.zeros([TILE, 8, 4], gl.int32, _SCALES)
    w0, w1 = gl.inline_asm_elementwise(
        FP8_WORDS,
        "=&r,=&r,r,r",
        [raw, _spread(bits)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    words.store(gl.reshape(gl.join(w0, w1), [TILE, 128]))


@gluon.jit
def copy_values(near, near_stride: gl.constexpr, slot, tile):
    """bfloat16 rows, as they are; back when they have arrived."""
    slot = gl.convert_layout(slot, gl.SliceLayout(1, _COPY))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, _COPY))
    filled = slot >= 0
    offset = gl.where(filled, slot, 0).to(gl.int64) * near_stride
    place = near + offset[:, None] + col[None, :]
    async_copy.async_copy_global_to_shared(tile, place, mask=filled[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _copy_part(
    heads,
    q_smem,
    first,
    stride: gl.constexpr,
    N: gl.constexpr,
    START: gl.constexpr,
    COUNT: gl.constexpr,
):
    head = first + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _COPY))
    col = START + gl.arange(0, COUNT, layout=gl.SliceLayout(0, _COPY))
    place = heads + (head.to(gl.int64) * stride)[:, None] + col[None, :]
    async_copy.async_copy_global_to_shared(
        q_smem.slice(START, COUNT, dim=1), place, mask=(head < N)[:, None]
    )


@gluon.jit
def copy_queries(heads, q_smem, first, stride: gl.constexpr, N: gl.constexpr, ROTARY: gl.constexpr):
    """Begin to copy 64 heads of a query, but for channels that are to be rotated."""
    if ROTARY:
        _copy_part(heads, q_smem, first, stride, N, 0, 256)
        _copy_part(heads, q_smem, first, stride, N, 256, 128)
        _copy_part(heads, q_smem, first, stride, N, 384, 64)
    else:
        _copy_part(heads, q_smem, first, stride, N, 0, WIDTH)


@gluon.jit
def rotate_pairs(even, odd, c, s):
    """bfloat16 pairs times exp(i angle), ``c`` and ``s`` of as many dimensions, rounded once."""
    LAYOUT: gl.constexpr = even.type.layout
    c = c + gl.zeros(even.shape, gl.float32, LAYOUT)
    s = s + gl.zeros(even.shape, gl.float32, LAYOUT)
    even, odd = gl.inline_asm_elementwise(
        _ROTATE,
        "=&f,=&f,f,f,f,f",
        [even.to(gl.float32), odd.to(gl.float32), c, s],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    return even.to(gl.bfloat16), odd.to(gl.bfloat16)


@gluon.jit
def column_halves(y):
    """The first and the second half of the columns, which are in registers of the same threads."""
    y = gl.reshape(y, [y.shape[0], 2, y.shape[1] // 2])
    return gl.split(gl.permute(y, (0, 2, 1)))


@gluon.jit
def columns_joined(first, second):
    """The inverse of `column_halves`."""
    LAYOUT: gl.constexpr = first.type.layout
    both = gl.join(first, gl.convert_layout(second, LAYOUT))
    both = gl.permute(both, (0, 2, 1))
    return gl.reshape(both, [first.shape[0], 2 * first.shape[1]])


@gluon.jit
def load_turned(heads, first, stride: gl.constexpr, cos, sin, t, N: gl.constexpr):
    """The last channels of 64 heads of query ``t``, and cosines and sines."""
    head = first + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _COPY))
    col = WIDTH - ROTARY_WIDTH + gl.arange(0, ROTARY_WIDTH, layout=gl.SliceLayout(0, _COPY))
    place = heads + (head.to(gl.int64) * stride)[:, None] + col[None, :]
    x = gl.load(place, mask=(head < N)[:, None], other=0.0)
    pair = gl.arange(0, ROTARY_WIDTH // 2, layout=gl.SliceLayout(0, _TURN))
    angle = t.to(gl.int32) * (ROTARY_WIDTH // 2) + pair
    return x, gl.load(cos + angle).to(gl.float32), gl.load(sin + angle).to(gl.float32)


@gluon.jit
def turn_queries(x, c, s, q_smem):
    """Rotate what `load_turned` loaded, on its way to shared memory."""
    even, odd = gl.split(gl.reshape(x, [HEADS, ROTARY_WIDTH // 2, 2]))
    even, odd = gl.convert_layout(even, _TURN), gl.convert_layout(odd, _TURN)
    even, odd = rotate_pairs(even, odd, c[None, :], s[None, :])
    turned = gl.reshape(gl.join(even, odd), [HEADS, ROTARY_WIDTH])
    q_smem.slice(WIDTH - ROTARY_WIDTH, ROTARY_WIDTH, dim=1).store(turned)


@gluon.jit
def normaliser(top, total, sink):
    """What the unnormalised output is multiplied with; all in binary logarithms."""
    high = gl.maximum(top, sink)
    high = gl.where(high == float("-inf"), 0.0, high)
    kept = gl.exp2(top - high)
    below = total * kept + gl.exp2(sink - high)
    return gl.where(below > 0, kept / below, 0.0)
