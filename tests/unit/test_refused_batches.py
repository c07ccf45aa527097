"""A pass that fails, wherever and by whatever, leaves no trace: the others get the text they would
have had, and only a request that fails alone ends.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cedar.cache.paged import Mark, PagedKV
from cedar.engine.build import LoadedModel
from cedar.engine.core import EngineCore
from cedar.engine.images import ImageInput
from cedar.engine.runner import Runner
from cedar.errors import CedarError, RequestError
from cedar.model import Model
from cedar.testing.tiny import random_tokens, tiny_model
from real_engine import (
    PAGE,
    Entry,
    Oracle,
    catalogue,
    drain,
    expected,
    loaded_tiny,
    make_core,
    make_runner,
    prefill,
    submit,
)

GOOD = "trunk 60"
MOST = 6


def named(name: str) -> Entry:
    return next(each for each in catalogue() if each.name == name)


def short(name: str) -> Entry:
    """The first tokens of a request's text are those of a shorter one."""
    entry = named(name)
    return replace(entry, params=replace(entry.params, max_tokens=MOST))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


# --- images that the check at the door does not see ---------------------------------------------


def beside_a_bad_image(core: EngineCore, wrong: ImageInput) -> None:
    """The good request is in the middle of its prompt when the bad one comes."""
    submit(core, named(GOOD), "good")
    found = drain(core, steps=1)
    image = named("image 0")
    with pytest.raises(RequestError, match=r"images\[0\]"):
        core.request(image.tokens, image.params, images=(wrong,))
    request = core.request(image.tokens, image.params, id="bad", images=image.images)
    core.submit(replace(request, images=(wrong,)))
    drain(core, found)
    assert found["bad", 0].reason == "error"
    assert found["good", 0].error is None
    assert found["good", 0].tokens == expected("decoder", GOOD)[0]


def test_an_image_with_the_types_of_another_grid() -> None:
    """Refused while the batch is embedded: the history of the others is still theirs."""
    wrong = replace(named("image 0").images[0], types=(0, 1, 1, 1, 1, 1, 2, 3))
    beside_a_bad_image(make_core(token_budget=30), wrong)


def test_an_image_with_too_few_patches() -> None:
    image = named("image 0").images[0]
    beside_a_bad_image(make_core(token_budget=30), replace(image, patches=image.patches[:30]))


def test_an_image_for_a_model_without_a_vision_tower() -> None:
    """Refused when it is handed in; if it got past that, ended alone."""
    loaded = loaded_tiny()
    blind = LoadedModel(
        tiny_model(vision_n_layers=0).eval().requires_grad_(False),
        loaded.tokenizer,
        loaded.directory,
    )
    core = make_core(blind, token_budget=30)
    submit(core, named(GOOD), "good")
    found = drain(core, steps=1)
    image = named("image 0")
    with pytest.raises(RequestError, match="no vision tower"):
        submit(core, image, "bad")
    request = core.request(image.tokens, image.params, id="bad")
    core.submit(replace(request, images=image.images))
    drain(core, found)
    assert found["bad", 0].reason == "error"
    assert found["good", 0].error is None
    assert found["good", 0].reason == "length"


# --- a fault at every place of a pass -----------------------------------------------------------

Fault = Callable[[], None]
LAYERS = loaded_tiny().model.config.n_layers
BAD_LENGTH = 23  # of the prompt of a request that no pass survives
NEIGHBOURS = ("hit 36", "penalties", "two samples")


@contextmanager
def raising_at(place: str, fault: Fault, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Call ``fault`` when a pass comes to a place."""

    def before(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            fault()
            return real(*args, **more)

        patch.setattr(owner, name, call)

    def after(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            found = real(*args, **more)
            fault()
            return found

        patch.setattr(owner, name, call)

    kind, _, number = place.partition(" ")
    model = loaded_tiny().model
    with patch.context() as patch:
        if kind == "layer":
            layer = model.backbone()[int(number)]
            hook = layer.register_forward_hook(lambda *_: fault())
            try:
                yield
            finally:
                hook.remove()
            return
        owner, name = {
            "replay": (Runner, "_with_replay"),
            "images": (Runner, "_batch"),
            "main": (PagedKV, "extend_main"),
            "counted": (PagedKV, "advance"),
            "skipped": (PagedKV, "skip"),
            "drafts": (Model, "draft_store"),
            "logits": (Runner, "_results"),
            "snapshots": (PagedKV, "captured"),
        }[kind]
        (after if number == "after" else before)(owner, name)
        yield


PLACES = [
    "skipped after",
    *(f"layer {n}" for n in range(LAYERS)),
    "replay after",
    "images",
    "main after",
    "counted after",
    "drafts after",
    "logits",
    "logits after",
    "snapshots after",
]


def check_faults(place: str, patch: pytest.MonkeyPatch) -> None:
    """Every third pass of several sequences fails, and each with the bad request."""
    core = make_core(draft=True, token_budget=30, max_running=4)
    tick = iter(range(10**6))
    drafter = core._drafter
    assert drafter is not None
    Oracle(core, "decoder", lambda: next(tick) % 4 == 0)
    core._drafter = None  # drafts begin with the neighbours' second token, without the bad one
    passes: list[tuple[bool, int]] = []
    faults = []
    period = 1 if place.startswith("skipped") else 3  # few passes come there

    def noted(self: Runner, work: Any, execute: Any = Runner.execute) -> Any:
        bad = any(each.prompt_tokens == BAD_LENGTH for each in work)
        passes.append((bad, len(work)))
        return execute(self, work)

    def fault() -> None:
        bad, count = passes[-1]
        several = sum(size > 1 for _, size in passes)
        if bad or (count > 1 and several % period == 1 % period):
            faults.append(bad)
            raise ZeroDivisionError(f"a fault at {place}")

    patch.setattr(Runner, "execute", noted)
    submit(core, short(NEIGHBOURS[0]), NEIGHBOURS[0])
    found = drain(core, steps=1)
    core._drafter = drafter
    for name in NEIGHBOURS[1:]:
        submit(core, short(name), name)
    # The beginning is cached by now or soon, so that a pass with a prefix fails too.
    bad = [*named(NEIGHBOURS[0]).tokens[:13], *random_tokens(loaded_tiny().model.config, 10, 3)]
    assert len(bad) == BAD_LENGTH
    with raising_at(place, fault, patch):
        drain(core, found, steps=2)
        submit(core, replace(named(GOOD), tokens=tuple(bad)), "bad")
        drain(core, found, steps=2)
        submit(core, short("hit 24"), "hit 24")
        drain(core, found)
    assert found["bad", 0].reason == "error"
    for name in (*NEIGHBOURS, "hit 24"):
        for k, text in enumerate(expected("decoder", name)):
            assert found[name, k].error is None
            assert found[name, k].tokens == text[:MOST], (name, k)
    assert True in faults
    assert False in faults
    assert core.stats().cached_tokens > 0
    assert sum(core.stats().accepted) > 0


@pytest.mark.parametrize("place", PLACES[::3])
def test_a_fault_anywhere_in_a_pass(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_faults(place, monkeypatch)


def check_state(place: str, patch: pytest.MonkeyPatch) -> None:
    """Logits after a fault in the middle of a prompt, beside a verified draft."""
    texts = [random_tokens(loaded_tiny().model.config, 70, seed=seed) for seed in (4, 5)]

    def fault() -> None:
        raise ZeroDivisionError(place)

    found = []
    for faulty in (False, True):
        runner = make_runner(draft=True)
        for slot in (0, 1):
            runner.open(slot)
            runner.execute([prefill(runner, slot, texts[slot], 0, 31, 60 - 29 * slot)])
        rows = []
        for turn, (start, count) in enumerate([(31, 25), (56, 4), (60, 1)]):
            work = [
                prefill(runner, 0, texts[0], start, count, 60, wants="last"),
                prefill(runner, 1, texts[1], 31 + 3 * turn, 3, 31, wants="all"),
            ]
            if faulty:
                with raising_at(place, fault, patch), pytest.raises(ZeroDivisionError):
                    runner.execute(work)
            for each in work:
                (result,) = runner.execute([each])
                if result.logits is not None:
                    rows.append(result.logits)
        rows.append(runner.draft([0, 1], [7, 7]).logits_NBV.flatten(0, 1))
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "skipped after"])
def test_the_state_after_a_fault_is_the_one_before(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every place that every pass comes to."""
    check_state(place, monkeypatch)


def keeps_nothing(self: PagedKV, sizes: Any, real: Any = PagedKV.mark) -> Mark:
    """As if no ring row could be overwritten."""
    return replace(real(self, sizes), rows=())


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(PagedKV, "rollback", lambda self, mark: None), (PagedKV, "mark", keeps_nothing)],
    ids=["no rollback", "rows are not kept"],
)
def test_a_trace_is_noticed(
    owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, CedarError, ValueError)):
        check_state("layer 5", monkeypatch)
    if name == "rollback":
        with pytest.raises((AssertionError, CedarError)):
            check_faults("layer 5", monkeypatch)


@pytest.mark.parametrize("place", ["layer 0", "layer 6", "logits"])
def test_a_prefix_is_still_there_after_a_fault(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that was to run it again fails, twice; with and without a snapshot."""
    text = random_tokens(loaded_tiny().model.config, 60, seed=2)
    for at in (None, 36):
        runner = make_runner()
        runner.open(0)
        work = prefill(runner, 0, text, 0, 60, 60)
        (wanted,) = runner.execute([replace(work, snapshots=(36,))])
        runner.open(0)
        snapshot = None if at is None else wanted.snapshots[at]
        runner.restore(0, range(48 // PAGE), 48, text[:48], snapshot)
        work = prefill(runner, 0, text, 48, 12, 60)

        def fault() -> None:
            raise MemoryError

        for _ in range(2):
            with raising_at(place, fault, monkeypatch), pytest.raises(MemoryError):
                runner.execute([work])
        (found,) = runner.execute([work])
        assert found.logits is not None
        assert wanted.logits is not None
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-10)


# --- what is forgotten --------------------------------------------------------------------------


def held(core: EngineCore) -> tuple[int, int]:
    """Open slots and images of the runner."""
    runner = core._runner
    assert isinstance(runner, Runner)
    slots = sum(state is not None for state in runner.store._slots)
    assert slots == len(core._open)
    return slots, len(runner._features)


def test_idle_slots_hold_nothing() -> None:
    core = make_core()
    for name in ("image 0", "image 2", "three samples"):
        submit(core, named(name), name)
    drain(core, steps=5)
    assert held(core) == (5, 2)
    assert core.cancel("image 0")
    assert held(core) == (4, 1)
    drain(core)
    assert held(core) == (0, 0)
    submit(core, named("image 1"), "image 1")
    drain(core, steps=1)
    assert held(core) == (1, 1)
    core.close()
    assert held(core) == (0, 0)
