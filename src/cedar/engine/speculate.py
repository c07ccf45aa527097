"""Drafted tokens against the model's own: which are kept, and how many are worth verifying.

Two ways to verify, both from the logits of one pass over ``[last token, d_1 … d_k]``, whose row i
belongs to the token after ``d_i``:

- `verify_keyed`, the default: at each position the token is drawn from the model's distribution
  with that position's random numbers, exactly as without drafts, and drafting goes on while drafts
  equal what was drawn. The text is the same token for token, whatever was drafted.
- `verify_rejection`: rejection sampling (Leviathan et al., arXiv:2211.17192). The text has the same
  distribution, but other tokens than without drafts. `accept` is its rule on probabilities alone.

Both look at one position after the other, and the sampler's history and mask advance with tokens
of the text only: rejected drafts are never seen by a grammar.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cedar.engine.draft_plan import AcceptanceStats, StepProfile, plan_lengths, survival
from cedar.engine.sampler import Chosen, Sampler

__all__ = [
    "AcceptanceStats",
    "KeyedDraft",
    "StepProfile",
    "Verdict",
    "Verification",
    "accept",
    "plan_lengths",
    "survival",
    "verify_keyed",
    "verify_rejection",
]


class Verdict(NamedTuple):
    """accepted: how many drafts are kept; next_token: what follows them."""

    accepted: int
    next_token: int


class Verification(NamedTuple):
    """What the text gained: ``accepted`` drafts, then one token more unless the text ended.

    Of the rows that were run, the first ``1 + accepted`` belong to the text; the others have to be
    rolled back.
    """

    accepted: int
    chosen: tuple[Chosen, ...]

    @property
    def tokens(self) -> list[int]:
        return [chosen.token for chosen in self.chosen]


def accept(
    draft_tokens: Sequence[int],
    draft_probs_KV: Tensor | None,
    target_probs_KV: Tensor,
    uniforms: Sequence[float],
) -> Verdict:
    """Rejection sampling plus a bonus token, on probabilities.

    draft_probs: ``[k, V]``, what each draft was really drawn from; None if drafts were not drawn
    but determined, as the most likely token. target_probs: ``[k + 1, V]``, the last row for the
    bonus token. uniforms: k + 1 independent numbers in (0, 1); the last draws ``next_token``.

    Draft x is kept with probability ``min(1, p(x) / q(x))``; at the first that is not, the next
    token comes from ``max(p − q, 0)``, normalised. Then tokens are distributed as the target's.
    """
    count = len(draft_tokens)
    if len(target_probs_KV) != count + 1 or len(uniforms) != count + 1:
        raise ValueError(
            f"{count} drafts with {len(target_probs_KV)} rows of target probabilities and "
            f"{len(uniforms)} random numbers; expected {count + 1} of both"
        )
    for i, token in enumerate(draft_tokens):
        p_V = target_probs_KV[i]
        q_V = _draft_row(draft_probs_KV, i, token, p_V)
        if not _keeps(p_V, q_V, token, uniforms[i]):
            return Verdict(i, _inverse(_residual(p_V, q_V), uniforms[-1]))
    return Verdict(count, _inverse(target_probs_KV[count], uniforms[-1]))


def verify_keyed(
    sampler: Sampler,
    logits_KV: Tensor,
    draft_tokens: Sequence[int],
    *,
    finished: Callable[[int], bool] | None = None,
) -> Verification:
    """Draw every position from the model; go on while the draft was that very token.

    logits: ``[k + 1, V]`` for k drafts. finished: called with each token of the text in order; true
    ends the text with that token, and no later token is drawn.
    """
    _check_rows(logits_KV, draft_tokens)
    chosen: list[Chosen] = []
    for i, logits_V in enumerate(logits_KV):
        chosen.append(sampler.step(logits_V))
        token = chosen[-1].token
        kept = i < len(draft_tokens) and token == draft_tokens[i]
        if finished is not None and finished(token):
            return Verification(i + kept, tuple(chosen))
        if not kept:
            break
    return Verification(len(chosen) - 1, tuple(chosen))


def verify_rejection(
    sampler: Sampler,
    logits_KV: Tensor,
    draft_tokens: Sequence[int],
    draft_probs_KV: Tensor | None,
    *,
    finished: Callable[[int], bool] | None = None,
) -> Verification:
    """Rejection sampling against the sampler's distributions; arguments as in `accept`.

    The random numbers belong to the positions, and must not be those that the drafts were drawn
    with (`KeyedDraft` uses others). At temperature 0 drafts are kept while they are the most likely
    token, as in `verify_keyed`.
    """
    _check_rows(logits_KV, draft_tokens)
    chosen: list[Chosen] = []
    for i, logits_V in enumerate(logits_KV):
        token, kept = _verify_one(sampler, logits_V, i, draft_tokens, draft_probs_KV)
        chosen.append(sampler.report(logits_V, token))
        sampler.accept(token)
        if finished is not None and finished(token):
            return Verification(i + kept, tuple(chosen))
        if not kept:
            break
    return Verification(len(chosen) - 1, tuple(chosen))


class KeyedDraft:
    """Chooses drafted tokens with the random numbers that will later draw the model's own.

    Call it once for every position of a block with the draft head's logits ``[B, V]``, one row a
    sampler; it returns tokens ``[B]``. Where draft and model agree on the probabilities they then
    agree on the token, so that sampled text accepts nearly as many drafts as greedy text. With
    ``keep_probs``, ``probs_KV(b)`` is what the drafts of sampler b were drawn from.
    """

    def __init__(self, samplers: Sequence[Sampler], *, keep_probs: bool = False) -> None:
        self._samplers = samplers
        self._drafted: list[list[int]] = [[] for _ in samplers]
        self._probs: list[list[Tensor]] | None = [[] for _ in samplers] if keep_probs else None

    def __call__(self, logits_BV: Tensor) -> Tensor:
        for b, (sampler, drafted) in enumerate(zip(self._samplers, self._drafted, strict=True)):
            history = [*sampler.history, *drafted]
            if self._probs is not None:
                probs_V = sampler.distribution(logits_BV[b], history, masked=False)
                self._probs[b].append(probs_V)
            drafted.append(sampler.draft_at(logits_BV[b], len(history), history))
        return torch.tensor([drafted[-1] for drafted in self._drafted], device=logits_BV.device)

    def probs_KV(self, b: int) -> Tensor:
        if self._probs is None:
            raise ValueError("probabilities were not kept; pass keep_probs=True")
        return torch.stack(self._probs[b])


def _verify_one(
    sampler: Sampler,
    logits_V: Tensor,
    i: int,
    draft_tokens: Sequence[int],
    draft_probs_KV: Tensor | None,
) -> tuple[int, bool]:
    """The token at the sampler's position, and whether it is draft i."""
    p_V = sampler.distribution(logits_V)
    keep, replace = sampler.verify_uniforms(sampler.position, 2)
    if i == len(draft_tokens):
        return _inverse(p_V, replace), False
    token = draft_tokens[i]
    q_V = _draft_row(draft_probs_KV, i, token, p_V)
    if _keeps(p_V, q_V, token, keep):
        return token, True
    return _inverse(_residual(p_V, q_V), replace), False


def _draft_row(draft_probs_KV: Tensor | None, i: int, token: int, p_V: Tensor) -> Tensor:
    if draft_probs_KV is None:
        return torch.zeros_like(p_V).index_fill(0, torch.tensor(token, device=p_V.device), 1.0)
    q_V = draft_probs_KV[i].to(p_V)
    if not float(q_V[token]) > 0.0:
        raise ValueError(
            f"draft {i} is token {token}, which has no probability in what it was drawn from; "
            "the text would not follow the model's distribution"
        )
    return q_V


def _keeps(p_V: Tensor, q_V: Tensor, token: int, uniform: float) -> bool:
    return uniform * float(q_V[token]) < float(p_V[token])


def _residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    rest = (p_V - q_V).clamp(min=0.0)
    # Equal distributions reject nothing but by rounding; then any draw from p is as good.
    return rest if float(rest.sum()) > 0.0 else p_V


def _inverse(weights_V: Tensor, uniform: float) -> int:
    """The token at which the running sum of the weights passes ``uniform`` of their total."""
    running = weights_V.cumsum(0)
    token = int(torch.searchsorted(running, uniform * running[-1], right=True))
    # By rounding the place may lie behind the last token that has any weight.
    return min(token, int(weights_V.nonzero()[-1]))


def _check_rows(logits_KV: Tensor, draft_tokens: Sequence[int]) -> None:
    if logits_KV.ndim != 2 or len(logits_KV) != len(draft_tokens) + 1:
        raise ValueError(
            f"logits have the shape {list(logits_KV.shape)} for {len(draft_tokens)} drafts; "
            f"expected {len(draft_tokens) + 1} rows"
        )
