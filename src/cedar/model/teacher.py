"""The indexer's loss: its scores should rank entries as the layer's attention weighs them."""

from dataclasses import replace

import torch
from torch import Tensor

from cedar.config.plan import LayerPlan
from cedar.model.context import Shared
from cedar.model.forward import ForwardContext
from cedar.model.indexer import IndexQuery
from cedar.ops import Ops, widen
from cedar.ops.main_kv import FlatMain, MainKV
from cedar.ops.sparse_attention import Rows, Source

__all__ = ["index_loss"]


def index_loss(
    ops: Ops,
    index_query: IndexQuery,
    q_TNH: Tensor,
    window: Source,
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
    if not isinstance(main, FlatMain) or not isinstance(window, Rows):
        raise TypeError("the index loss needs main KV in floating point, without a packed store")
    if main.rows_RH.shape[0] == 0:  # no sequence has finished a group yet
        return 0.0 * widen(index_query.w_TI).sum()
    q, sink = q_TNH.detach(), sink_N.detach()
    visible_T = ctx.visible_T(plan.compress_ratio)
    window = Rows(window.rows_RH.detach(), window.slots_TK)
    fixed = replace(main, rows_RH=main.rows_RH.detach())

    def divergence(queries: slice, entries: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over queries, and how many counted; ``entries`` and ``scores`` are ``[T, M]``."""
        near = Rows(window.rows_RH, window.slots_TK[queries])
        far = replace(fixed, first_T=main.first_T[queries]).select(entries)
        mass = ops.attention_mass(q[queries], (near, far), sink, scale)
        known = entries >= 0
        counted = known.sum(1) >= 2
        teacher = mass / mass.sum(1, keepdim=True).clamp_min(1e-30)
        # A finite stand-in for −∞ keeps 0 · log 0 out of the gradient.
        student = widen(scores).masked_fill(~known, -1e30).log_softmax(1)
        kl = (teacher * (teacher.clamp_min(1e-30).log() - student)).masked_fill(~known, 0.0)
        return (kl.sum(1) * counted).sum(), counted.sum()

    if ctx.signals is not None and ctx.signals.index_dense:
        parts = []
        for n, (start, stop) in enumerate(ctx.bounds):
            queries, count = slice(start, stop), main.counts[n]
            numbers = torch.arange(count, device=visible_T.device)
            entries = torch.where(numbers < visible_T[queries].unsqueeze(1), numbers, -1)
            part = index_query.rows(queries)
            scores = ops.index_score(part.q_TIJ, part.w_TI, main.keys(n, count))
            parts.append(divergence(queries, entries, scores))
        total = torch.stack([part for part, _ in parts]).sum()
        counted = torch.stack([part for _, part in parts]).sum()
        return total / counted.clamp_min(1)

    pool = shared.candidates_for(plan)
    entries = shared.selection_for(plan).entries_TK if pool is None else pool.entries(visible_T)
    rows = main.select(entries).slots_TK.clamp_min(0)
    scores = ops.index_score_rows(index_query.q_TIJ, index_query.w_TI, main.keys_RJ, rows)
    total, counted = divergence(slice(None), entries, scores)
    return total / counted.clamp_min(1)
