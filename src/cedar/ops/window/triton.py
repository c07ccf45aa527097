"""Window places in one launch. A program takes one token. Bytes: ``4 T W``. Bound by the launch."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.dependent_launch import dependent, hand_over

__all__ = ["window_places"]


@triton.jit
def _places(
    slot, position, start, out,
    W: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    token = tl.program_id(0)
    own_slot = tl.load(slot + token).to(tl.int32)
    first = tl.maximum(tl.load(start + token).to(tl.int64), 0)
    back = tl.arange(0, BLOCK)
    seen = tl.load(position + token).to(tl.int64) - back
    held = (seen >= first) & (own_slot >= 0)
    place = tl.where(held, own_slot * R + (seen % R).to(tl.int32), -1)
    tl.store(out + token.to(tl.int64) * W + back, place, mask=back < W)


def window_places(
    slot_T: Tensor, position_T: Tensor, start_T: Tensor, window: int, ring: int
) -> Tensor:
    """`cedar.ops.window.WindowPlaces`."""
    out = torch.empty((len(slot_T), window), dtype=torch.int32, device=slot_T.device)
    if out.numel():
        _places[(len(slot_T),)](
            slot_T.contiguous(), position_T.contiguous(), start_T.contiguous(), out, W=window,
            R=ring, BLOCK=triton.next_power_of_2(window), num_warps=1,
            **dependent(out.device, len(slot_T)),
        )  # fmt: skip
    return out
