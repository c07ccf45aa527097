"""Device functions that turn packed rows into matrix operands, shared by the Triton kernels.

Packed formats keep two neighbouring channels together (FP4: the nibbles of a byte; FP8: two
bytes). Every function here returns two tiles, the even and the odd channels: a dot product is the
sum of two, and nothing has to be interleaved.

The bits of a code are moved to where a floating-point number keeps exponent and mantissa; that is
the value times a power of two, subnormal codes included, and one multiplication by the block's
scale makes it right. The scale is short of a power of two, so that no intermediate leaves the
format: rows come out 2^-MAIN_SHRINK or 2^-WINDOW_SHRINK times too small, which the callers
make up for where it costs nothing. Results are exact in bfloat16: E2M1 x E4M3 has at most 6
significant bits, E4M3 x 2^k has 4.

``FAST`` chooses inline PTX that handles two bfloat16 values per instruction; without it the same
values come from plain arithmetic, which also runs in Triton's interpreter.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = [
    "FP4_LIFT",
    "FP4_TO_BF16",
    "FP8_LIFT",
    "FP8_TO_BF16",
    "MAIN_SHRINK",
    "WINDOW_SHRINK",
    "fp4_tile",
    "fp8_tile",
    "key_tile",
    "nibbles",
    "value_tile",
]

MAIN_SHRINK = 7  # binary digits
WINDOW_SHRINK = 40

# Two bytes to a 32-bit register, one in each half; then sign to bit 15 and magnitude to bits 8-6
# of the half: value x 2^-126.
FP4_TO_BF16 = tl.constexpr(
    """
    {
    .reg .b32 a, b, m, n;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shl.b32 m, a, 12;
    shl.b32 n, a, 6;
    and.b32 m, m, 0x80008000;
    lop3.b32 m, n, 0x01C001C0, m, 0xEA;
    mul.rn.bf16x2 $0, m, $5;
    shl.b32 m, b, 12;
    shl.b32 n, b, 6;
    and.b32 m, m, 0x80008000;
    lop3.b32 m, n, 0x01C001C0, m, 0xEA;
    mul.rn.bf16x2 $1, m, $6;
    shl.b32 m, a, 8;
    shl.b32 n, a, 2;
    and.b32 m, m, 0x80008000;
    lop3.b32 m, n, 0x01C001C0, m, 0xEA;
    mul.rn.bf16x2 $2, m, $5;
    shl.b32 m, b, 8;
    shl.b32 n, b, 2;
    and.b32 m, m, 0x80008000;
    lop3.b32 m, n, 0x01C001C0, m, 0xEA;
    mul.rn.bf16x2 $3, m, $6;
    }
    """
)
FP4_LIFT = tl.constexpr(2.0 ** (126 - MAIN_SHRINK))

# A register holds even, odd, even, odd byte; magnitude to bits 10-4 of each half: value x 2^-120.
FP8_TO_BF16 = tl.constexpr(
    """
    {
    .reg .b32 m, n;
    shl.b32 m, $2, 8;
    shl.b32 n, $2, 4;
    and.b32 m, m, 0x80008000;
    lop3.b32 m, n, 0x07F007F0, m, 0xEA;
    mul.rn.bf16x2 $0, m, $3;
    shr.u32 n, $2, 4;
    and.b32 m, $2, 0x80008000;
    lop3.b32 m, n, 0x07F007F0, m, 0xEA;
    mul.rn.bf16x2 $1, m, $3;
    }
    """
)
FP8_LIFT = tl.constexpr(120 - WINDOW_SHRINK)
_FP8_SHRINK = tl.constexpr(2.0**-WINDOW_SHRINK)


@triton.jit
def _spread(scale, PER: tl.constexpr, COLS: tl.constexpr):
    """``[R, COLS / PER]`` to ``[R, COLS]``, every value ``PER`` times."""
    wide = tl.broadcast_to(tl.expand_dims(scale, 2), (scale.shape[0], scale.shape[1], PER))
    return tl.reshape(wide, (scale.shape[0], COLS))


@triton.jit
def nibbles(raw):
    """float16 tiles of value x 2^-14 of the low and of the high nibbles."""
    wide = raw.to(tl.int32)
    low = ((wide & 8) << 12) | ((wide & 7) << 9)
    high = ((wide & 128) << 8) | ((wide & 112) << 5)
    return low.to(tl.int16).to(tl.float16, bitcast=True), high.to(tl.int16).to(
        tl.float16, bitcast=True
    )


@triton.jit
def fp4_tile(
    base, offset_R, filled_R, H: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """FP4_MAIN rows at byte ``offset_R``: tiles ``[R, PAIRS]`` of 2^-MAIN_SHRINK x value."""
    col = tl.arange(0, PAIRS)
    block = tl.arange(0, PAIRS // 8)
    inside = filled_R[:, None]
    inside_scale = filled_R[:, None]
    if PAIRS * 2 != H:
        inside = inside & (col < H // 2)[None, :]
        inside_scale = inside_scale & (block < H // 16)[None, :]
    raw = tl.load(base + offset_R[:, None] + col[None, :], mask=inside, other=0)
    byte = tl.load(base + offset_R[:, None] + (H // 2 + block)[None, :], mask=inside_scale, other=0)
    scale = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if FAST:
        low, high = tl.inline_asm_elementwise(
            FP4_TO_BF16,
            "=r,=r,=r,=r,r,r,r",
            [raw, _spread((scale * FP4_LIFT).to(tl.bfloat16), 8, PAIRS)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = nibbles(raw)
        wide = _spread(scale * 128.0, 8, PAIRS)
        low = (low.to(tl.float32) * wide).to(DTYPE)
        high = (high.to(tl.float32) * wide).to(DTYPE)
    return low, high


@triton.jit
def key_tile(
    base, row_R, filled_R, STRIDE: tl.constexpr, J: tl.constexpr, PAIRS: tl.constexpr,
    DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """FP4_ROW rows (one power of two per 32 channels): two tiles and a factor for each row.

    A value is tile x factor. The factor is the largest scale of the row; the tiles keep what the
    other blocks are below it, so they stay within bfloat16 whatever the scales.
    """
    BLOCKS: tl.constexpr = J // 32
    col = tl.arange(0, PAIRS)
    group = tl.arange(0, BLOCKS)
    # Rows are no more aligned than their pitch, whatever the compiler thinks of consecutive ones.
    ALIGNED: tl.constexpr = 4 if STRIDE % 4 == 0 else 1
    offset = tl.multiple_of(row_R * STRIDE, ALIGNED)
    inside = filled_R[:, None]
    raw = tl.load(base + offset[:, None] + col[None, :], mask=inside, other=0)
    if FAST and BLOCKS == 4:
        words = base.to(tl.pointer_type(tl.int32))
        word = tl.load(words + row_R * (STRIDE // 4) + J // 8, mask=filled_R, other=0)
        byte = (word[:, None] >> (group * 8)[None, :]) & 255
    else:
        place = base + offset[:, None] + (PAIRS + group)[None, :]
        byte = tl.load(place, mask=inside, other=0).to(tl.int32)
    top = tl.max(byte, 1)
    # Byte 0 stands for 2^-127, the one scale that is no normal float32.
    factor = tl.where(top == 0, 1 << 22, top << 23).to(tl.float32, bitcast=True)
    below = byte - top[:, None]
    if FAST:
        lift = (tl.maximum(253 + below, 0) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            FP4_TO_BF16,
            "=r,=r,=r,=r,r,r,r",
            [raw, _spread(lift, 16, PAIRS)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = nibbles(raw)
        lift = (tl.maximum(141 + below, 0) << 23).to(tl.float32, bitcast=True)
        wide = _spread(lift, 16, PAIRS)
        low = (low.to(tl.float32) * wide).to(DTYPE)
        high = (high.to(tl.float32) * wide).to(DTYPE)
    return low, high, factor


@triton.jit
def fp8_tile(
    base, offset_R, filled_R, H: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """FP8_ROW rows at byte ``offset_R``: tiles ``[R, PAIRS]`` of 2^-WINDOW_SHRINK x value.

    ``FAST`` reads pairs of bytes (``base`` points to int16 then; offsets stay in bytes) and takes
    block scales above 2^47 for 2^47.
    """
    col = tl.arange(0, PAIRS)
    block = tl.arange(0, PAIRS // 16)
    inside = filled_R[:, None]
    inside_scale = filled_R[:, None]
    if PAIRS * 2 != H:
        inside = inside & (col < H // 2)[None, :]
        inside_scale = inside_scale & (block < H // 32)[None, :]
    bytes_ = base.to(tl.pointer_type(tl.uint8))
    byte = tl.load(bytes_ + offset_R[:, None] + (H + block)[None, :], mask=inside_scale, other=0)
    if FAST:
        exponent = tl.minimum(byte.to(tl.int32) + FP8_LIFT, 254)
        factor = (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        raw = tl.load(base + (offset_R // 2)[:, None] + col[None, :], mask=inside, other=0)
        even, odd = tl.inline_asm_elementwise(
            FP8_TO_BF16,
            "=r,=r,r,r",
            [raw, _spread(factor, 16, PAIRS)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        # Byte 0 stands for 2^-127, the one scale that is no normal float32.
        wide = byte.to(tl.int32)
        factor = tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)
        wide = _spread(factor * _FP8_SHRINK, 16, PAIRS)
        place = bytes_ + offset_R[:, None] + 2 * col[None, :]
        even = tl.load(place, mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
        odd = tl.load(place + 1, mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
        even = (even.to(tl.float32) * wide).to(DTYPE)
        odd = (odd.to(tl.float32) * wide).to(DTYPE)
    return even, odd


@triton.jit
def value_tile(
    base, offset_R, filled_R, H: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows of any floating type at element ``offset_R``, even and odd channels apart.

    ``WHOLE``: read whole rows and part the channels in registers, which keeps loads wide.
    """
    if WHOLE:
        col = tl.arange(0, 2 * PAIRS)
        inside = filled_R[:, None]
        if PAIRS * 2 != H:
            inside = inside & (col < H)[None, :]
        rows = tl.load(base + offset_R[:, None] + col[None, :], mask=inside, other=0.0)
        even, odd = tl.split(tl.reshape(rows, (offset_R.shape[0], PAIRS, 2)))
        even, odd = even.to(DTYPE), odd.to(DTYPE)
    else:
        col = tl.arange(0, PAIRS)
        inside = filled_R[:, None]
        if PAIRS * 2 != H:
            inside = inside & (col < H // 2)[None, :]
        place = base + offset_R[:, None] + 2 * col[None, :]
        even = tl.load(place, mask=inside, other=0.0).to(DTYPE)
        odd = tl.load(place + 1, mask=inside, other=0.0).to(DTYPE)
    return even, odd
