"""The routed experts for many tokens on Hopper: prepare, two products, sum.

Bytes: every visited expert's ``3 D F (1/2 + 1/32)``, rows. FLOP: ``6 T A D F``, which is what
bounds it from some thousands of tokens on.
"""

# mypy: ignore-errors

import torch
from torch import Tensor

from cedar.ops.experts.many_gluon import down_kernel, gate_up_kernel
from cedar.ops.experts.prepare import MANY, combine, prepare
from cedar.quant import FP8_ROW, QuantTensor

__all__ = ["experts"]


def experts(
    x_TD: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: QuantTensor,
    w2: QuantTensor,
    w3: QuantTensor,
    *,
    limit: float,
    shared_TD: Tensor | None = None,
) -> Tensor:
    """As `cedar.ops.experts.Experts`: bfloat16, packed FP4, inputs in FP8; D, F in whole 128s.

    shared: the output of the shared expert, to be added.
    """
    tokens, dim = x_TD.shape
    active = experts_TA.shape[1]
    num_experts, inner = w1.shape[0], w1.shape[1]
    visits = tokens * active
    some, more = _widths(visits, num_experts)
    x, tiles = prepare(x_TD, experts_TA, num_experts, some + more, MANY)
    hidden, down = x.new_empty((visits, inner)), x.new_empty((visits, dim))
    gate_up_kernel[(inner // 64, len(tiles.expert_M))](
        x, tiles.source_R, tiles.expert_M, weights_TA.contiguous(),
        _words(w1.codes), _words(w1.scale), _words(w3.codes), _words(w3.scale), hidden,
        num_experts, limit, DIM=dim, INNER=inner, ACTIVE=active, FLOOR=FP8_ROW.amax_floor,
        SOME=some, MORE=more, STAGES=4,
        num_warps=8,
    )  # fmt: skip
    down_kernel[(dim // 128, len(tiles.expert_M))](
        hidden, tiles.source_R, tiles.expert_M, _words(w2.codes), _words(w2.scale), down,
        num_experts, DIM=dim, INNER=inner, SOME=some, MORE=more, STAGES=4,
        num_warps=8,
    )  # fmt: skip
    if shared_TD is None:
        out = torch.empty((tokens, dim), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty_like(x)
    return combine(down, shared_TD, active, out)


def _widths(visits: int, num_experts: int) -> tuple[int, int]:
    """Of a tile: what an expert gets on average, a power of two from 32 to 128; a quarter more."""
    mean = max(visits // num_experts, 1)
    some = min(max(1 << (mean - 1).bit_length(), 32), 128)
    return some, some // 4


def _words(packed: Tensor) -> Tensor:
    return packed.view(torch.int32)
