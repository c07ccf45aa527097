"""Sampling: greedy, temperature, top-p, seeds, and what bad values say."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.engine import Sampler, SamplingParams
from cedar.engine.draws import Purpose, uniforms
from cedar.engine.sampler import token_logprobs
from cedar.errors import RequestError

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, 0.0])
FIRST_DRAWS = [0.6806953452832024, 0.8475051760103246, 0.7646019111573698]


def draws(params: SamplingParams, count: int = 4000) -> torch.Tensor:
    sampler = Sampler(params)
    tokens = [sampler.choose(LOGITS) for _ in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / count


def test_zero_temperature_is_argmax() -> None:
    assert draws(SamplingParams(temperature=0.0, seed=0), 10)[1] == 1.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0)
    found = draws(SamplingParams(temperature=temperature, seed=1))
    # Four standard deviations of a frequency over 4,000 draws.
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probs = LOGITS.softmax(0)
    # The two likeliest reach 0.85 together, one alone does not.
    assert probs[1] < 0.85 < probs[1] + probs[3]
    found = draws(SamplingParams(top_p=0.85, seed=2))
    assert set(found.nonzero().flatten().tolist()) == {1, 3}
    share = probs[1] / (probs[1] + probs[3])
    assert abs(float(found[1] - share)) < 0.04


def test_top_p_never_empties_the_set() -> None:
    assert draws(SamplingParams(top_p=1e-9, seed=3), 20)[1] == 1.0


def test_equal_seeds_give_equal_tokens_and_others_do_not() -> None:
    def sequence(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler.choose(LOGITS) for _ in range(40)]

    assert sequence(5) == sequence(5)
    assert sequence(5) != sequence(6)


def test_without_a_seed_one_is_drawn_and_can_be_repeated() -> None:
    first = Sampler(SamplingParams())
    again = Sampler(SamplingParams(seed=first.seed))
    assert first.seed != Sampler(SamplingParams()).seed
    assert [first.choose(LOGITS) for _ in range(20)] == [again.choose(LOGITS) for _ in range(20)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("seed", -1),
    ],
)
def test_bad_values_name_the_field(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{field} is {value}.*expected"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


# --- draws that depend on seed and position alone ---------------------------------------------


def logits_at(position: int, size: int = 50) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(position))


def text_of(params: SamplingParams, count: int, **options: int) -> list[int]:
    sampler = Sampler(params, **options)
    return [sampler.choose(logits_at(i)) for i in range(count)]


@given(st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=20)
def test_tokens_do_not_depend_on_what_else_runs(rng: Random, others: int) -> None:
    """Several requests, advanced in any order and with draws in between, against each alone."""
    seeds = list(range(others))
    alone = {seed: text_of(SamplingParams(seed=seed), 12) for seed in seeds}
    samplers = {seed: Sampler(SamplingParams(seed=seed)) for seed in seeds}
    turns = seeds * 12
    rng.shuffle(turns)
    for seed in turns:
        sampler = samplers[seed]
        if rng.random() < 0.5:  # a draft, or anything else that looks ahead
            sampler.draft_at(logits_at(99), sampler.position + 3, sampler.history)
        sampler.choose(logits_at(sampler.position))
    assert {seed: sampler.history for seed, sampler in samplers.items()} == alone


def test_positions_may_be_drawn_in_any_order() -> None:
    expected = text_of(SamplingParams(seed=8), 20)
    sampler = Sampler(SamplingParams(seed=8))
    found = {i: sampler.choose_at(logits_at(i), i, ()).token for i in reversed(range(20))}
    assert [found[i] for i in range(20)] == expected


def test_a_stateful_generator_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two tests above fail if draws come from one running stream, as they used to."""
    stream = np.random.default_rng(0)
    monkeypatch.setattr(
        "cedar.engine.sampler.uniforms",
        lambda seed, sample, position, count, purpose="token": stream.random(count),
    )
    with pytest.raises(AssertionError):
        test_positions_may_be_drawn_in_any_order()


def test_the_texts_of_one_request_differ_and_are_repeatable() -> None:
    params = SamplingParams(seed=4, n=3)
    texts = [text_of(params, 30, sample=i) for i in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    assert texts[0] == text_of(SamplingParams(seed=4), 30)


def test_a_token_draw_ignores_who_else_can_be_drawn() -> None:
    """Removing tokens that lose does not change the winner: each has its own number."""
    for position in range(50):
        sampler = Sampler(SamplingParams(seed=1))
        logits = logits_at(position)
        token = sampler.choose_at(logits, position, ()).token
        others = torch.randperm(50)[:25]
        reduced = logits.index_fill(0, others[others != token], -torch.inf)
        assert sampler.choose_at(reduced, position, ()).token == token


def test_rounding_of_logits_rarely_changes_a_token() -> None:
    noise = 1e-4 * torch.randn(400, 500, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(SamplingParams(seed=1))
    changed = sum(
        sampler.choose_at(logits_at(i, 500), i, ()).token
        != sampler.choose_at(logits_at(i, 500) + noise[i], i, ()).token
        for i in range(400)
    )
    assert changed <= 2


def test_draws_are_uniform_open_prefix_stable_and_fixed_for_ever() -> None:
    drawn = uniforms(3, 0, 7, 200_000)
    assert 0 < drawn.min() < drawn.max() < 1
    counts = np.histogram(drawn, 50, (0, 1))[0]
    assert ((counts - 4000) ** 2 / 4000).sum() < 110  # 49 degrees of freedom: p about 1e-6
    assert (uniforms(3, 0, 7, 10) == drawn[:10]).all()
    others = [uniforms(*key, 10) for key in [(4, 0, 7), (3, 1, 7), (3, 0, 8)]]
    others.append(uniforms(3, 0, 7, 10, Purpose.VERIFY))
    assert all((other != drawn[:10]).all() for other in others)
    # Changing these numbers changes every text that a user may want to repeat.
    assert drawn[:3].tolist() == pytest.approx(FIRST_DRAWS, abs=0)


def test_draws_at_successive_positions_are_independent() -> None:
    first = np.array([uniforms(5, 0, i, 1)[0] for i in range(10_001)])
    counts = np.histogram2d(first[:-1], first[1:], 8, ((0, 1), (0, 1)))[0]
    assert ((counts - 156.25) ** 2 / 156.25).sum() < 130  # 63 degrees of freedom: p about 1e-6


# --- log-probabilities, masks, refusals -------------------------------------------------------


def test_logprobs_are_the_models_own_and_ordered() -> None:
    params = SamplingParams(logprobs=3, temperature=0.1, logit_bias={0: 50.0}, seed=0)
    chosen = Sampler(params).step(LOGITS)
    expected = LOGITS.double().log_softmax(0)
    assert chosen.token == 0
    assert chosen.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in chosen.top] == [1, 3, 0]
    assert [value for _, value in chosen.top] == pytest.approx(expected[[1, 3, 0]].tolist())
    assert Sampler(SamplingParams()).step(LOGITS).logprob is None
    assert Sampler(SamplingParams(logprobs=0)).step(LOGITS).top == ()


def test_prompt_logprobs_row_by_row() -> None:
    rows = torch.stack([logits_at(i) for i in range(4)])
    found = token_logprobs(rows, [3, 1, 4, 1], 1)
    for row, chosen in zip(rows.double(), found, strict=True):
        assert chosen.logprob == pytest.approx(float(row.log_softmax(0)[chosen.token]))
        assert chosen.top[0][0] == int(row.argmax())


class Alternating:
    """Even tokens, then odd ones, in turn."""

    def __init__(self, size: int) -> None:
        self.seen: list[int] = []
        self._ids = torch.arange(size)

    def allowed(self) -> torch.Tensor | None:
        return self._ids % 2 == len(self.seen) % 2

    def accept(self, token: int) -> None:
        self.seen.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_follows_the_text(temperature: float) -> None:
    mask = Alternating(50)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0), 50, mask=mask)
    for i in range(20):
        before = list(mask.seen)
        sampler.choose_at(logits_at(i), i, sampler.history)  # looking does not advance it
        assert mask.seen == before
        assert sampler.choose(logits_at(i)) % 2 == i % 2
    assert mask.seen == sampler.history


class Stuck(Alternating):
    def allowed(self) -> torch.Tensor | None:
        return torch.zeros(5, dtype=torch.bool)


class Misshapen(Alternating):
    def allowed(self) -> torch.Tensor | None:
        return torch.ones(4, dtype=torch.bool)


def test_what_cannot_be_sampled_is_refused() -> None:
    greedy = SamplingParams(temperature=0.0)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(RequestError, match="generated token 0 hold NaN or infinity"):
            Sampler(greedy).choose(LOGITS.index_fill(0, torch.tensor(2), bad))
    with pytest.raises(RequestError, match="no token is allowed as generated token 0"):
        Sampler(greedy, mask=Stuck(5)).choose(LOGITS)
    with pytest.raises(RequestError, match=r"token mask is torch.bool \[4\]; expected.*\[5\]"):
        Sampler(greedy, mask=Misshapen(5)).choose(LOGITS)
    with pytest.raises(RequestError, match="logit_bias names token 5; expected 0 to 4"):
        Sampler(SamplingParams(logit_bias={5: 1.0}), 5)
    with pytest.raises(RequestError, match="stop_token_ids names token 9; expected 0 to 4"):
        Sampler(SamplingParams(stop_token_ids=(9,)), 5)
    with pytest.raises(ValueError, match=r"shape \[5\]; expected \[6\]"):
        Sampler(greedy, 6).choose(LOGITS)


def test_equal_logits_give_the_lower_id() -> None:
    assert Sampler(SamplingParams(temperature=0.0)).choose(torch.tensor([0.0, 2.0, 2.0])) == 1
