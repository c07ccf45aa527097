"""The scheduler with plain integers: admission, ranks, deadlines, chunks, drafts, forks, checks."""

import subprocess
import sys
from random import Random
from typing import Any

import pytest

from cedar.engine.batching import share_budget
from cedar.engine.pool import PagePool
from cedar.engine.request import Request, RequestState
from cedar.engine.scheduler import Scheduler
from cedar.engine.steps import ItemKind
from cedar.errors import CapacityError, ConfigError, RequestError
from toy_engine import Params, ToyEngine, request, toy


def kinds(engine: ToyEngine) -> dict[str, list[tuple[str, int, int]]]:
    """Runs to the end; the items of every request as (kind, start, count)."""
    seen: dict[str, list[tuple[str, int, int]]] = {}

    def note(plan: Any) -> None:
        for item in plan.items:
            seen.setdefault(item.sequence.id, []).append((item.kind.value, item.start, item.count))

    engine.on_plan = note
    engine.run()
    return seen


# --- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "tokens is empty"),
        ({"params": Params(max_tokens=0)}, "max_tokens is 0; expected 1 or more"),
        ({"arrival": float("nan")}, "arrival is nan"),
        ({"deadline": float("nan")}, "deadline is nan"),
        ({"image_hashes": ((3, bytes(32)),)}, "position 3; expected"),
        ({"image_hashes": ((1, bytes(32)), (1, bytes(32)))}, "ascending positions"),
        ({"image_hashes": ((1, b"short"),)}, "5 bytes; expected the 32"),
    ],
)
def test_a_request_says_what_is_wrong_with_it(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"id": "a", "tokens": (1, 2, 3), "params": Params()}
    Request(**good)
    with pytest.raises(RequestError, match=message) as caught:
        Request(**{**good, **changes})
    assert "'a'" in str(caught.value)


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = toy(num_pages=5, page_tokens=4)
    engine.add(request("fits", range(1, 13), 8))
    with pytest.raises(CapacityError, match=r"13 prompt tokens and max_tokens = 8 need 6 pages"):
        engine.add(request("large", range(1, 14), 8))
    engine.run()
    engine.check_end()


def test_ids_are_unique_while_they_live() -> None:
    engine = toy()
    engine.add(request("a", [1]))
    with pytest.raises(RequestError, match="'a': the id is in use"):
        engine.add(request("a", [2]))
    engine.run()
    engine.add(request("a", [2]))


def test_the_queue_has_an_end() -> None:
    engine = toy(max_waiting=2)
    for name in "ab":
        engine.add(request(name, [1]))
    with pytest.raises(CapacityError, match="2 requests wait already"):
        engine.add(request("c", [1]))
    engine.step()
    engine.add(request("c", [1]))  # there is room again


def test_settings_are_checked_together() -> None:
    engine = toy()
    with pytest.raises(ConfigError, match=r"max_waiting is 0.*token_budget is 3.*aging_seconds"):
        Scheduler(
            engine.allocator, None, page_tokens=4, num_slots=4, token_budget=3, max_waiting=0,
            aging_seconds=-1.0,
        )  # fmt: skip


def test_the_scheduler_does_not_import_torch_itself() -> None:
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"  # any import of it fails
        "for name in ('cedar.cache', 'cedar.engine'):\n"
        "    import cedar, os\n"
        "    package = types.ModuleType(name)\n"
        "    package.__path__ = [os.path.join(cedar.__path__[0], name.split('.')[1])]\n"
        "    sys.modules[name] = package\n"
        "import cedar.engine.scheduler\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the order of things ------------------------------------------------------------------------


def test_one_request_step_by_step() -> None:
    engine = toy(token_budget=5)
    sequence = engine.add(request("c", range(1, 13), 3))
    assert (engine.scheduler.waiting, engine.scheduler.running) == (1, 0)
    plans = []
    engine.on_plan = plans.append
    engine.run()
    assert len(sequence.generated) == 3
    items = [item for plan in plans for item in plan.items]
    assert [(i.kind, i.start, i.count, i.is_last_chunk, i.wants_logits) for i in items] == [
        (ItemKind.PREFILL, 0, 5, False, False),
        (ItemKind.PREFILL, 5, 5, False, False),
        (ItemKind.PREFILL, 10, 2, True, True),
        (ItemKind.DECODE, 12, 1, True, True),
        (ItemKind.DECODE, 13, 1, True, True),
    ]
    assert [len(plan.admitted) for plan in plans] == [1, 0, 0, 0, 0]
    assert sequence.state is RequestState.FINISHED
    assert sequence.finish_reason == "length"
    assert sequence.pages == []
    assert sequence.slot is None


def test_decoding_comes_before_prompts() -> None:
    engine = toy(num_pages=30, token_budget=6)
    engine.add(request("c", [1, 2, 3], 8))
    engine.step()
    engine.add(request("d", range(1, 21), 2))
    plan = engine.step()
    assert [(item.sequence.id, item.count) for item in plan.items] == [("c", 1), ("d", 5)]


def test_prompts_share_the_budget() -> None:
    assert share_budget([100, 3, 4], 16) == [9, 3, 4]
    assert share_budget([100, 100, 100], 16) == [8, 4, 4]
    assert share_budget([5, 5], 2) == [1, 1]
    assert share_budget([5], 2) == [2]
    assert share_budget([], 7) == []
    chance = Random(0)
    for _ in range(500):
        needs = [chance.randint(1, 30) for _ in range(chance.randint(1, 8))]
        budget = chance.randint(len(needs), 60)
        shares = share_budget(needs, budget)
        assert sum(shares) == min(budget, sum(needs))
        assert all(1 <= share <= need for share, need in zip(shares, needs, strict=True))


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = toy(num_pages=200, token_budget=8)
    engine.add(request("long", [5] * 400, 1))
    short = engine.add(request("short", [1, 2, 3], 1))
    engine.step()
    assert short.finish_reason is not None


def test_higher_priority_passes_and_drives_out() -> None:
    engine = toy(num_pages=8, num_slots=1)
    low = engine.add(request("low", [1, 2, 3, 4], 12))
    engine.step()
    engine.step()
    same = engine.add(request("same", [7], 2, arrival=engine.now))
    high = engine.add(request("high", [8], 2, arrival=engine.now, priority=1))
    plan = engine.step()
    assert plan.preempted == (low,)
    assert [admission.sequence for admission in plan.admitted] == [high]
    order = []
    engine.on_plan = lambda plan: order.extend(a.sequence.id for a in plan.admitted)
    engine.run()
    assert order == ["low", "same"]  # by arrival again
    assert low.preemptions == 1
    assert same.preemptions == 0
    engine.check_end()


def in_vain() -> None:
    engine = toy(num_pages=8, num_slots=3)
    top = engine.add(request("top", range(1, 15), 10, priority=1))
    low = engine.add(request("low", [1, 2], 6))
    engine.step()
    assert (top.slot, low.slot) != (None, None)
    engine.add(request("wide", [9] * 20, 2, arrival=engine.now, priority=1))
    while top.finish_reason is None and low.finish_reason is None:
        assert low not in engine.step().preempted
    engine.run()
    engine.check_end()


def test_nobody_is_driven_out_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that would not fit even then waits, and what runs goes on."""
    in_vain()
    monkeypatch.setattr(PagePool, "could_place", lambda *_: True)
    with pytest.raises((AssertionError, IndexError)):  # negative control
        in_vain()


def starving(aging_seconds: float) -> int:
    """Steps until a request of low priority ends among endless ones of a high priority."""
    engine = toy(num_slots=2, aging_seconds=aging_seconds)
    low = engine.add(request("low", [1, 2, 3], 4, priority=0))
    number = 0
    while low.finish_reason is None and engine.steps < 400:
        while engine.scheduler.waiting < 4:
            engine.add(request(f"h{number}", [4], 5, priority=2, arrival=engine.now))
            number += 1
        engine.step()
    return engine.steps


def test_nobody_starves() -> None:
    assert starving(20.0) < 100
    assert starving(1e6) == 400  # negative control: without aging it would


def test_large_requests_do_not_starve() -> None:
    """Small ones that would fit do not pass a large one that waits for pages."""
    engine = toy(num_pages=10, num_slots=4)
    for n in range(3):
        engine.add(request(f"s{n}", [n + 1], 9, arrival=engine.now))
    engine.step()
    large = engine.add(request("large", range(1, 33), 4, arrival=engine.now))
    number = 3
    while large.finish_reason is None:
        assert engine.steps < 60
        while engine.scheduler.waiting < 4:
            engine.add(request(f"s{number}", [1], 9, arrival=engine.now))
            number += 1
        engine.step()


def test_the_oldest_is_never_preempted() -> None:
    engine = toy(num_pages=9, num_slots=4, token_budget=16, prefix=False)
    sequences = [
        engine.add(request(name, [n + 1] * 5, 24, arrival=float(n))) for n, name in enumerate("gik")
    ]
    engine.run()
    engine.check_end()
    assert sequences[0].preemptions == 0
    assert engine.preemptions > 0


# --- deadlines and cancellation -----------------------------------------------------------------


def test_deadlines_end_waiting_and_running_requests() -> None:
    engine = toy(num_slots=1)
    running = engine.add(request("c", [1, 2], 8, deadline=2.0))
    waiting = engine.add(request("d", [1, 2], 8, deadline=1.0))
    later = engine.add(request("k", [1, 2], 3, deadline=100.0))
    assert engine.step().expired == ()
    assert engine.step().expired == (waiting,)
    assert engine.step().expired == (running,)
    assert waiting.generated == []
    assert running.finish_reason == waiting.finish_reason == "deadline"
    assert len(running.generated) == 2
    engine.run()
    assert later.finish_reason != "deadline"
    engine.check_end()


@pytest.mark.parametrize("moment", ["waiting", "planned", "between"])
def test_cancellation_at_any_moment(moment: str) -> None:
    engine = toy()
    sequence = engine.add(request("c", [1, 2, 3, 4, 5], 6))
    if moment == "planned":
        engine.on_plan = lambda plan: engine.cancel("c") if engine.steps == 2 else None
    if moment != "waiting":
        engine.step()
        engine.step()
    if moment != "planned":
        engine.cancel("c")
    assert sequence.finish_reason == "cancelled"
    assert not engine.scheduler.has_work
    assert engine.scheduler.cancel("c") is None
    engine.scheduler.finish(sequence, "stop")  # once more changes nothing
    assert sequence.finish_reason == "cancelled"
    engine.check_end()


# --- prefix cache, preemption -------------------------------------------------------------------


def test_equal_prompts_share_pages() -> None:
    engine = toy(num_pages=40)
    engine.add(request("c", range(1, 15), 3))
    engine.run()
    second = engine.add(request("d", [*range(1, 15), 3], 3))
    plan = engine.step()
    (admission,) = plan.admitted
    assert admission.hit_tokens == second.hit_tokens == 12
    assert engine.index is not None
    assert admission.hit_key == engine.index.keys(second.request.tokens)[2]
    off = engine.add(request("k", range(1, 15), 3, reuse_prefix=False))
    engine.run()
    assert off.hit_tokens == 0
    engine.check_end()


def test_images_tell_prompts_apart() -> None:
    engine = toy(num_pages=40)
    pixels = [bytes([n]) * 32 for n in (1, 2)]
    for name, digest in (("c", 0), ("d", 1), ("k", 0)):
        new = engine.add(request(name, [7] * 12, 2, image_hashes=((5, pixels[digest]),)))
        engine.run()
        assert new.hit_tokens == {"c": 0, "d": 4, "k": 8}[name]


def test_a_hit_can_be_shortened() -> None:
    engine = toy(num_pages=40)
    asked = []

    def limit(sequence: Any, match: Any) -> int:
        asked.append((sequence.id, match.tokens, len(match.keys)))
        return 7

    engine.scheduler._pool = PagePool(engine.allocator, engine.index, 4, limit)
    engine.add(request("c", range(1, 15), 3))
    engine.run()
    second = engine.add(request("d", range(1, 15), 3))
    engine.run()
    assert asked == [("d", 12, 3)]
    assert second.hit_tokens == 4
    engine.check_end()


def test_generated_tokens_are_recomputed_as_generated_tokens() -> None:
    engine = toy(token_budget=20)
    sequence = engine.add(request("c", range(1, 7), 6))
    for _ in range(3):
        engine.step()
    assert len(sequence.generated) == 3
    engine.scheduler._preempt(sequence, [])
    assert engine.index is not None
    assert len(engine.index) == 2  # 8 of the 9 known tokens are stored
    items = kinds(engine)["c"]
    # The prompt's own page comes from the cache; the chunk ends where the prompt does.
    assert items[:3] == [("prefill", 4, 2), ("recompute", 6, 3), ("decode", 9, 1)]
    engine.check_end()


def test_a_request_gets_the_whole_pool_though_its_start_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An own page behind a cached equal of its first one must not keep that from eviction."""

    def serve() -> None:
        engine = toy(num_pages=6, num_slots=1, token_budget=64)
        engine.add(request("k", [1, 2, 3, 4, 9], 1))
        engine.run()
        # 16 prompt tokens and 8 new ones are 6 pages; the first is cached a second time.
        sequence = engine.add(request("c", range(1, 17), 8, reuse_prefix=False))
        engine.run(limit=60)
        assert len(sequence.generated) == 8
        assert sequence.preemptions == 0
        engine.check_end()

    serve()

    def faulty(self: PagePool, sequence: Any, *, leaving: bool) -> None:
        assert self.index is not None
        self.index.insert(sequence.slice(0, sequence.computed), (), sequence.pages)

    monkeypatch.setattr(PagePool, "remember", faulty)
    with pytest.raises(AssertionError):
        serve()


# --- drafts -------------------------------------------------------------------------------------


def test_drafts_are_cut_by_budget_and_max_tokens() -> None:
    engine = toy(num_pages=40, num_slots=2, token_budget=6)
    sequence = engine.add(request("c", range(1, 6), 9))
    engine.step()
    (item,) = draft(engine, [1] * 20).items
    assert (item.kind, item.count) == (ItemKind.VERIFY, 6)
    assert sequence.drafts == ()  # cleared by the commit
    engine.scheduler.token_budget = engine.token_budget = 60
    left = 9 - len(sequence.generated)
    (item,) = draft(engine, [1] * 20).items
    assert item.count == left  # the last one is the token after all drafts
    engine.run()
    engine.check_end()


def test_drafts_take_no_page_from_anybody() -> None:
    engine = toy(num_pages=4, num_slots=2, token_budget=40, prefix=False)
    first = engine.add(request("c", range(1, 6), 9))
    second = engine.add(request("d", range(1, 4), 9, arrival=1.0))
    engine.step()
    assert engine.allocator.free == 1
    plan = draft(engine, [1] * 20)
    # One takes the last free page; then both have what is left of their pages.
    assert [item.count for item in plan.items] == [7, 1]
    assert plan.preempted == ()
    assert (first.slot, second.slot) == (0, 1)
    engine.run()
    engine.check_end()


def draft(engine: ToyEngine, tokens: list[int]) -> Any:
    for sequence in engine.scheduler.sequences():
        sequence.drafts = tuple(tokens)
    return engine.step()


def test_drafts_leave_tokens_to_prompts() -> None:
    engine = toy(num_pages=40, num_slots=2, token_budget=9)
    engine.add(request("c", [1], 20))
    engine.step()
    engine.add(request("d", range(1, 20), 2))
    plan = draft(engine, [1] * 20)
    assert [(item.kind.value, item.count) for item in plan.items] == [("verify", 5), ("prefill", 4)]


def test_drafting_saves_steps() -> None:
    plain, drafted = toy(), toy(drafts=4, token_budget=16)
    for engine in (plain, drafted):
        engine.add(request("c", [3, 1, 2], 12))
        engine.run()
        engine.check_end()
    assert drafted.steps < plain.steps
    assert drafted.accepted > 0
