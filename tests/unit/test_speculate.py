"""Drafting changes neither tokens (keyed, greedy) nor their distribution (rejection sampling)."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.engine import Sampler, SamplingParams, speculate
from cedar.engine.draws import Purpose, uniforms
from cedar.engine.speculate import KeyedDraft, accept, verify_keyed, verify_rejection

V = 6
_SEED = torch.Generator().manual_seed(20)
# Two toy models of order one: logits after each token. The draft is like the target, not equal.
TARGET = torch.randn(V, V, generator=_SEED, dtype=torch.float64) * 1.5
DRAFT = TARGET + torch.randn(V, V, generator=_SEED, dtype=torch.float64)
START = 0
Verify = Callable[..., speculate.Verification]


def p_value(counts: Counter[Any], probabilities: dict[Any, float]) -> float:
    """Of the chi-square test; cells that should hold fewer than 5 are put together."""
    total = counts.total()
    assert set(counts) <= {cell for cell, p in probabilities.items() if p > 0}
    large = [cell for cell, p in probabilities.items() if p * total >= 5]
    pairs = [(counts[cell], probabilities[cell] * total) for cell in large]
    rest = total - sum(seen for seen, _ in pairs), total - sum(mean for _, mean in pairs)
    pairs += [rest] if rest[1] >= 5 else []
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def target_rows(last: int, drafts: Sequence[int]) -> Tensor:
    return TARGET[[last, *drafts]]


# --- rejection sampling -----------------------------------------------------------------------


def speculative_texts(count: int, length: int, k: int, *, greedy_drafts: bool) -> Counter[Any]:
    """Texts of the target model, each made by drafting, verifying, drafting again."""
    rng = np.random.default_rng(1)
    target, draft = TARGET.softmax(1), DRAFT.softmax(1)
    running = draft.cumsum(1).numpy()
    likeliest = draft.argmax(1).tolist()
    texts: Counter[Any] = Counter()
    for _ in range(count):
        text = [START]
        while len(text) <= length:
            drafts: list[int] = []
            for _ in range(k):
                last = (text + drafts)[-1]
                drawn = int(np.searchsorted(running[last], rng.random() * running[last, -1]))
                drafts.append(likeliest[last] if greedy_drafts else drawn)
            rows = [text[-1], *drafts]
            q_KV = None if greedy_drafts else draft[rows[:-1]]
            verdict = accept(drafts, q_KV, target[rows], rng.random(k + 1).tolist())
            text += [*drafts[: verdict.accepted], verdict.next_token]
        texts[tuple(text[1 : length + 1])] += 1
    return texts


def exact_texts(length: int) -> dict[Any, float]:
    target = TARGET.softmax(1)
    found = {}
    for text in itertools.product(range(V), repeat=length):
        steps = zip((START, *text), text, strict=False)
        found[text] = float(np.prod([float(target[a, b]) for a, b in steps]))
    return found


@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_texts_follow_the_target_distribution(greedy_drafts: bool) -> None:
    """All texts of three tokens (216 cells), so dependence between positions counts too."""
    texts = speculative_texts(12_000, 3, 2, greedy_drafts=greedy_drafts)
    assert p_value(texts, exact_texts(3)) > 1e-3


def lenient(p_V: Tensor, q_V: Tensor, token: int, uniform: float) -> bool:
    return uniform * float(q_V[token]) < 1.25 * float(p_V[token])


def strict(p_V: Tensor, q_V: Tensor, token: int, uniform: float) -> bool:
    return uniform < float(p_V[token])  # as if the draft were certain


def not_residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    return p_V


@pytest.mark.parametrize(
    ("part", "wrong"), [("_keeps", lenient), ("_keeps", strict), ("_residual", not_residual)]
)
def test_a_biased_acceptance_is_noticed(
    part: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculate, part, wrong)
    assert p_value(speculative_texts(12_000, 1, 1, greedy_drafts=False), exact_texts(1)) < 1e-6


def test_the_draft_distribution_itself_fails_the_test() -> None:
    texts: Counter[Any] = Counter()
    for token in torch.multinomial(DRAFT[START].softmax(0), 12_000, True).tolist():
        texts[(token,)] += 1
    assert p_value(texts, exact_texts(1)) < 1e-6


@given(st.integers(0, 10_000))
@settings(max_examples=50)
def test_the_rule_equals_its_definition(seed: int) -> None:
    """`accept` against the published rule on lists, with the same random numbers."""
    rng = Random(seed)

    def distribution() -> list[float]:
        weights = [rng.random() ** 3 * (rng.random() < 0.8) for _ in range(V)]
        weights[rng.randrange(V)] += 0.1
        return [w / sum(weights) for w in weights]

    k = rng.randrange(4)
    q = [distribution() for _ in range(k)]
    p = [distribution() for _ in range(k + 1)]
    drafts = [rng.choices(range(V), row)[0] for row in q]
    u = [rng.random() for _ in range(k + 1)]
    accepted = 0
    while accepted < k:
        x = drafts[accepted]
        if u[accepted] >= min(1.0, p[accepted][x] / q[accepted][x]):
            break
        accepted += 1
    left = p[accepted]
    if accepted < k:
        left = [max(a - b, 0.0) for a, b in zip(p[accepted], q[accepted], strict=True)]
    place, next_token = u[-1] * sum(left), 0
    while (place := place - left[next_token]) >= 0:
        next_token += 1
    found = accept(drafts, torch.tensor(q).view(k, V), torch.tensor(p), u)
    assert found == (accepted, next_token)


def test_equal_distributions_accept_everything() -> None:
    p = TARGET.softmax(1)
    for u in (1e-12, 0.5, 1 - 2**-53):
        assert accept([1, 2], p[:2], p[:3], [u, u, u]).accepted == 2


def test_what_does_not_fit_together_is_refused() -> None:
    p = TARGET.softmax(1)
    with pytest.raises(ValueError, match="2 drafts with 2 rows of target"):
        accept([1, 2], p[:2], p[:2], [0.5] * 3)
    with pytest.raises(ValueError, match="draft 0 is token 1, which has no probability"):
        accept([1], torch.eye(V)[:1], p[:2], [0.5] * 2)
    for verify in (verify_keyed, lambda *arguments: verify_rejection(*arguments, None)):
        with pytest.raises(ValueError, match="for 2 drafts; expected 3 rows"):
            verify(Sampler(SamplingParams()), TARGET[:2], [0, 1])
    with pytest.raises(ValueError, match="keep_probs"):
        KeyedDraft([]).probs_KV(0)


# Flat and different, the second largest where the first is not.
P_V, Q_V = torch.tensor([[0.8, 0.0, 0.5, 0.0, -0.5, 0.0], [0.0, 0.8, 0.0, 0.5, 0.0, -0.5]]).double()


def sampled_blocks(count: int) -> Counter[Any]:
    """First tokens of a verification with one keyed draft; a new seed every time."""
    texts: Counter[Any] = Counter()
    for seed in range(count):
        sampler = Sampler(SamplingParams(seed=seed, top_k=4, temperature=1.2), V)
        draft = KeyedDraft([sampler], keep_probs=True)
        token = int(draft(Q_V.unsqueeze(0)))
        found = verify_rejection(sampler, P_V.repeat(2, 1), [token], draft.probs_KV(0))
        assert sampler.history == found.tokens
        texts[found.tokens[0]] += 1
    return texts


def expected_first() -> dict[Any, float]:
    sampler = Sampler(SamplingParams(top_k=4, temperature=1.2), V)
    return dict(enumerate(sampler.distribution(P_V).tolist()))


def test_rejection_with_a_sampler_follows_its_distribution() -> None:
    assert p_value(sampled_blocks(10_000), expected_first()) > 1e-3


def test_verifying_with_the_drafts_own_random_numbers_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Sampler,
        "verify_uniforms",
        lambda self, position, count: uniforms(self.seed, 0, position, count, Purpose.TOKEN),
    )
    assert p_value(sampled_blocks(3_000), expected_first()) < 1e-6


# --- the same tokens with and without drafts --------------------------------------------------


class Grammar:
    """Never the same parity three times in a row; its state is the tokens it was given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self) -> Tensor | None:
        if len(self.seen) < 2 or (self.seen[-1] + self.seen[-2]) % 2:
            return None
        return torch.arange(V) % 2 != self.seen[-1] % 2

    def accept(self, token: int) -> None:
        self.seen.append(token)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([0.6, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**63 - 1),
)


def serial(params: SamplingParams, mask: Grammar | None, length: int) -> list[int]:
    sampler = Sampler(params, V, [START], mask)
    text = [START]
    while len(text) <= length:
        text.append(sampler.choose(TARGET[text[-1]]))
    return text[1:]


def drafted(
    params: SamplingParams,
    mask: Grammar | None,
    length: int,
    propose: Callable[[Sampler, list[int]], list[int]],
    verify: Verify = verify_keyed,
) -> tuple[list[int], int]:
    """The text, and how many passes of the model it took."""
    sampler = Sampler(params, V, [START], mask)
    text, passes = [START], 0
    while len(text) <= length:
        drafts = propose(sampler, text)
        found = verify(sampler, target_rows(text[-1], drafts), drafts)
        assert found.tokens[: found.accepted] == drafts[: found.accepted]
        assert len(found.tokens) == found.accepted + 1
        text += found.tokens
        # History and grammar know exactly the text: nothing that was rejected.
        assert sampler.history == text[1:]
        assert mask is None or mask.seen == text[1:]
        passes += 1
    return text[1 : length + 1], passes


@given(PARAMS, st.randoms(use_true_random=False), st.booleans(), st.floats(0, 1))
@settings(max_examples=120)
def test_keyed_verification_gives_the_tokens_of_no_drafting(
    params: SamplingParams, rng: Random, grammar: bool, right: float
) -> None:
    """Drafts of every quality and length, under every processor, with and without a grammar."""
    expected = serial(params, Grammar() if grammar else None, 24)

    def propose(sampler: Sampler, text: list[int]) -> list[int]:
        true = expected[len(text) - 1 :][: rng.randrange(6)]
        return [token if rng.random() < right else rng.randrange(V) for token in true]

    found, _ = drafted(params, Grammar() if grammar else None, 24, propose)
    assert found == expected


def greedy_draft(sampler: Sampler, text: list[int]) -> list[int]:
    drafts: list[int] = []
    for _ in range(4):
        drafts.append(int(DRAFT[(text + drafts)[-1]].argmax()))
    return drafts


def keyed_draft(sampler: Sampler, text: list[int]) -> list[int]:
    draft, drafts = KeyedDraft([sampler]), list[int]()
    for _ in range(4):
        drafts += draft(DRAFT[[(text + drafts)[-1]]]).tolist()
    return drafts


def independent_draft(sampler: Sampler, text: list[int]) -> list[int]:
    rng, drafts = Random(len(text)), list[int]()
    for _ in range(4):
        drafts += rng.choices(range(V), DRAFT[(text + drafts)[-1]].softmax(0).tolist())
    return drafts


def true_draft(sampler: Sampler, text: list[int]) -> list[int]:
    return serial(sampler.params, None, len(text) + 3)[len(text) - 1 :]


@pytest.mark.parametrize("verify", [verify_keyed, verify_rejection])
@pytest.mark.parametrize("propose", [greedy_draft, independent_draft, true_draft])
def test_greedy_with_drafting_is_greedy_without(verify: Verify, propose: Any) -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    rule = verify
    if verify is verify_rejection:
        # Drafts are handed in as determined, and as drawn from an even distribution.
        def rule(sampler: Sampler, rows: Tensor, drafts: list[int]) -> speculate.Verification:
            even = torch.full((len(drafts), V), 1 / V) if len(sampler.history) % 2 else None
            return verify_rejection(sampler, rows, drafts, even)

    found, passes = drafted(params, None, 60, propose, rule)
    assert found == serial(params, None, 60)
    if propose is true_draft:
        assert passes == 12


def test_a_grammar_that_saw_rejected_tokens_would_be_noticed() -> None:
    """The faulty way: masks for the whole block from the drafts, state never taken back."""

    def eager(sampler: Sampler, rows: Tensor, drafts: list[int]) -> speculate.Verification:
        found = verify_keyed(sampler, rows, drafts)
        for token in drafts[found.accepted :]:
            sampler._mask.accept(token)  # type: ignore[union-attr]
        return found

    with pytest.raises(AssertionError):
        drafted(SamplingParams(seed=1), Grammar(), 24, greedy_draft, eager)


def test_draws_from_one_running_stream_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyed verification is exact only because draws belong to positions."""
    params = SamplingParams(seed=5)
    assert drafted(params, None, 40, keyed_draft)[0] == serial(params, None, 40)

    def run(with_drafts: bool) -> list[int]:
        stream = np.random.default_rng(0)
        monkeypatch.setattr(
            "cedar.engine.sampler.uniforms",
            lambda seed, sample, position, count, purpose="token": stream.random(count),
        )
        return (
            drafted(params, None, 40, keyed_draft)[0] if with_drafts else serial(params, None, 40)
        )

    assert run(with_drafts=True) != run(with_drafts=False)


def test_drafts_with_the_models_own_random_numbers_are_accepted_more_often() -> None:
    """4 drafts a pass, 600 tokens: shared numbers need fewer passes than independent draws."""
    params = SamplingParams(seed=2)
    expected = serial(params, None, 600)
    keyed = drafted(params, None, 600, keyed_draft)
    independent = drafted(params, None, 600, independent_draft)
    assert keyed[0] == independent[0] == expected
    assert keyed[1] < 0.85 * independent[1]


def test_keyed_drafts_of_several_requests_do_not_mix() -> None:
    samplers = [Sampler(SamplingParams(seed=i, repetition_penalty=1.2), V) for i in range(3)]
    for i, sampler in enumerate(samplers):
        for token in range(i):
            sampler.accept(token)
    logits = [torch.randn(3, V, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    together = KeyedDraft(samplers)
    found = torch.stack([together(rows) for rows in logits], 1)
    for i, sampler in enumerate(samplers):
        alone = KeyedDraft([sampler])
        assert torch.cat([alone(rows[[i]]) for rows in logits]).tolist() == found[i].tolist()


@pytest.mark.parametrize("rejection", [False, True])
def test_a_text_that_ends_inside_a_block_takes_nothing_after_it(rejection: bool) -> None:
    mask = Grammar()
    params = SamplingParams(temperature=0.0)
    expected = serial(params, Grammar(), 8)
    for stop_after in range(1, 6):
        mask = Grammar()
        sampler = Sampler(params, V, [START], mask)
        heard: list[int] = []

        def finished(token: int, heard: list[int] = heard, limit: int = stop_after) -> bool:
            heard.append(token)
            return len(heard) == limit

        drafts = expected[:4]
        rows = target_rows(START, drafts)
        if rejection:
            found = verify_rejection(sampler, rows, drafts, None, finished=finished)
        else:
            found = verify_keyed(sampler, rows, drafts, finished=finished)
        assert found.tokens == heard == mask.seen == sampler.history == expected[:stop_after]
        # Every draft that was emitted has its row in the store; the bonus token has none.
        assert found.accepted == min(stop_after, 4)


def test_log_probabilities_come_with_verified_tokens() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    drafts = serial(params, None, 3)
    rows = target_rows(START, drafts)
    for found in (
        verify_keyed(Sampler(params), rows, drafts),
        verify_rejection(Sampler(params), rows, drafts, None),
    ):
        assert len(found.chosen) == 4
        for row, chosen in zip(rows, found.chosen, strict=True):
            assert chosen.logprob == pytest.approx(float(row.log_softmax(0)[chosen.token]))
            assert len(chosen.top) == 2
