"""Grouped products of rows sorted by expert with dense bfloat16 weights, forward and backward.

Rows are those of `cedar.ops.experts.training_plan`: the tiles of one expert follow one another and
rows without a visit are zeros. A tile has `ROWS` rows, and `more` if its expert has them, so that
an expert with a few more visits than `ROWS` reads its weights once. A program holds two products:
gate and up, or two neighbouring tiles of columns. Operands arrive by TMA.

FLOP: ``4 R D F`` of `hidden_rows`, `input_gradient` and `weight_gradients` of gate and up, half of
that of the others. Bytes: weights or their gradients once, ``2 E D F`` each; rows
``2 R (D + 3 F)`` of `hidden_rows`, ``2 R (D + F)`` of `product_rows`, ``10 R F`` of
`swiglu_gradient`, ``2 R (D + 2 F)`` of `input_gradient`.
"""

# mypy: ignore-errors

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cedar.ops.cast.triton import round_trip
from cedar.ops.experts.training_plan import VisitPlan, ceil_div, power_of_two
from cedar.ops.experts.training_swiglu import swiglu_parts

__all__ = [
    "ROWS",
    "Tiling",
    "hidden_rows",
    "input_gradient",
    "product_rows",
    "swiglu_gradient",
    "weight_gradients",
]

ROWS = 128
_STEP = 64  # of the dimension that is summed over


@dataclass(frozen=True, slots=True)
class Tiling:
    """more: further rows of a tile where its expert has them. columns: of each of two products."""

    more: int
    columns: int
    warps: int
    stages: int

    @property
    def per_tile(self) -> int:
        return ROWS + self.more


def hidden_rows(
    x_RD: Tensor, weight_V: Tensor, w1: Tensor, w3: Tensor, plan: VisitPlan, limit: float,
    tiling: Tiling, *, save: bool, quantise: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """``[R, F]`` each: weighted SwiGLU, and what it is computed from (with ``save``).

    quantise: the former goes through FP8 per 32 values.
    """
    _, inner, dim = w1.shape
    hidden = x_RD.new_empty((len(x_RD), inner))
    gate, up = (torch.empty_like(hidden), torch.empty_like(hidden)) if save else (None, None)
    _hidden[(ceil_div(inner, tiling.columns), len(plan.tile_M3))](
        _tiles(x_RD, ROWS), _tiles(x_RD, max(tiling.more, 16)),
        _tiles(w1, tiling.columns), _tiles(w3, tiling.columns),
        plan.tile_M3, plan.source_R, weight_V, hidden, gate, up, dim, inner, limit,
        SAVE=save, QUANTISE=quantise, **_constants(tiling),
    )  # fmt: skip
    return hidden, gate, up


def product_rows(
    rows_RK: Tensor, weight: Tensor, plan: VisitPlan, tiling: Tiling, *, along: bool
) -> Tensor:
    """``[R, N]``: each row through its expert's ``weight [E, N, K]`` (along) or ``[E, K, N]``."""
    n, k = weight.shape[1:] if along else weight.shape[:0:-1]
    out = rows_RK.new_empty((len(rows_RK), n))
    shape = (tiling.columns, _STEP) if along else (_STEP, tiling.columns)
    _rows[(ceil_div(n, 2 * tiling.columns), len(plan.tile_M3))](
        _tiles(rows_RK, ROWS), _tiles(rows_RK, max(tiling.more, 16)), _tiles(weight, *shape),
        plan.tile_M3, out, k, n, ALONG=along, **_constants(tiling),
    )  # fmt: skip
    return out


def swiglu_gradient(
    grad_RF: Tensor, weight_V: Tensor, gate_RF: Tensor, up_RF: Tensor, plan: VisitPlan, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of hidden rows, which is overwritten: of gate, up and routing weights."""
    rows, inner = grad_RF.shape
    up_grad, weight_grad = torch.empty_like(grad_RF), torch.empty_like(weight_V)
    _swiglu_gradient[(rows // 8,)](
        grad_RF, gate_RF, up_RF, plan.source_R, plan.first_E1, weight_V, up_grad, weight_grad,
        inner, len(plan.first_E1) - 1, limit,
        WIDTH=min(power_of_two(inner), 256), ROWS=8, num_warps=4,
    )  # fmt: skip
    return grad_RF, up_grad, weight_grad


def input_gradient(
    gate_grad: Tensor, up_grad: Tensor, w1: Tensor, w3: Tensor, plan: VisitPlan, tiling: Tiling
) -> Tensor:
    """``[R, D]``: the gradient of each row's token."""
    _, inner, dim = w1.shape
    out = gate_grad.new_empty((len(gate_grad), dim))
    _input_gradient[(ceil_div(dim, 2 * tiling.columns), len(plan.tile_M3))](
        _tiles(gate_grad, ROWS), _tiles(gate_grad, max(tiling.more, 16)),
        _tiles(up_grad, ROWS), _tiles(up_grad, max(tiling.more, 16)),
        _tiles(w1, _STEP, tiling.columns), _tiles(w3, _STEP, tiling.columns),
        plan.tile_M3, out, dim, inner, **_constants(tiling),
    )  # fmt: skip
    return out


def weight_gradients(
    left: tuple[Tensor, Tensor | None], right: Tensor, first_E1: Tensor, outs: list[Tensor]
) -> None:
    """Into ``outs``, one for each ``left [R, M]``: of each expert's rows ``leftᵀ right``.

    An out is ``[splits, E, M, N]``: its sum over parts of an expert's rows is the result.
    """
    first, second = left
    splits, num_experts, m, n = outs[0].shape
    m_tile, n_tile, pair = 64, 128, second is not None
    n_tiles = ceil_div(n, n_tile)
    tiles = ceil_div(m, m_tile if pair else 2 * m_tile) * n_tiles
    _weight_gradients[(tiles, num_experts, splits)](
        _tiles(first, _STEP, m_tile), _tiles(second if pair else first, _STEP, m_tile),
        _tiles(right, _STEP, n_tile), first_E1, outs[0], outs[-1], m, n, n_tiles, num_experts,
        splits, PAIR=pair, M_TILE=m_tile, N_TILE=n_tile, STEP=_STEP, STAGES=2,
        num_warps=4, num_stages=2,
    )  # fmt: skip


def _tiles(x: Tensor, rows: int, columns: int = _STEP) -> TensorDescriptor:
    """Tiles of a matrix, or of matrices below one another."""
    flat = x.view(-1, x.shape[-1])
    return TensorDescriptor(flat, list(flat.shape), [flat.shape[1], 1], [rows, columns])


def _constants(tiling: Tiling) -> dict[str, int]:
    return {
        "BM": ROWS, "BN": tiling.columns, "BK": _STEP, "MORE": tiling.more,
        "STAGES": tiling.stages, "num_warps": tiling.warps, "num_stages": tiling.stages,
    }  # fmt: skip


@triton.jit
def _sums(
    s0, s1, t0, t1, x, x_more, w0, w1, row, base, n0, n1, depth,
    ALONG: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, MORE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows from ``row`` on times columns ``n0`` and ``n1`` of the weights from row ``base`` on.

    ALONG: the weights' rows are columns of the product, not what is summed over. s: the first `BM`
    rows; t: `MORE` further ones.
    """
    for k in tl.range(0, depth, BK, num_stages=STAGES):
        a = x.load([row, k])
        if ALONG:
            b0 = w0.load([base + n0, k]).T
            b1 = w1.load([base + n1, k]).T
        else:
            b0 = w0.load([base + k, n0])
            b1 = w1.load([base + k, n1])
        s0 = tl.dot(a, b0, s0)
        s1 = tl.dot(a, b1, s1)
        if MORE > 0:
            a = x_more.load([row + BM, k])
            t0 = tl.dot(a, b0, t0)
            t1 = tl.dot(a, b1, t1)
    return s0, s1, t0, t1


@triton.jit
def _tile(tile_M3):
    """Of this program's tile: expert, first row, rows from there on."""
    at = tile_M3 + tl.program_id(1) * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _where(row, left, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a tile in rows of ``width``, and which there are."""
    i = tl.arange(0, ROWS)
    n = column + tl.arange(0, COLUMNS)
    at = (row + i).to(tl.int64)[:, None] * width + n[None, :]
    return at, (i < left)[:, None] & (n < width)[None, :]


@triton.jit
def _store_hidden(
    s0, s1, row, left, n, source_R, weight_V, hidden, gate, up, inner, limit, SAVE: tl.constexpr,
    QUANTISE: tl.constexpr,
):  # fmt: skip
    at, ok = _where(row, left, n, inner, s0.shape[0], s0.shape[1])
    i = tl.arange(0, s0.shape[0])
    source = tl.load(source_R + row + i, mask=i < left, other=-1)
    weight = tl.load(weight_V + source, mask=source >= 0, other=0.0)
    g = s0.to(tl.bfloat16)
    u = s1.to(tl.bfloat16)
    if SAVE:
        tl.store(gate + at, g, mask=ok)
        tl.store(up + at, u, mask=ok)
    silu, _, clamped = swiglu_parts(g.to(tl.float32), u.to(tl.float32), limit)
    y = (weight[:, None] * (silu * clamped)).to(tl.bfloat16)
    if QUANTISE:
        blocks = tl.reshape(y.to(tl.float32), (s0.shape[0] * s0.shape[1] // 32, 32))
        y = tl.reshape(round_trip(blocks, 0), (s0.shape[0], s0.shape[1]))
    tl.store(hidden + at, y, mask=ok)


@triton.jit
def _hidden_tile(
    x, x_more, w1, w3, row, left, expert, n, source_R, weight_V, hidden, gate, up, dim, inner,
    limit, SAVE: tl.constexpr, QUANTISE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, MORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    s = tl.zeros((BM, BN), tl.float32)
    t = tl.zeros((MORE if MORE > 0 else 16, BN), tl.float32)
    s0, s1, t0, t1 = _sums(
        s, s, t, t, x, x_more, w1, w3, row, expert * inner, n, n, dim, True, BM, BK, MORE, STAGES
    )
    _store_hidden(
        s0, s1, row, left, n, source_R, weight_V, hidden, gate, up, inner, limit, SAVE, QUANTISE
    )  # fmt: skip
    if MORE > 0:
        _store_hidden(
            t0, t1, row + BM, left - BM, n, source_R, weight_V, hidden, gate, up, inner, limit,
            SAVE, QUANTISE,
        )  # fmt: skip


@triton.jit
def _hidden(
    x, x_more, w1, w3, tile_M3, source_R, weight_V, hidden, gate, up, dim, inner, limit,
    SAVE: tl.constexpr, QUANTISE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, MORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, row, left = _tile(tile_M3)
    if left <= 0:
        return
    n = tl.program_id(0) * BN
    if MORE > 0 and left > BM:
        _hidden_tile(
            x, x_more, w1, w3, row, left, expert, n, source_R, weight_V, hidden, gate, up,
            dim, inner, limit, SAVE, QUANTISE, BM, BN, BK, MORE, STAGES,
        )  # fmt: skip
    else:
        _hidden_tile(
            x, x_more, w1, w3, row, left, expert, n, source_R, weight_V, hidden, gate, up,
            dim, inner, limit, SAVE, QUANTISE, BM, BN, BK, 0, STAGES,
        )  # fmt: skip


@triton.jit
def _store_rows(s, out, row, left, n, width):
    at, ok = _where(row, left, n, width, s.shape[0], s.shape[1])
    tl.store(out + at, s.to(tl.bfloat16), mask=ok)


@triton.jit
def _store_pairs(s0, s1, t0, t1, out, row, left, n, width, MORE: tl.constexpr):
    BM: tl.constexpr = s0.shape[0]
    BN: tl.constexpr = s0.shape[1]
    _store_rows(s0, out, row, left, n, width)
    _store_rows(s1, out, row, left, n + BN, width)
    if MORE > 0:
        _store_rows(t0, out, row + BM, left - BM, n, width)
        _store_rows(t1, out, row + BM, left - BM, n + BN, width)


@triton.jit
def _rows_tile(
    x, x_more, w, row, left, expert, column, out, depth, width, ALONG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    s = tl.zeros((BM, BN), tl.float32)
    t = tl.zeros((MORE if MORE > 0 else 16, BN), tl.float32)
    base = expert * (width if ALONG else depth)
    s0, s1, t0, t1 = _sums(
        s, s, t, t, x, x_more, w, w, row, base, column, column + BN, depth, ALONG, BM, BK, MORE,
        STAGES,
    )  # fmt: skip
    _store_pairs(s0, s1, t0, t1, out, row, left, column, width, MORE)


@triton.jit
def _rows(
    x, x_more, w, tile_M3, out, depth, width, ALONG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, row, left = _tile(tile_M3)
    if left <= 0:
        return
    column = tl.program_id(0) * (2 * BN)
    if MORE > 0 and left > BM:
        _rows_tile(
            x, x_more, w, row, left, expert, column, out, depth, width, ALONG, BM, BN, BK, MORE,
            STAGES,
        )  # fmt: skip
    else:
        _rows_tile(
            x, x_more, w, row, left, expert, column, out, depth, width, ALONG, BM, BN, BK, 0,
            STAGES,
        )  # fmt: skip


@triton.jit
def _swiglu_gradient(
    grad, gate, up, source_R, first_E1, weight_V, up_grad, weight_grad, inner, num_experts, limit,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    if first >= tl.load(first_E1 + num_experts):
        return
    row = first + tl.arange(0, ROWS)
    source = tl.load(source_R + row)
    weight = tl.load(weight_V + source, mask=source >= 0, other=0.0)[:, None]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, inner, WIDTH):
        n = start + tl.arange(0, WIDTH)
        ok = (n < inner)[None, :] & (row >= 0)[:, None]
        at = row.to(tl.int64)[:, None] * inner + n[None, :]
        d = tl.load(grad + at, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(gate + at, mask=ok, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=ok, other=0.0).to(tl.float32)
        silu, slope, clamped = swiglu_parts(g, u, limit)
        total += d * (silu * clamped)
        d = d * weight
        # No gradient passes where a clamp holds; at the limit itself it does.
        tl.store(grad + at, tl.where(g <= limit, d * clamped * slope, 0.0), mask=ok)
        tl.store(up_grad + at, tl.where(tl.abs(u) <= limit, d * silu, 0.0), mask=ok)
    tl.store(weight_grad + source, tl.sum(total, 1), mask=source >= 0)


@triton.jit
def _input_gradient_tile(
    gate_grad, gate_more, up_grad, up_more, w1, w3, row, left, expert, n, out, dim, inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    s = tl.zeros((BM, BN), tl.float32)
    t = tl.zeros((MORE if MORE > 0 else 16, BN), tl.float32)
    s0, s1, t0, t1 = _sums(
        s, s, t, t, gate_grad, gate_more, w1, w1, row, expert * inner, n, n + BN, inner, False,
        BM, BK, MORE, STAGES,
    )  # fmt: skip
    s0, s1, t0, t1 = _sums(
        s0, s1, t0, t1, up_grad, up_more, w3, w3, row, expert * inner, n, n + BN, inner, False,
        BM, BK, MORE, STAGES,
    )  # fmt: skip
    _store_pairs(s0, s1, t0, t1, out, row, left, n, dim, MORE)


@triton.jit
def _input_gradient(
    gate_grad, gate_more, up_grad, up_more, w1, w3, tile_M3, out, dim, inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, row, left = _tile(tile_M3)
    if left <= 0:
        return
    n = tl.program_id(0) * (2 * BN)
    if MORE > 0 and left > BM:
        _input_gradient_tile(
            gate_grad, gate_more, up_grad, up_more, w1, w3, row, left, expert, n, out, dim, inner,
            BM, BN, BK, MORE, STAGES,
        )  # fmt: skip
    else:
        _input_gradient_tile(
            gate_grad, gate_more, up_grad, up_more, w1, w3, row, left, expert, n, out, dim, inner,
            BM, BN, BK, 0, STAGES,
        )  # fmt: skip


@triton.jit
def _store_weights(s, out, m, n, m_size, n_size):
    i = m + tl.arange(0, s.shape[0])
    j = n + tl.arange(0, s.shape[1])
    ok = (i < m_size)[:, None] & (j < n_size)[None, :]
    tl.store(out + i[:, None] * n_size + j[None, :], s.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _weight_gradients(
    left0, left1, right, first_E1, out0, out1, m_size, n_size, n_tiles, num_experts, splits,
    PAIR: tl.constexpr, M_TILE: tl.constexpr, N_TILE: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    expert, split = tl.program_id(1), tl.program_id(2)
    m = tl.program_id(0) // n_tiles * (M_TILE if PAIR else 2 * M_TILE)
    n = tl.program_id(0) % n_tiles * N_TILE
    m1 = m if PAIR else m + M_TILE
    begin, end = tl.load(first_E1 + expert), tl.load(first_E1 + expert + 1)
    share = (end - begin + splits * STEP - 1) // (splits * STEP) * STEP
    begin += split * share
    end = tl.minimum(begin + share, end)
    s0 = tl.zeros((M_TILE, N_TILE), tl.float32)
    s1 = tl.zeros((M_TILE, N_TILE), tl.float32)
    for row in tl.range(begin, end, STEP, num_stages=STAGES):
        b = right.load([row, n])
        s0 = tl.dot(left0.load([row, m]).T, b, s0)
        s1 = tl.dot(left1.load([row, m1]).T, b, s1)
    at = (split * num_experts + expert).to(tl.int64) * m_size * n_size
    _store_weights(s0, out0 + at, m, n, m_size, n_size)
    _store_weights(s1, out1 + at, m1, n, m_size, n_size)
