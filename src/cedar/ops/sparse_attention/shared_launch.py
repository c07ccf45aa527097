"""When a query is spread over programs that join their shares themselves, and their launch.

Places to work in: ``T N H x SPLITS x 2`` bytes of shares, float16, of which ``1 / SPLITS`` is not
used (a program keeps its own), and ``T N x SPLITS x 8`` of maxima and sums. That is half of what
`window_gluon` leaves to its second launch.
"""

# mypy: ignore-errors

import torch
from torch import Tensor

from cedar.ops.dependent_launch import dependent
from cedar.ops.sparse_attention import shared_gluon
from cedar.ops.sparse_attention.packed_triton import LOG2E
from cedar.ops.sparse_attention.sources import FP4, FP8, Argument

__all__ = ["Counters", "launch", "splits_for"]

_SPLITS = (16, 8, 4)  # programs of a query: as many as are on the device at once
_COUNTERS = 64  # launches have fewer queries: 33 on 132 multiprocessors
_APART = 32  # int32 between counters, so that each has a line of the cache


class Counters:
    """What programs count with that wait for each other, by device; in use during a launch.

    Launches that may overlap need counters of their own. The first launch on a device allocates
    them, so it must not be captured in a graph.
    """

    def __init__(self) -> None:
        self._held: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """int32, one every `_APART`."""
        if device not in self._held:
            self._held[device] = torch.zeros(_COUNTERS * _APART, dtype=torch.int32, device=device)
        return self._held[device]


def splits_for(q_TNH: Tensor, near: Argument, far: Argument, multiprocessors: int) -> int:
    """Over how many programs to spread a query; 0 if the kernel is not for these inputs.

    One program fits on a multiprocessor, and those of a query wait for each other.
    """
    count, heads, _ = q_TNH.shape
    if (near.kind, far.kind) != (FP8, FP4) or heads % 64:
        return 0
    items = count * heads // 64
    most = (shared_gluon.MOST_NEAR.value, shared_gluon.MOST_FAR.value)
    if near.width > most[0] or far.width > most[1] or items > _COUNTERS:
        return 0
    return next((splits for splits in _SPLITS if splits * items <= multiprocessors), 0)


def launch(
    q_TNH: Tensor,
    near: Argument,
    far: Argument,
    sink_N: Tensor,
    scale: float,
    out: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    splits: int,
    counters: Counters,
) -> None:
    """Run the kernel; ``splits`` of `splits_for`."""
    count, heads, width = q_TNH.shape
    device, groups = q_TNH.device, heads // 64
    items = count * groups
    part = torch.empty((items, splits, 64, width), dtype=torch.float16, device=device)
    stats = torch.empty((items, splits, 2, 64), device=device)
    cos, sin = (None, None) if rotary is None else (x.contiguous() for x in rotary)
    shared_gluon.attend[(splits, groups, count)](
        q_TNH, out, part, stats, counters.on(device), sink_N, cos, sin,
        *near.or_nothing_of(far), *far.or_nothing_of(near), q_TNH.stride(0), q_TNH.stride(1),
        scale * LOG2E, N=heads, SPLITS=splits, ROTARY=0 if rotary is None else 64, num_warps=4,
        **dependent(device),
    )  # fmt: skip
