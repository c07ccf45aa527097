"""Rotary tables of a step in one launch. A program takes one token and all its tables. Bytes:
``8 n T r/2``. Bound by the launch. (Rotation itself is part of `cedar.ops.latent`.)"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.dependent_launch import dependent, hand_over

__all__ = ["rotary_tables"]


@triton.jit
def _tables(
    positions, frequencies, cos, sin, tokens,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr, COUNT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    token = tl.program_id(0)
    position = tl.load(positions + token)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    for table in tl.static_range(COUNT):
        frequency = tl.load(frequencies + table * PAIRS + pair, mask=inside, other=0.0)
        angle = (position - BACK[table]).to(tl.float32) * frequency
        place = (table * tokens + token).to(tl.int64) * PAIRS + pair
        tl.store(cos + place, tl.cos(angle), mask=inside)
        tl.store(sin + place, tl.sin(angle), mask=inside)


def rotary_tables(
    positions_T: Tensor, frequencies: Tensor, back: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """`cedar.ops.rope.RotaryTables`."""
    count, pairs = frequencies.shape
    shape = (count, len(positions_T), pairs)
    cos, sin = (torch.empty(shape, device=positions_T.device) for _ in range(2))
    if cos.numel():
        _tables[(len(positions_T),)](
            positions_T.contiguous(), frequencies.contiguous(), cos, sin, len(positions_T),
            PAIRS=pairs, BLOCK=triton.next_power_of_2(pairs), BACK=back, COUNT=count, num_warps=1,
            **dependent(cos.device, len(positions_T)),
        )  # fmt: skip
    return cos, sin
