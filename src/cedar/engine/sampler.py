"""Choosing the next token of one request from logits."""

import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cedar.engine import processors
from cedar.engine.draws import Purpose, uniforms
from cedar.engine.params import SamplingParams
from cedar.errors import RequestError

__all__ = ["Chosen", "Sampler", "SamplingParams", "TokenMask", "token_logprobs"]


class TokenMask(Protocol):
    """A grammar: which tokens may come next.

    Its state follows the text: ``accept`` is called once for every token of the output, in order,
    the end-of-text token included, and never for a drafted token that was rejected.
    """

    def allowed(self) -> Tensor | None:
        """bool ``[V]``, true where a token may come next; None if all may."""

    def accept(self, token: int) -> None:
        """The text goes on with this token."""


class Chosen(NamedTuple):
    """A token and what the model thought of it.

    logprob: log-softmax of the model's own logits, before any processor; None if not asked for.
    top: the most likely tokens with theirs, most likely first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws the tokens of one text.

    The draw at a position is a pure function of (seed, sample, position, distribution); see
    `cedar.engine.draws`. It is a race: token i finishes after ``−log(u_i) / p_i`` and the first one
    is taken, with one number ``u_i`` for each token of the vocabulary. So rounding in the logits
    changes a token only where the race is that close, and a draft that is drawn with the same
    numbers from similar probabilities is mostly the same token.

    vocab_size: checks ``logit_bias`` and the shape of logits; None checks nothing. prompt_tokens:
    for the repetition penalty. sample: which of the request's ``n`` texts. Raises `RequestError`
    for a bias on an unknown token.

    ``history`` holds the tokens generated so far; `choose` and `accept` extend it.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int | None = None,
        prompt_tokens: Sequence[int] = (),
        mask: TokenMask | None = None,
        *,
        sample: int = 0,
    ) -> None:
        if vocab_size is not None:
            _check_ids(params, vocab_size)
        self.params = params
        # A drawn seed stays within what a caller may pass, so that it can be used again.
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.history: list[int] = []
        self._vocab_size = vocab_size
        self._mask = mask
        self._sample = sample
        self._prompt = sorted(set(prompt_tokens)) if params.repetition_penalty != 1.0 else []

    @property
    def position(self) -> int:
        """Number of the next token in the generated text, from 0."""
        return len(self.history)

    def verify_uniforms(self, position: int, count: int) -> list[float]:
        """Numbers in (0, 1) for rejection sampling, independent of those that draw tokens."""
        drawn: list[float] = uniforms(
            self.seed, self._sample, position, count, Purpose.VERIFY
        ).tolist()
        return drawn

    def choose(self, logits_V: Tensor) -> int:
        """The next token, which becomes part of the text."""
        return self.step(logits_V).token

    def step(self, logits_V: Tensor) -> Chosen:
        """As `choose`, with log-probabilities where they were asked for."""
        chosen = self.choose_at(logits_V, self.position, self.history)
        self.accept(chosen.token)
        return chosen

    def choose_at(self, logits_V: Tensor, position: int, history: Sequence[int]) -> Chosen:
        """The token for a position after the generated tokens ``history``; changes no state.

        The mask counts as it stands, so it must have accepted exactly ``history``.
        """
        return self.report(logits_V, self._draw(logits_V, position, history, masked=True))

    def draft_at(self, logits_V: Tensor, position: int, history: Sequence[int]) -> int:
        """A draft for a position: the same draw from a draft's logits, without the mask.

        The mask's state after drafted tokens is unknown; forbidden drafts are not accepted later.
        """
        return self._draw(logits_V, position, history, masked=False)

    def accept(self, token: int) -> None:
        """The text goes on with this token, chosen here or elsewhere."""
        self.history.append(token)
        if self._mask is not None:
            self._mask.accept(token)

    def distribution(
        self, logits_V: Tensor, history: Sequence[int] | None = None, *, masked: bool = True
    ) -> Tensor:
        """What the token after ``history`` is drawn from: probabilities ``[V]``, float64, CPU.

        history: generated tokens, default this text so far. The order of the processors is that of
        `cedar.engine.processors`. At temperature 0 all probability is on one token.
        """
        scores = self._scores(logits_V, self.history if history is None else history, masked)
        if self.params.temperature == 0.0:
            return torch.zeros_like(scores).index_fill(0, processors.most_likely(scores, 1), 1.0)
        scores = processors.apply_temperature(scores, self.params.temperature)
        scores = processors.keep_top_k(scores, self.params.top_k)
        scores = processors.keep_top_p(scores, self.params.top_p)
        return processors.keep_min_p(scores, self.params.min_p).softmax(0)

    def report(self, logits_V: Tensor, token: int) -> Chosen:
        """The token with log-probabilities, if the request asked for them."""
        if self.params.logprobs is None:
            return Chosen(token)
        return token_logprobs(logits_V.unsqueeze(0), [token], self.params.logprobs)[0]

    def _draw(self, logits_V: Tensor, position: int, history: Sequence[int], masked: bool) -> int:
        if self.params.temperature == 0.0:
            return int(processors.most_likely(self._scores(logits_V, history, masked), 1))
        probs = self.distribution(logits_V, history, masked=masked).numpy()
        ids = probs.nonzero()[0]
        # Each token's number is at its own place, whichever others can be drawn.
        noise = uniforms(self.seed, self._sample, position, int(ids[-1]) + 1)[ids]
        return int(ids[np.argmin(-np.log(noise) / probs[ids])])

    def _scores(self, logits_V: Tensor, history: Sequence[int], masked: bool) -> Tensor:
        """Biased, masked and penalised logits, float64 on the CPU."""
        if logits_V.ndim != 1 or self._vocab_size not in (None, len(logits_V)):
            raise ValueError(
                f"logits have the shape {list(logits_V.shape)}; expected [{self._vocab_size}]"
            )
        params = self.params
        # On the CPU in float64, so that the draw does not depend on the device.
        scores = logits_V.to("cpu", torch.float64)
        if not float(scores.max()) < math.inf:
            raise RequestError(
                f"the model's logits for generated token {len(history)} hold NaN or infinity, so "
                "nothing can be sampled. Check the weights (cedar check) or compute in float32."
            )
        scores = processors.add_bias(scores, params.logit_bias)
        if masked and self._mask is not None:
            scores = processors.keep_allowed(scores, _checked(self._mask.allowed(), len(scores)))
        if float(scores.max()) == -math.inf:
            raise RequestError(
                f"no token is allowed as generated token {len(history)}: the mask and logit_bias "
                "forbid every one. Let the grammar end the text with the end-of-text token."
            )
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*self._prompt, *history}), dtype=torch.int64)
            scores = processors.penalise_repetition(scores, seen, params.repetition_penalty)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            ids = torch.tensor(list(history), dtype=torch.int64)
            seen, counts = ids.unique(return_counts=True)
            scores = processors.penalise_counts(
                scores, seen, counts, params.frequency_penalty, params.presence_penalty
            )
        return scores


def token_logprobs(logits_TV: Tensor, tokens: Sequence[int], top: int) -> tuple[Chosen, ...]:
    """Log-softmax of each row at its token, and the ``top`` most likely tokens of the row.

    For prompts: row t of a prompt's logits belongs to its token t + 1.
    """
    logprobs = logits_TV.to("cpu", torch.float64).log_softmax(1)
    found = []
    for row_V, token in zip(logprobs, tokens, strict=True):
        likely = processors.most_likely(row_V, top) if top else torch.empty(0, dtype=torch.int64)
        pairs = zip(likely.tolist(), row_V[likely].tolist(), strict=True)
        found.append(Chosen(int(token), float(row_V[token]), tuple(pairs)))
    return tuple(found)


def _checked(allowed_V: Tensor | None, vocab_size: int) -> Tensor | None:
    if allowed_V is None:
        return None
    if allowed_V.dtype != torch.bool or list(allowed_V.shape) != [vocab_size]:
        raise RequestError(
            f"the token mask is {allowed_V.dtype} {list(allowed_V.shape)}; expected torch.bool "
            f"[{vocab_size}]."
        )
    return allowed_V.cpu()


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for name, ids in (
        ("logit_bias", list(params.logit_bias)),
        ("stop_token_ids", list(params.stop_token_ids)),
    ):
        wrong = [token for token in ids if token >= vocab_size]
        if wrong:
            raise RequestError(
                f"sampling parameters: {name} names token {wrong[0]}; expected 0 to "
                f"{vocab_size - 1}, the model's vocabulary."
            )
