"""Every processor against plain Python on lists, alone and in their documented order."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, settings
from hypothesis import strategies as st

from cedar.engine import Sampler, SamplingParams, processors

# A coarse grid, so that equal logits are common; −inf as a mask before would leave it.
LOGIT = st.one_of(st.integers(-10, 10).map(lambda n: n / 2), st.just(-math.inf))
LOGITS = st.lists(LOGIT, min_size=1, max_size=12).filter(lambda x: max(x) > -math.inf)


def tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def ranked(logits: Sequence[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def only(logits: Sequence[float], kept: set[int]) -> list[float]:
    return [x if i in kept else -math.inf for i, x in enumerate(logits)]


def clear(decided: bool) -> None:
    """Leave out cases in which rounding decides; the fixed ones must not be among them."""
    if currently_in_test_context():
        assume(decided)
    else:
        assert decided


def naive_top_p(logits: Sequence[float], top_p: float) -> list[float]:
    probs, kept, gathered = softmax(logits), set(), 0.0
    for i in ranked(logits):
        clear(abs(gathered - top_p) > 1e-9)
        if gathered >= top_p:
            break
        kept.add(i)
        gathered += probs[i]
    return only(logits, kept)


def naive_min_p(logits: Sequence[float], min_p: float) -> list[float]:
    probs = softmax(logits)
    clear(all(abs(p - min_p * max(probs)) > 1e-12 for p in probs))
    return only(logits, {i for i, p in enumerate(probs) if p >= min_p * max(probs)})


def naive_penalties(
    logits: list[float], prompt: Sequence[int], history: Sequence[int], params: SamplingParams
) -> list[float]:
    logits = list(logits)
    for i in {*prompt, *history}:
        r = params.repetition_penalty
        logits[i] = logits[i] / r if logits[i] > 0 else logits[i] * r
    for i, count in Counter(history).items():
        logits[i] -= count * params.frequency_penalty + params.presence_penalty
    return logits


@given(LOGITS, st.dictionaries(st.integers(0, 11), st.sampled_from([-3.0, 0.5, -math.inf])))
def test_bias(logits: list[float], bias: dict[int, float]) -> None:
    bias = {i: b for i, b in bias.items() if i < len(logits)}
    found = processors.add_bias(tensor(logits), bias)
    assert found.tolist() == [x + bias.get(i, 0.0) for i, x in enumerate(logits)]


@given(LOGITS, st.data())
def test_mask(logits: list[float], data: st.DataObject) -> None:
    allowed = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    found = processors.keep_allowed(tensor(logits), torch.tensor(allowed))
    assert found.tolist() == only(logits, {i for i, ok in enumerate(allowed) if ok})
    assert processors.keep_allowed(tensor(logits), None).tolist() == logits


@given(LOGITS, st.data(), st.sampled_from([0.5, 1.0, 1.3]))
def test_repetition(logits: list[float], data: st.DataObject, penalty: float) -> None:
    seen = data.draw(st.sets(st.integers(0, len(logits) - 1)))
    ids = torch.tensor(sorted(seen), dtype=torch.int64)
    params = SamplingParams(repetition_penalty=penalty)
    found = processors.penalise_repetition(tensor(logits), ids, penalty)
    assert found.tolist() == naive_penalties(logits, [], sorted(seen), params)


@given(LOGITS, st.data(), st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence(
    logits: list[float], data: st.DataObject, frequency: float, presence: float
) -> None:
    history = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=20))
    ids, counts = torch.tensor(history, dtype=torch.int64).unique(return_counts=True)
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    found = processors.penalise_counts(tensor(logits), ids, counts, frequency, presence)
    assert found.tolist() == pytest.approx(naive_penalties(logits, [], history, params))


@given(LOGITS, st.floats(1e-3, 100))
def test_temperature(logits: list[float], temperature: float) -> None:
    found = processors.apply_temperature(tensor(logits), temperature).softmax(0)
    assert found.tolist() == pytest.approx(softmax([x / temperature for x in logits]), abs=1e-12)


@given(LOGITS, st.floats(5e-324, 1e-12))
def test_no_temperature_is_too_small(logits: list[float], temperature: float) -> None:
    found = processors.apply_temperature(tensor(logits), temperature).softmax(0)
    ties = logits.count(max(logits))
    assert found.tolist() == pytest.approx([(x == max(logits)) / ties for x in logits])


@given(LOGITS, st.integers(0, 14))
def test_top_k(logits: list[float], k: int) -> None:
    kept = set(ranked(logits)[: k or len(logits)])
    assert processors.keep_top_k(tensor(logits), k).tolist() == only(logits, kept)


@given(LOGITS, st.floats(1e-6, 1.0, exclude_max=True))
def test_top_p(logits: list[float], top_p: float) -> None:
    assert processors.keep_top_p(tensor(logits), top_p).tolist() == naive_top_p(logits, top_p)


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_top_p_of_a_real_vocabulary(scale: float, top_p: float) -> None:
    """Flat ones need the whole sort, peaked ones only the first look; both are the full answer."""
    logits = (torch.randn(5000, generator=torch.Generator().manual_seed(3)) * scale).double()
    assert processors.keep_top_p(logits, top_p).tolist() == naive_top_p(logits.tolist(), top_p)


@given(LOGITS, st.floats(0.0, 1.0))
def test_min_p(logits: list[float], min_p: float) -> None:
    assert processors.keep_min_p(tensor(logits), min_p).tolist() == naive_min_p(logits, min_p)


@given(LOGITS, st.integers(1, 14))
def test_most_likely_is_ordered_and_lower_ids_come_first(logits: list[float], count: int) -> None:
    assert processors.most_likely(tensor(logits), count).tolist() == ranked(logits)[:count]


class Fixed:
    """A mask that never changes."""

    def __init__(self, allowed: Sequence[bool]) -> None:
        self._allowed = torch.tensor(allowed)

    def allowed(self) -> torch.Tensor:
        return self._allowed

    def accept(self, token: int) -> None:
        pass


def naive_distribution(
    logits: list[float],
    prompt: Sequence[int],
    history: Sequence[int],
    allowed: Sequence[bool],
    params: SamplingParams,
) -> list[float]:
    """Bias, mask, penalties, temperature, top-k, top-p, min-p: written down a second time."""
    logits = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
    logits = only(logits, {i for i, ok in enumerate(allowed) if ok})
    logits = naive_penalties(logits, prompt, history, params)
    if params.temperature == 0.0:
        return [float(i == ranked(logits)[0]) for i in range(len(logits))]
    logits = [x / params.temperature for x in logits]
    if params.top_k:
        ordered = ranked(logits)
        if params.top_k < len(ordered):  # near-ties after division could fall either way
            a, b = (logits[ordered[params.top_k + i]] for i in (-1, 0))
            clear(a == b == -math.inf or a - b > 1e-9)
        logits = only(logits, set(ordered[: params.top_k]))
    if params.top_p < 1.0:
        values = sorted(logits, reverse=True)
        clear(all(a == b == -math.inf or a - b > 1e-9 for a, b in itertools.pairwise(values)))
        logits = naive_top_p(logits, params.top_p)
    if params.min_p:
        logits = naive_min_p(logits, params.min_p)
    return softmax(logits)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.15, 0.63, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21]),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    frequency_penalty=st.sampled_from([0.0, 0.31]),
    presence_penalty=st.sampled_from([0.0, -0.77]),
    logit_bias=st.dictionaries(st.integers(0, 3), st.floats(-3, 3), max_size=2),
)


def a_case(data: st.DataObject) -> tuple[list[float], list[int], list[int], list[bool]]:
    size = data.draw(st.integers(4, 9))
    rng = data.draw(st.randoms(use_true_random=False))
    logits = [rng.uniform(-4, 4) for _ in range(size)]
    prompt, history = ([rng.randrange(size) for _ in range(rng.randrange(6))] for _ in range(2))
    allowed = [rng.random() < 0.7 for _ in range(size)]
    allowed[rng.randrange(size)] = True
    return logits, prompt, history, allowed


@settings(max_examples=300)
@given(PARAMS, st.data())
def test_all_processors_in_their_documented_order(
    params: SamplingParams, data: st.DataObject
) -> None:
    logits, prompt, history, allowed = a_case(data)
    sampler = Sampler(params, len(logits), prompt, Fixed(allowed))
    expected = naive_distribution(logits, prompt, history, allowed, params)
    found = sampler.distribution(tensor(logits), history)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    token = sampler.choose_at(tensor(logits), len(history), history).token
    assert expected[token] > 0
    assert sampler.history == []


def test_another_order_would_be_noticed() -> None:
    """The naive order with bias moved behind the penalties gives another distribution here."""
    logits, history = [2.0, 1.5, 0.5, -1.0], [2]
    params = SamplingParams(
        repetition_penalty=2.0, logit_bias={2: 2.0}, temperature=2.0, top_p=0.72
    )
    found = Sampler(params).distribution(tensor(logits), history).tolist()
    assert found == pytest.approx(naive_distribution(logits, [], history, [True] * 4, params))

    late = naive_penalties(logits, [], history, params)
    late = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(late)]
    late = softmax(naive_top_p([x / 2.0 for x in late], 0.72))
    assert late != pytest.approx(found, abs=0.01)

    # And top-p before temperature.
    early = naive_penalties([2.0, 1.5, 2.5, -1.0], [], history, params)
    early = softmax([x / 2.0 for x in naive_top_p(early, 0.72)])
    assert early != pytest.approx(found, abs=0.01)
