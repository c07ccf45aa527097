"""The same model as engines without this cache run it: dense scores, dense attention, masks."""

import copy
from typing import Any

import torch
from torch import Tensor

from cedar.model import Model
from cedar.ops import Ops, widen, with_operations
from cedar.ops.sparse_attention import Rows, Source

__all__ = ["masked_model"]


def masked_model(model: Model, context: int) -> Model:
    """A copy that scores and attends to all ``context`` tokens and masks what was not selected."""
    model = copy.deepcopy(model)
    ops = masked_ops(model.ops)
    for module in model.modules():
        if hasattr(module, "ops"):
            holder: Any = module
            holder.ops = ops
    for layer in model.backbone():
        if layer.plan.has_indexer:
            # A pool as large as the context: reindex layers then score every key.
            layer.attn.indexer.pool_blocks = context // layer.attn.indexer.pool_block + 1
    return model


def masked_ops(ops: Ops) -> Ops:
    """Attention that scores everything it holds under a mask, as engines without this cache do."""

    def attention(
        q_TNH: Tensor, sources: tuple[Source, ...], sink_N: Tensor, scale: float
    ) -> Tensor:
        q = widen(q_TNH)
        scores, held = [], []
        for source in sources:
            if not isinstance(source, Rows):
                raise TypeError("the reference under masks holds floating-point rows")
            rows, slots = source
            held.append(rows)
            everything = torch.matmul(q, rows.to(q.dtype).transpose(0, 1)) * scale
            mask = torch.ones((len(q), len(rows) + 1), dtype=torch.bool, device=q.device)
            mask.scatter_(1, torch.where(slots >= 0, slots, len(rows)), False)
            scores.append(everything.masked_fill(mask[:, None, : len(rows)], -torch.inf))
        sink = sink_N.to(q.dtype).view(1, -1, 1).expand(len(q), -1, 1)
        p = torch.cat((*scores, sink), dim=-1).softmax(-1)[..., :-1]
        values = torch.cat(held).to(q.dtype)
        return torch.matmul(p, values).to(q_TNH.dtype)

    return with_operations(ops, sparse_attention=attention)
