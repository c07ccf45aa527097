"""Packed weights as operands of tensor cores, in registers and without moving a bit between lanes.

A lane holds 16 bytes (FP4; 32 in FP8) of a weight row, the codes of one block of 32, so one scale
serves them. What they decode to is the left operand of eight products of sixteen values each, if
the inputs are permuted alike (`cedar.ops.experts.prepare.ordered_place`). Decoded weights are 2^63
too small, inputs 2^63 too large; codes times powers of two are exact in bfloat16, for scales from
2^-61 to 2^64.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["blocks_layout", "operands", "words_layout"]

# A word holds eight codes of a row: code j and code j + 4 share a register. The magnitude goes to
# bits 8-6 of its half and the sign to bit 15 in one multiplication, which gives the value times
# 2^-126, then times the block's scale. Two words give eight registers.
_FOUR_BITS = gl.constexpr("""
{
.reg .b32 v, m;
and.b32 m, $8, 0x000F000F; mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 $0, m, $10;
and.b32 m, $8, 0x00F000F0; mul.lo.u32 m, m, 0x0104;
and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 $1, m, $10;
shr.u32 v, $8, 8;
and.b32 m, v, 0x000F000F; mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 $2, m, $10;
and.b32 m, v, 0x00F000F0; mul.lo.u32 m, m, 0x0104;
and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 $3, m, $10;
and.b32 m, $9, 0x000F000F; mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 $4, m, $10;
and.b32 m, $9, 0x00F000F0; mul.lo.u32 m, m, 0x0104;
and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 $5, m, $10;
shr.u32 v, $9, 8;
and.b32 m, v, 0x000F000F; mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 $6, m, $10;
and.b32 m, v, 0x00F000F0; mul.lo.u32 m, m, 0x0104;
and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 $7, m, $10;
}
""")

# The same with a byte a code and 64 bits a word: exponent and mantissa go to bits 10-4, which is
# the value times 2^-120.
_EIGHT_BITS = gl.constexpr("""
{
.reg .b32 u, v, m, s;
mov.b64 {u, v}, $8;
prmt.b32 s, u, v, 0x4000; shr.u32 m, s, 4; and.b32 m, m, 0x07F007F0;
lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $0, m, $10;
prmt.b32 s, u, v, 0x5010; shr.u32 m, s, 4; and.b32 m, m, 0x07F007F0;
lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $1, m, $10;
prmt.b32 s, u, v, 0x6020; shr.u32 m, s, 4; and.b32 m, m, 0x07F007F0;
lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $2, m, $10;
prmt.b32 s, u, v, 0x7030; shr.u32 m, s, 4; and.b32 m, m, 0x07F007F0;
lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $3, m, $10;
mov.b64 {u, v}, $9;
prmt.b32 s, u, v, 0x4000; shr.u32 m, s, 4; and.b32 m, m, 0x07F007F0;
lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $4, m, $10;
prmt.b32 s, u, v, 0x5010; shr.u32 m, s, 4; and.b32 m, m, 0x07F007F0;
lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $5, m, $10;
prmt.b32 s, u, v, 0x6020; shr.u32 m, s, 4; and.b32 m, m, 0x07F007F0;
lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $6, m, $10;
prmt.b32 s, u, v, 0x7030; shr.u32 m, s, 4; and.b32 m, m, 0x07F007F0;
lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $7, m, $10;
}
""")


@gluon.constexpr_function
def _rows(rows, warps, lanes, inside):
    """A layout of ``[rows, ...]``: an operand's rows (lane // 4, then 8, then warps), and how the
    four lanes of a row and a lane's values lie in the other dimensions."""
    zeros = [0] * (len(inside[0]) - 1)
    own = [[8, *zeros]]
    spread = []
    while 16 << len(spread) < 16 * warps:
        spread.append([16 << len(spread), *zeros])
    while 16 * warps << (len(own) - 1) < rows:
        own.append([16 * warps << (len(own) - 1), *zeros])
    return inside + own, lanes + [[1, *zeros], [2, *zeros], [4, *zeros]], spread


@gluon.constexpr_function
def words_layout(rows, warps):
    """``[rows, 16]`` words: four of a row in a lane."""
    own, lanes, spread = _rows(rows, warps, [[0, 4], [0, 8]], [[0, 1], [0, 2]])
    return gl.DistributedLinearLayout(own, lanes, spread, [], [rows, 16])


@gluon.constexpr_function
def blocks_layout(rows, warps):
    """``[rows, 4, 4]``: the same words by blocks."""
    own, lanes, spread = _rows(rows, warps, [[0, 1, 0], [0, 2, 0]], [[0, 0, 1], [0, 0, 2]])
    return gl.DistributedLinearLayout(own, lanes, spread, [], [rows, 4, 4])


@gluon.jit
def operands(word, byte, lhs: gl.constexpr, ROWS: gl.constexpr, EIGHT: gl.constexpr):
    """Eight operands ``[ROWS, 16]`` of words ``[ROWS, 16]`` and scale bytes ``[ROWS, 4]``."""
    blocks: gl.constexpr = blocks_layout(ROWS, gl.num_warps())
    # 2^(byte - 127) and what `word` lacks, as a pair of bfloat16.
    factor = (byte.to(gl.int32) + (57 if EIGHT else 63)) * 0x00800080
    factor = gl.expand_dims(factor, 2) + gl.zeros((ROWS, 4, 4), gl.int32, layout=blocks)
    factor = gl.convert_layout(gl.reshape(factor, (ROWS, 16)), word.type.layout)
    found = gl.inline_asm_elementwise(
        _EIGHT_BITS if EIGHT else _FOUR_BITS,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,r,r" if EIGHT
        else "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [word, factor],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip
    parts = ()
    for n in gl.static_range(8):
        # A new name for every value's column, not a move: the lanes' bits are the middle ones.
        bits = gl.permute(gl.reshape(found[n], (ROWS, 2, 2, 2, 2)), (0, 3, 1, 2, 4))
        parts = parts + (gl.convert_layout(gl.reshape(bits, (ROWS, 16)), lhs),)
    return parts
