"""One expert after the other, over the tokens sorted by expert."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.ops.experts import Shared
from cedar.ops.linear.reference import linear
from cedar.ops.precision import widen
from cedar.ops.route import Gating, Routing
from cedar.ops.route.reference import router
from cedar.quant import BlockFormat, QuantTensor, fake_quantize

__all__ = ["experts", "mixture", "swiglu"]


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(widen(gate).clamp_max(limit)) * widen(up).clamp(-limit, limit)


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
    x = x_TD if input_format is None else fake_quantize(x_TD, input_format)
    total = _routed(x, experts_TA, weights_TA, w1, w2, w3, limit, input_format)
    if shared is None:
        return total
    hidden = swiglu(linear(x, shared[0]), linear(x, shared[2]), limit).to(x.dtype)
    if input_format is not None:
        hidden = fake_quantize(hidden, input_format)
    return (total + linear(hidden, shared[1]).to(total.dtype)).to(x_TD.dtype)


def _routed(
    x_TD: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: Tensor | QuantTensor,
    w2: Tensor | QuantTensor,
    w3: Tensor | QuantTensor,
    limit: float,
    input_format: BlockFormat | None,
) -> Tensor:
    active = experts_TA.shape[1]
    order = experts_TA.flatten().argsort(stable=True)
    token = order.div(active, rounding_mode="floor")
    weight = weights_TA.flatten()[order].unsqueeze(-1)
    load = experts_TA.flatten().bincount(minlength=w1.shape[0]).tolist()
    visits = [(expert, count) for expert, count in enumerate(load) if count]
    total = torch.zeros(x_TD.shape, dtype=widen(x_TD).dtype, device=x_TD.device)
    if not visits:
        return total
    rows = x_TD[token].split([count for _, count in visits])
    gate = torch.cat([linear(r, _pick(w1, e)) for r, (e, _) in zip(rows, visits, strict=True)])
    up = torch.cat([linear(r, _pick(w3, e)) for r, (e, _) in zip(rows, visits, strict=True)])
    hidden = swiglu(gate, up, limit)
    hidden = (weight.to(hidden.dtype) * hidden).to(x_TD.dtype)
    if input_format is not None:
        hidden = fake_quantize(hidden, input_format)
    inner = hidden.split([count for _, count in visits])
    down = torch.cat([linear(h, _pick(w2, e)) for h, (e, _) in zip(inner, visits, strict=True)])
    return total.index_add(0, token, widen(down))


def _pick(weight: Tensor | QuantTensor, expert: int) -> Tensor | QuantTensor:
    if isinstance(weight, QuantTensor):
        return QuantTensor(weight.codes[expert], weight.scale[expert], weight.format)
    return weight[expert]


_PLAIN: Any = SimpleNamespace(router=router, experts=experts)


def mixture(
    x_TD: Tensor,
    gating: Gating,
    w1: Tensor | QuantTensor,
    w2: Tensor | QuantTensor,
    w3: Tensor | QuantTensor,
    *,
    limit: float,
    input_format: BlockFormat | None,
    shared: Shared | None = None,
    real_T: Tensor | None = None,
    parts: Any = _PLAIN,
) -> tuple[Tensor, Routing]:
    routing: Routing = parts.router(x_TD, **gating._asdict(), real_T=real_T)
    y_TD: Tensor = parts.experts(
        x_TD, routing.experts_TA, routing.weights_TA, w1, w2, w3,
        limit=limit, input_format=input_format, shared=shared,
    )  # fmt: skip
    return y_TD, routing
