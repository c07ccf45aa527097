"""Whatever the schedule, the real engine gives what the model gives alone, token for token.

Random arrivals, budgets, pools, cancellations and drafts through the whole engine on the small
float64 model. The requests are few and known (`real_engine.catalogue`), so that they share
prefixes; what each gives is worked out once, without the engine.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cedar.engine.core import EngineCore
from cedar.engine.runner import Runner
from cedar.errors import CedarError
from real_engine import (
    Oracle,
    catalogue,
    drain,
    expected,
    index_of,
    make_core,
    picture,
    submit,
    with_image,
)

EXAMPLES = settings(max_examples=4, deadline=None, derandomize=True)
MANY = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class Schedule:
    """arrivals: (step, number in the catalogue, priority); cancels: step -> which arrival."""

    replay: str
    draft: bool
    options: dict[str, Any]
    arrivals: tuple[tuple[int, int, int], ...]
    cancels: dict[int, int]
    wrong: float
    seed: int


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    running = draw(st.integers(1, 5))
    arrivals = draw(
        st.lists(
            st.tuples(
                st.integers(0, 25),
                st.integers(0, len(catalogue()) - 1),
                st.integers(-1, 1),
            ),
            min_size=1,
            max_size=5,
        )
    )
    cancels = draw(st.dictionaries(st.integers(0, 40), st.integers(0, 4), max_size=3))
    return Schedule(
        replay=draw(st.sampled_from(["off", "decoder", "decoder"])),
        draft=draw(st.booleans()),
        options={
            "max_running": running,
            "token_budget": running + draw(st.sampled_from([0, 1, 5, 12, 30, 80])),
            # The longest request takes six pages.
            "pool_tokens": 12 * draw(st.sampled_from([6, 7, 8, 9, 12, 40])),
            "prefix_cache": draw(st.sampled_from([True, True, True, False])),
            "ring_snapshots": draw(st.sampled_from([64, 64, 2, 1])),
            "prefix_hits": draw(st.sampled_from(["replay", "exact"])),
            "decoding": draw(st.sampled_from(["host", "device"])),
        },
        arrivals=tuple(sorted(arrivals)),
        cancels=cancels,
        wrong=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**20)),
    )


def run(schedule: Schedule) -> tuple[EngineCore, Counter[str]]:
    """Carry it out and compare all of it; what happened on the way."""
    options = schedule.options
    if schedule.draft:  # a sequence takes one token and its drafts
        options = options | {"draft": True}
    # With exact hits the windows of a prefix are never approximate.
    replay = schedule.replay
    if replay == "decoder" and options.get("prefix_hits") == "exact":
        replay = "encoder+decoder"
    core = make_core(replay=replay, **options)
    index = index_of(core)
    chance = Random(schedule.seed)
    if schedule.draft:
        Oracle(core, schedule.replay, lambda: chance.random() < schedule.wrong)
    found: dict[tuple[str, int], Any] = {}
    waiting = list(enumerate(schedule.arrivals))
    cancelled: set[str] = set()
    step = 0
    while waiting or core.has_work:
        while waiting and waiting[0][1][0] <= step:
            number, (_, which, priority) = waiting.pop(0)
            submit(core, catalogue()[which], str(number), priority=priority)
        if step in schedule.cancels:
            id = str(schedule.cancels[step])
            if core.cancel(id):
                cancelled.add(id)
            core._scheduler.check_integrity()
        drain(core, found, steps=1)
        step += 1
        assert step < 2000
    happened: Counter[str] = Counter(cancelled=len(cancelled))
    for number, (_, which, _) in enumerate(schedule.arrivals):
        request = catalogue()[which]
        texts = expected(schedule.replay, request.name)
        for sample, text in enumerate(texts):
            seen = found[str(number), sample]
            assert seen.error is None, seen.error
            if str(number) in cancelled and seen.reason == "cancelled":
                assert seen.tokens == text[: len(seen.tokens)], (request.name, sample)
                continue
            assert seen.reason == "length"
            assert seen.tokens == text, (request.name, sample)
    allocator = core._allocator
    assert allocator.used == (len(index) if index is not None else 0)
    if index is not None:
        index.clear()
    assert allocator.free == allocator.num_pages
    stats = core.stats()
    happened.update(
        preempted=stats.preemptions,
        cached=stats.cached_tokens,
        resumed=stats.snapshot_hits,
        accepted=sum(stats.accepted),
        rejected=sum(stats.drafted) - sum(stats.accepted),
    )
    return core, happened


# A prompt goes on from a snapshot, a few tokens at a time, before what the decoder has to see.
SHORT_CHUNKS = Schedule(
    replay="decoder",
    draft=False,
    options={"max_running": 1, "token_budget": 2, "pool_tokens": 72, "decoding": "device"},
    arrivals=((0, 6, 0), (0, 6, 0)),
    cancels={},
    wrong=0.0,
    seed=0,
)


@EXAMPLES
@example(SHORT_CHUNKS)
@given(schedules())
def test_any_schedule_gives_what_the_model_gives_alone(schedule: Schedule) -> None:
    run(schedule)


@pytest.mark.soak
@MANY
@given(schedules())
def test_many_more_schedules(schedule: Schedule) -> None:
    run(schedule)


HARD = Schedule(
    replay="decoder",
    draft=True,
    options={"max_running": 4, "token_budget": 23, "pool_tokens": 12 * 11},
    arrivals=(*((2 * k, k, 0) for k in range(len(catalogue()))), (30, 1, 1), (31, 10, 0)),
    cancels={6: 1, 19: 7},
    wrong=0.4,
    seed=5,
)


@pytest.mark.parametrize(
    ("replay", "hits"), [("off", "replay"), ("decoder", "replay"), ("decoder", "exact")]
)
def test_everything_at_once(replay: str, hits: str) -> None:
    """One schedule of which it is known that all of it happens."""
    options = {**HARD.options, "prefix_hits": hits}
    _, happened = run(Schedule(**{**vars(HARD), "replay": replay, "options": options}))
    if replay == "off":
        assert happened["cached"] == happened["resumed"] == 0
    else:
        assert happened["cached"] > (60 if hits == "replay" else 40)
        assert happened["resumed"] > 1
    assert happened["preempted"] > 0
    assert happened["cancelled"] == 2
    assert happened["accepted"] > 10
    assert happened["rejected"] > 10


def one(name: str, *, draft: bool) -> Schedule:
    """A single request of the catalogue."""
    number = [each.name for each in catalogue()].index(name)
    options = {"max_running": 4, "token_budget": 40, "pool_tokens": 480}
    return Schedule("decoder", draft, options, ((0, number, 0),), {}, 0.4, 1)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("rollback", one("trunk 60", draft=True)),
        ("copy_page", one("three samples", draft=False)),
        ("copy_slot", one("three samples", draft=False)),
    ],
    ids=["rollback", "copy_page", "copy_slot"],
)
def test_a_broken_runner_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, schedule: Schedule
) -> None:
    """Negative controls: what the schedules exercise makes a difference."""
    run(schedule)
    monkeypatch.setattr(Runner, name, lambda self, *args: None)
    with pytest.raises((AssertionError, CedarError)):
        run(schedule)


@pytest.mark.parametrize(
    ("replay", "budget"), [("off", 1), ("off", 7), ("decoder", 3), ("decoder", 10)]
)
def test_an_image_span_may_be_cut_at_every_position(replay: str, budget: int) -> None:
    """Chunks of many sizes, of prompts with images inside and across pages."""
    names = ["image 0", "image 2"]
    core = make_core(replay=replay, max_running=1, token_budget=budget)
    for name in names:
        request = next(each for each in catalogue() if each.name == name)
        submit(core, request, name)
    found = drain(core)
    for name in names:
        assert found[name, 0].tokens == expected(replay, name)[0], name


def test_the_images_of_the_catalogue_differ_by_pixels_alone() -> None:
    """Else the checks above could not see a prefix that is shared by mistake."""
    zero, one = (next(e for e in catalogue() if e.name == f"image {k}") for k in (0, 1))
    assert zero.tokens == one.tokens
    other = picture(9, seed=2)
    assert with_image((1,) * 33, other)[9:17] == (one.tokens[9],) * 8
    assert (zero.images[0].patches - one.images[0].patches).abs().max() > 0.1
