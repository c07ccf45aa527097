"""The planner of verification lengths, the step-time profile, acceptance counts."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.engine.speculate import AcceptanceStats, StepProfile, plan_lengths, survival

Sps = Callable[[int], float]
CONFIDENCE = st.floats(0.0, 1.0)
BLOCKS = st.lists(st.lists(CONFIDENCE, max_size=5), min_size=1, max_size=5)
# Seconds of a step with 1, 2, … tokens; any numbers, also profiles with jumps and plateaus.
SECONDS = st.lists(st.floats(0.1, 10.0), min_size=40, max_size=40)


def as_sps(seconds: Sequence[float]) -> Sps:
    return lambda tokens: 1.0 / seconds[tokens - 1]


def product(lengths: Sequence[int], blocks: Sequence[Sequence[float]], sps: Sps) -> float:
    """τ · SPS(B), counted directly."""
    admitted = sum(sum(survival(block)[:n]) for n, block in zip(lengths, blocks, strict=True))
    return (len(blocks) + admitted) * sps(len(blocks) + sum(lengths))


def test_survival_is_the_running_product() -> None:
    assert survival([0.5, 0.5, 1.0, 0.0, 1.0]) == [0.5, 0.25, 0.25, 0.0, 0.0]
    assert survival([]) == []
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="expected a probability"):
            survival([0.5, wrong])


def test_a_case_by_hand() -> None:
    blocks = [[0.9, 0.5], [0.8, 0.9, 0.1]]
    # Survivals .9 .45 and .8 .72 .072; τ = 2, 2.9, 3.7, 4.42, 4.87, 4.942 for B = 2 … 7.
    assert plan_lengths(blocks, lambda b: 1.0) == (2, 3)  # tokens are free
    assert plan_lengths(blocks, lambda b: 1.0 / b) == (0, 0)  # each costs a full step
    # One second and 0.2 for every token: 1.43, 1.81, 2.06, 2.21, 2.214, 2.06.
    assert plan_lengths(blocks, lambda b: 1.0 / (1.0 + 0.2 * b)) == (2, 2)
    assert plan_lengths(blocks, lambda b: 1.0 if b <= 4 else 0.0) == (1, 1)
    assert plan_lengths([], lambda b: 1.0) == ()
    assert plan_lengths([[], []], lambda b: 1.0) == (0, 0)


@settings(max_examples=300)
@given(BLOCKS, SECONDS)
def test_the_product_grows_with_every_admission_and_the_next_one_ends_it(
    blocks: list[list[float]], seconds: list[float]
) -> None:
    sps = as_sps(seconds)
    lengths = plan_lengths(blocks, sps)
    offers = sorted(
        (-a, j, r) for r, block in enumerate(blocks) for j, a in enumerate(survival(block))
    )
    admitted = offers[: sum(lengths)]
    # Admitted are exactly the most likely to survive, of each request the first ones.
    assert all(sum(r == i for *_, r in admitted) == n for i, n in enumerate(lengths))
    steps = [[sum(r == i for *_, r in offers[:n]) for i in range(len(blocks))] for n in range(26)]
    rates = [product(steps[n], blocks, sps) for n in range(min(len(offers), sum(lengths) + 1) + 1)]
    for n in range(sum(lengths)):
        assert rates[n + 1] > rates[n] * (1 - 1e-12)
    if sum(lengths) < len(offers):
        assert rates[sum(lengths) + 1] <= rates[sum(lengths)] * (1 + 1e-12)


def later_confidences_matter(
    plan: Callable[[Sequence[Sequence[float]], Sps], tuple[int, ...]],
    blocks: list[list[float]],
    sps: Sps,
    values: Sequence[float],
) -> bool:
    """Whether admission of some draft depends on a confidence after it in its block.

    A draft's own confidence is known before the draft is; those after it are not.
    """
    for request, block in enumerate(blocks):
        for j in range(len(block)):
            admitted = set()
            for value in values:
                changed = [list(other) for other in blocks]
                changed[request] = [*block[: j + 1], *([value] * (len(block) - j - 1))]
                admitted.add(plan(changed, sps)[request] > j)
            if len(admitted) > 1:
                return True
    return False


@settings(max_examples=150)
@given(BLOCKS, SECONDS)
def test_a_draft_is_admitted_without_regard_to_what_follows_it(
    blocks: list[list[float]], seconds: list[float]
) -> None:
    assert not later_confidences_matter(plan_lengths, blocks, as_sps(seconds), [0.0, 0.3, 1.0])


def best_of_all(blocks: Sequence[Sequence[float]], sps: Sps) -> tuple[int, ...]:
    """Faulty: the best product anywhere, past stretches that do not improve it."""
    every = itertools.product(*(range(len(block) + 1) for block in blocks))
    return max(every, key=lambda lengths: product(lengths, blocks, sps))


def test_a_planner_that_looks_ahead_would_be_noticed() -> None:
    # The third token of a step is dear, the fourth free: worth it only if both drafts survive.
    sps = as_sps([1.0, 1.8, 1.8])
    assert best_of_all([[0.7, 1.0]], sps) == (2,)
    assert plan_lengths([[0.7, 1.0]], sps) == (0,)
    assert later_confidences_matter(best_of_all, [[0.7, 1.0]], sps, [0.0, 1.0])


@settings(max_examples=200)
@given(BLOCKS, SECONDS, st.lists(st.floats(0.2, 1.0), min_size=40, max_size=40))
def test_cheaper_tokens_never_shorten(
    blocks: list[list[float]], seconds: list[float], cheaper: list[float]
) -> None:
    """If every step from B to B + 1 costs a smaller factor, no request gets fewer drafts."""
    growth = [b / a for a, b in itertools.pairwise(seconds)]
    lower = list(itertools.accumulate((g * c for g, c in zip(growth, cheaper, strict=False)), mul))
    before = plan_lengths(blocks, as_sps(seconds))
    after = plan_lengths(blocks, as_sps([seconds[0], *(seconds[0] * x for x in lower)]))
    # Rounding may decide where nothing was changed.
    if all(c < 1 - 1e-9 for c in cheaper):
        assert all(a >= b for a, b in zip(after, before, strict=True))


def mul(a: float, b: float) -> float:
    return a * b


@settings(max_examples=200)
@given(st.lists(CONFIDENCE, min_size=1, max_size=6), st.data(), SECONDS)
def test_more_confidence_never_shortens_a_request_that_runs_alone(
    block: list[float], data: st.DataObject, seconds: list[float]
) -> None:
    place = data.draw(st.integers(0, len(block) - 1))
    surer = list(block)
    surer[place] = data.draw(st.floats(min(1.0, block[place] + 1e-6), 1.0))
    sps = as_sps(seconds)
    assert plan_lengths([surer], sps) >= plan_lengths([block], sps)


def test_more_requests_leave_less_room_for_drafts() -> None:
    profile = StepProfile([(1, 1.0), (8, 1.0), (64, 8.0)])
    alone, crowd = (plan_lengths([[0.8] * 5] * n, profile) for n in (1, 16))
    assert alone == (5,)
    assert set(crowd) == {0}


def test_a_profile_between_below_and_beyond_its_points() -> None:
    profile = StepProfile([(10, 3.0), (2, 1.0), (4, 0.5)])
    # The faster step at 4 was noise.
    assert [profile.seconds(n) for n in (1, 2, 3, 4, 7, 10, 20)] == [1, 1, 1, 1, 2, 3, 6]
    assert profile(20) == pytest.approx(1 / 6)
    for points in ([], [(0, 1.0)], [(1, 0.0)]):
        with pytest.raises(ValueError, match=r"expected \(tokens, seconds\)"):
            StepProfile(points)


@given(st.lists(st.integers(0, 5).flatmap(lambda v: st.tuples(st.just(v), st.integers(0, v)))))
def test_acceptance_by_place(records: list[tuple[int, int]]) -> None:
    stats, halves = AcceptanceStats(), (AcceptanceStats(), AcceptanceStats())
    for i, record in enumerate(records):
        stats.record(*record)
        halves[i % 2].record(*record)
    for j in range(len(stats.verified)):
        assert stats.verified[j] == sum(verified > j for verified, _ in records)
        assert stats.accepted[j] == sum(accepted > j for _, accepted in records)
        assert stats.rates[j] == stats.accepted[j] / stats.verified[j]
    if records:
        mean = 1 + sum(accepted for _, accepted in records) / len(records)
        assert stats.accepted_length == pytest.approx(mean)
    halves[0].merge(halves[1])
    assert (halves[0].verified, halves[0].accepted) == (stats.verified, stats.accepted)
    assert halves[0].steps == stats.steps == len(records)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 of 2 drafts accepted"):
        AcceptanceStats().record(2, 3)
    assert AcceptanceStats().accepted_length == 0.0
