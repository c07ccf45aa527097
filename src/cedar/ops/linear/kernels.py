"""Products by the fastest version that can serve the given inputs.

Few tokens on compute capability 9.0: `cedar.ops.linear.hopper`. Few tokens elsewhere, or sizes
that it does not take: `cedar.ops.linear.triton`. Many tokens: packed weights are decoded to the
type of the input in one launch, and PyTorch multiplies.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.ops.cast.triton import cast
from cedar.ops.devices import is_hopper
from cedar.ops.linear import reference as plain
from cedar.ops.linear import triton as portable
from cedar.ops.norm.triton import rms_norm
from cedar.quant import FP8_BLOCK, FP8_ROW, BlockFormat, QuantTensor

try:
    from cedar.ops.linear import hopper
except ImportError:  # a Triton without Gluon
    hopper = None  # type: ignore[assignment]

__all__ = ["LinearKernels", "unsupported"]

_NARROW = (torch.float16, torch.bfloat16)
_FLOATS = (*_NARROW, torch.float32)
_FEW = 128  # tokens; more of them are no longer bound by the bytes of the weights
_AT_ONCE = 3  # weights of a launch
_CHAINED = 32  # tokens; with more, preparing them for the next product costs more than a launch

Weight = Tensor | QuantTensor
Norm = tuple[Tensor, float]


def unsupported(x: Tensor, weights: tuple[Weight, ...], norm: Norm | None = None) -> str | None:
    """Why no kernel can take these inputs; None if one can."""
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    if x.dtype not in _FLOATS:
        return f"an input in {x.dtype}"
    if any(w.format != FP8_BLOCK for w in weights if isinstance(w, QuantTensor)):
        return "packed weights in another format than FP8_BLOCK"
    if any(weight.dtype not in _FLOATS for weight in floats):
        return "a weight in another type than float16, bfloat16 and float32"
    if norm is not None:
        floats.append(norm[0])
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *floats)):
        return "a gradient is wanted"
    return None


class LinearKernels:
    """`Project`, `ProjectGroups`, `ProjectOutput` and `WideLinear`.

    Inputs they cannot take go to the reference.

    Holds counters of programs that arrived, zero between launches, so launches that may overlap
    need instances of their own.
    """

    def __init__(self) -> None:
        self._counters: dict[torch.device, Tensor] = {}

    def project(
        self,
        x: Tensor,
        weights: tuple[Weight, ...],
        *,
        input_format: BlockFormat | None,
        norm: Norm | None = None,
    ) -> tuple[Tensor, ...]:
        if unsupported(x, weights, norm) is not None:
            return plain.project(x, weights, input_format=input_format, norm=norm)
        rows = x.reshape(-1, x.shape[-1])
        outs: dict[int, Tensor] = {}
        for places in _batches(weights):
            group = tuple(weights[i] for i in places)
            found = None
            if isinstance(group[0], QuantTensor) and input_format in (None, FP8_ROW):
                found = self._few(rows, group, x.dtype, norm, input_format)
            if found is None:
                rows, norm, input_format = _prepared(rows, norm, input_format), None, None
                found = self._few(rows, group, x.dtype)
            if found is None:
                found = tuple(_product(rows, weight) for weight in group)
            outs |= dict(zip(places, found, strict=True))
        return tuple(outs[i].view(*x.shape[:-1], w.shape[0]) for i, w in enumerate(weights))

    def project_groups(self, o_TGK: Tensor, weight: Weight) -> Tensor:
        tokens, groups, width = o_TGK.shape
        if unsupported(o_TGK, (weight,)) is not None:
            return plain.project_groups(o_TGK, weight)
        rows = o_TGK.reshape(tokens, groups * width)
        found = self._few(rows, (weight,), rows.dtype, groups=groups)
        if found is not None:
            return found[0]
        if isinstance(weight, QuantTensor) and tokens <= _FEW:
            return portable.product(rows, weight, rows.dtype, groups)
        return plain.project_groups(o_TGK, _dense(weight, rows.dtype))

    def project_output(
        self, o_TGK: Tensor, first: Weight, second: Weight, *, input_format: BlockFormat | None
    ) -> Tensor:
        if input_format == FP8_ROW and unsupported(o_TGK, (first, second)) is None:
            found = self._both(o_TGK, first, second)
            if found is not None:
                return found
        grouped = self.project_groups(o_TGK, first)
        (out,) = self.project(grouped, (second,), input_format=input_format)
        return out

    def _both(self, o_TGK: Tensor, first: Weight, second: Weight) -> Tensor | None:
        """Two launches, each with many tokens; None where that does not serve."""
        tokens, groups, _ = o_TGK.shape
        if hopper is None or not 0 < tokens <= _CHAINED or not is_hopper(o_TGK.device):
            return None
        if not isinstance(first, QuantTensor) or not isinstance(second, QuantTensor):
            return None
        rows = o_TGK.flatten(1)
        plan, next_plan = (
            hopper.choose(rows, (w,), None, n) for w, n in ((first, groups), (second, 1))
        )
        if plan is None or next_plan is None or not (plan.many and next_plan.many):
            return None
        counters = self._arrivals(rows.device)
        grouped, out = (rows.new_empty((tokens, w.shape[0])) for w in (first, second))
        hopper.launch(rows, (first,), (grouped,), plan, counters, groups=groups, prepare=True)
        hopper.launch(grouped, (second,), (out,), next_plan, counters, prepared=True)
        return out

    def wide_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        reason = unsupported(x, (weight,))
        if reason is not None or x.dtype not in _NARROW or weight.dtype != x.dtype:
            return plain.wide_linear(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        found = self._few(rows, (weight,), torch.float32)
        if found is not None:
            out = found[0]
        elif rows.is_cuda:
            out = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        else:
            out = portable.product(rows, weight, torch.float32)
        return out.view(*x.shape[:-1], weight.shape[0])

    def _few(
        self,
        rows: Tensor,
        weights: tuple[Weight, ...],
        dtype: torch.dtype,
        norm: Norm | None = None,
        input_format: BlockFormat | None = None,
        groups: int = 1,
    ) -> tuple[Tensor, ...] | None:
        """By the kernel for Hopper, all weights in one launch; None where it does not serve."""
        if hopper is None or not 0 < len(rows) <= _FEW or not is_hopper(rows.device):
            return None
        plan = hopper.choose(rows, weights, norm, groups)
        if plan is None:
            return None
        if norm is not None and plan.splits > 1 and not plan.many:
            rows, norm = rms_norm(rows, *norm), None
        outs = tuple(rows.new_empty((len(rows), w.shape[0]), dtype=dtype) for w in weights)
        hopper.launch(
            rows, weights, outs, plan, self._arrivals(rows.device), norm=norm,
            cast=input_format is not None, groups=groups,
        )  # fmt: skip
        return outs

    def _arrivals(self, device: torch.device) -> Tensor:
        held = self._counters.get(device)
        if held is None:
            held = torch.zeros(hopper.COUNTERS, dtype=torch.int32, device=device)
            self._counters[device] = held
        return held


def _batches(weights: tuple[Weight, ...]) -> list[list[int]]:
    """Places of the weights that one launch serves: alike, and no more than it takes."""
    packed = [i for i, weight in enumerate(weights) if isinstance(weight, QuantTensor)]
    others = [i for i in range(len(weights)) if i not in packed]
    return [
        places[i : i + _AT_ONCE]
        for places in (packed, others)
        for i in range(0, len(places), _AT_ONCE)
    ]


def _prepared(rows: Tensor, norm: Norm | None, input_format: BlockFormat | None) -> Tensor:
    if norm is not None:
        rows = rms_norm(rows, *norm)
    return rows if input_format is None else cast(rows, input_format)


def _product(rows: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, QuantTensor) and len(rows) <= _FEW:
        return portable.product(rows, weight, rows.dtype)
    return F.linear(rows, _dense(weight, rows.dtype))


def _dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    return portable.dense(weight, dtype) if isinstance(weight, QuantTensor) else weight.to(dtype)
