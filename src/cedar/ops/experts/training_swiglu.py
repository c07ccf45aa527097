"""SwiGLU with its clamp, and its gradient, one launch each; no routing weight.

Bytes: ``6 T F`` forward and ``10 T F`` backward in bfloat16. FLOP: ``10 T F`` and ``20 T F``.
"""

# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedar.ops.experts.training_plan import ceil_div

__all__ = ["swiglu", "swiglu_parts"]

_BLOCK = 2048


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """As `cedar.ops.experts.Swiglu`, rounded to the type of ``gate``."""
    return _Swiglu.apply(gate.contiguous(), up.contiguous(), limit)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        count = gate.numel()
        _forward[(ceil_div(count, _BLOCK),)](gate, up, out, count, limit, BLOCK=_BLOCK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        count = gate.numel()
        _backward[(ceil_div(count, _BLOCK),)](
            gate, up, grad, gate_grad, up_grad, count, ctx.limit, BLOCK=_BLOCK
        )
        return gate_grad, up_grad, None


@triton.jit
def swiglu_parts(gate, up, limit):
    """Of float32 gate and up: silu of the clamped gate, its derivative, the clamped up."""
    gate = tl.minimum(gate, limit)
    grown = 1.0 + tl.exp(-gate)
    sigmoid = 1.0 / grown
    return gate / grown, sigmoid * (1.0 + gate * (1.0 - sigmoid)), tl.clamp(up, -limit, limit)


@triton.jit
def _forward(gate, up, out, count, limit, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    silu, _, clamped = swiglu_parts(g, u, limit)
    tl.store(out + at, silu * clamped, mask=at < count)


@triton.jit
def _backward(gate, up, grad, gate_grad, up_grad, count, limit, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32)
    silu, slope, clamped = swiglu_parts(g, u, limit)
    # No gradient passes where a clamp holds; at the limit itself it does.
    tl.store(gate_grad + at, tl.where(g <= limit, d * clamped * slope, 0.0), mask=at < count)
    tl.store(up_grad + at, tl.where(tl.abs(u) <= limit, d * silu, 0.0), mask=at < count)
