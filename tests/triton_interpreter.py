"""Makes Triton's CPU interpreter compute what the compiled kernels do. For tests only.

As it comes, the interpreter truncates where hardware rounds (float32 to bfloat16 and to the 8-bit
types) and multiplies bfloat16 matrices as if their bits were integers, without a word. `repair`
replaces both by PyTorch's arithmetic. `tests/interpreted` are test files for processes started with
``TRITON_INTERPRET=1`` (Triton reads it when it is imported), and import this module first.
"""

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

__all__ = ["AS_IT_COMES", "repair", "round_trip"]

AS_IT_COMES = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
# numpy and torch integers as wide as a value.
_SIGNED = {1: (np.int8, torch.int8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}


def _convert(values: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Bits of ``values`` converted between two floating types, rounded to nearest even."""
    width_in, width_out = (
        torch.tensor([], dtype=_TORCH[t]).element_size() for t in (source, target)
    )
    bits = np.ascontiguousarray(values).view(_SIGNED[width_in][0])
    wide = torch.from_numpy(bits.copy()).view(_TORCH[source]).to(torch.float32)
    found = wide.to(_TORCH[target]).view(_SIGNED[width_out][1]).numpy()
    return found.view(f"uint{8 * width_out}").reshape(values.shape)


def repair() -> None:
    """Patch the interpreter of this process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("run by tests/unit/test_kernels_interpreted.py, which interprets Triton")
    as_it_comes, dot = AS_IT_COMES

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source in _TORCH and target in _TORCH:
            return _convert(values, source, target)
        return as_it_comes(values, source, target, rounding)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = _convert(handle.data, tl.bfloat16, tl.float32).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def exact_dot(builder: Any, a: Any, b: Any, c: Any, *options: Any) -> Any:
        return dot(builder, widened(a), widened(b), c, *options)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = exact_dot


def round_trip(values: torch.Tensor, target: Any) -> torch.Tensor:
    """float32 values through ``target`` and back, as the interpreter of this process does it."""
    narrow = interpreter._convert_float(values.numpy(), tl.float32, target, None)
    back = interpreter._convert_float(narrow, target, tl.float32, None)
    return torch.from_numpy(back.view(np.float32).copy())
