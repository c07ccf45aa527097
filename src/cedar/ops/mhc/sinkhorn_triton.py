"""The coefficients of a token, one token a thread."""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

import triton
import triton.language as tl

__all__ = ["inverse", "mix_tokens", "sinkhorn"]


@triton.jit
def inverse(x, FAST: tl.constexpr):
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
        rate = inverse((e0 + e1) + (e2 + e3), FAST)
        k = k + (e0 * rate + eps, e1 * rate + eps, e2 * rate + eps, e3 * rate + eps)
    columns = ()
    c = ()
    for i in tl.static_range(4):
        total = (k[i] + k[4 + i]) + (k[8 + i] + k[12 + i]) + eps
        columns = columns + (total,)
        c = c + (inverse(total, FAST),)
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
            r = r + (inverse(total, FAST),)
        rows = sums
        sums = ()
        c = ()
        for i in tl.static_range(4):
            near = k[i] * r[0] + eps * columns[i] + k[4 + i] * r[1]
            total = near + (k[8 + i] * r[2] + k[12 + i] * r[3])
            sums = sums + (total,)
            c = c + (inverse(total, FAST),)
        columns = sums
    out = ()
    for n in tl.static_range(16):
        out = out + (k[n] * r[n // 4] * c[n % 4],)
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
