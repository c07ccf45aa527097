"""Plain generation, one sequence: exact prefill in chunks, then one token at a time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cedar.cache import DenseKV
from cedar.engine.build import LoadedModel
from cedar.engine.sampler import Sampler, SamplingParams
from cedar.errors import RequestError
from cedar.model import Batch

__all__ = ["Generation", "generate"]

_PREFILL_CHUNK = 1024


@dataclass(slots=True)
class Generation:
    """What is known of a running or finished generation; times are in seconds."""

    prompt_tokens: int
    seed: int
    tokens: list[int]
    finish_reason: str | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


def generate(
    loaded: LoadedModel, prompt: Sequence[int], params: SamplingParams
) -> Iterator[Generation]:
    """Yield the (same, growing) `Generation` after every token.

    The end-of-text token ends it and is not part of ``tokens``. Raises `RequestError` for a prompt
    that is empty, has unknown ids or leaves no room for one token.
    """
    model, config = loaded.model, loaded.model.config
    _check_prompt(prompt, config.vocab_size, config.max_position_embeddings)
    sampler = Sampler(params)
    state = Generation(len(prompt), sampler.seed, [])
    room = config.max_position_embeddings - len(prompt)
    store = DenseKV(config, device=loaded.device, dtype=model.compute_dtype)
    start = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(prompt), _PREFILL_CHUNK):
            chunk = prompt[first : first + _PREFILL_CHUNK]
            output = model(Batch.pack([chunk], device=loaded.device), store, logits="last")
    state.prefill_seconds = time.perf_counter() - start
    start = time.perf_counter()
    while state.finish_reason is None:
        token = sampler.choose(output.logits[0])
        if token == config.eos_token_id:
            state.finish_reason = "stop"
        else:
            state.tokens.append(token)
            if len(state.tokens) == min(params.max_tokens, room):
                state.finish_reason = "length"
        state.decode_seconds = time.perf_counter() - start
        yield state
        if state.finish_reason is None:
            with torch.inference_mode():
                output = model(Batch.pack([[token]], device=loaded.device), store, logits="last")


def _check_prompt(prompt: Sequence[int], vocab_size: int, limit: int) -> None:
    if not prompt:
        raise RequestError("the prompt has no tokens; give at least one (the begin-of-text token).")
    wrong = next((i for i, token in enumerate(prompt) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"prompt token {wrong} is {prompt[wrong]}; expected 0 to {vocab_size - 1}."
        )
    if len(prompt) >= limit:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but the model's positions end at {limit} "
            "(max_position_embeddings). Shorten it."
        )
