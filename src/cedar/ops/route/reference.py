"""Top-k routing with a selection bias."""

import torch.nn.functional as F
from torch import Tensor

from cedar.ops.linear.reference import linear
from cedar.ops.precision import widen
from cedar.ops.route import Routing

__all__ = ["route", "router"]


def route(
    logits_TE: Tensor,
    bias: Tensor,
    active: int,
    *,
    score_func: str,
    normalize: bool,
    route_scale: float,
) -> Routing:
    if score_func == "softmax":
        scores = logits_TE.softmax(-1)
    elif score_func == "sigmoid":
        scores = logits_TE.sigmoid()
    else:
        scores = F.softplus(logits_TE).sqrt()
    # `topk` leaves open which of two equal values it takes.
    experts = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[..., :active]
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * route_scale, scores)


def router(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias: Tensor,
    active: int,
    *,
    temp: float,
    score_func: str,
    normalize: bool,
    route_scale: float,
    real_T: Tensor | None = None,
) -> Routing:
    logits = linear(widen(x_TD), weight_ED) / temp
    routing = route(
        logits, bias, active, score_func=score_func, normalize=normalize, route_scale=route_scale
    )
    if real_T is None:
        return routing
    return Routing(*(each.where(real_T.unsqueeze(1), each[:1]) for each in routing))
