"""The forward pass of `cedar.ops.mhc.backward_triton`: that of the single launch, in three.

Unlike the single launch it hands out what the way back wants: the raw columns and the two
reciprocal RMS. Bytes of 16-bit streams: ``T x 10 D x 2``, and 2 D more that mostly stay in L2.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300 (types are compared as the compiler of kernels knows it)

import triton
import triton.language as tl

__all__ = ["norm_rows", "rounded", "update_streams"]


@triton.jit
def rounded(x, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """float32 to the streams' type. Declared impure so that the compiler moves results between
    layouts instead of computing every stream once for each of its uses."""
    if FAST:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=False, pack=2
        )
    return x.to(DTYPE)


@triton.jit
def _project(z, stream, weight, DTYPE: tl.constexpr):
    """``z + stream · weightᵀ``; float32 weights in two parts unless everything is float32."""
    # One way out: what stands behind a return is compiled, too.
    if DTYPE == tl.float32:
        z = tl.dot(stream, tl.trans(weight), z, input_precision="ieee")
    else:
        high = weight.to(tl.bfloat16)
        low = (weight - high.to(tl.float32)).to(tl.bfloat16)
        z = tl.dot(stream, tl.trans(high), z)
        z = tl.dot(stream, tl.trans(low), z)
    return z


@triton.jit
def _weights(comb, post, token_T, known_T, STREAM: tl.constexpr):
    """The five weights of new stream ``STREAM``: of the four old ones, and of y."""
    line = comb + token_T * 16 + STREAM
    c0 = tl.load(line, mask=known_T, other=0.0)[:, None]
    c1 = tl.load(line + 4, mask=known_T, other=0.0)[:, None]
    c2 = tl.load(line + 8, mask=known_T, other=0.0)[:, None]
    c3 = tl.load(line + 12, mask=known_T, other=0.0)[:, None]
    return c0, c1, c2, c3, tl.load(post + token_T * 4 + STREAM, mask=known_T, other=0.0)[:, None]


@triton.jit
def update_streams(
    x, y, comb, post, pre, fn, x_out, h, parts, count,
    D: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
    PER_SPLIT: tl.constexpr, UPDATE: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """New streams, their collapse before its norm, and of a share of the channels the sums z and
    ``Σ X'²``: ``parts [splits, 25, T]``."""
    split = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    known = token < count
    column = tl.arange(0, COLUMNS)
    p0 = tl.load(pre + token * 4, mask=known, other=0.0)[:, None]
    p1 = tl.load(pre + token * 4 + 1, mask=known, other=0.0)[:, None]
    p2 = tl.load(pre + token * 4 + 2, mask=known, other=0.0)[:, None]
    p3 = tl.load(pre + token * 4 + 3, mask=known, other=0.0)[:, None]
    if UPDATE:
        c00, c10, c20, c30, q0 = _weights(comb, post, token, known, 0)
        c01, c11, c21, c31, q1 = _weights(comb, post, token, known, 1)
        c02, c12, c22, c32, q2 = _weights(comb, post, token, known, 2)
        c03, c13, c23, c33, q3 = _weights(comb, post, token, known, 3)
    z = tl.zeros((TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for d in tl.range(split * PER_SPLIT, (split + 1) * PER_SPLIT, CHANNELS, num_stages=STAGES):
        here = d + tl.arange(0, CHANNELS)
        inside = known[:, None] & (here < D)[None, :]
        place = token[:, None] * (4 * D) + here[None, :]
        s0 = tl.load(x + place, mask=inside, other=0.0)
        s1 = tl.load(x + place + D, mask=inside, other=0.0)
        s2 = tl.load(x + place + 2 * D, mask=inside, other=0.0)
        s3 = tl.load(x + place + 3 * D, mask=inside, other=0.0)
        if UPDATE:
            new = tl.load(y + token[:, None] * D + here[None, :], mask=inside, other=0.0)
            new = new.to(tl.float32)
            f0, f1 = s0.to(tl.float32), s1.to(tl.float32)
            f2, f3 = s2.to(tl.float32), s3.to(tl.float32)
            s0 = q0 * new + (c00 * f0 + c10 * f1 + c20 * f2 + c30 * f3)
            s0 = rounded(s0, DTYPE, FAST)
            s1 = q1 * new + (c01 * f0 + c11 * f1 + c21 * f2 + c31 * f3)
            s1 = rounded(s1, DTYPE, FAST)
            s2 = q2 * new + (c02 * f0 + c12 * f1 + c22 * f2 + c32 * f3)
            s2 = rounded(s2, DTYPE, FAST)
            s3 = q3 * new + (c03 * f0 + c13 * f1 + c23 * f2 + c33 * f3)
            s3 = rounded(s3, DTYPE, FAST)
            tl.store(x_out + place, s0, mask=inside)
            tl.store(x_out + place + D, s1, mask=inside)
            tl.store(x_out + place + 2 * D, s2, mask=inside)
            tl.store(x_out + place + 3 * D, s3, mask=inside)
        rows = (column < 24)[:, None] & (here < D)[None, :]
        line = fn + column[:, None] * (4 * D) + here[None, :]
        z = _project(z, s0, tl.load(line, mask=rows, other=0.0), DTYPE)
        z = _project(z, s1, tl.load(line + D, mask=rows, other=0.0), DTYPE)
        z = _project(z, s2, tl.load(line + 2 * D, mask=rows, other=0.0), DTYPE)
        z = _project(z, s3, tl.load(line + 3 * D, mask=rows, other=0.0), DTYPE)
        f0, f1, f2, f3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
        squares += f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3
        collapsed = p0 * f0 + p1 * f1 + p2 * f2 + p3 * f3
        tl.store(h + token[:, None] * D + here[None, :], collapsed.to(DTYPE), mask=inside)
    mine = parts + split.to(tl.int64) * 25 * count + token
    tl.store(
        mine[:, None] + column[None, :] * count, z, mask=known[:, None] & (column < 24)[None, :]
    )
    tl.store(mine + 24 * count, tl.sum(squares, 1), mask=known)


@triton.jit
def norm_rows(h, weight, rate, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of one token in place, and its reciprocal root mean square."""
    token = tl.program_id(0).to(tl.int64)
    here = tl.arange(0, BLOCK)
    x = tl.load(h + token * D + here, mask=here < D, other=0.0).to(tl.float32)
    w = tl.load(weight + here, mask=here < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(h + token * D + here, w * (x * scale), mask=here < D)
    tl.store(rate + token, scale)
