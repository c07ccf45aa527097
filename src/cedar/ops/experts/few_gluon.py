"""Experts for few tokens on Hopper: packed weights go from memory straight into registers.

Weight rows are the long side of a product and 8 to 32 tokens the short one. What a lane loads are
operands as soon as they are decoded (`decode_gluon`): nothing goes through shared memory and no
warp waits for another.

The shared expert's FP8 weights take the same way in the same launches, as tiles of their own.

Bytes: every visited expert's ``3 D F (1/2 + 1/32)``, the shared one's ``3 D F``, and rows.
FLOP: ``6 T (A + 1) D F``.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from cedar.ops.experts.decode_gluon import blocks_layout, operands, words_layout
from cedar.ops.experts.prepare import FEW as _FEW
from cedar.ops.experts.swiglu_gluon import paired_row, store_hidden

__all__ = ["down_kernel", "gate_up_kernel"]

FEW = gl.constexpr(_FEW)


@gluon.constexpr_function
def _inputs_layout(tokens, warps):
    """``[tokens, 32]``: eight values of a token in a lane, the same in every warp."""
    own = [[0, 1], [0, 2], [0, 4]]
    while 8 << (len(own) - 3) < tokens:
        own.append([8 << (len(own) - 3), 0])
    spread = []
    while 1 << len(spread) < warps:
        spread.append([0, 0])
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(own, lanes, spread, [], [tokens, 32])


@gluon.constexpr_function
def _product_layout(warps):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.jit
def _fetch(codes, scales, step, last, EIGHT: gl.constexpr):
    """Words and scale bytes of a step, or of the last one when there is none."""
    step = gl.minimum(step, last)
    # Routed weights are read once, shared ones by every tile of tokens.
    word = gl.load(codes + step * 16, eviction_policy="" if EIGHT else "evict_first")
    return word, gl.load(scales + step * 4)


@gluon.jit
def _said(instruction: gl.constexpr):
    """An instruction that has no result."""
    warps: gl.constexpr = gl.num_warps()
    lane = gl.arange(0, 32 * warps, layout=gl.BlockedLayout([1], [32], [warps], [0]))
    gl.inline_asm_elementwise(
        instruction + " mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _here():
    """Keeps loads where they stand: the assembler puts off what nothing in the loop waits for."""
    _said("bar.warp.sync 0xffffffff;")


@gluon.jit
def _hand_over():
    """As `cedar.ops.dependent_launch.hand_over`."""
    _said("griddepcontrol.wait;")
    _said("griddepcontrol.launch_dependents;")


@gluon.jit
def _inputs(x, at_x, filled, step, steps, TOKENS: gl.constexpr):
    """The eight other operands ``[16, TOKENS]``; zeros behind the last step."""
    warps: gl.constexpr = gl.num_warps()
    rhs: gl.constexpr = gl.DotOperandLayout(1, _product_layout(warps), 2)
    parts = ()
    for p in gl.static_range(4):
        part = gl.load(x + at_x + (step * 128 + p * 32), mask=filled & (step < steps), other=0.0)
        bits = gl.permute(gl.reshape(part, (TOKENS, 4, 2, 2, 2)), (3, 1, 4, 0, 2))
        first, second = gl.split(gl.reshape(bits, (16, TOKENS, 2)))
        parts = parts + (gl.convert_layout(first, rhs), gl.convert_layout(second, rhs))
    return parts


@gluon.jit
def _sums(
    codes, scales, x, at_x, filled,
    WIDTH: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr,
    EIGHT: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """``[ROWS, TOKENS]``: weight rows, by pointers to their first words and scales, times inputs.

    ``WAIT`` for the launch before when the first weights are on their way.
    """
    mma: gl.constexpr = _product_layout(gl.num_warps())
    lhs: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    steps: gl.constexpr = WIDTH // 128
    coming = ()
    for s in gl.static_range(AHEAD):
        coming = coming + (_fetch(codes, scales, s, steps - 1, EIGHT),)
    if WAIT:
        _hand_over()
    inputs = _inputs(x, at_x, filled, 0, steps, TOKENS)
    acc = gl.zeros((ROWS, TOKENS), gl.float32, layout=mma)
    for start in range(0, steps, AHEAD):
        later = ()
        for s in gl.static_range(AHEAD):
            step = start + s
            weights = operands(coming[s][0], coming[s][1], lhs, ROWS, EIGHT)
            parts = inputs
            inputs = _inputs(x, at_x, filled, step + 1, steps, TOKENS)
            for n in gl.static_range(8):
                acc = mma_v2(weights[n], parts[n], acc)
            later = later + (_fetch(codes, scales, step + AHEAD, steps - 1, EIGHT),)
            _here()
        coming = later
    return acc


@gluon.jit
def _rows_at(x, place, WIDTH: gl.constexpr, TOKENS: gl.constexpr):
    """Offsets ``[TOKENS, 32]`` of input rows ``place``, and which rows there are (not -1)."""
    ins: gl.constexpr = _inputs_layout(TOKENS, gl.num_warps())
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, ins))[None, :]
    return place.to(gl.int64)[:, None] * WIDTH + column, (place >= 0)[:, None]


@gluon.jit
def _gate_up_tile(
    x, token, source, weight, codes1, scales1, codes3, scales3, hidden, expert, limit,
    DIM: gl.constexpr, INNER: gl.constexpr, FLOOR: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr, EIGHT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One tile of `gate_up_kernel`: half of ``ROWS`` of F for the tokens ``token [TOKENS]``."""
    words: gl.constexpr = words_layout(ROWS, gl.num_warps())
    blocks: gl.constexpr = gl.SliceLayout(2, blocks_layout(ROWS, gl.num_warps()))
    first = gl.program_id(0) * (ROWS // 2)
    base = expert.to(gl.int64) * INNER + first
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, words))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, words))[None, :]
    codes = gl.where((r & 8 == 0)[:, None], codes1, codes3)
    codes += (base + paired_row(r))[:, None] * (DIM // 8) + word
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, blocks))
    row = (first + paired_row(r)) // 32 if EIGHT else base + paired_row(r)
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, blocks))[None, :]
    scales = gl.where((r & 8 == 0)[:, None], scales1, scales3)
    scales += row[:, None] * (DIM // 32) + block
    at_x, filled = _rows_at(x, token, DIM, TOKENS)
    sums = _sums(codes, scales, x, at_x, filled, DIM, ROWS, TOKENS, AHEAD, EIGHT, PDL and EIGHT)
    store_hidden(sums, source, weight, hidden, first, limit, INNER, FLOOR, ROWS, TOKENS, FEW)


@gluon.jit
def _down_tile(
    hidden, source, codes, scales, out, expert,
    DIM: gl.constexpr, INNER: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr, EIGHT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One tile of `down_kernel`: ``ROWS`` of D for the rows ``source [TOKENS]``."""
    words: gl.constexpr = words_layout(ROWS, gl.num_warps())
    blocks: gl.constexpr = gl.SliceLayout(2, blocks_layout(ROWS, gl.num_warps()))
    first = gl.program_id(0) * ROWS
    base = expert.to(gl.int64) * DIM + first
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, words))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, words))[None, :]
    codes += (base + r)[:, None] * (INNER // 8) + word
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, blocks))
    row = (first + r) // 32 if EIGHT else base + r
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, blocks))[None, :]
    scales += row[:, None] * (INNER // 32) + block
    at_x, filled = _rows_at(hidden, source, INNER, TOKENS)
    acc = _sums(codes, scales, hidden, at_x, filled, INNER, ROWS, TOKENS, AHEAD, EIGHT, PDL)
    mma: gl.constexpr = acc.type.layout
    d = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
    source = gl.convert_layout(source, gl.SliceLayout(0, mma))
    where = out + source.to(gl.int64)[None, :] * DIM + d[:, None]
    gl.store(where, acc.to(gl.bfloat16), mask=(source >= 0)[None, :])


@gluon.jit
def _rows_of(source_R, tile, TOKENS: gl.constexpr):
    """The visits ``[TOKENS]`` of a tile, -1 where there is none."""
    layout: gl.constexpr = gl.SliceLayout(1, _inputs_layout(TOKENS, gl.num_warps()))
    at = source_R + tile * TOKENS + gl.arange(0, TOKENS, layout=layout)
    return gl.load(at, cache_modifier=".cg")


@gluon.jit
def _shared_rows(tile, tokens, TOKENS: gl.constexpr):
    """The tokens ``[TOKENS]`` of a tile of the shared expert, -1 behind the last."""
    layout: gl.constexpr = gl.SliceLayout(1, _inputs_layout(TOKENS, gl.num_warps()))
    token = tile * TOKENS + gl.arange(0, TOKENS, layout=layout)
    return gl.where(token < tokens, token, -1)


@gluon.jit(do_not_specialize=["tokens", "visits", "shared_tiles"])
def gate_up_kernel(
    x, source_R, expert_M, weight_V, codes1, scales1, codes3, scales3,
    shared1, shared1_scales, shared3, shared3_scales, hidden,
    num_experts, tokens, visits, shared_tiles, limit,
    DIM: gl.constexpr, INNER: gl.constexpr, ACTIVE: gl.constexpr, FLOOR: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr,
    SHARED_TOKENS: gl.constexpr, SHARED_AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``hidden [V + T, F]``: SwiGLU times the routing weight, through FP8 per 32, ordered.

    A row for every visit, then one for every token of the shared expert, whose weight is 1.
    """
    tile = gl.program_id(1)
    if tile < shared_tiles:
        if SHARED_TOKENS > 0:
            token = _shared_rows(tile, tokens, SHARED_TOKENS)
            source = gl.where(token >= 0, token + visits, -1)
            weight = gl.full((SHARED_TOKENS,), 1.0, gl.float32, layout=token.type.layout)
            _gate_up_tile(
                x, token, source, weight, shared1, shared1_scales, shared3, shared3_scales,
                hidden, tile * 0, limit, DIM, INNER, FLOOR, ROWS, SHARED_TOKENS, SHARED_AHEAD,
                True, PDL,
            )  # fmt: skip
    else:
        if PDL:
            _hand_over()
        expert = gl.load(expert_M + tile - shared_tiles, cache_modifier=".cg")
        if expert < num_experts:
            source = _rows_of(source_R, tile - shared_tiles, TOKENS)
            weight = gl.load(weight_V + source, mask=source >= 0, other=0.0)
            token = gl.where(source >= 0, source // ACTIVE, -1)
            _gate_up_tile(
                x, token, source, weight, codes1, scales1, codes3, scales3,
                hidden, expert, limit, DIM, INNER, FLOOR, ROWS, TOKENS, AHEAD, False, PDL,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens", "visits", "shared_tiles"])
def down_kernel(
    hidden, source_R, expert_M, codes, scales, shared, shared_scales, out,
    num_experts, tokens, visits, shared_tiles,
    DIM: gl.constexpr, INNER: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr,
    SHARED_TOKENS: gl.constexpr, SHARED_AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``out [V + T, D]``: each row of ``hidden`` through its expert's ``w2``.

    Tiles and weights were there before the launch that this one may overtake began to compute;
    tiles are read past the first cache, which may hold those of another layer.
    """
    tile = gl.program_id(1)
    if tile < shared_tiles:
        if SHARED_TOKENS > 0:
            token = _shared_rows(tile, tokens, SHARED_TOKENS)
            source = gl.where(token >= 0, token + visits, -1)
            _down_tile(
                hidden, source, shared, shared_scales, out, tile * 0,
                DIM, INNER, ROWS, SHARED_TOKENS, SHARED_AHEAD, True, PDL,
            )  # fmt: skip
    else:
        expert = gl.load(expert_M + tile - shared_tiles, cache_modifier=".cg")
        if expert < num_experts:
            source = _rows_of(source_R, tile - shared_tiles, TOKENS)
            _down_tile(
                hidden, source, codes, scales, out, expert,
                DIM, INNER, ROWS, TOKENS, AHEAD, False, PDL,
            )  # fmt: skip
