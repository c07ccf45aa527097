"""What several commands read from their options in the same way."""

import torch

from cedar.errors import BackendUnavailable, RequestError

__all__ = ["parse_device", "parse_dtype"]


def parse_device(name: str) -> torch.device:
    """The device that ``--device`` names; "auto" is the first GPU, or the CPU without one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BackendUnavailable(
            f'--device is {name!r}; expected "auto", "cpu" or "cuda:0".'
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendUnavailable(
            f"--device is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices. "
            "Use --device cpu."
        )
    return device


def parse_dtype(name: str) -> torch.dtype | None:
    """The type that ``--dtype`` names; None for "auto"."""
    known = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise RequestError(f"--dtype is {name!r}; expected one of {', '.join(known)}.")
    return known[name]
