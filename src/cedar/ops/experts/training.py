"""Experts on dense bfloat16 or float32 weights in bfloat16 arithmetic, with gradients.

Forward: three launches sort visits by expert, one copies tokens into that order, one product with
SwiGLU, its clamp and the routing weight in its epilogue, one through ``w2``, one sums a token's
visits in the order of its choices (no atomics). Backward mirrors it. The shared expert is a plain
product whose SwiGLU is one launch in either direction.

Values are rounded where the reference rounds them; gradients at most there: sums over a token's
visits, over gate and up, and gradients of float32 weights stay float32 until they are written.

FLOP: ``6 T A D F`` forward, ``12 T A D F`` backward. Bytes: bfloat16 weights ``6 E D F`` forward,
twice that backward; rows ``T A (10 D + 8 F)`` forward, ``T A (12 D + 20 F)`` backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedar.ops.cast.triton import cast
from cedar.ops.devices import is_hopper, multiprocessors
from cedar.ops.experts import Shared, packed
from cedar.ops.experts import training_triton as products
from cedar.ops.experts.training_plan import VisitPlan, gather_rows, plan_visits, sum_visits
from cedar.ops.experts.training_swiglu import swiglu
from cedar.ops.experts.training_triton import Tiling
from cedar.quant import FP8_ROW, BlockFormat, QuantTensor

__all__ = ["dense", "dense_experts", "experts", "taken"]

hopper: Any
try:
    from cedar.ops.experts import training_gluon as hopper
except ImportError:  # this Triton lacks Gluon, or what it needs of it
    hopper = None

Weights = tuple[Tensor, Tensor, Tensor]

# One program with many registers for a multiprocessor, or two smaller ones that hide one
# another's beginning and end where sums are short.
LARGE = Tiling(more=64, columns=128, warps=8, stages=4)
SMALL = Tiling(more=0, columns=64, warps=4, stages=3)
_SHORT = 512  # terms of a sum
_MANY = 512  # rows of an expert: fewer are no slower in the portable kernel (measured)


def experts(
    x_TD: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: Tensor | QuantTensor,
    w2: Tensor | QuantTensor,
    w3: Tensor | QuantTensor,
    *,
    limit: float,
    input_format: BlockFormat | None,
    shared: Shared | None = None,
) -> Tensor:
    """As `cedar.ops.experts.Experts`: dense weights here, all else by `packed`.

    Without gradients, too: nothing is read on the host, which plain PyTorch does.
    """
    own = dense((w1, w2, w3))
    more = None if shared is None else dense(shared)
    if own is None or (more is None) != (shared is None) or not taken(x_TD, own, input_format):
        return packed.experts(
            x_TD, experts_TA, weights_TA, w1, w2, w3,
            limit=limit, input_format=input_format, shared=shared,
        )  # fmt: skip
    return dense_experts(
        x_TD, experts_TA, weights_TA, *own, limit=limit, quantise=input_format is not None,
        shared=more,
    )  # fmt: skip


def dense(weights: Shared) -> Weights | None:
    """The weights, if all are tensors."""
    found = [w for w in weights if isinstance(w, Tensor)]
    return (found[0], found[1], found[2]) if len(found) == 3 else None


def taken(x_TD: Tensor, weights: Weights, input_format: BlockFormat | None) -> bool:
    """Whether the kernels are written for these inputs: bfloat16, whole and aligned 16 bytes."""
    inner, dim = sizes = weights[0].shape[1:]
    whole = 8 if input_format is None else FP8_ROW.cols
    return (
        x_TD.dtype == torch.bfloat16
        and is_hopper(x_TD.device)
        and len(x_TD) > 0
        and input_format in (None, FP8_ROW)
        and not any(size % whole for size in sizes)
        and all(w.dtype in (torch.bfloat16, torch.float32) for w in weights)
        and all(w.data_ptr() % 16 == 0 for w in weights)
        and weights[1].shape[1:] == (dim, inner)
    )


def dense_experts(
    x_TD: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    *,
    limit: float,
    quantise: bool = False,
    shared: Weights | None = None,
) -> Tensor:
    """`experts` for what is `taken`. quantise: inputs of products go through FP8 per 32 values."""
    x = cast(x_TD, FP8_ROW) if quantise else x_TD
    more_TD = None
    if shared is not None:
        v1, v2, v3 = (w.to(x.dtype) for w in shared)
        hidden = swiglu(F.linear(x, v1), F.linear(x, v3), limit)
        more_TD = F.linear(cast(hidden, FP8_ROW) if quantise else hidden, v2)
    total: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        x, experts_TA, weights_TA, w1, w2, w3, more_TD, limit, quantise, torch.is_grad_enabled()
    )
    return total


def tiling(dim: int, inner: int) -> Tiling:
    """For the products of experts of this shape."""
    return SMALL if min(dim, inner) <= _SHORT else LARGE


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        experts_TA: Tensor,
        weights_TA: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        more_TD: Tensor | None,
        limit: float,
        quantise: bool,
        save: bool,
    ) -> Tensor:
        ctx.limit, ctx.active = limit, experts_TA.shape[1]
        ctx.weight_types, ctx.route_type = (w1.dtype, w2.dtype), weights_TA.dtype
        save = save and any(ctx.needs_input_grad)
        x_TD, weight_V = x_TD.contiguous(), weights_TA.to(torch.float32).contiguous()
        v1, v2, v3 = (w.to(torch.bfloat16).contiguous() for w in (w1, w2, w3))
        num_experts, inner, dim = w1.shape
        ctx.tiling = tiles = tiling(dim, inner)
        plan = plan_visits(experts_TA, num_experts, tiles.per_tile)
        x_RD = gather_rows(x_TD, plan, ctx.active)
        hidden, gate, up = products.hidden_rows(
            x_RD, weight_V, v1, v3, plan, limit, tiles, quantise=quantise, save=save
        )
        down = products.product_rows(hidden, v2, plan, tiles, along=True)
        kind = torch.float32 if more_TD is None else x_TD.dtype
        out = sum_visits(down, plan, ctx.active, more_TD, kind)
        if save:
            ctx.save_for_backward(
                x_RD, weight_V, v1, v2, v3, hidden, gate, up,
                plan.source_R, plan.place_V, plan.first_E1, plan.tile_M3,
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_V, v1, v2, v3, hidden, gate, up, *places = ctx.saved_tensors
        plan, tiles, limit = VisitPlan(*places), ctx.tiling, ctx.limit
        x, _, weights, w1, w2, w3, more, *_ = ctx.needs_input_grad
        tokens = len(grad_TD)
        dy_RD = gather_rows(grad_TD.contiguous(), plan, ctx.active)
        dx = dweights = dw1 = dw2 = dw3 = None
        if w2:
            (dw2,) = weight_gradients((dy_RD, None), hidden, plan.first_E1, ctx.weight_types[1])
        if x or weights or w1 or w3:
            grad = products.product_rows(dy_RD, v2, plan, tiles, along=False)
            gate_grad, up_grad, weight_V = products.swiglu_gradient(
                grad, weight_V, gate, up, plan, limit
            )
            if weights:
                dweights = weight_V.view(tokens, ctx.active).to(ctx.route_type)
            if w1 or w3:
                dw1, dw3 = weight_gradients(
                    (gate_grad, up_grad), x_RD, plan.first_E1, ctx.weight_types[0]
                )
            if x:
                dx_RD = products.input_gradient(gate_grad, up_grad, v1, v3, plan, tiles)
                dx = sum_visits(dx_RD, plan, ctx.active, None, torch.bfloat16)
        dmore = grad_TD if more else None
        return dx, None, dweights, dw1, dw2, dw3, dmore, None, None, None


def weight_gradients(
    left: tuple[Tensor, Tensor | None], right: Tensor, first_E1: Tensor, dtype: torch.dtype,
    *, splits: int | None = None, by_hand: bool | None = None,
) -> list[Tensor]:  # fmt: skip
    """``[E, M, N]`` for each ``left [R, M]``: of each expert's rows ``leftᵀ right [R, N]``.

    splits: parts of an expert's rows that are summed apart; None: as many as fill the device.
    by_hand: with the program for Hopper; None: if experts have many rows.
    """
    num_experts, m, n = len(first_E1) - 1, left[0].shape[1], right.shape[1]
    programs = multiprocessors(right.device)
    if by_hand is None:
        many = len(right) >= _MANY * num_experts
        by_hand = hopper is not None and right.is_cuda and many
    if splits is None:
        pairs = num_experts * m * n * (1 if left[1] is None else 2) // (2 * 128 * 128)
        splits = min(max(programs // max(pairs, 1), 1), 8)
    kind = dtype if splits == 1 else torch.float32
    outs = [
        torch.empty((splits, num_experts, m, n), dtype=kind, device=right.device)
        for x in left if x is not None
    ]  # fmt: skip
    if by_hand:
        hopper.weight_gradients(left, right, first_E1, outs, programs)
    else:
        products.weight_gradients(left, right, first_E1, outs)
    return [out[0] if splits == 1 else out.sum(0).to(dtype) for out in outs]
