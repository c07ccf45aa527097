"""What a watched request says of its newest token: the entries that the indexer selected."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.engine.core import EngineCore
from cedar.engine.engine import Engine
from cedar.engine.output import Output
from cedar.engine.params import SamplingParams
from cedar.engine.runner import Runner
from cedar.inputs.images import ImageSettings
from cedar.model import Batch
from cedar.testing.tiny import random_tokens
from real_engine import Oracle, catalogue, expected, loaded_tiny, make_core

NAME = "trunk 60"


class Watcher:
    """Keeps the selection of the last index source."""

    def __init__(self) -> None:
        self.found: Tensor | None = None

    def wants(self, name: str) -> bool:
        return False

    def record(self, name: str, value: Tensor) -> None:
        if name == "layers.7.attn.indexer.topk_idxs":
            self.found = value


def by_probe(tokens: list[int]) -> tuple[int, ...]:
    """Of the last token of a text, all tokens through all layers."""
    watcher = Watcher()
    with torch.inference_mode():
        loaded_tiny().model(Batch.pack([tokens]), probe=watcher)
    assert watcher.found is not None
    return tuple(entry for entry in watcher.found[-1].tolist() if entry >= 0)


def outputs(core: EngineCore, watch: bool, **params: Any) -> list[Output]:
    request = next(each for each in catalogue() if each.name == NAME)
    wanted = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, **params)
    core.submit(core.request(request.tokens, wanted, id="seen"), watch=watch)
    found = []
    while core.has_work:
        found += core.step()
    return found


@pytest.mark.parametrize("draft", [False, True])
def test_it_is_the_selection_of_the_newest_token_that_ran(draft: bool) -> None:
    core = make_core(replay="off", draft=draft)
    if draft:
        tick = iter(range(10**6))
        Oracle(core, "off", lambda: next(tick) % 4 == 0)
    prompt = next(each for each in catalogue() if each.name == NAME).tokens
    text = expected("off", NAME)[0]
    known, seen = 0, set()
    for output in outputs(core, watch=True):
        known += len(output.tokens)
        assert output.entry_tokens == 1  # the decoder's source
        # The newest of them was drawn, but did not run yet.
        assert output.selected == by_probe([*prompt, *text[: known - 1]])
        seen.add(output.selected)
    assert known == len(text)
    assert len(seen) > 3  # a selection that stood still would have been noticed


def test_every_sample_has_its_own() -> None:
    found = outputs(make_core(replay="off"), watch=True, n=3)
    last = [next(o for o in reversed(found) if o.index == k) for k in range(3)]
    texts = {k: [t for o in found if o.index == k for t in o.tokens] for k in range(3)}
    prompt = next(each for each in catalogue() if each.name == NAME).tokens
    for k, output in enumerate(last):
        assert output.selected == by_probe([*prompt, *texts[k][:-1]])
    assert len({output.selected for output in last}) > 1


def test_nothing_is_recorded_for_those_that_are_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    real = Runner._results

    def watch(self: Runner, *args: Any) -> Any:
        results = real(self, *args)
        seen.extend(result.selected_KE for result in results)
        return results

    monkeypatch.setattr(Runner, "_results", watch)
    assert all(output.selected is None for output in outputs(make_core(), watch=False))
    assert seen
    assert all(each is None for each in seen)
    core = make_core()
    other = random_tokens(loaded_tiny().model.config, 20, seed=3)
    core.submit(core.request(other, SamplingParams(max_tokens=12, ignore_eos=True), id="other"))
    found = outputs(core, watch=True)
    assert all((output.selected is None) == (output.id == "other") for output in found)
    assert any(each is not None for each in seen)


def test_the_asynchronous_engine_hands_watch_and_masks_on() -> None:
    class Odd:
        def allowed(self) -> Tensor:
            return torch.arange(loaded_tiny().model.config.vocab_size) % 2 == 1

        def accept(self, token: int) -> None:
            pass

    async def run() -> list[Output]:
        core = make_core()
        async with Engine.around(core) as engine:
            assert engine.tokenizer is core.tokenizer
            assert engine.limits is core.limits
            model = loaded_tiny().model.config
            assert engine.image_settings == ImageSettings.from_config(model)
            assert engine.limits.image_token_id == model.image_token_id
            id = await engine.submit(
                [5, 6], {"max_tokens": 7, "ignore_eos": True}, masks=Odd, watch=True
            )
            return [output async for output in engine.stream(id)]

    found = asyncio.run(run())
    tokens = [token for output in found for token in output.tokens]
    assert len(tokens) == 7
    assert all(token % 2 for token in tokens)
    assert all(output.selected is not None for output in found)
