"""The indexer's loss: its scores should rank entries as the layer's attention weighs them."""

import torch
from torch import Tensor

from cedar.config.plan import LayerPlan
from cedar.model.context import ForwardContext, MainKV, Shared
from cedar.model.indexer import IndexQuery
from cedar.ops import Ops, widen
from cedar.ops.sparse_attention import Rows

__all__ = ["index_loss"]


def index_loss(
    ops: Ops,
    index_query: IndexQuery,
    q_TNH: Tensor,
    window: Rows,
    main: MainKV,
    sink_N: Tensor,
    scale: float,
    shared: Shared,
    plan: LayerPlan,
    ctx: ForwardContext,
) -> Tensor:
    """``KL(p ‖ softmax(I))``, mean over the queries with two supervised entries or more.

    ``p``: this layer's joint softmax over window, supervised entries and sink, summed over heads
    and renormalised over the supervised entries. Those are all visible entries in a dense
    warm-up, else the candidate pool where there is one, else the selection. Without any such
    query the loss is zero.
    """
    entries = _supervised(main, shared, plan, ctx)
    rows = main.select(entries)
    mass = ops.attention_mass(
        q_TNH.detach(),
        (
            Rows(window.rows_RH.detach(), window.slots_TK),
            Rows(main.rows_RH.detach(), rows.slots_TK),
        ),
        sink_N.detach(),
        scale,
    )
    known = entries >= 0
    scored = known.sum(1) >= 2
    teacher = mass / mass.sum(1, keepdim=True).clamp_min(1e-30)
    scores = widen(
        ops.index_score_rows(
            index_query.q_TIJ, index_query.w_TI, main.keys_RJ, rows.slots_TK.clamp_min(0)
        )
    )
    # A finite stand-in for −∞ keeps 0 · log 0 out of the gradient.
    student = scores.masked_fill(~known, -1e30).log_softmax(1)
    kl = torch.where(
        known, teacher * (teacher.clamp_min(1e-30).log() - student), torch.zeros_like(student)
    ).sum(1)
    return (kl * scored).sum() / scored.sum().clamp_min(1)


def _supervised(main: MainKV, shared: Shared, plan: LayerPlan, ctx: ForwardContext) -> Tensor:
    """Entry numbers ``[T, M]``, −1 padded."""
    visible_T = ctx.visible_T(plan.compress_ratio)
    if ctx.signals is not None and ctx.signals.index_dense:
        numbers = torch.arange(max(main.counts, default=0), device=visible_T.device)
        return torch.where(numbers < visible_T.unsqueeze(1), numbers, -1)
    pool = shared.candidates_for(plan)
    if pool is not None:
        return pool.entries(visible_T)
    return shared.selection_for(plan).entries_TK
