"""The engine on a small random model: equal to the plain model, step by step.

In float64, where two valid orders of the same sums practically never part a quantiser or a top-k.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cedar.cache import DenseKV
from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine.build import LoadedModel
from cedar.engine.llm import LLM, Completion
from cedar.engine.params import SamplingParams
from cedar.engine.sampler import Sampler
from cedar.inputs.tokenizer import Tokenizer
from cedar.model import Batch
from cedar.testing.tiny import random_tokens, tiny_model

PAGE, TOKENS = 12, 26


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    directory = locate_checkpoint("cedar-tiny")
    model = tiny_model().eval().requires_grad_(False)
    return LoadedModel(model, Tokenizer.from_file(directory), directory)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    config = loaded.model.config
    shared = random_tokens(config, 31, seed=1)
    lengths = (1, 14, 25, 40)
    own = [random_tokens(config, n, seed=n + 2) for n in lengths]
    return [*own[:2], *(shared + each for each in own[2:])]


def params(k: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if k % 2 == 0 else 0.7, seed=k, max_tokens=TOKENS, ignore_eos=True
    )


def engine(loaded: LoadedModel, **options: object) -> LLM:
    settings = {"page_tokens": PAGE, "pool_tokens": 600, "token_budget": 40, "check": True}
    return LLM(loaded, **(settings | options))


def run(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    return llm.generate(prompts, [params(k) for k in range(len(prompts))], progress=False)


def plain(loaded: LoadedModel, prompt: Sequence[int], wanted: SamplingParams) -> list[int]:
    """All tokens through all layers, one after the other, in floating point."""
    model = loaded.model
    store = DenseKV(model.config, dtype=torch.float64)
    sampler = Sampler(wanted, model.config.vocab_size, prompt)
    new = list(prompt)
    with torch.inference_mode():
        while len(sampler.history) < wanted.max_tokens:
            logits = model(Batch.pack([new]), store, logits="last").logits
            new = [sampler.choose(logits[0])]
    return sampler.history


@pytest.fixture(scope="module")
def exact(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [plain(loaded, prompt, params(k)) for k, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def replayed(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """With decoder replay, each alone and at once."""
    llm = engine(loaded, prefix_cache=False, max_running=1, token_budget=200)
    return [done.tokens for done in run(llm, prompts)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": True},
        {"max_running": 2, "token_budget": 7},
        {"draft": True, "pool_tokens": 110},
        {"draft": True, "batch_invariant": True},
    ],
)
def test_without_replay_it_is_the_plain_model(
    loaded: LoadedModel,
    prompts: list[list[int]],
    exact: list[list[int]],
    options: dict[str, object],
) -> None:
    llm = engine(loaded, replay="off", **options)
    for k, done in enumerate(run(llm, prompts)):
        assert done.error is None
        assert done.tokens == exact[k], k
    stats = llm.stats()
    assert (stats.preemptions > 0) == ("pool_tokens" in options)
    assert (sum(stats.drafted) > 0) == ("draft" in options)


@pytest.mark.parametrize(
    "options",
    [{"token_budget": 9, "max_running": 3}, {"draft": True}, {"pool_tokens": 110, "draft": True}],
)
def test_with_decoder_replay_neighbours_chunks_and_hits_change_nothing(
    loaded: LoadedModel,
    prompts: list[list[int]],
    replayed: list[list[int]],
    options: dict[str, object],
) -> None:
    llm = engine(loaded, **options)
    for _ in range(2):  # the second time the prompts are cached
        for k, done in enumerate(run(llm, prompts)):
            assert done.error is None
            assert done.tokens == replayed[k], k
    assert llm.stats().cached_tokens > 0


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_batch_invariant_is_meant_to_the_last_bit(
    loaded: LoadedModel, prompts: list[list[int]], batch_invariant: bool
) -> None:
    """In float32, alone against together, without drafts against with them."""
    single = replace(loaded, model=tiny_model(dtype=torch.float32).eval().requires_grad_(False))
    wanted = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    found = []
    for together in (False, True):
        llm = engine(
            single,
            draft=together,
            batch_invariant=batch_invariant,
            decoding="device",
            prefix_cache=False,
        )
        parts = [prompts] if together else [[prompt] for prompt in prompts]
        done = [one for part in parts for one in llm.generate(part, wanted, progress=False)]
        found.append([one.samples[0].logprobs for one in done])
    assert (found[0] == found[1]) == batch_invariant


def test_replay_is_an_approximation(exact: list[list[int]], replayed: list[list[int]]) -> None:
    """The check above could not see anything if every mode gave the same tokens."""
    assert exact != replayed


def test_samples_of_one_prompt_equal_separate_requests(
    loaded: LoadedModel, prompts: list[list[int]]
) -> None:
    wanted = SamplingParams(n=3, seed=4, max_tokens=8, ignore_eos=True)
    for draft in (False, True):
        (done,) = engine(loaded, draft=draft).generate(prompts[3], wanted, progress=False)
        (narrow,) = engine(loaded, max_running=1).generate(prompts[3], wanted, progress=False)
        assert [s.tokens for s in done.samples] == [s.tokens for s in narrow.samples]
        assert len({tuple(s.tokens) for s in done.samples}) == 3


def test_prompt_scores_are_those_of_the_exact_model(
    loaded: LoadedModel, prompts: list[list[int]]
) -> None:
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    (done,) = engine(loaded, token_budget=17).generate(prompts[3], wanted, progress=False)
    with torch.inference_mode():
        logits = loaded.model(Batch.pack([prompts[3]])).logits.double().log_softmax(1)
    assert done.prompt_logprobs is not None
    found = [each.logprob for each in done.prompt_logprobs if each is not None]
    expected = [float(logits[i, token]) for i, token in enumerate(prompts[3][1:])]
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_prefix_on_disk_gives_the_same_text(
    loaded: LoadedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    found = []
    for cached in (0, 60):
        with engine(loaded, disk_cache=tmp_path / "prefixes") as llm:
            (done,) = run(llm, [prompts[3]])
            assert done.usage.cached_tokens == cached
            found.append(done.tokens)
    assert found[0] == found[1]
