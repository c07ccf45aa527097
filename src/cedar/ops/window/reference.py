"""Window places as written."""

import torch
from torch import Tensor

__all__ = ["window_places"]


def window_places(
    slot_T: Tensor, position_T: Tensor, start_T: Tensor, window: int, ring: int
) -> Tensor:
    seen_TW = position_T.long().unsqueeze(1) - torch.arange(window, device=position_T.device)
    started = seen_TW >= start_T.long().clamp_min(0).unsqueeze(1)
    held = started & (slot_T >= 0).unsqueeze(1)
    return torch.where(held, slot_T.long().unsqueeze(1) * ring + seen_TW % ring, -1).int()
