"""Decoding where only the device knows the places equals decoding that the host plans."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.cache.layout import KVLayout
from cedar.engine.runner import Decoding, Replay, Runner
from cedar.engine.runner_protocol import Work
from cedar.engine.stepping import _Size, _StepNumbers
from cedar.errors import CapacityError
from cedar.model import Model
from cedar.ops import with_operations
from cedar.ops.packed import unpack_rows
from cedar.quant import FP8_ROW
from cedar.testing.tiny import random_tokens, tiny_model

SLOTS, PAGE, PAGES, PROMPT, LENGTH = 3, 12, 10, 30, 100
TABLE = torch.randperm(SLOTS * PAGES, generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model().eval().requires_grad_(False)


def new_runner(model: Model, decoding: Decoding, replay: Replay = Replay.DECODER) -> Runner:
    loaded: Any = SimpleNamespace(model=model, device=torch.device("cpu"), directory=Path())
    layout = KVLayout.from_config(model.config, page_tokens=PAGE)
    return Runner(
        loaded,
        layout,
        num_pages=SLOTS * PAGES,
        num_slots=SLOTS,
        draft=True,
        replay=replay,
        decoding=decoding,
    )


def text(model: Model, slot: int) -> list[int]:
    return random_tokens(model.config, LENGTH, seed=slot)


def work(model: Model, slot: int, start: int, count: int, **more: Any) -> Work:
    return Work(
        slot=slot,
        tokens=tuple(text(model, slot)[start : start + count]),
        start=start,
        pages=tuple(TABLE[slot * PAGES : (slot + 1) * PAGES]),
        wants_logits=more.pop("wants", "all" if start else "last"),
        is_last_chunk=True,
        prompt_tokens=PROMPT,
        **more,
    )


def prefilled(model: Model, decoding: Decoding) -> Runner:
    runner = new_runner(model, decoding)
    for slot in range(SLOTS):
        runner.open(slot)
    runner.execute([work(model, slot, 0, PROMPT - slot) for slot in range(SLOTS)])
    return runner


def rows_of(results: Sequence[Any]) -> list[Tensor]:
    return [result.logits for result in results]


def compare(host: Runner, device: Runner, seed: int, steps: int = 12) -> None:
    """Random sequences, of one token or several, some of which are taken back."""
    model, chance = host.model, Random(seed)
    place = [PROMPT - slot for slot in range(SLOTS)]
    for _ in range(steps):
        slots = chance.sample(range(SLOTS), chance.randint(1, SLOTS))
        counts = [chance.choice([1, 1, 2, 4]) for _ in slots]
        items = [
            work(model, s, place[s], n, watch=True) for s, n in zip(slots, counts, strict=True)
        ]
        expected, found = host.execute(items), device.execute(items)
        for want, got in zip(expected, found, strict=True):
            torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-10)
            assert torch.equal(got.selected_KE, want.selected_KE)
        for slot, count in zip(slots, counts, strict=True):
            place[slot] += count - chance.randrange(count)
            for runner in (host, device):
                runner.rollback(slot, place[slot])
        drafts = [runner.draft(slots, [5] * len(slots)).logits_NBV for runner in (host, device)]
        torch.testing.assert_close(drafts[1], drafts[0], rtol=0, atol=1e-10)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_decoding_on_the_device_is_decoding(model: Model, seed: int) -> None:
    compare(prefilled(model, Decoding.HOST), prefilled(model, Decoding.DEVICE), seed)


def shifted(places: Any) -> Any:
    def wrong(slot_T: Tensor, position_T: Tensor, *rest: Any) -> Tensor:
        return places(slot_T, torch.where(position_T > 0, position_T - 1, -1), *rest)

    return wrong


def lazy(latents: Any) -> Any:
    return lambda jobs, eps: latents(jobs[:1], eps)


def forgetful(ring: Any) -> Any:
    def wrong(residues: Any, *rest: Any) -> Tensor:
        return ring(residues._replace(ring=torch.zeros_like(residues.ring)), *rest)

    return wrong


@pytest.mark.parametrize(
    ("operation", "wrong"),
    [("window_places", shifted), ("latents", lazy), ("compress_ring", forgetful)],
)
def test_a_mistake_shows(operation: str, wrong: Any) -> None:
    """Windows one token late; no index keys; groups that forget their beginning."""
    broken = tiny_model().eval().requires_grad_(False)
    ops = with_operations(broken.ops, **{operation: wrong(getattr(broken.ops, operation))})
    for module in broken.modules():
        if hasattr(module, "ops"):
            module.ops = ops
    host = prefilled(broken, Decoding.HOST)  # does not use these operations
    with pytest.raises(AssertionError):
        compare(host, prefilled(broken, Decoding.DEVICE), 1)


def test_padding_reads_and_writes_nothing(model: Model) -> None:
    """A pass of nothing but padding leaves every byte; a pass with some gives what it gives."""
    runner = prefilled(model, Decoding.DEVICE)
    store = runner.store
    rings = [ring.clone() for ring in store._every_ring()]
    pages = [store.read_page(page) for page in range(store.num_pages)]
    numbers = _StepNumbers(_Size(4, 4), torch.device("cpu"))
    with torch.inference_mode():
        output = model.step(
            numbers.input(), store.arrays, most_queries=4, most_tokens=PAGE * PAGES, drafts=True
        )
    assert output.logits.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(rings, store._every_ring(), strict=True))
    assert pages == [store.read_page(page) for page in range(store.num_pages)]
    alone, among = prefilled(model, Decoding.DEVICE), prefilled(model, Decoding.DEVICE)
    (want,) = alone.execute([work(model, 1, PROMPT - 1, 1)])  # a size without padding
    got = among.execute([work(model, s, PROMPT - s, 1 + s) for s in range(SLOTS)])[1]
    torch.testing.assert_close(got.logits[:1], want.logits, rtol=0, atol=1e-10)


def test_padding_visits_no_expert_of_its_own(model: Model) -> None:
    seen: list[Tensor] = []
    runner = prefilled(model, Decoding.DEVICE)
    hooks = [
        layer.ffn.register_forward_hook(lambda _, args, out: seen.append(out[1].experts_TA))
        for layer in model.backbone()
    ]
    runner.execute([work(model, slot, PROMPT - slot, 1) for slot in range(SLOTS)])
    for hook in hooks:
        hook.remove()
    assert len(seen) == model.config.n_layers
    for experts_TA in seen:
        assert len(experts_TA) == 4  # three tokens
        assert set(experts_TA[3].tolist()) == set(experts_TA[0].tolist())


def test_snapshots_of_a_step_are_those_of_a_pass(model: Model) -> None:
    runners = [prefilled(model, way) for way in (Decoding.HOST, Decoding.DEVICE)]
    found = []
    for runner in runners:
        for start in range(PROMPT, 60, 3):
            at = start + 3 - (start + 3) % PAGE
            wanted = (at,) if at > start else ()
            (result,) = runner.execute([work(model, 0, start, 3, snapshots=wanted)])
            found += list(result.snapshots.values())
    half = len(found) // 2
    assert half >= 2
    for want, got in zip(found[:half], found[half:], strict=True):
        assert got.position == want.position
        # The same values: a block on the edge of two scales can be packed with either.
        windows = [unpack_rows(each.rings_LRB, FP8_ROW, torch.float64) for each in (got, want)]
        torch.testing.assert_close(*windows, rtol=0, atol=0)
        assert torch.equal(got.classes_R, want.classes_R)


def test_a_step_that_fails_leaves_no_trace(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for faulty in (False, True):
        runner = prefilled(model, Decoding.DEVICE)
        batch = [work(model, 0, PROMPT, 4), work(model, 1, PROMPT - 1, 1)]
        if faulty:
            with monkeypatch.context() as patch:
                patch.setattr(runner.model, "logits", lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    runner.execute(batch)
            with pytest.raises(CapacityError, match="pages of 12 tokens; 34 tokens need more"):
                runner.execute([replace(batch[0], pages=batch[0].pages[:2])])
        results.append(rows_of(runner.execute(batch)))
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_prefill_reads_packed_rows_in_place(model: Model) -> None:
    """Whole prompts in chunks, exact and with a replay, are those of a store of numbers."""
    for replay in (Replay.OFF, Replay.DECODER):
        found = []
        for way in (Decoding.HOST, Decoding.DEVICE):
            runner = new_runner(model, way, replay)
            for slot in range(2):
                runner.open(slot)
            for start, count in ((0, 17), (17, 40), (57, 23)):
                items = [
                    replace(work(model, slot, start, count, wants="last"), prompt_tokens=80)
                    for slot in range(2)
                ]
                results = runner.execute(items)
            found.append(rows_of(results))
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
