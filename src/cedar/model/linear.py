"""Weights: where their numbers live, and the modules that hold them."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from cedar.ops import Ops
from cedar.quant import FP8_ROW, BlockFormat, Element, QuantTensor, Scale

__all__ = ["BuildSpec", "Linear", "Norm", "Weight", "WeightStorage", "new_parameter"]


class WeightStorage(StrEnum):
    """How the weights that the release quantises are held in a built model.

    ``PLAIN``: floating point, inputs are not quantised (bf16 checkpoints, ordinary training).
    ``PACKED``: codes and scales as in the released files; inputs are quantised.
    ``DEQUANTIZED``: floating point that lies on the released grid already; inputs are quantised.
    ``QAT``: floating-point masters that every forward casts to the grid; inputs are quantised.
    """

    PLAIN = "plain"
    PACKED = "packed"
    DEQUANTIZED = "dequantized"
    QAT = "qat"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSpec:
    """What every module needs to know when it is built.

    dtype: the type of parameters that the release holds in bfloat16.
    trainable: Engram tables are floating-point masters in plain storage too.
    """

    ops: Ops
    storage: WeightStorage
    dtype: torch.dtype
    device: torch.device | None = None
    trainable: bool = False


def new_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
) -> nn.Parameter:
    """An uninitialised parameter; codes and scale bytes take no gradient."""
    data = torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(data, requires_grad=dtype.is_floating_point and dtype.itemsize > 1)


class Weight(nn.Module):
    """A weight ``[..., out, in]``, held as its format and the storage ask.

    ``value()`` is what enters a product; ``input_format`` is what the product's input is cast
    to first (None: not at all). Without a format the weight is always plain.
    """

    def __init__(self, shape: tuple[int, ...], fmt: BlockFormat | None, spec: BuildSpec) -> None:
        super().__init__()
        self.ops = spec.ops
        self.format = fmt
        self.cast_on_use = fmt is not None and spec.storage is WeightStorage.QAT
        quantized_product = fmt is not None and spec.storage is not WeightStorage.PLAIN
        self.input_format = FP8_ROW if quantized_product else None
        self.scale: nn.Parameter | None = None
        if fmt is not None and spec.storage is WeightStorage.PACKED:
            codes, scales = fmt.packed_shapes(shape)
            code_type = torch.float8_e4m3fn if fmt.element is Element.E4M3 else torch.uint8
            scale_type = torch.uint8 if fmt.scale is Scale.E8M0 else torch.float8_e4m3fn
            self.weight = new_parameter(codes, code_type, spec.device)
            self.scale = new_parameter(scales, scale_type, spec.device)
        else:
            self.weight = new_parameter(shape, spec.dtype, spec.device)

    def value(self) -> Tensor | QuantTensor:
        """The weight as it enters a product."""
        if self.format is not None and self.scale is not None:
            return QuantTensor(self.weight, self.scale, self.format)
        if self.format is not None and self.cast_on_use:
            return self.ops.cast(self.weight, self.format)
        return self.weight


class Linear(Weight):
    """``y = x Wᵀ + b``, the input cast to FP8 per 32 first where the product is quantised."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fmt: BlockFormat | None,
        spec: BuildSpec,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__((out_features, in_features), fmt, spec)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = new_parameter((out_features,), spec.dtype, spec.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            (y,) = self.ops.project(x, (self.value(),), input_format=self.input_format)
            return y
        if self.input_format is not None:
            x = self.ops.cast(x, self.input_format)
        return self.ops.linear(x, self.value(), self.bias)


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, width: int, eps: float, spec: BuildSpec) -> None:
        super().__init__()
        self.ops = spec.ops
        self.eps = eps
        self.weight = new_parameter((width,), spec.dtype, spec.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)
