"""What the streams' gradients want to know of every token: the way back through its coefficients,
one token a thread, and beside it, bound by memory, the sums ``Σ h dh``, one token a program.

Sinkhorn is gone through backwards: a half step's input is its output times the sums it divided by,
so only those 4 sums are kept, for as long as the launch takes. With a half step's result ``c`` and
``p`` the gradient times the result, the gradient times the input is ``p − c Σ p``, sums over what
was divided by its sum: no division on the way back.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from cedar.ops.mhc.sinkhorn_triton import inverse

__all__ = ["prepare"]


@triton.jit
def _sums(c, eps, ROWS: tl.constexpr):
    """Sums of the rows or columns of a 4 x 4 matrix, plus eps."""
    out = ()
    for n in tl.static_range(4):
        if ROWS:
            total = (c[4 * n] + c[4 * n + 1]) + (c[4 * n + 2] + c[4 * n + 3])
        else:
            total = (c[n] + c[4 + n]) + (c[8 + n] + c[12 + n])
        out = out + (total + eps,)
    return out


@triton.jit
def _times(c, s, ROWS: tl.constexpr):
    """Every row (or column) times its factor."""
    out = ()
    for n in tl.static_range(16):
        out = out + (c[n] * s[n // 4 if ROWS else n % 4],)
    return out


@triton.jit
def _divided(c, s, ROWS: tl.constexpr, FAST: tl.constexpr):
    """Every row (or column) over its sum."""
    rates = ()
    for n in tl.static_range(4):
        rates = rates + (inverse(s[n], FAST),)
    return _times(c, rates, ROWS)


@triton.jit
def _undivided(p, c, ROWS: tl.constexpr):
    """``p − c Σ p`` over each row (or column)."""
    total = _sums(p, 0.0, ROWS)
    out = ()
    for n in tl.static_range(16):
        out = out + (p[n] - c[n] * total[n // 4 if ROWS else n % 4],)
    return out


@triton.jit
def _keep(scratch, s, number, token, known, count):
    for n in tl.static_range(4):
        tl.store(scratch + (number * 4 + n) * count + token, s[n], mask=known)


@triton.jit
def _kept(scratch, number, token, known, count):
    """Sums of half steps ``number`` and the one before."""
    out = ()
    for n in tl.static_range(8):
        place = scratch + ((number - n // 4) * 4 + n % 4) * count + token
        out = out + (tl.load(place, mask=known, other=1.0),)
    return out


@triton.jit
def _softmax_rows(a, FAST: tl.constexpr):
    out = ()
    for n in tl.static_range(4):
        top = tl.maximum(tl.maximum(a[4 * n], a[4 * n + 1]), tl.maximum(a[4 * n + 2], a[4 * n + 3]))
        e0, e1 = tl.exp(a[4 * n] - top), tl.exp(a[4 * n + 1] - top)
        e2, e3 = tl.exp(a[4 * n + 2] - top), tl.exp(a[4 * n + 3] - top)
        rate = inverse((e0 + e1) + (e2 + e3), FAST)
        out = out + (e0 * rate, e1 * rate, e2 * rate, e3 * rate)
    return out


@triton.jit
def _logits_back(a, g, scratch, token, known, count, hc_eps, ITERATIONS: tl.constexpr,
                 FAST: tl.constexpr):  # fmt: skip
    """The gradient of the 16 logits from that of the last half step's result."""
    soft = _softmax_rows(a, FAST)
    c = ()
    for k in tl.static_range(16):
        c = c + (soft[k] + hc_eps,)
    s = _sums(c, hc_eps, False)
    _keep(scratch, s, 1, token, known, count)
    c = _divided(c, s, False, FAST)
    for step in range(1, ITERATIONS):
        s = _sums(c, hc_eps, True)
        _keep(scratch, s, 2 * step, token, known, count)
        c = _divided(c, s, True, FAST)
        s = _sums(c, hc_eps, False)
        _keep(scratch, s, 2 * step + 1, token, known, count)
        c = _divided(c, s, False, FAST)
    p = ()
    for k in tl.static_range(16):
        p = p + (g[k] * c[k],)
    tl.debug_barrier()
    if ITERATIONS > 1:
        # Sums are asked for three steps before they are wanted.
        s = _kept(scratch, 2 * ITERATIONS - 1, token, known, count)
        then = _kept(scratch, tl.maximum(2 * ITERATIONS - 3, 1), token, known, count)
        later = _kept(scratch, tl.maximum(2 * ITERATIONS - 5, 1), token, known, count)
        for back in range(1, ITERATIONS):
            coming = tl.maximum(2 * (ITERATIONS - back) - 5, 1)
            last = _kept(scratch, coming, token, known, count)
            p = _undivided(p, c, False)
            c = _times(c, (s[0], s[1], s[2], s[3]), False)
            p = _undivided(p, c, True)
            c = _times(c, (s[4], s[5], s[6], s[7]), True)
            s, then, later = then, later, last
    p = _undivided(p, c, False)
    # Now p is the gradient times soft + eps; what the softmax wants is the gradient times soft.
    d = ()
    for k in tl.static_range(16):
        whole = soft[k] + hc_eps
        d = d + (tl.where(whole > 0.0, p[k] * (soft[k] * inverse(whole, FAST)), 0.0),)
    total = _sums(d, 0.0, True)
    out = ()
    for k in tl.static_range(16):
        out = out + (d[k] - soft[k] * total[k // 4],)
    return out


@triton.jit
def _solve(
    kept, rates, base, scale, dpre, dpost, dcomb, post, pre, comb, table, zeta, scratch, small,
    count, hc_eps,
    D: tl.constexpr, ITERATIONS: tl.constexpr, UPDATE: tl.constexpr, CUT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, 32)
    token = tl.program_id(0).to(tl.int64) * 32 + lane
    known = token < count
    z = ()
    for k in tl.static_range(24):
        z = z + (tl.load(kept + k * count + token, mask=known, other=0.0),)
    rho = tl.load(kept + 24 * count + token, mask=known, other=0.0)
    d = ()  # of the scaled columns
    for k in tl.static_range(8):
        factor = tl.load(scale) if k < 4 else tl.load(scale + 1)
        gate = 1.0 / (1.0 + tl.exp(-(z[k] * rho * factor + tl.load(base + k))))
        if k < 4:
            slope = tl.load(dpre + token * 4 + k, mask=known, other=0.0)
        else:
            slope = 2.0 * tl.load(dpost + token * 4 + (k - 4), mask=known, other=0.0)
        d = d + (slope * gate * (1.0 - gate),)
    a = ()
    g = ()
    for k in tl.static_range(16):
        a = a + (z[8 + k] * rho * tl.load(scale + 2) + tl.load(base + 8 + k),)
        g = g + (tl.load(dcomb + token * 16 + k, mask=known, other=0.0),)
    d = d + _logits_back(a, g, scratch, token, known, count, hc_eps, ITERATIONS, FAST)

    line = table + token // 16 * 512 + token % 16 * 4
    mine = small + tl.program_id(0) * 32
    d_rho = tl.zeros((32,), tl.float32)
    for part in tl.static_range(3):
        factor = tl.load(scale + part)
        d_scale = tl.zeros((32,), tl.float32)
        for k in tl.static_range(0 if part == 0 else 4 * part, 24 if part == 2 else 4 * part + 4):
            d_scale += d[k] * z[k] * rho
            d_rho += d[k] * factor * z[k]
            value = d[k] * factor * rho
            if CUT:
                at = zeta + token // 16 * 1024 + token % 16 * 32 + k
                high = value.to(tl.bfloat16)
                tl.store(at, high)
                tl.store(at + 512, (value - high.to(tl.float32)).to(tl.bfloat16))
            else:
                tl.store(zeta + token * 32 + k, value)
            tl.store(mine + k, tl.sum(d[k], 0))
        tl.store(mine + 24 + part, tl.sum(d_scale, 0))
    if CUT:
        nothing = zeta + (tl.program_id(0).to(tl.int64) * 2048 + 24)
        row, eight = tl.arange(0, 64)[:, None], tl.arange(0, 8)[None, :]
        tl.store(nothing + row * 32 + eight, tl.zeros((64, 8), tl.bfloat16))
    rate = tl.load(rates + token, mask=known, other=0.0)
    tl.store(line, rate)
    tl.store(line + 1, tl.zeros((32,), tl.float32), mask=~known)  # of the others: `_share`
    tl.store(line + 2, rho * rho * rho * d_rho / (4 * D))
    fours = token[:, None] * 4 + tl.arange(0, 4)[None, :]
    into = line[:, None] + tl.arange(0, 4)[None, :]
    tl.store(into + 64, tl.load(pre + fours, mask=known[:, None], other=0.0))
    if UPDATE:
        tl.store(into + 128, tl.load(post + fours, mask=known[:, None], other=0.0))
        all_16 = tl.arange(0, 16)[None, :]
        values = tl.load(comb + token[:, None] * 16 + all_16, mask=known[:, None], other=0.0)
        tl.store(line[:, None] + (192 + all_16 // 4 * 64 + all_16 % 4), values)


@triton.jit
def _share(h, dh, rates, table, token, D: tl.constexpr, BLOCK: tl.constexpr):
    """The factor of c in dc, of one token. dh is read again soon, h is not."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, D, BLOCK):
        here = start + tl.arange(0, BLOCK)
        place = token * D + here
        a = tl.load(h + place, mask=here < D, other=0.0, eviction_policy="evict_first")
        b = tl.load(dh + place, mask=here < D, other=0.0, eviction_policy="evict_last")
        total += a.to(tl.float32) * b.to(tl.float32)
    rate = tl.load(rates + token)
    tl.store(table + token // 16 * 512 + token % 16 * 4 + 1, rate * rate * tl.sum(total, 0) / D)


@triton.jit
def prepare(
    h, dh, kept, rates, base, scale, dpre, dpost, dcomb, post, pre, comb, table, zeta, scratch,
    small, count, hc_eps,
    D: tl.constexpr, ITERATIONS: tl.constexpr, UPDATE: tl.constexpr, CUT: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs: one for 32 tokens' coefficients, then one for every token's sum.

    ``table [T / 16, 8, 16, 4]``: for a token eight times four numbers: r, the factor of c in dc, κ
    and a gap; pre; post; the four rows of comb; a gap. ``zeta``: 24 ζ and zeros to 32, float32
    ``[T, 32]``, or CUT into two bfloat16 parts ``[T / 16, 2, 16, 32]``. ``small [T / 32, 32]``:
    sums over the tokens, of 24 for base and of 3 for scale.
    """
    if PDL:
        gdc_launch_dependents()
    solved = (count + 31) // 32
    if tl.program_id(0) < solved:
        _solve(
            kept, rates, base, scale, dpre, dpost, dcomb, post, pre, comb, table, zeta, scratch,
            small, count, hc_eps, D, ITERATIONS, UPDATE, CUT, FAST,
        )  # fmt: skip
    else:
        token = (tl.program_id(0) - solved).to(tl.int64)
        _share(h, dh, rates, table, token, D, BLOCK)
