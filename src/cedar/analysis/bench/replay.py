"""What each replay setting costs: agreement with the exact model on given text.

Every document's first tokens are a prompt under the setting; then the document's own next tokens
are fed one at a time, and each distribution is compared with that of the exact run.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from cedar.cache.layout import KVLayout
from cedar.engine.build import LoadedModel
from cedar.engine.runner import Replay, Runner
from cedar.engine.runner_protocol import Work
from cedar.errors import DataError
from cedar.inputs.documents import read_documents

__all__ = ["measure"]

_PROMPT, _STEPS = 960, 32


def measure(loaded: LoadedModel, quick: bool, corpus: Path) -> Iterator[tuple[str, float]]:
    """Mean KL divergence, agreement of the likeliest token, loss: exact and per setting."""
    length = _PROMPT + _STEPS + 1
    texts = []
    for document in read_documents(corpus):
        ids = [loaded.model.config.bos_token_id]
        ids += loaded.tokenizer.encode(document[: 8 * length], control=False)
        if len(ids) >= length:
            texts.append(ids[:length])
        if len(texts) == (4 if quick else 20):
            break
    if not texts:
        raise DataError(f"{corpus} has no document of {length} tokens; give longer ones.")
    layout = KVLayout.from_config(loaded.model.config)
    exact = [_logprobs(loaded, layout, Replay.OFF, ids, 0) for ids in texts]
    half = _PROMPT // 2 // layout.page_tokens * layout.page_tokens
    late = (_PROMPT - 1) // layout.page_tokens * layout.page_tokens
    yield "documents", len(texts)
    yield "exact_nats", _nats(exact, texts)
    for name, replay, hit in (
        ("decoder", Replay.DECODER, 0),
        ("encoder_decoder_hit_half", Replay.ENCODER_DECODER, half),
        ("encoder_decoder_hit_late", Replay.ENCODER_DECODER, late),
    ):
        found = [_logprobs(loaded, layout, replay, ids, hit) for ids in texts]
        yield f"{name}_nats", _nats(found, texts)
        pairs = list(zip(exact, found, strict=True))
        kl = torch.cat([(e.exp() * (e - f)).sum(-1) for e, f in pairs])
        yield f"{name}_kl", float(kl.mean())
        same = torch.cat([e.argmax(-1) == f.argmax(-1) for e, f in pairs])
        yield f"{name}_same_top_token", float(same.double().mean())


def _nats(found: list[Tensor], texts: list[list[int]]) -> float:
    rows = [
        -f.gather(1, torch.tensor(ids[_PROMPT:]).unsqueeze(1)).mean()
        for f, ids in zip(found, texts, strict=True)
    ]
    return float(torch.stack(rows).mean())


def _logprobs(
    loaded: LoadedModel, layout: KVLayout, replay: Replay, ids: list[int], hit: int
) -> Tensor:
    """Log-probabilities ``[steps + 1, V]`` from the prompt's end on."""
    num_pages = layout.pages_for(len(ids))
    runner = Runner(loaded, layout, num_pages=num_pages, num_slots=1, replay=replay)
    runner.open(0)

    def run(start: int, stop: int, prompt: int) -> Tensor:
        work = Work(
            slot=0,
            tokens=tuple(ids[start:stop]),
            start=start,
            pages=tuple(range(num_pages)),
            wants_logits="last",
            is_last_chunk=True,
            prompt_tokens=prompt,
        )
        (result,) = runner.execute([work])
        if result.logits is None:
            raise RuntimeError("the runner returned no logits")
        return result.logits

    if hit:  # someone else left the pages behind
        run(0, hit + 1, hit + 1)
        runner.close(0)
        runner.restore(0, range(hit // layout.page_tokens), hit, ids[:hit])
    rows = [run(hit, _PROMPT, _PROMPT)]
    rows += [run(p, p + 1, _PROMPT) for p in range(_PROMPT, _PROMPT + _STEPS)]
    return torch.cat(rows).cpu().double().log_softmax(-1)
