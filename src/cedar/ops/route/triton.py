"""The router in two launches: products of bfloat16 split along D, then the whole decision.

Products are exact and sums float32, 256 values at a time and those in order, however many tokens
there are: a token's routing does not depend on its batch. Ties go to the lowest number.

Bytes: ``2 D (E + T)``, and ``4 T E`` for each part of D in between. FLOP: ``2 T E D``.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.route import Routing
from cedar.ops.route import reference as plain

__all__ = ["PART", "SCORES", "decide", "part_sums", "router", "unsupported"]

SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
PART = 256  # values of D that are summed at a stretch
_SPLIT_BELOW = 256  # tokens; more fill the device without splitting D
_MOST = 1024  # experts


def unsupported(x_TD: Tensor, weight_ED: Tensor, score_func: str) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if x_TD.dtype != torch.bfloat16 or weight_ED.dtype != torch.bfloat16:
        return f"{x_TD.dtype} times {weight_ED.dtype}"
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_ED.requires_grad):
        return "a gradient"
    if len(x_TD) == 0 or x_TD.shape[1] % 16 or len(weight_ED) > _MOST:
        return "no tokens, odd widths or very many experts"
    return None if score_func in SCORES else f"scores by {score_func}"


def router(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias: Tensor,
    active: int,
    *,
    temp: float,
    score_func: str,
    normalize: bool,
    route_scale: float,
    real_T: Tensor | None = None,
) -> Routing:
    """`cedar.ops.route.Router`; inputs it cannot take go to the reference."""
    if unsupported(x_TD, weight_ED, score_func) is not None:
        return plain.router(
            x_TD, weight_ED, bias, active,
            temp=temp, score_func=score_func, normalize=normalize, route_scale=route_scale,
            real_T=real_T,
        )  # fmt: skip
    tokens, dim = x_TD.shape
    count = weight_ED.shape[0]
    x, bias = x_TD.contiguous(), bias.to(torch.float32)
    if bias.stride(-1) != 1:
        bias = bias.contiguous()
    parts = triton.cdiv(dim, PART)
    splits = parts if tokens < _SPLIT_BELOW else 1
    sums = torch.empty((splits, tokens, count), dtype=torch.float32, device=x.device)
    block = min(max(triton.next_power_of_2(tokens), 16), 64)
    _products[(triton.cdiv(count, 64), splits, triton.cdiv(tokens, block))](
        x, weight_ED.contiguous(), sums, tokens, count,
        DIM=dim, PART=PART, PARTS=parts // splits, ROWS=64, TOKENS=block, STEP=64,
        num_warps=4, num_stages=4, **dependent(x.device),
    )  # fmt: skip
    experts = torch.empty((tokens, active), dtype=torch.int64, device=x.device)
    weights = torch.empty((tokens, active), dtype=torch.float32, device=x.device)
    scores = torch.empty((tokens, count), dtype=torch.float32, device=x.device)
    one = bias.dim() == 1 or len(bias) == 1
    _decide[(tokens,)](
        sums, bias, real_T, experts, weights, scores, tokens, count, 0 if one else bias.stride(0),
        float(temp), float(route_scale), SPLITS=splits, ACTIVE=active,
        WIDTH=triton.next_power_of_2(count), CHOSEN=triton.next_power_of_2(active),
        SCORES=SCORES[score_func], NORMALIZE=normalize, num_warps=4,
        enable_fp_fusion=False, **dependent(x.device),
    )  # fmt: skip
    return Routing(experts, weights, scores)


@triton.jit(do_not_specialize=["tokens"])
def _products(
    x, weight, sums, tokens, count,
    DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``sums [S, T, E]``: a program takes ``PARTS`` parts of D for some experts and tokens."""
    if PDL:
        hand_over()
    part_sums(
        x, weight, sums, tokens, count, tl.program_id(0), tl.program_id(1), tl.program_id(2),
        DIM, PART, PARTS, ROWS, TOKENS, STEP,
    )  # fmt: skip


@triton.jit
def part_sums(
    x, weight, sums, tokens, count, tile, split, block,
    DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Products of a tile of experts with a block of tokens over a split of D, to ``sums``."""
    e = tile * ROWS + tl.arange(0, ROWS)
    t = block * TOKENS + tl.arange(0, TOKENS)
    at_w = weight + e.to(tl.int64)[:, None] * DIM
    at_x = x + t.to(tl.int64)[None, :] * DIM
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for p in range(PARTS):
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        start = (split * PARTS + p) * PART
        for step in range(0, PART, STEP):
            d = start + step + tl.arange(0, STEP)
            inside = d < DIM
            w = tl.load(at_w + d[None, :], mask=(e < count)[:, None] & inside[None, :], other=0.0)
            v = tl.load(at_x + d[:, None], mask=(t < tokens)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(w, v, acc)
        total += acc
    place = split.to(tl.int64) * tokens * count + t.to(tl.int64)[None, :] * count
    tl.store(sums + place + e[:, None], total, mask=(e < count)[:, None] & (t < tokens)[None, :])


@triton.jit
def _exp(x):
    """``e^x`` for ``x`` from -87 to 0 to a unit in the last place or two; 0 below."""
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4  # ln 2 in two parts, the first exact times n
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * r * r + r + 1.0
    scale = ((tl.maximum(n, -126.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, p * scale)


@triton.jit
def _log1p(x):
    """``ln(1 + x)`` for ``x`` from 0 to 1, by the series of 2 artanh(x / (2 + x))."""
    s = tl.div_rn(x, 2.0 + x)
    q = s * s
    p = q * 0.05882353 + 0.06666667
    p = p * q + 0.07692308
    p = p * q + 0.09090909
    p = p * q + 0.11111111
    p = p * q + 0.14285715
    p = p * q + 0.2
    p = p * q + 0.33333334
    return 2.0 * (s + s * q * p)


@triton.jit(do_not_specialize=["tokens"])
def _decide(
    sums, bias, real, experts, weights, scores, tokens, count, bias_stride, temp, route_scale,
    SPLITS: tl.constexpr, ACTIVE: tl.constexpr, WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
    SCORES: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    decide(
        sums, bias, real, experts, weights, scores, tl.program_id(0), tokens, count, bias_stride,
        temp, route_scale, SPLITS, ACTIVE, WIDTH, CHOSEN, SCORES, NORMALIZE,
    )  # fmt: skip


@triton.jit
def decide(
    sums, bias, real, experts, weights, scores, token, tokens, count, bias_stride,
    temp, route_scale,
    SPLITS: tl.constexpr, ACTIVE: tl.constexpr, WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
    SCORES: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """One token: its scores, then the best one ``ACTIVE`` times; the first row's if not real.

    Stores all of it and returns the numbers ``[CHOSEN]`` of its experts, -1 behind the last.
    """
    token = tl.zeros((), tl.int64) + token
    row = token
    if real is not None:
        row = tl.where(tl.load(real + token) != 0, token, 0)
    e = tl.arange(0, WIDTH)
    inside = e < count
    logit = tl.zeros((WIDTH,), tl.float32)
    for s in tl.static_range(SPLITS):
        at = (s * tokens + row) * count
        # Past L1: another multiprocessor may just have written them.
        logit += tl.load(sums + at + e, mask=inside, other=0.0, cache_modifier=".cg")
    logit = tl.div_rn(logit, tl.full((WIDTH,), 1.0, tl.float32) * temp)
    if SCORES == 0:
        high = tl.max(tl.where(inside, logit, -float("inf")), 0)
        grown = tl.where(inside, _exp(logit - high), 0.0)
        score = tl.div_rn(grown, tl.zeros((WIDTH,), tl.float32) + tl.sum(grown, 0))
    elif SCORES == 1:
        small = _exp(-tl.abs(logit))
        score = tl.div_rn(tl.where(logit < 0, small, 1.0), 1.0 + small)
    else:
        softplus = tl.maximum(logit, 0.0) + _log1p(_exp(-tl.abs(logit)))
        score = tl.sqrt_rn(softplus)
    tl.store(scores + token * count + e, score, mask=inside)
    # Order-preserving bits above, the complement of the number below: one maximum finds both.
    biased = score + tl.load(bias + row * bias_stride + e, mask=inside, other=0.0)
    bits = (biased + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (bits.to(tl.int64) << 32) | (WIDTH - 1 - e).to(tl.int64)
    key = tl.where(inside, key, -0x8000000000000000)
    a = tl.arange(0, CHOSEN)
    number = tl.full((CHOSEN,), -1, tl.int32)
    for n in tl.static_range(ACTIVE):
        best = WIDTH - 1 - (tl.max(key, 0) & 0xFFFFFFFF).to(tl.int32)
        number = tl.where(a == n, best, number)
        key = tl.where(e == best, -0x8000000000000000, key)
    weight = tl.sum(tl.where(number[:, None] == e[None, :], score[None, :], 0.0), 1)
    if NORMALIZE:
        whole = tl.sum(weight, 0) + 1e-20
        weight = tl.div_rn(weight, tl.zeros((CHOSEN,), tl.float32) + whole)
    at = token * ACTIVE + a
    tl.store(experts + at, number.to(tl.int64), mask=a < ACTIVE)
    tl.store(weights + at, weight * route_scale, mask=a < ACTIVE)
    return number
