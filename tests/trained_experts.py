"""Inputs of experts in training, the same for the interpreter and for a GPU; and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cedar.ops.experts import reference as plain
from cedar.quant import FP8_ROW

__all__ = ["TrainedExperts", "gradients", "reference", "trained_experts"]


@dataclass(frozen=True, slots=True)
class TrainedExperts:
    """inputs: x, routing weights, w1, w2, w3, and those of a shared expert or nothing."""

    experts_TA: Tensor
    inputs: tuple[Tensor, ...]
    grad_TD: Tensor

    def double(self) -> "TrainedExperts":
        wide = tuple(v.double() for v in self.inputs)
        return TrainedExperts(self.experts_TA, wide, self.grad_TD.double())


def trained_experts(
    tokens: int, dim: int, inner: int, count: int, active: int, *,
    dtype: torch.dtype = torch.float32, shared: bool = False, device: str = "cpu",
) -> TrainedExperts:  # fmt: skip
    """dtype: of the weights, whose values fit bfloat16 so that float64 sees the same ones."""
    g = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).bfloat16()

    one = ((inner, dim), (dim, inner), (inner, dim))
    shapes = [(count, *shape) for shape in one] + (list(one) if shared else [])
    weights = [(normal(*shape) * (2 / shape[-1]) ** 0.5).bfloat16().to(dtype) for shape in shapes]
    chosen = torch.rand(tokens, count, generator=g, device=device).topk(active, 1).indices
    routing = torch.rand(tokens, active, generator=g, device=device)
    inputs = (normal(tokens, dim), routing, *weights)
    return TrainedExperts(chosen, inputs, normal(tokens, dim))


def gradients(
    experts: Callable[..., Tensor], case: TrainedExperts, limit: float, **options: bool
) -> list[Tensor]:
    """The output, then the gradients of one combination of its values."""
    inputs = [v.detach().requires_grad_() for v in case.inputs]
    x, routing, w1, w2, w3, *shared = inputs
    out = experts(
        x,
        case.experts_TA,
        routing,
        w1,
        w2,
        w3,
        limit=limit,
        shared=tuple(shared) or None,
        **options,
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, case.grad_TD.to(out.dtype))]


def reference(*values: Tensor, quantise: bool = False, **options: Any) -> Tensor:
    """Plain PyTorch. quantise: inputs of products go through FP8."""
    return plain.experts(*values, **options, input_format=FP8_ROW if quantise else None)
