"""Products of some dozens of tokens for Hopper: decoded weights from registers, tokens from
shared memory.

A first launch normalises and casts the tokens and writes their channels in the order in which the
threads hold them after decoding (see `cedar.ops.linear.hopper`): of every 64 channels the 32 even
ones, then the 32 odd ones, each in fours of pairs. Where the tokens are results of such a product,
that one does it at its end instead. In the second, a warp decodes 16 rows of the
weights, and all warps of a program multiply them with the same tokens on the tensor cores.

Bytes: every weight's ``out in (1 + 1/1024)`` once for 64 tokens (then from L2), ``2 T in`` once for
each tile of rows (from L2), ``2 T out``. FLOP: ``2 T in out``.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from cedar.ops.linear.hopper_parts import (
    SHRINK,
    barrier,
    deal,
    even_odd,
    normed,
    numbers,
    pick,
    rates,
    ready,
    tile_layout,
)

__all__ = ["STEP", "kernel", "prepare_kernel"]

STEP = 128  # channels that one step takes
_CHANNELS = gl.constexpr(STEP)

# Sign to bit 15 and magnitude to bits 10-4 of each half: value x 2^-120; then the factor.
_SCALED_CODES = gl.constexpr("""
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
""")


@gluon.jit
def _ordered(x, layout: gl.constexpr):
    """``[W, N, 32]``: channels as they follow in an operand, eight neighbours in a thread."""
    W: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    x = x.reshape((W, N, 4, 2, 2, 2)).permute((0, 1, 3, 4, 2, 5)).reshape((W, N, 32))
    return gl.convert_layout(x, layout)


@gluon.jit
def prepare_kernel(
    x, norm, out, count, x_pitch, out_pitch, eps,
    K: gl.constexpr, TURNS: gl.constexpr, NORM: gl.constexpr, CAST: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Eight tokens, one turn of their channels: normalised, cast, in the order of the operands."""
    W: gl.constexpr = gl.num_warps()
    xl: gl.constexpr = tile_layout(W, 8)
    ready(PDL)
    warp, row, column = numbers(xl, W, 8, 32)
    token = gl.program_id(0) * 8 + row
    known = token < count
    x_at = x + (token.to(gl.int64) * x_pitch + warp * 32 + column)
    here = gl.program_id(1) * (W * 32) + warp * 32 + column
    value = gl.load(x_at + gl.program_id(1) * (W * 32), mask=known & (here < K // 2), other=0)
    if NORM:
        rate = rates(x_at, known, warp * 32 + column, eps, K, 8, TURNS, K == TURNS * W * 64)
        weight = gl.load(norm + here, mask=here < K // 2, other=0)
        value = normed(value, weight, deal(rate, 8, xl), 8, xl)
    even, odd = even_odd(value, CAST, xl)
    place = gl.program_id(1) * (W * 64) + warp * 64 + column
    out_at = out + (token.to(gl.int64) * out_pitch + place)
    gl.store(out_at, _ordered(even, xl), mask=known & (place < K))
    gl.store(out_at + 32, _ordered(odd, xl), mask=known & (place < K))


@gluon.constexpr_function
def _rows_layout(warps):
    """``[16 warps, 32]``: 8 neighbours in a thread, 4 threads a row, 16 rows a warp."""
    reg = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lane = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warp = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [16 * warps, 32])


@gluon.constexpr_function
def _blocks_layout(warps):
    """The same as ``[warps / 2, 32, 2, 16]``: what shares a scale in places of its own."""
    reg = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 8, 0, 0]]
    lane = [[0, 0, 0, 8], [0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warp = [[0, 16, 0, 0]] + [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 2)]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [warps // 2, 32, 2, 16])


@gluon.jit
def _decoded(raw, byte, layout: gl.constexpr):
    """Operands of 64 channels: even ``[R, 32]`` and odd ones, 2^-SHRINK times their value."""
    R: gl.constexpr = raw.shape[0]
    factor = gl.minimum(byte.to(gl.int32) + (120 - SHRINK), 254) << 7
    factor = factor.to(gl.int16).to(gl.bfloat16, bitcast=True)
    factor = gl.expand_dims(gl.expand_dims(factor, 1), 3)
    factor = factor.broadcast_to((R // 32, 32, 2, 16)).reshape((R, 32))
    factor = gl.convert_layout(factor, raw.type.layout, assert_trivial=True)
    even, odd = gl.inline_asm_elementwise(
        _SCALED_CODES, "=r,=r,r,r", [raw, factor], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=2,
    )  # fmt: skip
    return _left(even, layout), _left(odd, layout)


@gluon.jit
def _left(x, layout: gl.constexpr):
    R: gl.constexpr = x.shape[0]
    x = x.reshape((R, 4, 2, 2, 2)).permute((0, 2, 3, 1, 4)).reshape((R, 32))
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _cast(out, FLOOR: gl.constexpr):
    """Results ``[R, N]``, rounded to bfloat16, through FP8 per 32 rows."""
    R: gl.constexpr = out.shape[0]
    N: gl.constexpr = out.shape[1]
    layout: gl.constexpr = out.type.layout
    blocks = gl.reshape(out.to(gl.bfloat16).to(gl.float32), (R // 32, 32, N))
    # A power of two at or above amax / 448, from the bits; its inverse is exact.
    ratio = gl.maximum(gl.max(gl.maximum(blocks, -blocks), axis=1), FLOOR) / 448.0
    exponent = (ratio.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    factor = gl.expand_dims((exponent << 23).to(gl.float32, bitcast=True), 1)
    inverse = gl.expand_dims(((254 - exponent) << 23).to(gl.float32, bitcast=True), 1)
    found = (blocks * inverse).to(gl.float8e4nv).to(gl.float32) * factor
    return gl.convert_layout(gl.reshape(found, (R, N)), layout)


@gluon.jit
def _place(c):
    """Where `prepare_kernel` puts channel ``c``: of its 64 the even first, in fours of pairs."""
    j = (c >> 1) & 31
    fours = ((j & 4) << 2) | ((j & 2) << 2) | ((j >> 2) & 6) | (j & 1)
    return (c & -64) | ((c & 1) << 5) | fours


@gluon.jit
def kernel(
    x, code0, scale0, y0, code1, scale1, y1, code2, scale2, y2, parts, counters,
    count, x_pitch, rows0, rows1, rows2, tiles0, tiles1, tiles,
    K: gl.constexpr, N: gl.constexpr, STEPS: gl.constexpr, SPLITS: gl.constexpr,
    GROUP: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr, PREPARE: gl.constexpr,
    FLOOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A tile of 16 rows a warp for ``N`` tokens, over 1/SPLITS of the channels.

    Programs that differ in their tokens follow one another and find the weights in L2.

    x: bfloat16 from `prepare_kernel`; the rest is as in `cedar.ops.linear.hopper.kernel`.
    """
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = 16 * W
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, N, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    wl: gl.constexpr = _rows_layout(W)
    sl: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, _blocks_layout(W)))
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])
    in_x: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = gl.program_id(1)
    start = gl.program_id(2) * (STEPS * _CHANNELS)
    code = pick(tile, tiles0, tiles1, code0, code1, code2)
    scale = pick(tile, tiles0, tiles1, scale0, scale1, scale2)
    y = pick(tile, tiles0, tiles1, y0, y1, y2)
    rows = pick(tile, tiles0, tiles1, rows0, rows1, rows2)
    row0 = (tile - pick(tile, tiles0, tiles1, 0, tiles0, tiles0 + tiles1)) * R
    row = gl.arange(0, R, layout=gl.SliceLayout(1, wl))
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, wl))
    w_at = code + row0.to(gl.int64) * (K // 2) + start // 2
    w_at = w_at + (row[:, None] * (K // 2) + column[None, :])
    block_row = row0 // 32 + gl.arange(0, R // 32, layout=gl.SliceLayout(1, sl))
    block = gl.arange(0, 2, layout=gl.SliceLayout(0, sl))
    s_at = scale + (block_row[:, None] * (K // 32) + start // 32 + block[None, :])
    ring = ()
    for step in gl.static_range(AHEAD):
        ring = ring + (
            gl.load(w_at + step * 64), gl.load(s_at + step * 4),
            gl.load(w_at + (step * 64 + 32)), gl.load(s_at + (step * 4 + 2)),
        )  # fmt: skip
    ready(PDL)

    if GROUP > 0:
        x = x + row0 // GROUP * K
    part = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, _CHANNELS], in_x)
    token = gl.program_id(0) * N + gl.arange(0, N, layout=gl.SliceLayout(1, copy))
    place = start + gl.arange(0, _CHANNELS, layout=gl.SliceLayout(0, copy))
    x_at = x + (token.to(gl.int64)[:, None] * x_pitch + place[None, :])
    known = (token < count)[:, None] & (place >= 0)[None, :]
    for step in gl.static_range(STAGES - 1):
        if step < STEPS:
            async_copy.async_copy_global_to_shared(
                part.index(step), x_at + step * _CHANNELS, mask=known
            )
        async_copy.commit_group()
    acc = gl.zeros((R, N), gl.float32, layout=mma)
    for step in gl.static_range(STEPS):
        raw0, byte0, raw1, byte1 = ring[0], ring[1], ring[2], ring[3]
        ring = ring[4:]
        if step + AHEAD < STEPS:
            ring = ring + (
                gl.load(w_at + (step + AHEAD) * 64), gl.load(s_at + (step + AHEAD) * 4),
                gl.load(w_at + ((step + AHEAD) * 64 + 32)),
                gl.load(s_at + ((step + AHEAD) * 4 + 2)),
            )  # fmt: skip
        # No product is in flight while operands are decoded: nothing keeps their registers apart.
        even0, odd0 = _decoded(raw0, byte0, left)
        even1, odd1 = _decoded(raw1, byte1, left)
        async_copy.wait_group(STAGES - 2)
        hopper.fence_async_shared()
        barrier()
        now = part.index(step % STAGES)
        acc = hopper.warpgroup_mma(even0, now.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma(odd0, now.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma(even1, now.slice(64, 32, 1).permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma(odd1, now.slice(96, 32, 1).permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        # When every warp is here, the last part of x may be overwritten.
        barrier()
        if step + STAGES - 1 < STEPS:
            async_copy.async_copy_global_to_shared(
                part.index((step + STAGES - 1) % STAGES), x_at + (step + STAGES - 1) * _CHANNELS,
                mask=known,
            )  # fmt: skip
        async_copy.commit_group()
    async_copy.wait_group(0)
    yl: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, W], [0, 1])
    out = gl.convert_layout(acc, yl) * (2.0**SHRINK)
    r = gl.arange(0, R, layout=gl.SliceLayout(1, yl))[:, None]
    n = gl.arange(0, N, layout=gl.SliceLayout(0, yl))[None, :]
    t = gl.program_id(0) * N + n
    y_at = y + (t.to(gl.int64) * rows + row0 + r)
    if PREPARE:
        y_at = y + (t.to(gl.int64) * rows + _place(row0 + r))
    if SPLITS == 1:
        if PREPARE:
            out = _cast(out, FLOOR)
        gl.store(y_at, out.to(y.dtype.element_ty), mask=t < count)
    else:
        work = gl.program_id(0) * tiles + tile
        part_at = parts + work.to(gl.int64) * (SPLITS * R * N) + n * R + r
        gl.store(part_at + gl.program_id(2) * (R * N), out)
        barrier()
        if gl.atomic_add(counters + work, 1) == SPLITS - 1:
            barrier()
            # Past L1, which may be stale.
            total = gl.load(part_at, cache_modifier=".cg")
            for s in gl.static_range(1, SPLITS):
                total += gl.load(part_at + s * (R * N), cache_modifier=".cg")
            if PREPARE:
                total = _cast(total, FLOOR)
            gl.store(y_at, total.to(y.dtype.element_ty), mask=t < count)
            gl.store(counters + work, 0)
