"""What a request has to fit into, checked before it is queued."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from cedar.engine.params import SamplingParams
from cedar.engine.request import Request
from cedar.errors import RequestError

__all__ = ["EngineLimits", "check_times", "check_tokens", "fitting", "sampling_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """What a request has to fit into, and the sizes behind the figures.

    vocab_size, bos, eos: of the model. max_positions: the longest sequence. page_tokens,
    num_pages: of the pool; page_bytes, slot_bytes: what one page and one running sequence hold.
    max_waiting: requests in the queue. entry_tokens: tokens of an entry of the last index source.
    image_token_id: what stands for an image in a prompt; None for a model that takes none.
    """

    vocab_size: int
    bos: int
    eos: int
    max_positions: int
    page_tokens: int
    num_pages: int
    page_bytes: int
    slot_bytes: int
    max_waiting: int
    entry_tokens: int = 1
    image_token_id: int | None = None


def sampling_of(request: Request) -> SamplingParams:
    """The sampling parameters of a request, which to the scheduler are no more than a limit."""
    if not isinstance(request.params, SamplingParams):
        raise RequestError(
            f"request {request.id!r}: params is a {type(request.params).__name__}; expected "
            "SamplingParams."
        )
    return request.params


def check_tokens(prompt: Sequence[int], limits: EngineLimits) -> tuple[int, ...]:
    """The prompt as plain integers; `RequestError` if it is empty, too long or unknown tokens."""
    if not isinstance(prompt, Iterable):
        raise RequestError(
            f"the prompt is a {type(prompt).__name__}; expected text or a list of token ids."
        )
    given: list[Any] = list(prompt)
    if not given:
        raise RequestError("the prompt has no tokens; give at least one (the begin-of-text token).")
    for place, token in enumerate(given):
        if not isinstance(token, Integral) or not 0 <= int(token) < limits.vocab_size:
            raise RequestError(
                f"prompt token {place} is {token!r}; expected 0 to {limits.vocab_size - 1}."
            )
    tokens = tuple(int(token) for token in given)
    if len(tokens) >= limits.max_positions:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but the model's positions end at "
            f"{limits.max_positions} (max_position_embeddings). Shorten it."
        )
    return tokens


def check_times(priority: int, timeout: float | None) -> None:
    """Raises `RequestError` for what is no priority or no timeout."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority is {priority!r}; expected an integer, more is sooner.")
    real = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (real and 0 < timeout < math.inf):
        raise RequestError(f"timeout is {timeout!r}; expected more than 0 seconds, or None.")


def fitting(
    tokens: tuple[int, ...], params: SamplingParams, limits: EngineLimits
) -> SamplingParams:
    """With ``max_tokens`` within the model's positions; raises if the pool is too small."""
    most = min(params.max_tokens, limits.max_positions - len(tokens))
    room = limits.num_pages * limits.page_tokens
    if len(tokens) + most > room:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and max_tokens is {most}, together "
            f"{len(tokens) + most}; allowed are {room}, what the pool holds ({limits.num_pages} "
            f"pages of {limits.page_tokens} tokens). Shorten one, or enlarge pool_tokens."
        )
    return replace(params, max_tokens=most)
