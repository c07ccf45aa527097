"""Sampling: greedy, temperature, top-p, seeds, and what bad values say."""

import pytest
import torch

from cedar.engine import Sampler, SamplingParams
from cedar.errors import RequestError

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, 0.0])


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
