"""What a request may ask of sampling and stopping. No torch."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cedar.errors import RequestError

__all__ = ["SamplingParams"]

# Field -> smallest and largest value; None is no limit.
_INTEGERS: Mapping[str, tuple[int, int | None]] = {
    "max_tokens": (1, None),
    "top_k": (0, None),
    "seed": (0, 2**63 - 1),
    "n": (1, 1000),
    "logprobs": (0, 100),
    "prompt_logprobs": (0, 100),
}
# Field -> smallest and largest value, and whether the smallest itself is excluded.
_NUMBERS: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, 100.0, True),
    "frequency_penalty": (-2.0, 2.0, False),
    "presence_penalty": (-2.0, 2.0, False),
}
_MAY_BE_NONE = ("seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; all bad values raise one `RequestError`.

    max_tokens: the most tokens to generate.
    temperature: divides the logits; 0 takes the most likely token.
    top_k: sample from the k most likely tokens; 0 is off.
    top_p: sample from the smallest set of most likely tokens whose probabilities reach it.
    min_p: drop tokens less likely than this share of the most likely one's probability.
    repetition_penalty: divides positive and multiplies negative logits of every token that the
        prompt or the text so far holds; 1 is off.
    frequency_penalty, presence_penalty: subtracted from the logits of generated tokens, once per
        occurrence and once at all.
    logit_bias: token id -> number added to its logit; −inf forbids the token.
    seed: with the position of a token it decides every draw; None draws a new seed.
    stop: the text ends before the first of these strings. A single string counts as one.
    stop_token_ids: tokens that end the text, like the end-of-text token.
    ignore_eos: the end-of-text token is a token like any other.
    n: how many texts to generate for the prompt.
    logprobs, prompt_logprobs: report log-probabilities of the generated and the prompt tokens and
        those of so many most likely tokens; None reports nothing.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, limits in _INTEGERS.items():
            problems += _integer_problems(name, getattr(self, name), *limits)
        for name, bounds in _NUMBERS.items():
            problems += _number_problems(name, getattr(self, name), *bounds)
        if self.ignore_eos not in (True, False):
            problems.append(f"ignore_eos is {self.ignore_eos!r}; expected true or false")
        stop = _listed(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            problems.append(f"stop is {self.stop!r}; expected strings of one character or more")
        ids = _listed(self.stop_token_ids)
        if not all(_is_integer(token) and token >= 0 for token in ids):
            problems.append(f"stop_token_ids is {self.stop_token_ids!r}; expected token ids")
        problems += _bias_problems(self.logit_bias)
        if problems:
            raise RequestError("sampling parameters: " + "; ".join(problems) + ".")
        # Own, unchangeable copies: the caller's lists may change while the request runs.
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """From decoded JSON: lists for tuples, and token ids of ``logit_bias`` as strings.

        Raises `RequestError` for unknown names, too, with the nearest known one.
        """
        known = [f.name for f in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise RequestError(
                f"sampling parameters: {', '.join(map(repr, unknown))} unknown; expected some of "
                f"{', '.join(known)}.{hint}"
            )
        values = dict(values)
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            values["logit_bias"] = {_token_id(token): amount for token, amount in bias.items()}
        return cls(**values)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(value: Any) -> tuple[Any, ...]:
    """A string is one item, not its characters; what is no list becomes an item to refuse."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (value,)
    return tuple(value)


def _token_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def _integer_problems(name: str, value: Any, low: int, high: int | None) -> list[str]:
    if value is None and name in _MAY_BE_NONE:
        return []
    if _is_integer(value) and low <= value and (high is None or value <= high):
        return []
    allowed = f"an integer of {low} or more" if high is None else f"an integer, {low} to {high}"
    if name == "seed":
        allowed = "an integer, 0 to 2^63 - 1"
    return [f"{name} is {value!r}; expected {allowed}"]


def _number_problems(name: str, value: Any, low: float, high: float, open_: bool) -> list[str]:
    # NaN fails every comparison.
    if _is_number(value) and (low < value if open_ else low <= value) and value <= high:
        return []
    start = f"more than {low:g} and at most" if open_ else f"{low:g} to"
    return [f"{name} is {value!r}; expected {start} {high:g}"]


def _bias_problems(bias: object) -> list[str]:
    if not isinstance(bias, Mapping):
        return [f"logit_bias is {bias!r}; expected token ids with a number each"]
    for token, amount in bias.items():
        if not _is_integer(token) or token < 0:
            return [f"logit_bias has the key {token!r}; expected a token id of 0 or more"]
        if not _is_number(amount) or math.isnan(amount) or amount == math.inf:
            return [f"logit_bias[{token}] is {amount!r}; expected a finite number or -inf"]
    return []
