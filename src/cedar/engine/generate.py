"""The plain loop, one sequence: exact prefill in chunks, then one token at a time.

No scheduler, no packed cache, no drafts: what the engine's output is compared with.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cedar.cache import DenseKV
from cedar.engine.build import LoadedModel
from cedar.engine.sampler import Sampler, SamplingParams
from cedar.engine.stopping import StopChecker
from cedar.errors import RequestError
from cedar.model import Batch

__all__ = ["Generation", "generate"]

_PREFILL_CHUNK = 1024


@dataclass(slots=True)
class Generation:
    """What is known of a running or finished generation; times are in seconds.

    text ends before a stop string; tokens may reach a little further.
    """

    prompt_tokens: int
    seed: int
    tokens: list[int]
    text: str = ""
    finish_reason: str | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


def generate(
    loaded: LoadedModel, prompt: Sequence[int], params: SamplingParams
) -> Iterator[Generation]:
    """Yield the (same, growing) `Generation` after every token.

    The end-of-text token ends it and is not part of ``tokens``. Raises `RequestError` for a prompt
    that is empty, has unknown ids or leaves no room for one token, and for what only the engine
    does (several samples, log-probabilities).
    """
    model, config = loaded.model, loaded.model.config
    _check(prompt, params, config.vocab_size, config.max_position_embeddings)
    sampler = Sampler(params, config.vocab_size, prompt)
    stop = StopChecker(
        params,
        config.eos_token_id,
        loaded.tokenizer.stream(),
        max_tokens=config.max_position_embeddings - len(prompt),
    )
    state = Generation(len(prompt), sampler.seed, [])
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
        progress = stop.push(token)
        state.text += progress.text
        if stop.num_tokens > len(state.tokens):
            state.tokens.append(token)
        state.finish_reason = progress.finish_reason
        state.decode_seconds = time.perf_counter() - start
        yield state
        if state.finish_reason is None:
            with torch.inference_mode():
                output = model(Batch.pack([[token]], device=loaded.device), store, logits="last")


def _check(prompt: Sequence[int], params: SamplingParams, vocab_size: int, limit: int) -> None:
    engine_only = {
        "n": params.n != 1,
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
    }
    asked = [name for name, wanted in engine_only.items() if wanted]
    if asked:
        raise RequestError(
            f"generate() continues one text; {', '.join(asked)} need the engine. Use cedar.LLM."
        )
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
