"""Gather attention in plain PyTorch, in chunks of queries so that memory stays linear."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.ops.packed import unpack_rows
from cedar.ops.precision import widen
from cedar.ops.rope.reference import rotate
from cedar.ops.sparse_attention import Rows, Source

__all__ = ["attention_mass", "rotated_attention", "sparse_attention"]

BLOCK = 64  # slots per step of the running softmax
_FLOOR = -1e30  # a running maximum that every score exceeds


def sparse_attention(
    q_TNH: Tensor, sources: tuple[Source, ...], sink_N: Tensor, scale: float
) -> Tensor:
    rows = tuple(_unpacked(s, q_TNH.dtype) for s in sources)
    chunk = _queries_per_chunk(q_TNH, BLOCK)
    parts = [
        _attend(
            q_TNH[t : t + chunk],
            tuple(Rows(s.rows_RH, s.slots_TK[t : t + chunk]) for s in rows),
            sink_N,
            scale,
        )
        for t in range(0, q_TNH.shape[0], chunk)
    ]
    return torch.cat(parts) if parts else torch.zeros_like(q_TNH)


_PLAIN: Any = SimpleNamespace(rotate=rotate, sparse_attention=sparse_attention)


def rotated_attention(
    q_TNH: Tensor,
    sources: tuple[Source, ...],
    sink_N: Tensor,
    scale: float,
    rotary: tuple[Tensor, Tensor],
    *,
    parts: Any = _PLAIN,
) -> Tensor:
    q = parts.rotate(q_TNH, *rotary)
    o: Tensor = parts.rotate(
        parts.sparse_attention(q, sources, sink_N, scale), *rotary, inverse=True
    )
    return o


@torch.no_grad()
def attention_mass(
    q_TNH: Tensor, sources: tuple[Source, ...], sink_N: Tensor, scale: float
) -> Tensor:
    rows = tuple(_unpacked(s, q_TNH.dtype) for s in sources)
    width = sum(s.slots_TK.shape[1] for s in sources)
    chunk = _queries_per_chunk(q_TNH, max(width, 1))
    parts = []
    for t in range(0, q_TNH.shape[0], chunk):
        q = widen(q_TNH[t : t + chunk])
        logits = torch.cat(
            [_scores(q, *_gather(s, slice(t, t + chunk)), scale) for s in rows], dim=-1
        )
        sink = sink_N.to(q.dtype).view(1, -1, 1).expand(len(q), -1, 1)
        mass = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1].sum(1)
        parts.append(mass[:, width - sources[-1].slots_TK.shape[1] :])
    return torch.cat(parts)


def _unpacked(source: Source, dtype: torch.dtype) -> Rows:
    """Packed rows that some query names as values, each dequantised once."""
    if isinstance(source, Rows):
        return source
    filled = source.slots_TK >= 0
    unique, where = torch.unique(source.slots_TK[filled].long(), return_inverse=True)
    slots = torch.full(source.slots_TK.shape, -1, dtype=torch.int64, device=filled.device)
    slots[filled] = where
    return Rows(unpack_rows(source.raw_RB[unique], source.format, dtype), slots)


def _attend(q_TNH: Tensor, sources: tuple[Rows, ...], sink_N: Tensor, scale: float) -> Tensor:
    q = widen(q_TNH)
    top = torch.full(q.shape[:2], _FLOOR, dtype=q.dtype, device=q.device)
    total = torch.zeros_like(top)
    out = torch.zeros_like(q)
    for values, filled in _blocks(sources):
        wide = values.to(q.dtype)
        scores = _scores(q, wide, filled, scale)
        new_top = torch.maximum(top, scores.detach().amax(-1))
        p = torch.exp(scores - new_top.unsqueeze(-1))
        shrink = torch.exp(top - new_top)
        total = total * shrink + p.sum(-1)
        rounded = p.to(values.dtype).to(q.dtype)
        out = out * shrink.unsqueeze(-1) + torch.matmul(rounded, wide)
        top = new_top
    sink = sink_N.to(q.dtype)
    # A query that sees nothing has no maximum; measured from the sink its denominator is 1.
    top = torch.where(top == _FLOOR, sink.detach(), top)
    # A sink far above every score would overflow (its gradient first): measure from nearer to it.
    nearer = (sink.detach() - top - 80.0).clamp_min(0.0)
    shrink = torch.exp(-nearer)
    out, total = out * shrink.unsqueeze(-1), total * shrink
    total = total + torch.exp(sink - top - nearer)
    return (out / total.unsqueeze(-1)).to(q_TNH.dtype)


def _blocks(sources: tuple[Rows, ...]) -> list[tuple[Tensor, Tensor]]:
    """Values ``[T, ≤64, H]`` and filled flags of 64 slots at a time, all sources in one order."""
    blocks: list[tuple[Tensor, Tensor]] = []
    pending: list[tuple[Tensor, Tensor]] = []
    room = BLOCK
    for source in sources:
        start = 0
        width = source.slots_TK.shape[1]
        while start < width:
            stop = min(start + room, width)
            pending.append(
                _gather(Rows(source.rows_RH, source.slots_TK[:, start:stop]), slice(None))
            )
            room -= stop - start
            start = stop
            if room == 0:
                blocks.append(_join(pending))
                pending, room = [], BLOCK
    if pending:
        blocks.append(_join(pending))
    return blocks


def _join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([v for v, _ in parts], dim=1), torch.cat([f for _, f in parts], dim=1)


def _gather(source: Rows, queries: slice) -> tuple[Tensor, Tensor]:
    slots = source.slots_TK[queries]
    filled = slots >= 0
    if source.rows_RH.shape[0] == 0:
        shape = (*slots.shape, source.rows_RH.shape[1])
        return source.rows_RH.new_zeros(shape), torch.zeros_like(filled)
    # An embedding, because its gradient copes with rows that thousands of queries share.
    return F.embedding(slots.clamp_min(0), source.rows_RH), filled


def _scores(q: Tensor, values: Tensor, filled: Tensor, scale: float) -> Tensor:
    """``[T, N, K]`` scaled scores, −∞ in empty slots."""
    scores = torch.matmul(q, values.to(q.dtype).transpose(1, 2)) * scale
    return scores.masked_fill(~filled.unsqueeze(1), -torch.inf)


def _queries_per_chunk(q_TNH: Tensor, width: int) -> int:
    """So many queries that their gathered rows stay near 16 MiB (on a GPU 1 GiB) of float32."""
    budget = 2**22 if q_TNH.device.type == "cpu" else 2**28
    per_query = width * (q_TNH.shape[2] + q_TNH.shape[1])
    return max(1, budget // per_query)
