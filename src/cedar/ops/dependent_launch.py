"""Programmatic dependent launch: a kernel is brought up while the one before it still runs.

A launch inside a CUDA graph costs about a microsecond, more than many kernels of a decode step
compute. A kernel with a parameter ``PDL`` that calls `hand_over` before its first access to memory,
and is launched with ``**dependent(device)``, waits there until everything before it is done and
visible, and lets the next one be brought up likewise. It changes no result: whatever is launched in
the ordinary way waits as ever.
"""

# mypy: ignore-errors

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["dependent", "hand_over"]

_MOST_PROGRAMS = 1024


@triton.jit
def hand_over():
    """Wait for the kernels before this one, then let the next one be brought up."""
    gdc_wait()
    gdc_launch_dependents()


def dependent(device: torch.device, programs: int = 1) -> dict[str, bool]:
    """Options of such a launch of so many programs.

    Of an ordinary one below compute capability 9.0, and from the size on where programs take turns:
    each of them would pay for the wait (measured: a fifth of a large copy's time).
    """
    able = programs <= _MOST_PROGRAMS and _able(device)
    return {"PDL": able, "launch_pdl": able}


@cache
def _able(device: torch.device) -> bool:
    if device.type == "cuda" and not triton.knobs.runtime.interpret:
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return device.type == "meta"  # compiled for such a device without one
