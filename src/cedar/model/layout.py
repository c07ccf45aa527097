"""Where every token of a batch stands: positions, windows, groups and n-gram look-back.

Plain index arithmetic on the lengths of the batch and of the store; no layer repeats it.
"""

import torch
from torch import Tensor

from cedar.model.batch import Batch
from cedar.model.context import GroupLayout, KVStore, Rotary

__all__ = ["group_layout", "lookback", "positions", "rotary", "window_slots"]


def positions(batch: Batch, starts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Position within its sequence, and the sequence, of each packed token; both int64 ``[T]``."""
    device = batch.tokens_T.device
    place = torch.cat(
        [
            torch.arange(start, start + length, device=device)
            for start, length in zip(starts, batch.lengths, strict=True)
        ]
    )
    lengths = torch.tensor(batch.lengths, device=device)
    return place, torch.repeat_interleave(lengths, output_size=place.shape[0])


def rotary(positions_T: Tensor, frequencies: Tensor) -> Rotary:
    """Angles are position times frequency in float32, as the reference computes them."""
    angles = positions_T.to(torch.float32).unsqueeze(1) * frequencies
    return Rotary(angles.cos(), angles.sin())


def window_slots(
    lengths: tuple[int, ...], past: tuple[int, ...], window: int, device: torch.device
) -> Tensor:
    """``[T, window]``: rows of "past rows, then new rows" that each query sees, −1 for none."""
    firsts, rows = [], []
    offset = 0
    for length, before in zip(lengths, past, strict=True):
        firsts.append(torch.full((length,), offset, device=device))
        rows.append(torch.arange(offset + before, offset + before + length, device=device))
        offset += before + length
    row_T, first_T = torch.cat(rows), torch.cat(firsts)
    slots = row_T.unsqueeze(1) + torch.arange(1 - window, 1, device=device)
    return torch.where(slots >= first_T.unsqueeze(1), slots, -1)


def group_layout(
    batch: Batch, starts: tuple[int, ...], ratio: int, frequencies: Tensor
) -> GroupLayout:
    """The groups of ``ratio`` tokens that this batch finishes."""
    device = batch.tokens_T.device
    rows, firsts, counts = [], [], []
    offset = 0
    for start, length in zip(starts, batch.lengths, strict=True):
        residue = start % ratio
        count = (residue + length) // ratio
        rows.append(torch.arange(offset, offset + count * ratio, device=device))
        firsts.append(
            torch.arange(start - residue, start - residue + count * ratio, ratio, device=device)
        )
        counts.append(count)
        offset += residue + length
    return GroupLayout(
        rows_GR=torch.cat(rows).view(-1, ratio),
        counts=tuple(counts),
        rotary=rotary(torch.cat(firsts), frequencies),
    )


def lookback(
    classes_T: Tensor, batch: Batch, store: KVStore | None, order: int, pad_class: int
) -> Tensor:
    """Engram classes ``[T, order]`` of each token and those before it.

    ``classes_T`` is −1 on image-span tokens. Looking back stops at the start of the sequence and
    at the first −1: that place and everything further back count as the pad class.
    """
    back = order - 1
    nothing = torch.full((back,), -1, dtype=torch.int64, device=classes_T.device)
    rows = []
    for (start, stop), slot in zip(batch.bounds, batch.slots, strict=True):
        before = nothing if store is None else store.history(slot)
        seen = torch.cat((before, classes_T[start:stop]))
        # Column k is k places back.
        rows.append(torch.stack([seen[back - k : len(seen) - k] for k in range(order)], dim=1))
    known = torch.cat(rows)
    alive = (known >= 0).cumprod(1).bool()
    return torch.where(alive, known, pad_class)
