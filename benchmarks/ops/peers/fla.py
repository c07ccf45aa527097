"""fla's attention to selected blocks (NSA; Triton, tuned on first use).

Keys and values are separate there, a selection is whole blocks of 64 rows for all heads of a
group of 16 and more, a mask hides later rows, and there is no sink; head widths end at 256. It
gets blocks that we see as single rows. Backward gives gradients of keys and of values apart.
"""

import importlib
from functools import partial
from typing import Any

import torch
from benchmarks.ops.measure import relative_error
from benchmarks.ops.peers import Built, Columns, backward_of, column
from torch import Tensor

from cedar.ops.sparse_attention import Rows
from cedar.ops.sparse_attention import reference as plain

__all__ = ["BLOCK", "block_slots", "blocks"]

BLOCK = 64
FEW = 256  # tokens that are compared with float64


def block_slots(blocks_TS: Tensor) -> Tensor:
    """Rows of the selected blocks, -1 for what is absent (-1) or later than its query."""
    tokens = len(blocks_TS)
    device = blocks_TS.device
    slots = blocks_TS.unsqueeze(2) * BLOCK + torch.arange(BLOCK, device=device)
    own = torch.arange(tokens, device=device).view(-1, 1, 1)
    absent = (blocks_TS < 0).unsqueeze(2)
    return torch.where((slots <= own) & ~absent, slots, -1).flatten(1)


def blocks(q: Tensor, rows: Tensor, blocks_TS: Tensor, grad: Tensor | None = None) -> Columns:
    """Column ``fla``: attention of queries ``[T, N, H]`` to blocks of rows ``[T, H]``, as keys
    and values; with ``grad`` its backward pass. It also makes means of blocks, which it then
    does not use."""
    return column("fla", partial(_blocks, q, rows, blocks_TS, grad))


def _blocks(q: Tensor, rows: Tensor, blocks_TS: Tensor, grad: Tensor | None) -> Built:
    module: Any = importlib.import_module("fla.ops.nsa")

    def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        out: Tensor = module.parallel_nsa(
            q[None], k[None, :, None], v[None, :, None], block_indices=chosen[None, :, None],
            block_counts=chosen.shape[1], block_size=BLOCK,
        )  # fmt: skip
        return out[0]

    def ready(tokens: int) -> Any:
        chosen = blocks_TS[:tokens].contiguous()
        leaves = q[:tokens], rows[:tokens], rows[:tokens]
        if grad is None:
            return partial(attend, *leaves, chosen)
        return backward_of(partial(attend, chosen=chosen), leaves, [grad[:tokens]])

    call = ready(len(q))
    call()  # tunes itself on what will be timed
    found = ready(FEW)()
    wanted = _exact(q[:FEW], rows[:FEW], blocks_TS[:FEW], None if grad is None else grad[:FEW])
    if grad is None:
        error = relative_error(found, wanted[0])
        return Built([call], error, 2 * q.nbytes + 2 * rows.nbytes + blocks_TS.nbytes)
    error = max(
        relative_error(found[0], wanted[0]),
        relative_error(found[1].double() + found[2].double(), wanted[1]),
    )
    return Built([call], error, 6 * q.nbytes + 4 * rows.nbytes + blocks_TS.nbytes)


def _exact(q: Tensor, rows: Tensor, blocks_TS: Tensor, grad: Tensor | None) -> tuple[Tensor, ...]:
    """The output, or gradients of queries and rows, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, rows)]
    slots = block_slots(blocks_TS)
    sink = torch.full((q.shape[1],), -torch.inf, dtype=torch.float64, device=q.device)
    with torch.enable_grad():
        out = plain.sparse_attention(leaves[0], (Rows(leaves[1], slots),), sink, q.shape[2] ** -0.5)
    if grad is None:
        return (out.detach(),)
    return torch.autograd.grad(out, leaves, grad.double())
