"""The scheduler's forks, what it refuses of its caller, and that the check of its state notices."""

from collections.abc import Callable
from typing import Any

import pytest

from cedar.cache.prefix import PrefixIndex
from cedar.engine.request import RequestState
from cedar.engine.scheduler import Scheduler
from toy_engine import ToyEngine, request, toy

# --- forks --------------------------------------------------------------------------------------


def forked(prompt: int, children: int, **settings: Any) -> ToyEngine:
    """A request that forks after its prompt; the children draw tokens of their own."""
    settings = {"num_pages": 40, "num_slots": 4, "token_budget": 32, **settings}
    engine = toy(**settings)
    engine.add(request("x", range(1, prompt + 1), 5))
    engine.fork_plan = {"x": children}
    return engine


@pytest.mark.parametrize("prompt", [7, 8])
def test_forks_share_the_pages_of_the_prompt(prompt: int) -> None:
    engine = forked(prompt, 3)
    engine.step()
    assert engine.scheduler.running == 4
    # 1 full page, and 4 times the last one; or 2 full pages.
    assert engine.allocator.used == {7: 1 + 4, 8: 2}[prompt]
    plan = engine.step()
    assert len(plan.copies) == (3 if prompt == 7 else 0)
    assert len(plan.slot_copies) == 3
    engine.run()
    engine.check_end()
    assert len({tuple(s.generated) for s in engine.ended.values()}) > 1


def test_forks_wait_when_there_is_no_room() -> None:
    engine = forked(7, 3, num_slots=2)
    engine.step()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (2, 2)
    engine.run()
    engine.check_end()
    assert engine.hits == 2


def test_the_source_of_a_fork_may_end_before_the_copy() -> None:
    engine = forked(7, 2)
    engine.step()
    engine.cancel("x")
    new = engine.add(request("y", [9] * 9, 5))
    plan = engine.step()
    assert new.slot is not None
    assert len(plan.copies) == 2
    engine.run()
    engine.check_end()


def test_a_fork_that_ends_at_once_is_not_copied() -> None:
    engine = forked(7, 2)
    engine.step()
    engine.cancel("x-1/1")
    plan = engine.step()
    assert len(plan.copies) == len(plan.slot_copies) == 1
    engine.run()
    engine.check_end()


def test_forks_that_all_end_before_the_next_step_leave_nothing() -> None:
    engine = forked(7, 2)
    engine.step()
    for sequence in engine.scheduler.sequences():
        engine.cancel(sequence.id)
    engine.check_end()


# --- misuse by the caller -----------------------------------------------------------------------


def planned() -> tuple[Scheduler, Any]:
    engine = toy()
    engine.scheduler.add(request("c", [1, 2, 3], 2))
    (item,) = engine.scheduler.step(0.0).items
    return engine.scheduler, item


@pytest.mark.parametrize(
    ("tokens", "computed"), [((), 2), ((4,), 2), ((4,), 4), ((4, 5), 3), ((4, 5, 6), 3)]
)
def test_a_commit_must_fit_its_item(tokens: tuple[int, ...], computed: int) -> None:
    scheduler, item = planned()
    with pytest.raises(ValueError, match="commit of 'c'"):
        scheduler.commit(item.sequence, tokens, computed)
    scheduler.commit(item.sequence, (4,), 3)  # nothing was changed
    scheduler.check_integrity()


def test_accepted_drafts_must_be_those_that_are_stored() -> None:
    scheduler, item = planned()
    sequence = scheduler.add(request("d", [1], 9))
    scheduler.commit(item.sequence, (4,), 3)
    scheduler.finish(item.sequence, "stop")
    scheduler.step(0.0)
    scheduler.commit(sequence, (4,), 1)
    sequence.drafts = (5, 6)
    scheduler.step(0.0)
    with pytest.raises(ValueError, match="not the tokens that were accepted"):
        scheduler.commit(sequence, (7, 8), 3)
    with pytest.raises(ValueError, match="verifies drafts"):
        scheduler.fork(sequence, "e")
    scheduler.commit(sequence, (5, 8), 3)
    scheduler.check_integrity()


def test_steps_do_not_overlap() -> None:
    scheduler, item = planned()
    with pytest.raises(ValueError, match="not committed since the last step: 'c'"):
        scheduler.step(1.0)
    scheduler.commit(item.sequence, (), 3)  # the text ended here
    with pytest.raises(ValueError, match="given no token"):
        scheduler.step(1.0)
    with pytest.raises(ValueError, match="nothing in flight"):
        scheduler.commit(item.sequence, (4,), 3)
    scheduler.finish(item.sequence, "stop")
    assert scheduler.step(1.0).items == ()


def test_max_tokens_must_end_a_sequence() -> None:
    scheduler, item = planned()
    scheduler.commit(item.sequence, (4,), 3)
    scheduler.step(0.0)
    scheduler.commit(item.sequence, (5,), 4)
    with pytest.raises(ValueError, match="reached max_tokens"):
        scheduler.step(0.0)


def test_sequences_of_others_are_refused() -> None:
    first, item = planned()
    second, _ = planned()
    for call in (
        lambda: second.finish(item.sequence, "stop"),
        lambda: second.commit(item.sequence, (4,), 3),
        lambda: second.fork(item.sequence, "e"),
    ):
        with pytest.raises(ValueError, match="not a sequence of this scheduler"):
            call()
    first.check_integrity()


# --- the check of the state notices -------------------------------------------------------------


def damage(name: str) -> Callable[[ToyEngine], None]:
    def change(engine: ToyEngine) -> None:
        scheduler = engine.scheduler
        first, second, third = scheduler.sequences()
        assert third.slot is None
        match name:
            case "slot":
                second.slot = first.slot
            case "range":
                second.slot = 99
            case "alias":
                engine.allocator.retain(first.pages[-1:])
                engine.allocator.release(second.pages[-1:])
                second.pages[-1] = first.pages[-1]
            case "twice":
                engine.allocator.retain(first.pages[:1])
                engine.allocator.release(first.pages[-1:])
                first.pages[-1] = first.pages[0]
            case "leak":
                engine.allocator.allocate(1)
            case "freed":
                engine.allocator.release(first.pages[-1:])
            case "short":
                engine.allocator.release(first.pages[-1:])
                first.pages.pop()
            case "computed":
                first.computed += 2
            case "waiting":
                third.computed = 1
            case "state":
                third.state = RequestState.DECODE
            case "order":
                scheduler._running.reverse()
            case "lost":
                del scheduler._sequences["c"]
            case "queued":
                scheduler._waiting.append(third)
            case "stray":
                scheduler._running.remove(first)
            case "flight":
                scheduler._in_flight[third] = next(iter(scheduler._in_flight.values()))
            case "stuck":
                assert isinstance(engine.index, PrefixIndex)
                node = next(iter(engine.index._nodes.values()))
                node.children += 1

    return change


DAMAGES = (
    *("slot", "range", "alias", "twice", "leak", "freed", "short", "computed", "waiting", "state"),
    *("order", "lost", "queued", "stray", "flight", "stuck"),
)


def two_running_one_waiting() -> ToyEngine:
    engine = toy(num_pages=40, num_slots=2, token_budget=16)
    for n, name in enumerate("cdk"):
        engine.add(request(name, range(n + 1, n + 7), 9, arrival=float(n)))
    engine.step()
    engine.step()
    engine.scheduler.step(engine.now)  # with items in flight
    engine.scheduler.check_integrity()
    return engine


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed(name: str) -> None:
    engine = two_running_one_waiting()
    damage(name)(engine)
    with pytest.raises(AssertionError):
        engine.scheduler.check_integrity()
