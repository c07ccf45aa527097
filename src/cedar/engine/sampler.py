"""Choosing the next token from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.errors import RequestError

__all__ = ["Sampler", "SamplingParams"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Bad values raise `RequestError`.

    temperature: 0 takes the most likely token. top_p: sample from the smallest set of most likely
    tokens whose probabilities reach it. seed: None draws a new one.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max_tokens is {self.max_tokens}; expected 1 or more")
        if not 0.0 <= self.temperature <= 100.0:
            problems.append(f"temperature is {self.temperature}; expected 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            problems.append(f"top_p is {self.top_p}; expected more than 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            problems.append(f"seed is {self.seed}; expected 0 to 2^63 - 1")
        if problems:
            raise RequestError("sampling parameters: " + "; ".join(problems) + ".")


class Sampler:
    """Draws tokens with its own random state: equal seeds give equal draws."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator()
        # A drawn seed stays within what a caller may pass, so that it can be used again.
        self.seed = self._generator.seed() % 2**63 if params.seed is None else params.seed
        self._generator.manual_seed(self.seed)

    def choose(self, logits_V: Tensor) -> int:
        """The next token of one sequence."""
        if self.params.temperature == 0.0:
            return int(logits_V.argmax())
        # On the CPU in float64, so that the draw does not depend on the device's random numbers.
        probs = (logits_V.to("cpu", torch.float64) / self.params.temperature).softmax(0)
        if self.params.top_p < 1.0:
            sorted_probs, order = probs.sort(descending=True, stable=True)
            # Kept: every token before which less than top_p is gathered, so at least one.
            kept = sorted_probs.cumsum(0) - sorted_probs < self.params.top_p
            probs = torch.zeros_like(probs).scatter(0, order[kept], sorted_probs[kept])
        return int(torch.multinomial(probs, 1, generator=self._generator))
