"""Device functions of the linear kernels for Hopper: layouts, decoding, norm and cast."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "CODES", "SHRINK", "barrier", "columns", "deal", "even_odd", "halves_layout", "load_tokens",
    "load_weights", "normed", "numbers", "operand", "pick", "rates", "ready", "tile_layout",
    "times", "within",
]  # fmt: skip

# Triton 3.6 calls it by its older name.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
SHRINK = gl.constexpr(40)  # binary digits

# Sign to bit 15 and magnitude to bits 10-4 of each half: value x 2^-120.
CODES = gl.constexpr("""
{
.reg .b32 m, n;
shl.b32 m, $2, 8;
shl.b32 n, $2, 4;
and.b32 m, m, 0x80008000;
lop3.b32 $0, n, 0x07F007F0, m, 0xEA;
shr.u32 n, $2, 4;
and.b32 m, $2, 0x80008000;
lop3.b32 $1, n, 0x07F007F0, m, 0xEA;
}
""")

_PART = gl.constexpr("""
prmt.b32 $0, $2, $3, 0x5410;
prmt.b32 $1, $2, $3, 0x7632;
""")

# To three bits of mantissa, or to the grid of the subnormal codes: adding and taking away again a
# power of two of the right size (sixteen times the value's own, or more) rounds to nearest even.
_ROUND_PART = gl.constexpr("""
{
.reg .b32 a, b;
and.b32 a, $2, 0x7F807F80;
and.b32 b, $3, 0x7F807F80;
max.u16x2 a, a, $4;
max.u16x2 b, b, $5;
add.u32 a, a, 0x02000200;
add.u32 b, b, 0x02000200;
lop3.b32 a, $2, 0x80008000, a, 0xEA;
lop3.b32 b, $3, 0x80008000, b, 0xEA;
{
.reg .b32 c, d;
add.rn.bf16x2 c, $2, a;
add.rn.bf16x2 d, $3, b;
sub.rn.bf16x2 a, c, a;
sub.rn.bf16x2 b, d, b;
}
prmt.b32 $0, a, b, 0x5410;
prmt.b32 $1, a, b, 0x7632;
}
""")

_NORM = gl.constexpr("""
{
.reg .b32 a, b, c, d;
shl.b32 a, $1, 16;
and.b32 b, $1, 0xFFFF0000;
shl.b32 c, $2, 16;
and.b32 d, $2, 0xFFFF0000;
mul.rn.f32 a, a, $3;
mul.rn.f32 b, b, $3;
mul.rn.f32 a, a, c;
mul.rn.f32 b, b, d;
cvt.rn.bf16x2.f32 $0, b, a;
}
""")


@gluon.constexpr_function
def tile_layout(warps, rows):
    """``[warps, rows, 32]``: 8 neighbours in a thread; 4 threads a row, 8 rows a warp at once."""
    reg = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[0, b, 0] for b in (8, 16, 32, 64) if b < rows]
    lane = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [warps, rows, 32])


@gluon.constexpr_function
def halves_layout(warps, rows):
    """`tile_layout` as ``[warps, rows, 2, 16]``."""
    reg = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
    reg += [[0, b, 0, 0] for b in (8, 16, 32, 64) if b < rows]
    lane = [[0, 0, 0, 8], [0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warp = [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [warps, rows, 2, 16])


@gluon.jit
def numbers(layout: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """Numbers along the three dimensions of a layout, ready to be added."""
    a = gl.arange(0, A, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    b = gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return a[:, None, None], b[None, :, None], c[None, None, :]


@gluon.jit
def operand(x, layout: gl.constexpr, RIGHT: gl.constexpr):
    """A tile as an operand, its channels in the order in which its threads hold them."""
    W: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    x = x.reshape((W, R, 4, 2, 2, 2)).permute((0, 1, 3, 4, 2, 5)).reshape((W, R, 32))
    if RIGHT:
        x = x.permute((0, 2, 1))
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _pair_max(a, b):
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _halve(x, W: gl.constexpr, N: gl.constexpr, M: gl.constexpr):
    a, b = gl.split(x.reshape((W, N, 2, M // 2, 2)))
    return _pair_max(a, b)


@gluon.jit
def _rounded(word, layout: gl.constexpr):
    """Pairs of bfloat16 ``[W, N, 32]`` through FP8 per 32 values: even and odd channels."""
    W: gl.constexpr = word.shape[0]
    N: gl.constexpr = word.shape[1]
    size = word & 0x7FFF7FFF
    size = _halve(size, W, N, 16)
    size = _halve(size, W, N, 8)
    size = _halve(size, W, N, 4)
    low, high = size & 0xFFFF, (size >> 16) & 0xFFFF
    most = gl.max(gl.maximum(low, high), 3)
    # 2^ceil(log2(most / 448)) has this exponent (448 = 1.75 x 2^8), or that of the least scale.
    exponent = gl.maximum(((most + 0x1F) >> 7) - 8, 105)
    least = (exponent - 6) << 7  # of the smallest value that is no subnormal code
    least = least | (least << 16)
    halves: gl.constexpr = gl.SliceLayout(3, halves_layout(W, N))
    least = gl.expand_dims(gl.convert_layout(least, halves, assert_trivial=True), 3)
    wide = least.broadcast_to((W, N, 2, 16)).reshape((W, N, 32))
    wide = gl.convert_layout(wide, layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        _ROUND_PART, "=r,=r,r,r,r,r", [word, wide], dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def even_odd(word, CAST: gl.constexpr, layout: gl.constexpr):
    """Even and odd channels of pairs of bfloat16."""
    if CAST:
        even, odd = _rounded(word, layout)
    else:
        even, odd = gl.inline_asm_elementwise(
            _PART, "=r,=r,r,r", [word], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    return even, odd


@gluon.jit
def normed(word, weight, rate, N: gl.constexpr, layout: gl.constexpr):
    W: gl.constexpr = word.shape[0]
    shape: gl.constexpr = (W, N, 32)
    weight = gl.convert_layout(weight.broadcast_to(shape), layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        _NORM, "=r,r,r,r", [word, weight, rate.broadcast_to(shape)], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def ready(PDL: gl.constexpr):
    """Wait for the launch before this one, of which only the inputs are results."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.constexpr_function
def _repeated(warps, tokens):
    """`tile_layout` of eight tokens as ``[warps, 8 / tokens, tokens, 32]``."""
    if tokens >= 8:
        reg = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
        reg += [[0, 0, b, 0] for b in (8, 16, 32, 64) if b < tokens]
        lane = [[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    else:
        reg = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
        lane = [[0, 0, 0, 8], [0, 0, 0, 16]]
        lane += [[0, 0, b, 0] if b < tokens else [0, b // tokens, 0, 0] for b in (1, 2, 4)]
    warp = [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    shape = [warps, max(8 // tokens, 1), tokens, 32]
    return gl.DistributedLinearLayout(reg, lane, warp, [], shape)


@gluon.jit
def columns(held, TURN: gl.constexpr, TOKENS: gl.constexpr, W: gl.constexpr):
    """The tokens of one turn ``[W, N, 32]``, repeated if there are fewer than eight."""
    N: gl.constexpr = max(TOKENS, 8)
    SLOTS: gl.constexpr = N // TOKENS
    wide: gl.constexpr = _repeated(W, TOKENS)
    view = held[TURN // SLOTS].slice((TURN % SLOTS) * TOKENS, TOKENS, 1)
    x = gl.expand_dims(view.load(gl.SliceLayout(1, wide)), 1)
    x = x.broadcast_to((W, SLOTS, TOKENS, 32)).reshape((W, N, 32))
    return gl.convert_layout(x, tile_layout(W, N), assert_trivial=True)


@gluon.jit
def times(x, factor):
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, factor], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def within(program, programs, tiles, PER_GROUP: gl.constexpr):
    """First tile, step and end for a program: as many programs for every group."""
    groups = tiles // PER_GROUP
    each = programs // groups
    group = program // each
    return group * PER_GROUP + program % each, each, (group + 1) * PER_GROUP


@gluon.jit
def load_tokens(
    x_at, known, place, AFTER: gl.constexpr, LIMIT: gl.constexpr, WHOLE: gl.constexpr
):  # fmt: skip
    """A turn's channels of the tokens, zeros where there are none."""
    inside = known & (place >= 0)
    if not WHOLE:
        inside = known & (place + AFTER < LIMIT)
    return gl.load(x_at + AFTER, mask=inside, other=0)


@gluon.jit
def load_weights(
    at, place, more, AFTER: gl.constexpr, LIMIT: gl.constexpr, WHOLE: gl.constexpr
):  # fmt: skip
    """A turn's part of a tile, or of its scales: zeros beyond the row, anything if no tile."""
    if WHOLE:
        return gl.load(at + AFTER, mask=(place >= 0) & more)
    inside = (place + AFTER < LIMIT) & more
    return gl.load(at + AFTER, mask=inside, other=0)


@gluon.jit
def pick(tile, tiles0, tiles1, a, b, c):
    """What belongs to the weight that a tile is of."""
    found = a
    if tile >= tiles0:
        found = b
    if tile >= tiles0 + tiles1:
        found = c
    return found


@gluon.jit
def deal(rate, TOKENS: gl.constexpr, xl: gl.constexpr):
    """Numbers of the tokens ``[N]`` at each of their rows: of token ``row % TOKENS``."""
    N: gl.constexpr = rate.shape[0]
    if TOKENS < N:
        parts: gl.constexpr = gl.BlockedLayout(
            [1, 1], [N // TOKENS, 32 // (N // TOKENS)], [1, gl.num_warps()], [1, 0]
        )
        rate = gl.convert_layout(rate, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        # Rows beyond the tokens are zero tokens; every slot takes those of the first.
        first = gl.convert_layout(rate.reshape((N // TOKENS, TOKENS)), parts)
        slot = gl.arange(0, N // TOKENS, layout=gl.SliceLayout(1, parts))[:, None]
        one = gl.sum(gl.where(slot == 0, first, 0.0), 0)
        rate = gl.expand_dims(one, 0).broadcast_to((N // TOKENS, TOKENS)).reshape((N,))
    return gl.convert_layout(rate, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]


@gluon.jit
def rates(
    x_at, known, place, eps, K: gl.constexpr, N: gl.constexpr, TURNS: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """``[N]``: one over the root mean square of every token, in one order whatever their number."""
    W: gl.constexpr = gl.num_warps()
    total = gl.zeros((W, N, 32), gl.float32, layout=tile_layout(W, N))
    for turn in gl.static_range(TURNS):
        word = load_tokens(x_at, known, place, turn * (32 * W), K // 2, WHOLE)
        low = (word << 16).to(gl.float32, bitcast=True)
        high = (word & -65536).to(gl.float32, bitcast=True)
        total += low * low + high * high
    return gl.rsqrt(gl.sum(gl.sum(total, 2), 0) / K + eps)
