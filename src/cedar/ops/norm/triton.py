"""RMSNorm in one launch. A program takes one row. Bytes: ``2 D`` values a row. Bound by the launch
at decode, by memory in prefill. It differs from the reference by the order of one sum."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.norm import reference as plain

__all__ = ["rms_norm", "unsupported"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 16384


@triton.jit
def _norm(
    x, weight, out, stride, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        hand_over()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    w = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(x + row * stride + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    tl.store(out + row * D + channel, w * (wide * scale), mask=inside)


def unsupported(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if x.dtype not in _FLOATS:
        return f"values in {x.dtype}"
    if x.shape[-1] > _WIDEST:
        return f"rows {x.shape[-1]} wide"
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "a gradient is wanted"
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`cedar.ops.norm.RmsNorm`; inputs it cannot take go to the reference."""
    if unsupported(x, weight) is not None:
        return plain.rms_norm(x, weight, eps)
    width = x.shape[-1]
    if x.dim() != 2 or x.stride(1) != 1:  # rows of a matrix may be far apart
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        stride = x.stride(0) if x.dim() == 2 else width
        rows = x.numel() // width
        _norm[(rows,)](
            x, weight.contiguous(), out, stride, eps, D=width,
            BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4,
            enable_fp_fusion=False, **dependent(x.device, rows),
        )  # fmt: skip
    return out
