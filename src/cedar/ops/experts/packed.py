"""The fastest version that can serve the given weights."""

import torch
from torch import Tensor

from cedar.ops.cast.triton import cast
from cedar.ops.devices import is_hopper
from cedar.ops.experts import Shared, reference
from cedar.ops.linear.reference import linear
from cedar.quant import FP4_ROW, FP8_BLOCK, FP8_ROW, BlockFormat, QuantTensor

__all__ = ["experts", "for_few"]

_WIDTH = 128  # of a step of the Hopper kernels
_FEW = 16  # visits an expert gets on average: more are many

Three = tuple[QuantTensor, QuantTensor, QuantTensor]


def experts(
    x_TD: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: Tensor | QuantTensor,
    w2: Tensor | QuantTensor,
    w3: Tensor | QuantTensor,
    *,
    limit: float,
    input_format: BlockFormat | None,
    shared: Shared | None = None,
) -> Tensor:
    """As `cedar.ops.experts.Experts`: by kernels for packed FP4 weights, else in plain PyTorch."""
    weights = _served(x_TD, (w1, w2, w3), input_format)
    if weights is None:
        return reference.experts(
            x_TD, experts_TA, weights_TA, w1, w2, w3,
            limit=limit, input_format=input_format, shared=shared,
        )  # fmt: skip
    if not _on_hopper(x_TD, weights):
        from cedar.ops.experts import triton

        total: Tensor = triton.experts(x_TD, experts_TA, weights_TA, *weights, limit=limit)
        return total if shared is None else _add(total, x_TD, shared, limit)
    if experts_TA.numel() <= _FEW * w1.shape[0]:
        from cedar.ops.experts import few

        own = _alike(shared, weights)
        total = few.experts(x_TD, experts_TA, weights_TA, *weights, limit=limit, shared=own)
        return total if shared is None or own is not None else _add(total, x_TD, shared, limit)
    from cedar.ops.experts import many

    more = None if shared is None else _shared_expert(x_TD, shared, limit)
    return many.experts(x_TD, experts_TA, weights_TA, *weights, limit=limit, shared_TD=more)


def for_few(
    x_TD: Tensor, weights: Shared, active: int, input_format: BlockFormat | None, shared: Shared
) -> tuple[Three, Three] | None:
    """The weights and the shared expert's as `few` takes them; None if it does not."""
    own = _served(x_TD, weights, input_format)
    if own is None or not _on_hopper(x_TD, own) or len(x_TD) * active > _FEW * own[0].shape[0]:
        return None
    more = _alike(shared, own)
    return None if more is None else (own, more)


def _served(x_TD: Tensor, weights: Shared, input_format: BlockFormat | None) -> Three | None:
    """The weights, if a kernel can take them and the tokens."""
    found = _packed(weights, FP4_ROW)
    if (
        found is None
        or input_format != FP8_ROW
        or x_TD.dtype not in (torch.bfloat16, torch.float32)
        or len(x_TD) == 0
        or (x_TD.requires_grad and torch.is_grad_enabled())
        or any(weight.shape[-1] % FP4_ROW.cols for weight in found)
    ):
        return None
    return found


def _alike(shared: Shared | None, weights: Three) -> Three | None:
    """A shared expert that is packed and of the same sizes as the others."""
    found = None if shared is None else _packed(shared, FP8_BLOCK)
    return found if found is not None and found[0].shape == weights[0].shape[1:] else None


def _packed(weights: Shared, fmt: BlockFormat) -> Three | None:
    """The weights, if all are packed in this format."""
    found = [w for w in weights if isinstance(w, QuantTensor) and w.format == fmt]
    return (found[0], found[1], found[2]) if len(found) == 3 else None


def _on_hopper(x_TD: Tensor, weights: Three) -> bool:
    return (
        x_TD.dtype == torch.bfloat16
        and weights[0].shape[-1] % _WIDTH == 0
        and weights[1].shape[-1] % _WIDTH == 0
        and is_hopper(x_TD.device)
    )


def _add(total: Tensor, x_TD: Tensor, shared: Shared, limit: float) -> Tensor:
    return (total + _shared_expert(x_TD, shared, limit)).to(x_TD.dtype)


def _shared_expert(x_TD: Tensor, shared: Shared, limit: float) -> Tensor:
    x = cast(x_TD, FP8_ROW)
    hidden = reference.swiglu(linear(x, shared[0]), linear(x, shared[2]), limit).to(x.dtype)
    return linear(cast(hidden, FP8_ROW), shared[1])
