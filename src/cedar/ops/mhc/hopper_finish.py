"""The finish programs of `cedar.ops.mhc.hopper`, and what both kinds of programs agree on.

A finish program reads the parts of its tokens once, from L2: 26 values of each slice, 8.3 KB a
token with 80 slices. It adds them up in their order, sends the slice programs the reciprocal RMS of
the collapsed input, and goes on to sigmoids and Sinkhorn, one token a thread.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cedar.ops.mhc.sinkhorn_triton import sinkhorn

__all__ = ["LIST", "PLAIN", "RING", "ROWS", "barrier", "finish_tiles", "part_place"]

# Triton 3.6 calls it by its older name.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
RING = gl.constexpr(4)  # tiles of a group whose parts have a place
ROWS = gl.constexpr(26)  # of a part: z, the sums of squares of X' and of the collapsed input
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LIST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_TOKEN = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_sinkhorn = gluon.jit(sinkhorn.fn)


@gluon.jit
def part_place(number, token, OWN: gl.constexpr):
    """Where a part has a value of a token: what one finish program reads is contiguous."""
    return token // OWN * (ROWS * OWN) + number * OWN + token % OWN


@gluon.jit
def _coefficients(
    rows, rho, base, scale, pre_out, post_out, comb_out, token, known, hc_eps,
    ITERATIONS: gl.constexpr,
):  # fmt: skip
    """From z in shared memory to the coefficients, one token a thread."""
    factor = gl.load(scale) * rho
    for n in gl.static_range(4):
        a = rows.index(n).load(_TOKEN) * factor + gl.load(base + n)
        gl.store(pre_out + token * 4 + n, 1.0 / (1.0 + gl.exp(-a)) + hc_eps, mask=known)
    factor = gl.load(scale + 1) * rho
    for n in gl.static_range(4):
        a = rows.index(4 + n).load(_TOKEN) * factor + gl.load(base + 4 + n)
        gl.store(post_out + token * 4 + n, 2.0 / (1.0 + gl.exp(-a)), mask=known)
    factor = gl.load(scale + 2) * rho
    logits = ()
    for n in gl.static_range(8, 24):
        logits = logits + (rows.index(n).load(_TOKEN) * factor + gl.load(base + n),)
    comb = _sinkhorn(logits, hc_eps, ITERATIONS, True)
    for n in gl.static_range(16):
        gl.store(comb_out + token * 16 + n, comb[n], mask=known)


@gluon.jit
def finish_tiles(
    base, scale, pre_out, post_out, comb_out, kept, rates, parts, arrivals, ready, count,
    norm_eps, hc_eps,
    D: gl.constexpr, CH: gl.constexpr, GROUPS: gl.constexpr, FINISH: gl.constexpr,
    KEEP: gl.constexpr, ITERATIONS: gl.constexpr,
):  # fmt: skip
    """Of all tiles of a group 1/FINISH of the tokens: the parts added up, the rates sent, the
    coefficients."""
    SLICES: gl.constexpr = D // CH
    OWN: gl.constexpr = 64 // FINISH
    PARTS: gl.constexpr = gl.BlockedLayout([1, OWN // 4], [8, 4], [4, 1], [1, 0])  # rows x tokens
    AHEAD: gl.constexpr = 160 // (OWN // 4)  # loads under way at once
    number = gl.program_id(0) - SLICES * GROUPS
    group = number // FINISH
    first = number % FINISH * OWN
    sums = gl.allocate_shared_memory(gl.float32, [32, OWN], PLAIN)
    rows = sums._reinterpret(gl.float32, [32, OWN], LIST)
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, PARTS))
    lane = gl.arange(0, OWN, layout=gl.SliceLayout(0, PARTS))
    own = first + gl.arange(0, OWN, layout=_TOKEN)
    turn = 0
    for tile in range(group, gl.cdiv(count, 64), GROUPS):
        place = group * RING + turn % RING
        mine = ready + place * 64
        barrier()  # the words of the last turns are written
        used = (gl.load(mine + first, volatile=True) >> 32).to(gl.int32) + 1
        while gl.atomic_add(arrivals + place, 0, sem="acquire") != used * SLICES:
            pass
        part = parts + (place * (SLICES * ROWS * 64) + first * ROWS)
        part = part + part_place(row[:, None], lane[None, :], OWN)
        total = gl.zeros([32, OWN], gl.float32, PARTS)
        for start in gl.static_range(0, SLICES, AHEAD):
            values = ()
            for n in gl.static_range(start, min(start + AHEAD, SLICES)):
                line = part + n * (ROWS * 64)
                values = values + (
                    gl.load(line, mask=(row < ROWS)[:, None], other=0.0, cache_modifier=".cg"),
                )
            for n in gl.static_range(min(AHEAD, SLICES - start)):
                total += values[n]
        sums.store(total)
        barrier()  # the parts are read: their place may be written again
        rate = gl.rsqrt(rows.index(25).load(_TOKEN) / D + norm_eps)
        word = (used.to(gl.int64) << 32) | rate.to(gl.int32, bitcast=True).to(gl.int64)
        gl.store(mine + own, word)
        token = tile.to(gl.int64) * 64 + own
        known = token < count
        rho = gl.rsqrt(rows.index(24).load(_TOKEN) / (4 * D) + norm_eps)
        if KEEP:
            gl.store(rates + token, rate, mask=known)
            gl.store(kept + 24 * count.to(gl.int64) + token, rho, mask=known)
            for n in gl.static_range(24):
                line = kept + n * count.to(gl.int64) + token
                gl.store(line, rows.index(n).load(_TOKEN), mask=known)
        _coefficients(
            rows, rho, base, scale, pre_out, post_out, comb_out, token, known, hc_eps, ITERATIONS
        )  # fmt: skip
        turn += 1  # noqa: SIM113 (no enumerate in a kernel)
