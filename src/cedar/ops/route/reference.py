"""Top-k routing with a selection bias."""

import torch.nn.functional as F
from torch import Tensor

from cedar.ops.route import Routing

__all__ = ["route"]


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
    experts = (scores + bias).topk(active, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * route_scale, scores)
