"""Whatever the schedule, every request gives what it gives alone, and every page comes back.

The model is a pure function of the token sequence that reads its pages (`toy_engine`); the state
of the scheduler is checked after every step, commit, fork and cancellation.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import PrefixIndex
from cedar.engine.pool import PagePool
from cedar.engine.scheduler import Scheduler
from cedar.engine.steps import ItemKind, StepPlan
from cedar.errors import CedarError
from toy_engine import ToyEngine, request

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def schedules(draw: st.DrawFn) -> ToyEngine:
    """A small pool, a few slots, and how wild it gets."""
    slots = draw(st.integers(1, 5))
    return ToyEngine(
        num_pages=draw(st.integers(6, 24)),
        page_tokens=draw(st.sampled_from([1, 2, 4, 5])),
        num_slots=slots,
        token_budget=slots + draw(st.integers(0, 24)),
        aging_seconds=draw(st.sampled_from([0.0, 3.0, 50.0])),
        prefix=draw(st.booleans()),
        chance=Random(draw(st.integers(0, 2**32))),
        drafts=draw(st.sampled_from([0, 0, 1, 4])),
        cancel_rate=draw(st.sampled_from([0.0, 0.0, 0.02, 0.2])),
        fork_rate=draw(st.sampled_from([0.0, 0.0, 0.05])),
        shorten=draw(st.booleans()),
    )


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[int, dict[str, Any]]]:
    """Requests and the step at which each comes; few beginnings, so that prefixes are shared."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        beginning = draw(st.sampled_from([(), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9, 9, 9)]))
        tail = draw(st.lists(st.integers(1, 22), min_size=1, max_size=14))
        deadline = draw(st.one_of(st.none(), st.none(), st.integers(1, 60).map(float)))
        new = {
            "tokens": (*beginning, *tail),
            "max_tokens": draw(st.integers(1, 20)),
            "priority": draw(st.integers(-1, 1)),
            "deadline": deadline,
            "reuse_prefix": draw(st.sampled_from([True, True, True, False])),
        }
        found.append((draw(st.integers(0, 25)), new))
    return sorted(found, key=lambda pair: pair[0])


def fits(engine: ToyEngine, new: dict[str, Any]) -> bool:
    size = len(new["tokens"]) + new["max_tokens"]
    return -(-size // engine.page_tokens) <= engine.num_pages


def serve(engine: ToyEngine, coming: list[tuple[int, dict[str, Any]]]) -> None:
    coming = [(at, new) for at, new in coming if fits(engine, new)]
    number = 0
    while coming or engine.scheduler.has_work:
        while coming and coming[0][0] <= engine.steps:
            _, new = coming.pop(0)
            engine.add(request(f"r{number}", arrival=engine.now, **new))
            number += 1
        assert engine.steps < 5000, "the schedule does not end"
        engine.step()


@EXAMPLES
@given(engine=schedules(), coming=traffic())
def test_output_is_that_of_the_request_alone(
    engine: ToyEngine, coming: list[tuple[int, dict[str, Any]]]
) -> None:
    serve(engine, coming)
    engine.check_end()


@EXAMPLES
@given(
    prompt=st.lists(st.integers(1, 22), min_size=1, max_size=30),
    budgets=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    preempt=st.sets(st.integers(0, 20)),
    drafts=st.integers(0, 3),
)
def test_chunks_and_preemption_at_any_step(
    prompt: list[int], budgets: list[int], preempt: set[int], drafts: int
) -> None:
    """One request, prefill cut anywhere, thrown out before any step."""
    engine = ToyEngine(num_pages=20, page_tokens=2, num_slots=1, token_budget=9, drafts=drafts)
    engine.add(request("a", prompt, 9))
    scheduler = engine.scheduler
    while scheduler.has_work:
        scheduler.token_budget = budgets[engine.steps % len(budgets)]
        if engine.steps in preempt and scheduler.running:
            scheduler._preempt(scheduler.sequences()[0], [])
            engine.verify()
        engine.step()
    engine.check_end()


@EXAMPLES
@given(common=st.integers(0, 20), tail=st.integers(1, 9), size=st.sampled_from([1, 2, 3, 8]))
def test_prefix_hits_of_any_length(common: int, tail: int, size: int) -> None:
    engine = ToyEngine(num_pages=64, page_tokens=size, num_slots=2, token_budget=16)
    text = [at % 21 + 1 for at in range(common)]
    engine.add(request("first", [*text, 22, 22], 3))
    engine.run()
    second = engine.add(request("second", [*text, *[7] * tail], 3))
    engine.step()
    assert second.hit_tokens == common // size * size
    engine.run()
    engine.check_end()


# --- many requests ------------------------------------------------------------------------------


BEGINNINGS = [range(0), range(1, 5), range(1, 9), range(1, 11), (9, 9, 9, 9, *range(5, 11))]


def random_requests(engine: ToyEngine, count: int, seed: int) -> None:
    """Feed ``count`` requests, at most 20 at a time, and run to the end."""
    chance = Random(seed)
    added = 0
    while added < count or engine.scheduler.has_work:
        while added < count and len(engine.scheduler.sequences()) < 20:
            tokens = [*chance.choice(BEGINNINGS)]
            if engine.ended and chance.random() < 0.3:  # a conversation goes on
                before = chance.choice(list(engine.ended.values())[-20:]).tokens
                tokens = [*before] if len(before) < 24 else tokens
            tokens += [chance.randrange(1, 23) for _ in range(chance.randint(1, 12))]
            new = request(
                f"r{added}",
                tokens,
                chance.randint(1, 16),
                priority=chance.randint(-1, 1),
                arrival=engine.now,
                deadline=engine.now + chance.randint(5, 200) if chance.random() < 0.1 else None,
            )
            engine.add(new)
            added += 1
        assert engine.steps < 50 * count, "the schedule does not end"
        engine.step()


@pytest.mark.parametrize("prefix", [True, False])
def test_two_thousand_requests_through_a_small_pool(prefix: bool) -> None:
    engine = ToyEngine(
        num_pages=16, num_slots=6, token_budget=16, drafts=3, fork_rate=0.02, prefix=prefix,
        max_forks=500, chance=Random(1),
    )  # fmt: skip
    random_requests(engine, 2000, 2)
    engine.check_end()
    assert len(engine.ended) == 2000 + engine.forks
    # It was a small pool indeed, and everything happened.
    for happened in (engine.preemptions, engine.forks, engine.accepted, engine.rejected):
        assert happened > 30
    assert (engine.hits > 300) == prefix


def test_two_hundred_cancellations() -> None:
    engine = ToyEngine(
        num_pages=16, num_slots=6, token_budget=16, drafts=2, cancel_rate=0.2, fork_rate=0.02,
        chance=Random(3),
    )  # fmt: skip
    random_requests(engine, 600, 4)
    engine.check_end()
    reasons = [sequence.finish_reason for sequence in engine.ended.values()]
    assert reasons.count("cancelled") >= 200
    assert reasons.count("stop") + reasons.count("length") >= 100


# --- negative controls: each fault is noticed ---------------------------------------------------


def busy(check: bool = False) -> ToyEngine:
    return ToyEngine(
        num_pages=14, num_slots=5, token_budget=12, drafts=3, cancel_rate=0.02, fork_rate=0.05,
        chance=Random(5), check=check,
    )  # fmt: skip


def goes_wrong(engine: ToyEngine, feed: Callable[[ToyEngine], None]) -> bool:
    """Whether an output is wrong, without any check of the state; or nothing works any more."""
    assert not engine.check
    try:
        feed(engine)
    except (AssertionError, LookupError, ValueError, CedarError):
        return True
    return bool(engine.wrong())


def crowd(engine: ToyEngine) -> None:
    random_requests(engine, 150, 6)


def test_the_busy_run_is_right_without_a_fault() -> None:
    engine = busy()
    assert not goes_wrong(engine, crowd)
    engine.check_end()


@pytest.mark.parametrize("fault", ["no page copy", "no slot copy", "no rollback"])
def test_a_runner_that_forgets_shows_in_the_output(fault: str) -> None:
    engine = busy()
    engine.runner.faults.add(fault)
    assert goes_wrong(engine, crowd)


def shared_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a page that is in use is handed out."""
    allocate = PageAllocator.allocate

    def faulty(self: PageAllocator, count: int) -> list[int]:
        pages = allocate(self, count)
        used = [p for p in range(self.num_pages) if self.refcount(p) and p not in pages]
        if used and pages:
            self.release(pages[:1])
            self.retain(used[:1])
            pages[0] = used[0]
        return pages

    monkeypatch.setattr(PageAllocator, "allocate", faulty)


def names_without_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is named by its own tokens alone."""

    def faulty(self: PrefixIndex, tokens: Any, image_hashes: Any, count: int) -> Any:
        size = self.page_tokens
        for place in range(count):
            yield bytes(tokens[place * size : (place + 1) * size]) + bytes([place])

    monkeypatch.setattr(PrefixIndex, "_chain", faulty)


def remembers_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest token, which is not stored yet, counts as stored."""
    remember = PagePool.remember

    def faulty(self: PagePool, sequence: Any, *, leaving: bool) -> None:
        computed = sequence.computed
        sequence.computed = sequence.length
        remember(self, sequence, leaving=leaving)
        sequence.computed = computed

    monkeypatch.setattr(PagePool, "remember", faulty)


def replays_generated_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a preemption the generated tokens count as prompt."""
    step = Scheduler.step

    def faulty(self: Scheduler, now: float) -> StepPlan:
        plan = step(self, now)
        items = [
            replace(item, kind=ItemKind.PREFILL) if item.kind is ItemKind.RECOMPUTE else item
            for item in plan.items
        ]
        return replace(plan, items=tuple(items))

    monkeypatch.setattr(Scheduler, "step", faulty)


def conversations(engine: ToyEngine) -> None:
    """One after the other: a prompt, its continuation, and a text that is alike in the middle."""
    for n in range(1, 13):
        first = engine.add(request(f"a{n}", range(n, 2 * n), 6))
        engine.run()
        engine.add(request(f"b{n}", [*first.tokens, 5], 3))
        engine.run()
        engine.add(request(f"c{n}", [9, 9, 9, 9, *first.tokens[4:], 5], 3))
        engine.run()


FAULTS = [shared_page, names_without_past, remembers_too_much, replays_generated_tokens]


@pytest.mark.parametrize("inject", FAULTS)
def test_a_fault_of_the_plan_shows_in_the_output(
    inject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch)
    assert goes_wrong(busy(), crowd) or goes_wrong(ToyEngine(check=False), conversations)


def test_conversations_are_right_without_a_fault() -> None:
    engine = ToyEngine()
    conversations(engine)
    engine.check_end()
    assert engine.hits > 10


def test_a_leak_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody keeps a page for ever: seen by the check and by the count at the end."""
    drop = Scheduler._drop

    def faulty(self: Scheduler, sequence: Any) -> None:
        if sequence.id == "r7":
            self._pool.allocator.retain(sequence.pages[-1:])
        drop(self, sequence)

    monkeypatch.setattr(Scheduler, "_drop", faulty)
    with pytest.raises(AssertionError, match=r"held by nobody|holders known"):
        random_requests(busy(check=True), 60, 6)
    engine = busy()
    random_requests(engine, 60, 6)
    with pytest.raises(AssertionError):
        engine.check_end()
