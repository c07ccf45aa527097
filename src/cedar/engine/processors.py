"""What stands between a model's logits and the distribution that is sampled.

Pure functions on float64 ``[V]`` on the CPU; −inf is the logit of a token that cannot be drawn.
`Sampler.distribution` applies them in this order, each to what the one before left:

1. `add_bias`: the caller's numbers.
2. `keep_allowed`: the grammar's mask.
3. `penalise_repetition`, then `penalise_counts`.
4. `apply_temperature`.
5. `keep_top_k`, 6. `keep_top_p`, 7. `keep_min_p`.

So penalties see biased logits, no penalty can bring a forbidden token back, and top-p counts
probabilities after temperature and top-k. Among equal logits the lower id comes first everywhere.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = [
    "add_bias",
    "apply_temperature",
    "keep_allowed",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "most_likely",
    "penalise_counts",
    "penalise_repetition",
]

# Top-p sorts so many tokens, and more only if these hold too little of the probability.
_LOOKS = (512, 8192)


def add_bias(logits_V: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Adds a number to the logits of some tokens."""
    if not bias:
        return logits_V
    amounts = torch.tensor(list(bias.values()), dtype=logits_V.dtype)
    return logits_V.index_add(0, torch.tensor(list(bias)), amounts)


def keep_allowed(logits_V: Tensor, allowed_V: Tensor | None) -> Tensor:
    """−inf where a mask (bool) is false; None allows everything."""
    return logits_V if allowed_V is None else logits_V.masked_fill(~allowed_V, -math.inf)


def penalise_repetition(logits_V: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divides positive and multiplies negative logits of the tokens ``seen`` (ids, no repeats).

    The formula of CTRL (arXiv:1909.05858, section 4.1) with the usual treatment of negative logits.
    """
    if penalty == 1.0 or not len(seen):
        return logits_V
    old = logits_V[seen]
    return logits_V.index_copy(0, seen, torch.where(old > 0, old / penalty, old * penalty))


def penalise_counts(
    logits_V: Tensor, seen: Tensor, counts: Tensor, frequency: float, presence: float
) -> Tensor:
    """Subtracts ``count · frequency + presence`` from the logits of the tokens ``seen``."""
    if (frequency == 0.0 and presence == 0.0) or not len(seen):
        return logits_V
    return logits_V.index_add(0, seen, -(counts.to(logits_V.dtype) * frequency + presence))


def apply_temperature(logits_V: Tensor, temperature: float) -> Tensor:
    """``(logits − max) / temperature`` for a temperature above 0."""
    # Shifted first: the most likely token stays finite however small the temperature is.
    return (logits_V - logits_V.max()) / temperature


def keep_top_k(logits_V: Tensor, k: int) -> Tensor:
    """The ``k`` highest logits, of equal ones the lower ids; 0 keeps all."""
    if k == 0 or k >= len(logits_V):
        return logits_V
    return _only(logits_V, most_likely(logits_V, k))


def keep_top_p(logits_V: Tensor, top_p: float) -> Tensor:
    """The shortest list of most likely tokens whose probabilities reach ``top_p``: at least one."""
    if top_p >= 1.0:
        return logits_V
    possible = (logits_V > -math.inf).nonzero().flatten()
    scores = logits_V[possible]
    probs = scores.softmax(0)
    for count in (*_LOOKS, len(scores)):
        order = most_likely(scores, count)
        if float(probs[order].sum()) > top_p:
            break
    # Kept: every token before which less than top_p is gathered.
    before = probs[order].cumsum(0) - probs[order]
    return _only(logits_V, possible[order[before < top_p]])


def keep_min_p(logits_V: Tensor, min_p: float) -> Tensor:
    """Tokens whose probability is at least ``min_p`` times the most likely token's; 0 keeps all."""
    if min_p == 0.0:
        return logits_V
    return logits_V.masked_fill(logits_V < logits_V.max() + math.log(min_p), -math.inf)


def most_likely(scores_V: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` highest scores, highest first, of equal ones the lower id first."""
    if count >= len(scores_V):
        return scores_V.sort(descending=True, stable=True).indices
    # topk may take any of several equal scores, so it only finds the limit.
    limit = scores_V.topk(count).values[-1]
    ids = (scores_V >= limit).nonzero().flatten()
    return ids[scores_V[ids].sort(descending=True, stable=True).indices[:count]]


def _only(logits_V: Tensor, ids: Tensor) -> Tensor:
    return torch.full_like(logits_V, -math.inf).index_copy(0, ids, logits_V[ids])
