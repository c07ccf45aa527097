"""Products of packed keys with index queries on Hopper, with layouts chosen by hand (Gluon).

For 32 heads of 128 bfloat16 channels whose values FP4_ROW can hold, as the indexer makes them. Keys
and queries are E2M1 codes times a power of two a block of 32 channels, and codes are exact in E4M3:
the tensor cores multiply codes, block by block, which is exact, and the float32 sums of the four
blocks are added with the key's scales. The powers of the queries' blocks are in their codes and
their heads' weights (`keep_query`).

A warp unpacks the words of 16 keys in the registers where the tensor cores want the left operand: a
thread takes one word of every block of two keys, so the order of channels inside a product is
another one, and the queries in shared memory follow it. The rounded and weighted heads are summed
by a second product, with ones.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = [
    "KEYS",
    "SUM",
    "WORDS",
    "add_heads",
    "block_scales",
    "dots",
    "keep_query",
    "load_query",
    "operands",
]

KEYS = gl.constexpr(64)  # of a tile
# 64 keys by 16 words: lanes take 4 neighbouring words of 8 keys.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
_PRODUCT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 32])
)
SUM = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
)
_HEADS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))

# Bytes of E4M3, 2^-6 of the values, of four words of E2M1 codes: the even codes of a word, its odd.
_CODES = """
    and.b32 t, {x}, 0x80808080;
    shr.u32 u, {x}, 2;
    and.b32 u, u, 0x1C1C1C1C;
    or.b32 {odd}, t, u;
    shl.b32 t, {x}, 4;
    and.b32 t, t, 0x80808080;
    shl.b32 u, {x}, 2;
    and.b32 u, u, 0x1C1C1C1C;
    or.b32 {even}, t, u;
"""
_UNPACK = gl.constexpr(
    "{ .reg .b32 t, u;"
    + "".join(_CODES.format(x=f"${8 + n}", even=f"${2 * n}", odd=f"${2 * n + 1}") for n in range(4))
    + "}"
)

# Two products, rounded to bfloat16 behind their ReLU, times their weights, rounded again.
_WEIGH = gl.constexpr(
    """
    {
    .reg .b32 m;
    cvt.rn.relu.bf16x2.f32 m, $2, $1;
    mul.rn.bf16x2 $0, m, $3;
    }
    """
)


@gluon.jit
def operands(codes):
    """E4M3 ``[64, 32]`` of every block, 2^-6 of the codes, channels in `keep_query`'s order."""
    parts = gl.inline_asm_elementwise(
        _UNPACK,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [codes],
        dtype=(gl.float8e4nv,) * 8,
        is_pure=True,
        pack=4,
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, _PRODUCT, 4)
    found = ()
    for block in gl.static_range(4):
        # key, byte of a word, word of the block, even or odd
        pair = gl.reshape(gl.join(parts[2 * block], parts[2 * block + 1]), [64, 4, 4, 2])
        pair = gl.reshape(gl.permute(pair, (0, 3, 2, 1)), [64, 32])
        found += (gl.convert_layout(pair, LEFT, assert_trivial=True),)
    return found


@gluon.jit
def block_scales(scales):
    """float32 ``[64, 1]`` of every block from words of E8M0, where the products are."""
    scales = gl.convert_layout(scales, gl.SliceLayout(1, _PRODUCT), assert_trivial=True)
    found = ()
    for block in gl.static_range(4):
        word = scales << (23 - 8 * block) if block < 3 else scales >> 1
        found += (gl.expand_dims((word & 0x7F800000).to(gl.float32, bitcast=True), 1),)
    return found


@gluon.jit
def load_query(q, w, token, stop, q_stride, w_stride):
    """bfloat16 ``[32, 32]`` of every block of a token's heads, and their weights; or zeros."""
    head = gl.arange(0, 32, layout=gl.SliceLayout(1, _HEADS))
    channel = gl.arange(0, 32, layout=gl.SliceLayout(0, _HEADS))
    here = q + token * q_stride + gl.expand_dims(head * 128, 1) + gl.expand_dims(channel, 0)
    blocks = ()
    for block in gl.static_range(4):
        blocks += (gl.load(here + block * 32, mask=token < stop, other=0.0),)
    return blocks, gl.load(w + token * w_stride + head, mask=token < stop, other=0.0)


@gluon.jit
def keep_query(query, queries, weights, n):
    """Query ``n`` of a program to shared memory as E4M3 ``[block, head, 32]``, and its weights.

    A head's largest value is scaled to between 128 and 256, which is made up for in its weight:
    exact for codes of blocks whose scales lie within 2^13 of each other.
    """
    blocks, weight = query
    most = gl.zeros([32, 32], gl.float32, _HEADS)
    for block in gl.static_range(4):
        most = gl.maximum(most, gl.abs(blocks[block].to(gl.float32)))
    power = gl.maximum(gl.max(most, 1).to(gl.int32, bitcast=True) >> 23, 7)
    scale = gl.expand_dims(((261 - power) << 23).to(gl.float32, bitcast=True), 1)
    for block in gl.static_range(4):
        value = (blocks[block].to(gl.float32) * scale).to(gl.float8e4nv)
        # head, word, byte, even or odd
        value = gl.permute(gl.reshape(value, [32, 4, 4, 2]), (0, 3, 1, 2))
        queries.index(4 * n + block).store(gl.reshape(value, [32, 32]))
    # The keys' codes are 2^-6 of their values.
    weight = weight.to(gl.float32) * ((power - 1) << 23).to(gl.float32, bitcast=True)
    weights.index(n).store(weight.to(gl.bfloat16))


@gluon.jit
def _multiply(keys, queries, n, block: gl.constexpr):
    none = gl.zeros([KEYS, 32], gl.float32, _PRODUCT)
    query = queries.index(4 * n + block).permute((1, 0))
    return warpgroup_mma(keys[block], query, none, is_async=True)


@gluon.jit
def dots(keys, factors, queries, n, AT_ONCE: gl.constexpr):
    """float32 ``[64, 32]``: products of 64 keys with the heads of query ``n``.

    AT_ONCE: of all blocks at once; else one is multiplied while the one before it is added, in
    fewer registers.
    """
    if AT_ONCE:
        a, b = _multiply(keys, queries, n, 0), _multiply(keys, queries, n, 1)
        c, d = _multiply(keys, queries, n, 2), _multiply(keys, queries, n, 3)
        a, b, c, d = warpgroup_mma_wait(0, deps=[a, b, c, d])
        dot = a * factors[0] + b * factors[1] + c * factors[2] + d * factors[3]
    else:
        before = _multiply(keys, queries, n, 0)
        for block in gl.static_range(1, 4):
            after = _multiply(keys, queries, n, block)
            before = warpgroup_mma_wait(1, deps=[before])
            if block == 1:
                dot = before * factors[0]
            else:
                dot += before * factors[block - 1]
            before = after
        dot += warpgroup_mma_wait(0, deps=[before]) * factors[3]
    return dot


@gluon.jit
def add_heads(dot, weights, n, total, column, WIDTH: gl.constexpr):
    """Add the weighted heads to the ``column``-th ``WIDTH`` columns of ``total`` ``[64, 8]``.

    The sum is a product with ones: exact but for the order of its float32 additions.
    """
    weight = weights.index(n).load(gl.SliceLayout(0, _PRODUCT))
    dot, weight = gl.broadcast(dot, gl.expand_dims(weight, 0))
    weighted = gl.inline_asm_elementwise(
        _WEIGH, "=r,r,r,r", [dot, weight], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUM, 2)
    weighted = gl.convert_layout(weighted, LEFT, assert_trivial=True)
    place = gl.arange(0, 8, layout=gl.SliceLayout(0, RIGHT)) // WIDTH
    head = gl.arange(0, 32, layout=gl.SliceLayout(1, RIGHT))
    ones = gl.expand_dims(place, 0) == gl.expand_dims(head * 0 + column, 1)
    return mma_v2(weighted, ones.to(gl.bfloat16), total)
