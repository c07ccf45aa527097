"""Routed experts as two grouped products on packed FP4 weights, for any widths.

Tokens are sorted by expert and padded to tiles, so that every tile belongs to one expert; idle
tiles leave at once, and no size is read on the host. Weight rows are the long side of the tile and
tokens the short one, so a few tokens waste nothing. Weights stay packed until they are in
registers: a 32-bit word holds eight codes of one row, and all first codes are one operand, all
second codes another, so nothing is interleaved; the activations are permuted alike. Codes times
power-of-two scales are exact in bfloat16.

`few` and `many` do the same several times as fast on Hopper, for widths of whole 128s.

Bytes: every visited expert's ``3 D F (1/2 + 1/32)``, and ``T A (2 D + 2 F)`` for rows.
FLOP: ``6 T A D F``.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.experts.prepare import EIGHTHS, combine, ordered_place, prepare
from cedar.quant import FP8_ROW, QuantTensor

__all__ = ["experts", "visits_per_tile"]


def experts(
    x_TD: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: QuantTensor,
    w2: QuantTensor,
    w3: QuantTensor,
    *,
    limit: float,
) -> Tensor:
    """As `cedar.ops.experts.Experts` without a shared expert; packed FP4, inputs in FP8."""
    tokens, dim = x_TD.shape
    num_experts, inner = w1.shape[0], w1.shape[1]
    block = visits_per_tile(experts_TA.numel(), num_experts)
    x, tiles = prepare(x_TD, experts_TA, num_experts, block, EIGHTHS)
    count = len(tiles.expert_M)
    hidden = x_TD.new_empty((experts_TA.numel(), inner))
    down = x_TD.new_empty((experts_TA.numel(), dim))
    wide = x_TD.dtype == torch.float32
    up_rows, down_rows = _weight_rows(inner), _weight_rows(dim)
    _gate_up[(count, triton.cdiv(inner, up_rows))](
        x, tiles.source_R, weights_TA.contiguous(), tiles.expert_M,
        w1.codes.view(torch.int32), w1.scale, w3.codes.view(torch.int32), w3.scale, hidden,
        num_experts, limit, DIM=dim, INNER=inner, ACTIVE=experts_TA.shape[1],
        FLOOR=FP8_ROW.amax_floor, ROWS=up_rows, TOKENS=block, WORDS=_words(dim), WIDE=wide,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _down[(count, triton.cdiv(dim, down_rows))](
        hidden, tiles.source_R, tiles.expert_M, w2.codes.view(torch.int32), w2.scale, down,
        num_experts, DIM=dim, INNER=inner, ROWS=down_rows, TOKENS=block, WORDS=_words(inner),
        WIDE=wide, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = torch.empty((tokens, dim), dtype=torch.float32, device=x_TD.device)
    return combine(down, None, experts_TA.shape[1], out)


def visits_per_tile(visits: int, num_experts: int) -> int:
    """Rows of a tile: about as many as an expert gets, a power of two from 16 to 128."""
    mean = max(visits // num_experts, 1)
    return min(max(1 << (mean - 1).bit_length(), 16), 128)


def _weight_rows(rows: int) -> int:
    return min(max(triton.next_power_of_2(rows), 32), 64)


def _words(columns: int) -> int:
    """Words of a row that a step of the product takes; each holds eight codes."""
    return min(max(triton.next_power_of_2(columns // 8), 16), 32)


@triton.jit
def _codes(word, factor, J: tl.constexpr, WIDE: tl.constexpr):
    """The J-th E2M1 code of every word, times its factor, exactly.

    The three magnitude bits are the low exponent bits and the high mantissa bit of a bfloat16 that
    is 2^126 too small, the smallest one as a subnormal.
    """
    nibble = word >> (4 * J)
    bits = ((nibble & 7) << 6) | ((nibble & 8) << 12)
    value = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    exact = value.to(tl.float32) * factor.to(tl.float32)
    return exact if WIDE else exact.to(tl.bfloat16)


@triton.jit
def _factor(scale):
    """``2^(byte - 127 + 63)`` as a bfloat16."""
    return ((scale.to(tl.int32) + 63) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _dots(
    acc, word, factor, x_at, x_in, STEP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """``acc [ROWS, TOKENS]`` and the product of a step's words with their eight parts of x."""
    for j in tl.static_range(8):
        x = tl.load(x_at + j * STEP, mask=x_in, other=0.0)
        acc = tl.dot(_codes(word, factor, j, WIDE), x, acc, input_precision="ieee")
    return acc


@triton.jit
def _gate_up(
    x, source_R, weight_V, expert_M, c1, s1, c3, s3, hidden,
    count, limit,
    DIM: tl.constexpr, INNER: tl.constexpr, ACTIVE: tl.constexpr, FLOOR: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``hidden [V, F]``, in eighths: weighted SwiGLU, through FP8 per 32 values."""
    tile = tl.program_id(0)
    expert = tl.load(expert_M + tile)
    if expert >= count:
        return
    source = tl.load(source_R + tile * TOKENS + tl.arange(0, TOKENS))
    x_ok = (source >= 0)[None, :]
    f = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = (f < INNER)[:, None]
    row = (expert.to(tl.int64) * INNER + f)[:, None]
    x_ptr = x + ((source // ACTIVE).to(tl.int64) * DIM)[None, :]
    kind = tl.float32 if WIDE else tl.bfloat16
    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    words: tl.constexpr = DIM // 8
    k = tl.arange(0, WORDS)
    ok = row_ok & (k < words)[None, :]
    # Scales are bytes, too small for asynchronous copies: those of the next step are read early.
    scale1 = tl.load(s1 + row * (DIM // 32) + (k // 4)[None, :], mask=ok, other=0)
    scale3 = tl.load(s3 + row * (DIM // 32) + (k // 4)[None, :], mask=ok, other=0)
    for start in range(0, words, WORDS):
        at = start + k
        ok = row_ok & (at < words)[None, :]
        word1 = tl.load(c1 + row * words + at[None, :], mask=ok, other=0)
        word3 = tl.load(c3 + row * words + at[None, :], mask=ok, other=0)
        factor1, factor3 = _factor(scale1), _factor(scale3)
        ahead = at + WORDS
        ok = row_ok & (ahead < words)[None, :]
        scale1 = tl.load(s1 + row * (DIM // 32) + (ahead // 4)[None, :], mask=ok, other=0)
        scale3 = tl.load(s3 + row * (DIM // 32) + (ahead // 4)[None, :], mask=ok, other=0)
        x_at, x_in = x_ptr + at[:, None], x_ok & (at < words)[:, None]
        gate = _dots(gate, word1, factor1, x_at, x_in, words, WIDE)
        up = _dots(up, word3, factor3, x_at, x_in, words, WIDE)
    gate = tl.minimum(gate.to(kind).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(kind).to(tl.float32), -limit), limit)
    weight = tl.load(weight_V + source, mask=source >= 0, other=0.0)
    y = weight[None, :] * (gate / (1.0 + tl.exp(-gate)) * up)
    y = y.to(kind).to(tl.float32)
    # FP8 per 32 along F: a power of two at or above amax / 448, from the bits.
    blocks = tl.reshape(y, (ROWS // 32, 32, TOKENS))
    ratio = tl.maximum(tl.max(tl.abs(blocks), axis=1), FLOOR) / 448.0
    exponent = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    factor = (exponent << 23).to(tl.float32, bitcast=True)[:, None, :]
    codes = (blocks / factor).to(tl.float8e4nv)
    y = tl.reshape(codes.to(tl.float32) * factor, (ROWS, TOKENS))
    place = source.to(tl.int64)[None, :] * INNER + ordered_place(f, INNER, 0)[:, None]
    tl.store(hidden + place, (y * 9223372036854775808.0).to(kind), mask=row_ok & x_ok)


@triton.jit
def _down(
    hidden, source_R, expert_M, codes, scales, out, count,
    DIM: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``out [V, D]``: each row through its expert's ``w2``."""
    tile = tl.program_id(0)
    expert = tl.load(expert_M + tile)
    if expert >= count:
        return
    source = tl.load(source_R + tile * TOKENS + tl.arange(0, TOKENS))
    x_ok = (source >= 0)[None, :]
    d = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = (d < DIM)[:, None]
    row = (expert.to(tl.int64) * DIM + d)[:, None]
    x_ptr = hidden + (source.to(tl.int64) * INNER)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    words: tl.constexpr = INNER // 8
    k = tl.arange(0, WORDS)
    ok = row_ok & (k < words)[None, :]
    scale = tl.load(scales + row * (INNER // 32) + (k // 4)[None, :], mask=ok, other=0)
    for start in range(0, words, WORDS):
        at = start + k
        ok = row_ok & (at < words)[None, :]
        word = tl.load(codes + row * words + at[None, :], mask=ok, other=0)
        factor = _factor(scale)
        ahead = at + WORDS
        ok = row_ok & (ahead < words)[None, :]
        scale = tl.load(scales + row * (INNER // 32) + (ahead // 4)[None, :], mask=ok, other=0)
        x_at, x_in = x_ptr + at[:, None], x_ok & (at < words)[:, None]
        acc = _dots(acc, word, factor, x_at, x_in, words, WIDE)
    kind = tl.float32 if WIDE else tl.bfloat16
    where = out + source.to(tl.int64)[None, :] * DIM + d[:, None]
    tl.store(where, acc.to(kind), mask=row_ok & x_ok)
