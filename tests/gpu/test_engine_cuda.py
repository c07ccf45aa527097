"""What the engine keeps on a GPU: snapshots, a pass that fails, and what a watched token selects.

In float64, so that the device makes the choices that a CPU makes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from cedar.cache.layout import KVLayout
from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine.assemble import EngineConfig, build_core
from cedar.engine.build import LoadedModel
from cedar.engine.params import SamplingParams
from cedar.engine.runner import Replay, Runner
from cedar.engine.runner_protocol import Work
from cedar.inputs.tokenizer import Tokenizer
from cedar.testing.tiny import random_tokens, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE, PROMPT = 12, 70


@cache
def loaded() -> LoadedModel:
    directory = locate_checkpoint("cedar-tiny")
    model = tiny_model().to("cuda").eval().requires_grad_(False)
    return LoadedModel(model, Tokenizer.from_file(directory), directory)


def new_runner(replay: Replay = Replay.DECODER) -> Runner:
    layout = KVLayout.from_config(loaded().model.config, page_tokens=PAGE)
    return Runner(loaded(), layout, num_pages=40, num_slots=2, replay=replay, draft=True)


def work(slot: int, text: Sequence[int], start: int, count: int) -> Work:
    stop = start + count
    return Work(
        slot=slot,
        tokens=tuple(text[start:stop]),
        start=start,
        pages=tuple(range(slot * 20, slot * 20 + 20)),
        wants_logits="last",
        is_last_chunk=stop >= PROMPT,
        prompt_tokens=PROMPT,
    )


def text_of(seed: int) -> list[int]:
    return random_tokens(loaded().model.config, PROMPT + 4, seed=seed)


def continued(runner: Runner, start: int, chunks: Sequence[int]) -> Tensor:
    rows = []
    for count in [*chunks, 1, 1]:
        (result,) = runner.execute([work(0, text_of(1), start, count)])
        start += count
        if start >= PROMPT and result.logits is not None:
            rows.append(result.logits)
    return torch.cat(rows)


@pytest.mark.parametrize("replay", [Replay.DECODER, Replay.ENCODER_DECODER])
def test_a_hit_at_a_snapshot_is_a_cold_run(replay: Replay) -> None:
    runner = new_runner(replay)
    runner.open(0)
    wanted = continued(runner, 0, [PROMPT])
    runner.open(0)
    (result,) = runner.execute([replace(work(0, text_of(1), 0, 62), snapshots=(36, 60))])
    for at, snapshot in result.snapshots.items():
        assert snapshot.rings_LRB.device.type == "cuda"
        runner.open(0)
        runner.restore(0, range(5), 60, text_of(1)[:60], snapshot)
        found = continued(runner, 60, [PROMPT - 60])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10, msg=str(at))
    worse = replace(snapshot, rings_LRB=snapshot.rings_LRB.flip(1))
    runner.open(0)
    runner.restore(0, range(5), 60, text_of(1)[:60], worse)
    assert (continued(runner, 60, [PROMPT - 60]) - wanted).abs().max() > 1e-6


def test_a_pass_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for faulty in (False, True):
        runner = new_runner()
        for slot in (0, 1):
            runner.open(slot)
            runner.execute([work(slot, text_of(1 + slot), 0, 30)])
        batch = [work(0, text_of(1), 30, 40), work(1, text_of(2), 30, 2)]
        if faulty:
            for name in ("draft_store", "logits"):
                with monkeypatch.context() as patch:
                    patch.setattr(runner.model, name, lambda *_: 1 // 0)
                    with pytest.raises(ZeroDivisionError):
                        runner.execute(batch)
        (first, second) = runner.execute(batch)
        assert first.logits is not None
        assert second.logits is None
        (second,) = runner.execute([work(1, text_of(2), 32, PROMPT - 32)])
        assert second.logits is not None
        found.append(torch.cat((first.logits, second.logits)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


def test_the_engine_watches_resumes_and_lets_go() -> None:
    core = build_core(
        loaded(),
        EngineConfig(
            page_tokens=PAGE,
            pool_tokens=600,
            token_budget=40,
            draft=True,
            replay="encoder+decoder",
            check=True,
        ),
    )
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    seen = []
    for _ in range(2):
        core.submit(core.request(text_of(3), params), watch=True)
        tokens: list[int] = []
        while core.has_work:
            for output in core.step():
                assert output.error is None
                assert output.selected is not None
                assert list(output.selected) == sorted(set(output.selected))
                tokens += output.tokens
        seen.append(tokens)
    assert seen[0] == seen[1]
    assert core.stats().snapshot_hits == 1
    assert not core._open
