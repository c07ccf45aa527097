"""Products of few tokens for Hopper: every byte of the weights read once, by warps on their own.

The warps of a program share its rows of the weights and part their channels in turns of 64 bytes a
row. A thread loads 16 bytes of a row at once, and those bytes are its share of the tensor core's
left operand; its share of the tokens, on the short side of the product, is found the same way.
Which channel stands where in a product does not matter as long as both sides agree, so nothing is
interleaved: FP8 codes, two to a 16-bit element, give one operand of the even channels and one of
the odd. Loads of weights run ahead, from one tile of rows to the next where programs stay for
several. Then tokens are normalised and cast once and kept in shared memory, while the first weights
are on their way; where they are too many for that (what they take is missing for loads under way),
they are read and cast again for every tile.

Codes are decoded by moving their bits, to 2^-120 times their value; what is missing, and the scale
of the block, is put on the other side of the product. Both are exact in bfloat16. All is 2^-40
times too small until the end, so that no scale leaves the format.

Bytes: every weight's ``out in (1 + 1/1024)`` (bfloat16: ``2 out in``) once, ``2 T in`` once for
each program or tile (from L2), ``2 T out``. FLOP: ``2 T in out``. Bound by memory, and below some
ten megabytes by the launch and one way through the multiprocessor.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from cedar.ops.linear.hopper_parts import (
    CODES,
    SHRINK,
    barrier,
    columns,
    deal,
    even_odd,
    halves_layout,
    load_tokens,
    load_weights,
    normed,
    numbers,
    operand,
    pick,
    rates,
    ready,
    tile_layout,
    times,
    within,
)

__all__ = ["kernel"]


@gluon.jit
def _parts(
    value, place, norm, rate, N: gl.constexpr, LIMIT: gl.constexpr, FP8: gl.constexpr,
    NORM: gl.constexpr, CAST: gl.constexpr,
):  # fmt: skip
    """Tokens as the products take them: even and odd channels (the same if they are not apart)."""
    W: gl.constexpr = gl.num_warps()
    xl: gl.constexpr = tile_layout(W, N)
    if FP8:
        if NORM:
            weight = gl.load(norm + place, mask=place < LIMIT, other=0)
            value = normed(value, weight, rate, N, xl)
        even, odd = even_odd(value, CAST, xl)
    else:
        even = value.to(gl.bfloat16, bitcast=True)
        odd = even
    return even, odd


@gluon.jit
def _fill(
    x, norm, count, x_pitch, rate, start,
    K: gl.constexpr, TOKENS: gl.constexpr, TURNS: gl.constexpr, WHOLE: gl.constexpr,
    FP8: gl.constexpr, NORM: gl.constexpr, CAST: gl.constexpr, X_AHEAD: gl.constexpr,
):  # fmt: skip
    """The parts of the tokens in shared memory, for several turns at once if tokens are few.

    A buffer for each step, since accesses to one buffer wait for one another.
    """
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = max(TOKENS, 8)
    SLOTS: gl.constexpr = N // TOKENS
    STEPS: gl.constexpr = (TURNS + SLOTS - 1) // SLOTS
    ELEMENTS: gl.constexpr = K // 2 if FP8 else K
    xl: gl.constexpr = tile_layout(W, N)
    warp, row, column = numbers(xl, W, N, 32)
    token = row % TOKENS
    known = token < count
    off = row // TOKENS * (W * 32) + warp * 32 + column
    x_at = x + start + (token.to(gl.int64) * x_pitch + off)
    if NORM:
        rate = deal(rate, TOKENS, xl)
    ALL: gl.constexpr = WHOLE and TURNS % SLOTS == 0
    STEP: gl.constexpr = SLOTS * W * 32
    in_x: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shape: gl.constexpr = (W, N, 32)
    evens = ()
    odds = ()
    ring = ()
    for i in gl.static_range(min(X_AHEAD, STEPS)):
        ring = ring + (load_tokens(x_at, known, start + off, i * STEP, ELEMENTS, ALL),)
    for i in gl.static_range(STEPS):
        value = ring[0]
        ring = ring[1:]
        if i + X_AHEAD < STEPS:
            ring = ring + (
                load_tokens(x_at, known, start + off, (i + X_AHEAD) * STEP, ELEMENTS, ALL),
            )
        place = start + off + i * STEP
        even, odd = _parts(value, place, norm, rate, N, ELEMENTS, FP8, NORM, CAST)
        evens = evens + (gl.allocate_shared_memory(gl.bfloat16, shape, in_x, even),)
        if FP8:
            odds = odds + (gl.allocate_shared_memory(gl.bfloat16, shape, in_x, odd),)
    return evens, odds


@gluon.jit
def _sum_turns(
    ring, s_ring, x_ring, evens, odds, x_at, known, x_in, norm, rate,
    w_at, s_at, w_next, s_next, w_in, s_in, more,
    K: gl.constexpr, R: gl.constexpr, TOKENS: gl.constexpr, TURNS: gl.constexpr,
    WHOLE: gl.constexpr, FP8: gl.constexpr, NORM: gl.constexpr, CAST: gl.constexpr,
    HOLD: gl.constexpr, AHEAD: gl.constexpr, X_AHEAD: gl.constexpr,
):  # fmt: skip
    """A tile's product, what each warp has of it, and the loads under way for the next tile."""
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = max(TOKENS, 8)
    ELEMENTS: gl.constexpr = K // 2 if FP8 else K
    TURN: gl.constexpr = W * 32
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    xl: gl.constexpr = tile_layout(W, N)
    acc = gl.zeros((W, R, N), gl.float32, layout=mma)
    for turn in gl.static_range(TURNS):
        raw = ring[0]
        LATER = (turn + AHEAD) % TURNS
        if turn + AHEAD < TURNS:
            coming = load_weights(w_at, w_in, True, LATER * TURN, ELEMENTS, WHOLE)
        else:
            coming = load_weights(w_next, w_in, more, LATER * TURN, ELEMENTS, WHOLE)
        ring = ring[1:] + (coming,)
        if HOLD:
            x_even = columns(evens, turn, TOKENS, W)
            x_odd = x_even
            if FP8:
                x_odd = columns(odds, turn, TOKENS, W)
        else:
            value = x_ring[0]
            place = (turn + X_AHEAD) % TURNS * TURN
            x_ring = x_ring[1:] + (load_tokens(x_at, known, x_in, place, ELEMENTS, WHOLE),)
            x_even, x_odd = _parts(
                value, x_in + turn * TURN, norm, rate, N, ELEMENTS, FP8, NORM, CAST
            )
        if FP8:
            byte = s_ring[0]
            if turn + AHEAD < TURNS:
                scales = load_weights(s_at, s_in, True, LATER * 2 * W, K // 32, WHOLE)
            else:
                scales = load_weights(s_next, s_in, more, LATER * 2 * W, K // 32, WHOLE)
            s_ring = s_ring[1:] + (scales,)
            # 2^(byte - 127 + 120 - 40) as a bfloat16.
            factor = gl.minimum(byte.to(gl.int32) + (120 - SHRINK), 254) << 7
            factor = factor.to(gl.int16).to(gl.bfloat16, bitcast=True)
            factor = gl.expand_dims(gl.expand_dims(factor, 1), 3)
            factor = factor.broadcast_to((W, N, 2, 16)).reshape((W, N, 32))
            factor = gl.convert_layout(factor, xl, assert_trivial=True)
            even, odd = gl.inline_asm_elementwise(
                CODES, "=r,=r,r", [raw], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
            )
            x_even, x_odd = times(x_even, factor), times(x_odd, factor)
            acc = mma_v2(operand(even, left, False), operand(x_even, right, True), acc)
            acc = mma_v2(operand(odd, left, False), operand(x_odd, right, True), acc)
        else:
            even = raw.to(gl.bfloat16, bitcast=True)
            acc = mma_v2(operand(even, left, False), operand(x_even, right, True), acc)
    return acc, ring, s_ring, x_ring


@gluon.jit
def kernel(
    x, norm, code0, scale0, y0, code1, scale1, y1, code2, scale2, y2, parts, counters,
    count, x_pitch, rows0, rows1, rows2, tiles0, tiles1, tiles, eps,
    K: gl.constexpr, R: gl.constexpr, TOKENS: gl.constexpr, TURNS: gl.constexpr,
    SPLITS: gl.constexpr, FP8: gl.constexpr, NORM: gl.constexpr, CAST: gl.constexpr,
    HOLD: gl.constexpr, GROUP: gl.constexpr, AHEAD: gl.constexpr, X_AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of ``R`` rows of up to three weights for all tokens, over 1/SPLITS of the channels.

    x: rows of bfloat16 (pairs as int32 for FP8 weights), ``x_pitch`` elements apart; rows of a
    weight belong to groups of ``GROUP`` with channels of their own in x (0: all share them), and
    a program's tiles to one group.
    """
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = max(TOKENS, 8)
    ELEMENTS: gl.constexpr = K // 2 if FP8 else K  # 16-bit elements of a row
    TURN: gl.constexpr = W * 32  # of these in a turn
    WHOLE: gl.constexpr = ELEMENTS == TURNS * SPLITS * TURN
    wl: gl.constexpr = tile_layout(W, R)
    sl: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, halves_layout(W, N)))
    gl.static_assert(SPLITS == 1 or not NORM)
    split = gl.program_id(1)
    start = split * (TURNS * TURN)
    per = gl.num_programs(0)
    first = gl.program_id(0)
    step, stop = per, tiles
    if GROUP > 0:
        # Programs are dealt out to groups.
        first, step, stop = within(first, per, tiles, GROUP // R)

    warp, row, column = numbers(wl, W, R, 32)
    w_off = row * ELEMENTS + (start + warp * 32 + column)
    w_in = start + warp * 32 + column + row * 0
    s_in = (
        2 * gl.arange(0, W, layout=gl.SliceLayout(1, sl))[:, None]
        + gl.arange(0, 2, layout=gl.SliceLayout(0, sl))[None, :]
        + start // 16
    )
    code = pick(first, tiles0, tiles1, code0, code1, code2)
    scale = pick(first, tiles0, tiles1, scale0, scale1, scale2)
    row0 = (first - pick(first, tiles0, tiles1, 0, tiles0, tiles0 + tiles1)) * R
    w_at = code + row0.to(gl.int64) * ELEMENTS + w_off
    s_at = scale + row0 // 32 * (K // 32) + s_in
    # Codes are parameters; other weights may have been cast by the launch before.
    ready(PDL and not FP8)
    ring = ()
    s_ring = ()
    for turn in gl.static_range(AHEAD):
        ring = ring + (load_weights(w_at, w_in, True, turn * TURN, ELEMENTS, WHOLE),)
        if FP8:
            scales = load_weights(s_at, s_in, True, turn * (2 * W), K // 32, WHOLE)
            s_ring = s_ring + (scales,)
    ready(PDL and FP8)

    if GROUP > 0:
        x = x + first * R // GROUP * ELEMENTS
    xl: gl.constexpr = tile_layout(W, N)
    x_warp, token, x_column = numbers(xl, W, N, 32)
    known = token < count
    x_in = start + x_warp * 32 + x_column
    x_at = x + start + (token.to(gl.int64) * x_pitch + x_warp * 32 + x_column)
    rate = 0
    if NORM:
        rate = rates(x_at, known, x_in, eps, K, N, TURNS, WHOLE)
    evens = ()
    odds = ()
    x_ring = ()
    if HOLD:
        evens, odds = _fill(
            x, norm, count, x_pitch, rate, start,
            K, TOKENS, TURNS, WHOLE, FP8, NORM, CAST, X_AHEAD,
        )  # fmt: skip
    else:
        if NORM:
            rate = deal(rate, N, xl)
        for turn in gl.static_range(X_AHEAD):
            x_ring = x_ring + (load_tokens(x_at, known, x_in, turn * TURN, ELEMENTS, WHOLE),)

    yl: gl.constexpr = gl.BlockedLayout([1, 1], [min(R, 32), 32 // min(R, 32)], [1, W], [0, 1])
    r = gl.arange(0, R, layout=gl.SliceLayout(1, yl))[:, None]
    n = gl.arange(0, N, layout=gl.SliceLayout(0, yl))[None, :]
    for tile in range(first, stop, step):
        y = pick(tile, tiles0, tiles1, y0, y1, y2)
        rows = pick(tile, tiles0, tiles1, rows0, rows1, rows2)
        y_row = (tile - pick(tile, tiles0, tiles1, 0, tiles0, tiles0 + tiles1)) * R
        after = tile + step
        more = after < stop
        code = pick(after, tiles0, tiles1, code0, code1, code2)
        scale = pick(after, tiles0, tiles1, scale0, scale1, scale2)
        row0 = (after - pick(after, tiles0, tiles1, 0, tiles0, tiles0 + tiles1)) * R
        w_next = code + row0.to(gl.int64) * ELEMENTS + w_off
        s_next = scale + row0 // 32 * (K // 32) + s_in
        acc, ring, s_ring, x_ring = _sum_turns(
            ring, s_ring, x_ring, evens, odds, x_at, known, x_in, norm, rate,
            w_at, s_at, w_next, s_next, w_in, s_in, more,
            K, R, TOKENS, TURNS, WHOLE, FP8, NORM, CAST, HOLD, AHEAD, X_AHEAD,
        )  # fmt: skip
        w_at, s_at = w_next, s_next
        out = gl.convert_layout(gl.sum(acc, 0), yl)
        if FP8:
            out = out * (2.0**SHRINK)
        y_at = y + (n.to(gl.int64) * rows + y_row + r)
        if SPLITS == 1:
            gl.store(y_at, out.to(y.dtype.element_ty), mask=n < count)
        else:
            part = parts + tile.to(gl.int64) * (SPLITS * R * N) + n * R + r
            gl.store(part + split * (R * N), out)
            barrier()
            if gl.atomic_add(counters + tile, 1) == SPLITS - 1:
                barrier()
                # Past L1, which may be stale.
                total = gl.load(part, cache_modifier=".cg")
                for s in gl.static_range(1, SPLITS):
                    total += gl.load(part + s * (R * N), cache_modifier=".cg")
                gl.store(y_at, total.to(y.dtype.element_ty), mask=n < count)
                gl.store(counters + tile, 0)
