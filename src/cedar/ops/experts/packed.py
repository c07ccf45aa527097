"""The fastest version that can serve the given weights."""

import torch
from torch import Tensor

from cedar.ops.experts import reference
from cedar.quant import FP4_ROW, FP8_ROW, BlockFormat, QuantTensor

__all__ = ["experts"]

_WIDTH = 128  # of the Hopper kernel's step


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
) -> Tensor:
    """As `cedar.ops.experts.Experts`: by a kernel for packed FP4 weights, else in plain PyTorch."""
    if (
        not isinstance(w1, QuantTensor)
        or not isinstance(w2, QuantTensor)
        or not isinstance(w3, QuantTensor)
        or w1.format != FP4_ROW
        or input_format != FP8_ROW
        or x_TD.dtype not in (torch.bfloat16, torch.float32)
        or len(x_TD) == 0
        or (x_TD.requires_grad and torch.is_grad_enabled())
        or w1.shape[-1] % FP4_ROW.cols
        or w2.shape[-1] % FP4_ROW.cols
    ):
        return reference.experts(
            x_TD, experts_TA, weights_TA, w1, w2, w3, limit=limit, input_format=input_format
        )
    whole = w1.shape[-1] % _WIDTH == 0 and w2.shape[-1] % _WIDTH == 0
    if (
        whole
        and x_TD.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x_TD.device) == (9, 0)
    ):
        from cedar.ops.experts.gluon import experts as kernel
    else:
        from cedar.ops.experts.triton import experts as kernel
    return kernel(x_TD, experts_TA, weights_TA, w1, w2, w3, limit=limit, input_format=input_format)
