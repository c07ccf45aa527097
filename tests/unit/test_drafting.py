"""How many drafts are verified, from confidences and learned step times."""

import pytest
import torch
from engine_setting import ToyProposal

from cedar.engine.draft_plan import StepProfile
from cedar.engine.drafting import Drafter
from cedar.engine.params import SamplingParams
from cedar.engine.sampler import Sampler


class Head:
    """Drafts 1, 2, 3, 4 with given raw confidences."""

    def __init__(self, confidence: list[float]) -> None:
        self.confidence = confidence
        self.calls = 0
        self.broken = False

    def draft(self, slots: list[int], first: list[int], choose: object) -> ToyProposal:
        self.calls += 1
        if self.broken:
            raise ZeroDivisionError("no draft today")
        count = len(slots)
        return ToyProposal(
            torch.tensor([[1, 2, 3, 4]] * count), torch.tensor([self.confidence] * count)
        )


def drafter(head: Head, most: int = 4, profile: StepProfile | None = None) -> Drafter:
    return Drafter(head, most, profile)  # type: ignore[arg-type]


def propose(drafts: Drafter, count: int = 1) -> list[tuple[int, ...]]:
    samplers = [Sampler(SamplingParams(seed=0)) for _ in range(count)]
    return drafts.propose(list(range(count)), [7] * count, samplers)


def test_everything_is_verified_while_nothing_is_known() -> None:
    assert propose(drafter(Head([0.0, -3.0, -3.0, -3.0])), 2) == [(1, 2, 3, 4)] * 2
    assert propose(drafter(Head([0.0] * 4), most=2)) == [(1, 2)]
    assert propose(drafter(Head([0.0] * 4)), 0) == []


def test_drafts_that_cost_more_than_they_bring_are_left_out() -> None:
    # Half the time more for each token; the first draft survives with 0.88, the second with 0.11.
    profile = StepProfile([(1, 1.0), (5, 3.0)])
    assert propose(drafter(Head([2.0, -2.0, 2.0, 2.0]), profile=profile)) == [(1,)]
    assert propose(drafter(Head([9.0] * 4), profile=profile)) == [(1, 2, 3, 4)]


def test_learned_times_decide_and_are_tried_again() -> None:
    head = Head([-1.0] * 4)  # each survives with a quarter of the one before
    drafts = drafter(head)
    assert propose(drafts) == [(1, 2, 3, 4)]
    for _ in range(30):
        drafts.observe(5, 5.0)
        drafts.observe(1, 1.0)
    assert propose(drafts) == [()]
    calls = head.calls
    assert [propose(drafts) for _ in range(15)] == [[()]] * 15
    assert head.calls == calls  # no drafting in between
    assert propose(drafts) == [(1, 2, 3, 4)]
    for _ in range(30):
        drafts.observe(5, 1.0)
    assert propose(drafts) == [(1, 2, 3, 4)]


def test_a_head_that_breaks_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    head = Head([0.0] * 4)
    drafts = drafter(head)
    head.broken = True
    assert propose(drafts) == [()]
    assert "drafting failed and is off" in caplog.text
    head.broken = False
    assert propose(drafts) == [()]
