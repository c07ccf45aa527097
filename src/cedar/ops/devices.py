"""What kernels ask about a device, before every launch: answered once."""

from functools import cache

import torch

__all__ = ["is_hopper", "multiprocessors"]


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it has compute capability 9.0, which kernels with wgmma are compiled for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many it has; those of an H200 where a kernel is compiled or interpreted without one."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
