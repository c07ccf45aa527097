"""Long runs of the real engine on the tiny preset: thousands of requests, and one long prompt."""

import logging
import resource
import sys
import time
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cedar.cache.paged as paged
from cedar.cache.layout import KVLayout
from cedar.checkpoint.locate import locate_checkpoint
from cedar.config import tiny
from cedar.engine.build import LoadedModel
from cedar.engine.params import SamplingParams
from cedar.engine.runner import Runner
from cedar.engine.runner_protocol import Work
from cedar.engine.sampler import Sampler
from cedar.inputs.tokenizer import Tokenizer
from cedar.model import Model
from cedar.model.indexer import Indexer
from cedar.quant import FP4_ROW
from cedar.testing.tiny import random_tokens, randomise
from real_engine import drain, index_of, make_core

_LOG = logging.getLogger(__name__)
REQUESTS, CANCELLED, PAGE = 2000, 200, 64
LONG = 131_072


def preset(dtype: torch.dtype) -> LoadedModel:
    """`cedar.config.tiny` with random weights."""
    config = tiny()
    model = Model(config, dtype=dtype, trainable=True, token_map=torch.arange(config.vocab_size))
    randomise(model, 0).eval().requires_grad_(False)
    directory = locate_checkpoint("cedar-tiny")
    return LoadedModel(model, Tokenizer.from_file(directory), directory)


def work(
    tokens: tuple[int, ...], start: int, prompt: int, pages: tuple[int, ...], *, last: bool = True
) -> Work:
    stop = start + len(tokens)
    return Work(
        slot=0,
        tokens=tokens,
        start=start,
        pages=pages,
        wants_logits="last" if last and stop >= prompt else "none",
        is_last_chunk=stop >= prompt,
        prompt_tokens=prompt,
    )


def alone(loaded: LoadedModel, tokens: tuple[int, ...], params: SamplingParams) -> list[int]:
    """What a request gives from a runner that holds nothing else."""
    layout = KVLayout.from_config(loaded.model.config, PAGE)
    runner = Runner(loaded, layout, num_pages=4, num_slots=1)
    runner.open(0)
    sampler = Sampler(params, loaded.model.config.vocab_size, tokens)
    new, start = tokens, 0
    while len(sampler.history) < params.max_tokens:
        (result,) = runner.execute([work(new, start, len(tokens), (2, 0, 3, 1))])
        start += len(new)
        assert result.logits is not None
        new = (sampler.choose(result.logits[-1]),)
    return sampler.history


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("draft", [False, True])
def test_two_thousand_requests(draft: bool) -> None:
    """Sixty different ones in random order, a tenth of them cancelled at some step.

    In float64, where what ran beside a request does not show in its tokens; so a page that two
    share by mistake does.
    """
    loaded = preset(torch.float64)
    config, chance = loaded.model.config, Random(int(draft))
    trunk = random_tokens(config, 150, seed=1)
    kinds: list[tuple[tuple[int, ...], SamplingParams]] = []
    for k in range(60):
        kept = chance.choice([0, 0, 20, 64, 70, 128])
        own = random_tokens(config, chance.randint(1, 25), seed=100 + k)
        heat = chance.choice([0.0, 0.9])
        params = SamplingParams(
            temperature=heat, seed=k, max_tokens=chance.randint(1, 5), ignore_eos=True
        )
        kinds.append(((*trunk[:kept], *own), params))
    wanted = [alone(loaded, *kind) for kind in kinds]
    core = make_core(
        loaded, page_tokens=PAGE, pool_tokens=9 * PAGE, max_running=6, token_budget=96, draft=draft
    )
    index = index_of(core)
    assert index is not None
    found: dict[tuple[str, int], Any] = {}
    which: dict[str, int] = {}
    doomed = set(chance.sample(range(REQUESTS), CANCELLED))
    cancelled: set[str] = set()
    alive: list[str] = []
    while len(which) < REQUESTS or core.has_work:
        for _ in range(chance.choice([0, 1, 1, 2, 4])):
            if len(which) < REQUESTS and len(alive) < 20:
                id = str(len(which))
                which[id] = chance.randrange(len(kinds))
                tokens, params = kinds[which[id]]
                priority = chance.choice([0, 0, 0, 1])
                core.submit(core.request(tokens, params, id=id, priority=priority))
                alive.append(id)
        for id in list(alive):
            if int(id) in doomed and chance.random() < 0.4 and core.cancel(id):
                cancelled.add(id)
                core._scheduler.check_integrity()
        drain(core, found, steps=1)
        alive = [id for id in alive if (id, 0) not in found or found[id, 0].reason is None]
    assert len(found) == REQUESTS
    for id, kind in which.items():
        seen = found[id, 0]
        text = wanted[kind]
        if seen.reason == "cancelled":
            assert id in cancelled
            text = text[: len(seen.tokens)]
        else:
            assert seen.reason == "length", (id, seen.error)
        assert seen.tokens == text, (id, kind)
    assert len(cancelled) > CANCELLED // 2
    stats = core.stats()
    assert stats.cached_tokens > 0
    assert (stats.waiting, stats.running) == (0, 0)
    assert core._allocator.used == len(index)
    index.clear()
    assert core._allocator.free == core._allocator.num_pages
    print(
        f"\n{REQUESTS} requests, {len(cancelled)} cancelled, {stats.preemptions} preemptions, "
        f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens cached, "
        f"{stats.steps} steps, {stats.busy_seconds:.0f} s"
    )


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_long_prompt_and_a_needle_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """131072 tokens in decoder replay: memory, and an early entry that the last query looks for.

    Weights are random, so nothing in the text could be a needle to them. Instead the index key of
    an early entry of the pool's source is replaced by one that the last token's query scores
    highest, in the packed pool, and that token runs again.
    """
    loaded = preset(torch.float32)
    config = loaded.model.config
    layout = KVLayout.from_config(config)
    pages = layout.pages_for(LONG)
    before = peak_bytes()
    runner = Runner(
        SimpleNamespace(model=loaded.model, device=torch.device("cpu")),  # type: ignore[arg-type]
        layout,
        num_pages=pages,
        num_slots=1,
    )
    order = tuple(torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist())
    tokens = tuple(random_tokens(config, LONG, seed=0))
    runner.open(0)
    began = time.monotonic()
    # The last token runs by itself, so that it can run again.
    prompt, chunk = LONG - 1, 1024
    for start in range(0, prompt, chunk):
        part = tokens[start : min(start + chunk, prompt)]
        runner.execute([work(part, start, prompt, order, last=False)])
    seconds = time.monotonic() - began
    predicted = layout.page_bytes * pages
    assert runner.store.global_nbytes == predicted
    grown = peak_bytes() - before
    print(
        f"\n{LONG} tokens in {seconds:.0f} s; cache predicted {predicted / 2**20:.1f} MiB "
        f"({float(layout.bytes_per_token):.0f} B/token), peak {peak_bytes() / 2**20:.0f} MiB, "
        f"{grown / 2**20:.0f} MiB of it since the model was built"
    )
    assert peak_bytes() < 24 * 2**30

    source = config.candidate_source_layer
    real, seen = Indexer.select, {}

    def watch(self: Indexer, query: Any, main: Any, shared: Any, ctx: Any) -> Any:
        selection, pool = real(self, query, main, shared, ctx)
        seen[self.plan.index] = (query, selection, pool, main)
        return selection, pool

    monkeypatch.setattr(Indexer, "select", watch)

    def again() -> tuple[set[int], set[int]]:
        """Selected entries and pool blocks of the last token at the pool's source."""
        runner.execute([work(tokens[prompt:], prompt, prompt, order)])
        runner.rollback(0, prompt)
        _, selection, pool, _ = seen[source]
        return set(selection.entries_TK[0].tolist()), set(pool.blocks_TB[0].tolist())

    entry = 1000
    block = entry // config.candidate_block_size
    entries, blocks = again()
    query, _, _, main = seen[source]
    assert entry not in entries  # else there is nothing to show

    def scores(keys: Tensor) -> Tensor:
        return loaded.model.ops.index_score(query.q_TIJ, query.w_TI, keys)[0]

    options = torch.cat((query.q_TIJ[0], -query.q_TIJ[0]))
    options = 8.0 * options / options.norm(dim=1, keepdim=True)
    key = options[int(scores(options).argmax())]
    page, place = order[entry // layout.page_tokens], entry % layout.page_tokens
    runner.store._keys[source][page, place] = paged.pack_rows(key.unsqueeze(0), FP4_ROW)[0]
    found = scores(main.keys(0, LONG))
    assert int(found.argmax()) == entry
    entries, blocks = again()
    assert entry in entries
    assert block in blocks
    chosen = sorted(e // config.candidate_block_size for e in entries if e >= 0)
    message = f"needle in block {block}; selected entries lie in blocks {chosen}"
    _LOG.info(message)
    print(message + f"; pool {sorted(blocks)}")
    # What searches in the pool stays inside it.
    for layer in config.index_source_layers:
        if layer > source:
            inside = {
                e // config.candidate_block_size for e in seen[layer][1].entries_TK[0].tolist()
            }
            assert inside - {-1} <= blocks
