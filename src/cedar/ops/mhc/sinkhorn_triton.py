"""The coefficients of a token and the way back through them, one token a thread.

Sinkhorn is gone through backwards: a step's input is its output times the sums it divided by, so
only those 4 sums per half step are kept, for as long as the launch takes.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

import triton
import triton.language as tl

__all__ = ["mix_tokens", "sinkhorn", "solve_tokens"]


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    """1 / x of positive, normal values; FAST: one unit in the last place off at most."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def sinkhorn(logits, eps, ITERATIONS: tl.constexpr, FAST: tl.constexpr):
    """Softmax over the rows of 4 x 4 logits, plus eps; then columns and rows divided in turn by
    their sums plus eps, columns first and last.

    Of a result ``k[j, i] / (R_j C_i)`` only the 8 divisors change. A row's sum is its divisor's
    ``(Σ_i k[j, i] / C_i) / R_j``, so the new one is ``Σ_i k[j, i] / C_i + eps R_j``: half the
    operations, and less than half of them one after the other.
    """
    k = ()
    for j in tl.static_range(4):
        top = tl.maximum(
            tl.maximum(logits[4 * j], logits[4 * j + 1]),
            tl.maximum(logits[4 * j + 2], logits[4 * j + 3]),
        )
        e0, e1 = tl.exp(logits[4 * j] - top), tl.exp(logits[4 * j + 1] - top)
        e2, e3 = tl.exp(logits[4 * j + 2] - top), tl.exp(logits[4 * j + 3] - top)
        rate = _inverse((e0 + e1) + (e2 + e3), FAST)
        k = k + (e0 * rate + eps, e1 * rate + eps, e2 * rate + eps, e3 * rate + eps)
    columns = ()
    c = ()
    for i in tl.static_range(4):
        total = (k[i] + k[4 + i]) + (k[8 + i] + k[12 + i]) + eps
        columns = columns + (total,)
        c = c + (_inverse(total, FAST),)
    one = k[0] * 0.0 + 1.0
    rows = (one, one, one, one)
    r = (one, one, one, one)
    for _ in range(1, ITERATIONS):
        sums = ()
        r = ()
        for j in tl.static_range(4):
            near = k[4 * j] * c[0] + eps * rows[j] + k[4 * j + 1] * c[1]
            total = near + (k[4 * j + 2] * c[2] + k[4 * j + 3] * c[3])
            sums = sums + (total,)
            r = r + (_inverse(total, FAST),)
        rows = sums
        sums = ()
        c = ()
        for i in tl.static_range(4):
            near = k[i] * r[0] + eps * columns[i] + k[4 + i] * r[1]
            total = near + (k[8 + i] * r[2] + k[12 + i] * r[3])
            sums = sums + (total,)
            c = c + (_inverse(total, FAST),)
        columns = sums
    out = ()
    for n in tl.static_range(16):
        out = out + (k[n] * r[n // 4] * c[n % 4],)
    return out


@triton.jit
def _sums4(c, eps, ROWS: tl.constexpr):
    """Sums of the rows or columns of a 4 x 4 matrix, plus eps."""
    out = ()
    for n in tl.static_range(4):
        if ROWS:
            total = c[4 * n] + c[4 * n + 1] + c[4 * n + 2] + c[4 * n + 3] + eps
        else:
            total = c[n] + c[4 + n] + c[8 + n] + c[12 + n] + eps
        out = out + (total,)
    return out


@triton.jit
def _times(c, s, ROWS: tl.constexpr):
    """Every row (or column) times its factor."""
    out = ()
    for n in tl.static_range(16):
        out = out + (c[n] * s[n // 4 if ROWS else n % 4],)
    return out


@triton.jit
def _inverses(s):
    return (1.0 / s[0], 1.0 / s[1], 1.0 / s[2], 1.0 / s[3])


@triton.jit
def _products(a, b):
    out = ()
    for n in tl.static_range(16):
        out = out + (a[n] * b[n],)
    return out


@triton.jit
def _centred(d, c, ROWS: tl.constexpr):
    """``d − Σ d c`` over each row (or column)."""
    total = _sums4(_products(d, c), 0.0, ROWS)
    out = ()
    for n in tl.static_range(16):
        out = out + (d[n] - total[n // 4 if ROWS else n % 4],)
    return out


@triton.jit
def _keep(scratch, s, number, token_T, known_T, count):
    for n in tl.static_range(4):
        tl.store(scratch + (number * 4 + n) * count + token_T, s[n], mask=known_T)


@triton.jit
def _kept(scratch, number, token_T, known_T, count):
    out = ()
    for n in tl.static_range(4):
        place = scratch + (number * 4 + n) * count + token_T
        out = out + (tl.load(place, mask=known_T, other=1.0),)
    return out


@triton.jit
def _softmax_rows(a):
    out = ()
    for n in tl.static_range(4):
        top = tl.maximum(tl.maximum(a[4 * n], a[4 * n + 1]), tl.maximum(a[4 * n + 2], a[4 * n + 3]))
        e0, e1 = tl.exp(a[4 * n] - top), tl.exp(a[4 * n + 1] - top)
        e2, e3 = tl.exp(a[4 * n + 2] - top), tl.exp(a[4 * n + 3] - top)
        rate = 1.0 / (e0 + e1 + e2 + e3)
        out = out + (e0 * rate, e1 * rate, e2 * rate, e3 * rate)
    return out


@triton.jit
def mix_tokens(
    parts, base, scale, pre, post, comb_out, kept, count, norm_eps, hc_eps,
    D: tl.constexpr, SPLITS: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """The coefficients, one token a thread; ``kept [25, T]`` has z and ρ for the way back."""
    token = tl.program_id(0).to(tl.int64) * 32 + tl.arange(0, 32)
    known = token < count
    z = ()
    for k in tl.static_range(25):
        total = tl.zeros((32,), tl.float32)
        for s in tl.static_range(SPLITS):
            total += tl.load(parts + (s * 25 + k) * count + token, mask=known, other=1.0)
        z = z + (total,)
    rho = tl.rsqrt(z[24] / (4 * D) + norm_eps)
    tl.store(kept + 24 * count + token, rho, mask=known)
    a = ()
    for k in tl.static_range(24):
        tl.store(kept + k * count + token, z[k], mask=known)
        part = scale + (0 if k < 4 else 1 if k < 8 else 2)
        a = a + (z[k] * rho * tl.load(part) + tl.load(base + k),)
    for k in tl.static_range(4):
        tl.store(pre + token * 4 + k, 1.0 / (1.0 + tl.exp(-a[k])) + hc_eps, mask=known)
        tl.store(post + token * 4 + k, 2.0 / (1.0 + tl.exp(-a[4 + k])), mask=known)
    logits = ()
    for k in tl.static_range(16):
        logits = logits + (a[8 + k],)
    comb = sinkhorn(logits, hc_eps, ITERATIONS, False)
    for k in tl.static_range(16):
        tl.store(comb_out + token * 16 + k, comb[k], mask=known)


@triton.jit
def solve_tokens(
    kept, rates, base, scale, dpre, dpost, dcomb, inner, post, pre, comb, table, scratch, small,
    count, hc_eps,
    D: tl.constexpr, ITERATIONS: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """One token a thread. ``table [T / 32, 64, 32]``: for a token 24 ζ, r, the factor of c in dc,
    κ, a gap, and from 32 on post, pre and comb: all that `_streams` wants to know of it."""
    lane = tl.arange(0, 32)
    token = tl.program_id(0).to(tl.int64) * 32 + lane
    known = token < count
    z = ()
    for k in tl.static_range(24):
        z = z + (tl.load(kept + k * count + token, mask=known, other=0.0),)
    rho = tl.load(kept + 24 * count + token, mask=known, other=0.0)
    rate = tl.load(rates + token, mask=known, other=0.0)
    sum_h = tl.load(inner + token, mask=known, other=0.0)

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
    soft = _softmax_rows(a)
    c = ()
    for k in tl.static_range(16):
        c = c + (soft[k] + hc_eps,)
    s = _sums4(c, hc_eps, False)
    _keep(scratch, s, 1, token, known, count)
    c = _times(c, _inverses(s), False)
    for step in range(1, ITERATIONS):
        s = _sums4(c, hc_eps, True)
        _keep(scratch, s, 2 * step, token, known, count)
        c = _times(c, _inverses(s), True)
        s = _sums4(c, hc_eps, False)
        _keep(scratch, s, 2 * step + 1, token, known, count)
        c = _times(c, _inverses(s), False)
    tl.debug_barrier()
    for back in range(1, ITERATIONS):
        s = _kept(scratch, 2 * (ITERATIONS - back) + 1, token, known, count)
        t = _kept(scratch, 2 * (ITERATIONS - back), token, known, count)
        g = _times(_centred(g, c, False), _inverses(s), False)
        c = _times(c, s, False)
        g = _times(_centred(g, c, True), _inverses(t), True)
        c = _times(c, t, True)
    s = _kept(scratch, 1, token, known, count)
    g = _times(_centred(g, c, False), _inverses(s), False)
    d = d + _products(_centred(g, soft, True), soft)

    line = table + tl.program_id(0).to(tl.int64) * 2048 + lane
    mine = small + tl.program_id(0) * 32
    d_rho = tl.zeros((32,), tl.float32)
    for part in tl.static_range(3):
        factor = tl.load(scale + part)
        d_scale = tl.zeros((32,), tl.float32)
        for k in tl.static_range(0 if part == 0 else 4 * part, 24 if part == 2 else 4 * part + 4):
            d_scale += d[k] * z[k] * rho
            d_rho += d[k] * factor * z[k]
            tl.store(line + k * 32, d[k] * factor * rho)
            tl.store(mine + k, tl.sum(d[k], 0))
        tl.store(mine + 24 + part, tl.sum(d_scale, 0))
    tl.store(line + 24 * 32, rate)
    tl.store(line + 25 * 32, rate * rate * sum_h / D)
    tl.store(line + 26 * 32, rho * rho * rho * d_rho / (4 * D))
    for k in tl.static_range(5):
        tl.store(line + (27 + k) * 32, tl.zeros((32,), tl.float32))
    for k in tl.static_range(4):
        tl.store(line + (36 + k) * 32, tl.load(pre + token * 4 + k, mask=known, other=0.0))
    if UPDATE:
        for k in tl.static_range(4):
            tl.store(line + (32 + k) * 32, tl.load(post + token * 4 + k, mask=known, other=0.0))
        for k in tl.static_range(16):
            tl.store(line + (40 + k) * 32, tl.load(comb + token * 16 + k, mask=known, other=0.0))
