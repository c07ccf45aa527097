"""A request that cannot run ends alone: the others go on, and with the text they would have had."""

import contextlib
import logging
from dataclasses import replace

import pytest

from cedar.engine.build import LoadedModel
from cedar.engine.core import EngineCore
from cedar.errors import RequestError
from cedar.testing.tiny import tiny_model
from real_engine import Entry, catalogue, drain, expected, loaded_tiny, make_core, submit

GOOD = "trunk 60"


def named(name: str) -> Entry:
    return next(each for each in catalogue() if each.name == name)


def beside_a_bad_one(core: EngineCore, bad: Entry) -> None:
    """The good request is in the middle of its prompt when the bad one comes."""
    submit(core, named(GOOD), "good")
    found = drain(core, steps=1)
    submit(core, bad, "bad")
    drain(core, found)
    assert found["bad", 0].reason == "error"
    assert found["good", 0].error is None
    assert found["good", 0].tokens == expected("decoder", GOOD)[0]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_an_image_with_the_types_of_another_grid() -> None:
    """Refused while the batch is embedded: the history of the others is still theirs."""
    image = named("image 0")
    wrong = replace(image.images[0], types=(0, 1, 1, 1, 1, 1, 2, 3))
    core = make_core(token_budget=30)
    beside_a_bad_one(core, Entry("bad", image.tokens, image.params, (wrong,)))


def test_an_image_with_too_few_patches() -> None:
    image = named("image 0")
    wrong = replace(image.images[0], patches=image.images[0].patches[:30])
    core = make_core(token_budget=30)
    beside_a_bad_one(core, Entry("bad", image.tokens, image.params, (wrong,)))


def test_an_image_for_a_model_without_a_vision_tower() -> None:
    """Refused when it is handed in, or ended alone."""
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
    with contextlib.suppress(RequestError):
        submit(core, Entry("bad", image.tokens, image.params, image.images), "bad")
    drain(core, found)
    assert found["good", 0].error is None
    assert found["good", 0].reason == "length"
