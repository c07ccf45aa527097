"""Equalities that the architecture must satisfy, whatever the weights and the text.

All in float64: there a rounding to FP8 or FP4, or a top-k, practically never falls to the other
side because a sum was taken in another order, so that equal means equal to 1e-9. Every group has
a negative control that shows that the comparison can fail.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.cache import DenseKV, Mark
from cedar.model import Batch, Model, WeightStorage
from cedar.testing import assert_close, random_tokens, same_bits, tiny_model

RATIOS = {
    "ratio 2 and 1": {},
    "ratio 4 and 2": {"compress_ratios": (0, 4, 4, 4, 2, 2, 2, 2, 0, 0)},
    "ratio 3, quantised products": {
        "compress_ratios": (0, 3, 3, 3, 1, 1, 1, 1, 0, 0),
        "storage": WeightStorage.QAT,
    },
}
variants = pytest.mark.parametrize("variant", RATIOS)


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def model_of(variant: str) -> Model:
    return tiny_model(**RATIOS[variant])


@dataclass
class Text:
    """A sequence, perhaps with image spans and their ready features."""

    tokens: list[int]
    types: list[int] | None = None
    features: Tensor | None = None

    def part(self, start: int, stop: int) -> "Text":
        if self.types is None or self.features is None:
            return Text(self.tokens[start:stop])
        before = sum(kind == 1 for kind in self.types[:start])
        types = self.types[start:stop]
        here = self.features[before : before + sum(kind == 1 for kind in types)]
        return Text(self.tokens[start:stop], types, here)

    def __len__(self) -> int:
        return len(self.tokens)


def pack(texts: Sequence[Text], slots: Sequence[int]) -> Batch:
    if all(text.types is None for text in texts):
        return Batch.pack([text.tokens for text in texts], slots=slots)
    types = [text.types or [-1] * len(text) for text in texts]
    features = [text.features for text in texts if text.features is not None]
    return Batch.pack(
        [text.tokens for text in texts],
        slots=slots,
        image_types=types,
        features=torch.cat(features),
    )


def plain_text(model: Model, length: int, seed: int) -> Text:
    return Text(random_tokens(model.config, length, seed))


def image_text(model: Model, seed: int) -> Text:
    """Five words, a span of 2 x 3 image tokens (10 positions > window), three words, a small
    span, 9 words."""
    rows, small = [0, *([1, 1, 1, 2] * 2), 3], [0, 1, 2, 3]
    types = [-1] * 5 + rows + [-1] * 3 + small + [-1] * 9
    features = torch.randn(7, model.config.dim, generator=torch.Generator().manual_seed(seed))
    tokens = random_tokens(model.config, len(types), seed)
    return Text(tokens, types, features.to(torch.float64))


# --- running and comparing --------------------------------------------------------------------


@dataclass
class Run:
    """Logits and taps of every sequence, token by token, and the store they left."""

    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    taps: dict[int, list[Tensor]] = field(default_factory=dict)
    store: DenseKV | None = None

    def add(self, slot: int, logits: Tensor, taps: Tensor) -> None:
        self.logits.setdefault(slot, []).append(logits)
        self.taps.setdefault(slot, []).append(taps)

    def of(self, slot: int) -> tuple[Tensor, Tensor]:
        return torch.cat(self.logits[slot]), torch.cat(self.taps[slot])


def step(model: Model, run: Run, texts: Sequence[Text], slots: Sequence[int]) -> None:
    """One forward pass (and the draft rings, where there is a store)."""
    batch = pack(texts, slots)
    out = model(batch, run.store)
    assert out.taps_TX is not None
    if run.store is not None:
        model.draft_write(out.taps_TX, batch, run.store)
    for (start, stop), slot in zip(batch.bounds, slots, strict=True):
        run.add(slot, out.logits[start:stop], out.taps_TX[start:stop])


def alone(model: Model, text: Text, *, stored: bool = False) -> Run:
    run = Run(store=new_store(model, 1) if stored else None)
    step(model, run, [text], [0])
    return run


def new_store(model: Model, sequences: int) -> DenseKV:
    return DenseKV(model.config, sequences, dtype=torch.float64)


def state(store: DenseKV, slot: int, model: Model) -> dict[str, Tensor]:
    """Everything that a store remembers of a sequence, draft rings included."""
    found = {"length": torch.tensor(store.length(slot)), "history": store.history(slot)}
    for layer in range(model.config.n_layers + model.config.n_mtp_layers):
        found[f"window {layer}"] = store.window(layer, slot)
    for layer in model.config.kv_source_layers:
        found[f"entries {layer}"], found[f"keys {layer}"] = store.entries(layer, slot)
        found[f"values {layer}"], found[f"gates {layer}"] = store.residue(layer, slot)
    return {name: value.clone() for name, value in found.items()}


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_close(value, expected[name], "float64", name)


def assert_same_run(model: Model, run: Run, slot: int, text: Text) -> None:
    """The same logits, taps and state as the text alone in one pass; the same drafts too."""
    want = alone(model, text, stored=run.store is not None)
    for found, expected, what in zip(run.of(slot), want.of(0), ("logits", "taps"), strict=True):
        assert_close(found, expected, "float64", what)
    if run.store is None or want.store is None:
        return
    assert_same_state(state(run.store, slot, model), state(want.store, 0, model))
    first = torch.tensor([7])
    drafts = model.draft_propose(first, (slot,), run.store)
    expected_drafts = model.draft_propose(first, (0,), want.store)
    assert drafts.tokens_NB.tolist() == expected_drafts.tokens_NB.tolist()
    assert_close(drafts.logits_NBV, expected_drafts.logits_NBV, "float64", "drafts")
    assert_close(drafts.confidence_NB, expected_drafts.confidence_NB, "float64", "confidence")


# --- packed equals alone ----------------------------------------------------------------------


@variants
@examples(4)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=5),
    seed=st.integers(0, 10**6),
    stored=st.booleans(),
    images=st.booleans(),
    data=st.data(),
)
def test_packed_equals_alone(
    variant: str, lengths: list[int], seed: int, stored: bool, images: bool, data: st.DataObject
) -> None:
    """Any mix of lengths in any order and in any slots, with images among them."""
    model = model_of(variant)
    texts = [plain_text(model, n, seed + i) for i, n in enumerate(lengths)]
    if images:
        texts[seed % len(texts)] = image_text(model, seed)
    slots = data.draw(st.permutations(range(len(texts))))
    run = Run(store=new_store(model, len(texts)) if stored else None)
    step(model, run, texts, slots)
    for text, slot in zip(texts, slots, strict=True):
        assert_same_run(model, run, slot, text)


@pytest.mark.parametrize("mixed", ["window_slots", "group_layout", "lookback"])
def test_packed_notices_mixed_sequences(mixed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: windows, groups or n-grams that run on into the next sequence."""
    import cedar.model.contexts as module

    model = model_of("ratio 2 and 1")
    texts = [plain_text(model, n, n) for n in (9, 13)]
    real: Callable[..., Any] = getattr(module, mixed)

    def joined(batch: Batch) -> Batch:
        return Batch(tokens_T=batch.tokens_T, lengths=(sum(batch.lengths),), slots=(0,))

    def broken(first: Any, *rest: Any) -> Any:
        if mixed == "window_slots":
            return real((sum(first),), (0,), *rest[1:])
        if mixed == "lookback":
            return real(first, joined(rest[0]), *rest[1:])
        good, one = real(first, *rest), real(joined(first), (0,), *rest[1:])
        return good._replace(rows_GR=one.rows_GR[: len(good.rows_GR)])

    monkeypatch.setattr(module, mixed, broken)
    run = Run()
    step(model, run, texts, [0, 1])
    monkeypatch.undo()
    assert_same_run(model, run, 0, texts[0])
    with pytest.raises(AssertionError, match="logits"):
        assert_same_run(model, run, 1, texts[1])


# --- steps of any size equal one pass ---------------------------------------------------------


def run_in_steps(model: Model, text: Text, cuts: Sequence[int], store: DenseKV) -> Run:
    run = Run(store=store)
    bounds = [0, *sorted(set(cuts)), len(text)]
    for start, stop in pairwise(bounds):
        if stop > start:
            step(model, run, [text.part(start, stop)], [0])
    return run


@variants
@examples(4)
@given(
    length=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    cuts=st.sets(st.integers(1, 39), max_size=9),
)
def test_chunks_equal_one_pass(variant: str, length: int, seed: int, cuts: set[int]) -> None:
    """Any boundaries: inside groups, inside the window, beyond the pool."""
    model = model_of(variant)
    text = plain_text(model, length, seed)
    run = run_in_steps(model, text, [cut for cut in cuts if cut < length], new_store(model, 1))
    assert_same_run(model, run, 0, text)


@variants
@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_steps_equal_one_pass(variant: str, size: int) -> None:
    """One token at a time, and blocks as drafts come."""
    model = model_of(variant)
    text = plain_text(model, 23, size)
    cuts = range(size, 23, size)
    assert_same_run(model, run_in_steps(model, text, cuts, new_store(model, 1)), 0, text)


@pytest.mark.parametrize("prompt", [11, 24])
def test_prefill_then_one_token_at_a_time(prompt: int) -> None:
    model = model_of("ratio 2 and 1")
    text = plain_text(model, 36, prompt)
    run = run_in_steps(model, text, range(prompt, 36), new_store(model, 1))
    assert_same_run(model, run, 0, text)


@examples(6)
@given(seed=st.integers(0, 10**6), cuts=st.sets(st.integers(1, 30), max_size=8))
def test_image_spans_may_be_cut_anywhere(seed: int, cuts: set[int]) -> None:
    model = model_of("ratio 2 and 1")
    text = image_text(model, seed)
    run = run_in_steps(model, text, list(cuts), new_store(model, 1))
    assert_same_run(model, run, 0, text)


def test_image_spans_one_position_at_a_time() -> None:
    model = model_of("ratio 2 and 1")
    text = image_text(model, 3)
    run = run_in_steps(model, text, range(1, len(text)), new_store(model, 1))
    assert_same_run(model, run, 0, text)
    # Negative control: another feature vector, or a span taken for text, is seen.
    assert text.features is not None
    for other in (replace(text, features=text.features.flip(0)), replace(text, types=None)):
        with pytest.raises(AssertionError, match="logits"):
            assert_same_run(model, run, 0, other)


@pytest.mark.parametrize("variant", [*RATIOS][::2])
@examples(2)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_any_schedule(variant: str, seed: int, data: st.DataObject) -> None:
    """Sequences come and go as in serving: every step takes some tokens of some sequences."""
    model = model_of(variant)
    texts = [plain_text(model, n, seed + n) for n in (11, 19)] + [image_text(model, seed)]
    run = Run(store=new_store(model, 3))
    done = [0, 0, 0]
    while any(done[i] < len(text) for i, text in enumerate(texts)):
        open_ = [i for i, text in enumerate(texts) if done[i] < len(text)]
        chosen = data.draw(st.permutations(open_))[: data.draw(st.integers(1, len(open_)))]
        take = [
            min(data.draw(st.sampled_from([1, 3, 7, 11])), len(texts[i]) - done[i]) for i in chosen
        ]
        parts = [texts[i].part(done[i], done[i] + n) for i, n in zip(chosen, take, strict=True)]
        step(model, run, parts, chosen)
        for i, n in zip(chosen, take, strict=True):
            done[i] += n
    for slot, text in enumerate(texts):
        assert_same_run(model, run, slot, text)


@variants
def test_draft_training_equals_proposing(variant: str) -> None:
    """From any place of a packed batch: the base logits that a store of that prefix would give."""
    model = model_of(variant)
    texts = [plain_text(model, n, n) for n in (19, 8)]
    batch = pack(texts, [0, 1])
    out = model(batch)
    assert out.taps_TX is not None
    anchors = [0, 4, 5, 12, 17, 19, 24]  # packed rows; the second text starts at 19
    firsts = torch.tensor([3 + anchor for anchor in anchors])
    trained = model.draft_train(out.taps_TX, batch, torch.tensor(anchors), firsts)
    for row, anchor in enumerate(anchors):
        one, place = (texts[0], anchor) if anchor < 19 else (texts[1], anchor - 19)
        run = alone(model, one.part(0, place + 1), stored=True)
        assert run.store is not None
        proposal = model.draft_propose(firsts[row : row + 1], (0,), run.store)
        previous = torch.cat((firsts[row : row + 1], proposal.tokens_NB[0, :-1]))
        base = proposal.logits_NBV[0] - model.draft.markov_bias(previous)
        assert_close(trained.logits_NBV[row], base, "float64", f"anchor {anchor}")
    shifted = model.draft_train(out.taps_TX, batch, torch.tensor([a + 1 for a in anchors]), firsts)
    assert not torch.allclose(shifted.logits_NBV, trained.logits_NBV)  # negative control


class LosesResidue(DenseKV):
    def extend_residue(self, layer: int, slot: int, kv_TH: Tensor, gate_TH: Tensor) -> None:
        super().extend_residue(layer, slot, torch.zeros_like(kv_TH), gate_TH)


class LosesHistory(DenseKV):
    def extend_history(self, slot: int, classes_T: Tensor) -> None:
        super().extend_history(slot, torch.full_like(classes_T, -1))


class LosesOneWindowRow(DenseKV):
    def extend_window(self, layer: int, slot: int, rows_TH: Tensor) -> None:
        super().extend_window(layer, slot, rows_TH)
        windows = self._state[slot].windows
        windows[layer] = torch.cat((torch.zeros_like(windows[layer][:1]), windows[layer][1:]))


class ScramblesKeys(DenseKV):
    def extend_main(self, layer: int, slot: int, rows_SH: Tensor, keys_SJ: Tensor) -> None:
        super().extend_main(layer, slot, rows_SH, keys_SJ.flip(1))


@pytest.mark.parametrize("broken", [LosesResidue, LosesHistory, LosesOneWindowRow, ScramblesKeys])
def test_steps_notice_a_broken_store(broken: type[DenseKV]) -> None:
    """Negative control: each thing that a store carries is needed."""
    model = model_of("ratio 2 and 1")
    text = plain_text(model, 33, 5)
    store = broken(model.config, 1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="logits"):
        assert_same_run(model, run_in_steps(model, text, range(3, 33, 3), store), 0, text)


# --- mark and rollback ------------------------------------------------------------------------


def states(store: DenseKV, model: Model) -> list[dict[str, Tensor]]:
    return [state(store, slot, model) for slot in range(store.num_sequences)]


def assert_restored(store: DenseKV, model: Model, before: list[dict[str, Tensor]]) -> None:
    for slot, expected in enumerate(before):
        for name, value in state(store, slot, model).items():
            assert same_bits(value, expected[name]), f"{name} of sequence {slot}"


@variants
@examples(3)
@given(
    seed=st.integers(0, 10**6),
    prompt=st.integers(1, 20),
    drafts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_rollback_leaves_no_trace(variant: str, seed: int, prompt: int, drafts: list[int]) -> None:
    """Nested marks, several sequences, any number of tokens; afterwards all goes on as if never."""
    model = model_of(variant)
    texts = [plain_text(model, prompt + 12, seed), image_text(model, seed)]
    cut = [prompt, min(prompt, 12)]
    run = Run(store=new_store(model, 2))
    store = run.store
    assert store is not None
    step(model, run, [t.part(0, n) for t, n in zip(texts, cut, strict=True)], [0, 1])
    levels: list[tuple[Mark, list[dict[str, Tensor]]]] = []
    for depth, length in enumerate(drafts):
        levels.append((store.mark(), states(store, model)))
        junk = [plain_text(model, length, seed + depth), plain_text(model, length + 1, seed)]
        slots = [1, 0] if depth % 2 else [0, 1]
        step(model, Run(store=store), junk[: 1 + seed % 2], slots[: 1 + seed % 2])
        model.draft_propose(torch.tensor([5, 6]), (0, 1), store)  # drafting itself writes nothing
    for mark, before in reversed(levels):
        store.rollback(mark)
        assert_restored(store, model, before)
        store.rollback(mark)  # twice is fine
        assert_restored(store, model, before)
    step(model, run, [t.part(n, len(t)) for t, n in zip(texts, cut, strict=True)], [0, 1])
    for slot, text in enumerate(texts):
        assert_same_run(model, run, slot, text)


@pytest.mark.parametrize("kept", [1, 2, 3, 5])
def test_accepting_part_of_a_draft(kept: int) -> None:
    """Verify five tokens, roll back, commit the first ``kept``: equal to never having drafted."""
    model = model_of("ratio 2 and 1")
    text = plain_text(model, 30, 9)
    run = Run(store=new_store(model, 1))
    assert run.store is not None
    step(model, run, [text.part(0, 13)], [0])
    place = 13
    while place < 30:
        mark = run.store.mark()
        wrong = [(token + 1) % 60 for token in text.tokens[place + kept : place + 5]]
        step(model, Run(store=run.store), [Text(text.tokens[place : place + kept] + wrong)], [0])
        run.store.rollback(mark)
        step(model, run, [text.part(place, min(place + kept, 30))], [0])
        place += kept
    assert_same_run(model, run, 0, text)


def test_reset_empties_one_slot() -> None:
    model = model_of("ratio 2 and 1")
    store, fresh = new_store(model, 2), new_store(model, 2)
    texts = [plain_text(model, 15, 1), plain_text(model, 15, 2)]
    step(model, Run(store=store), texts, [0, 1])
    other = state(store, 1, model)
    store.reset(0)
    assert_restored(store, model, [state(fresh, 0, model), other])
    run = Run(store=store)
    step(model, run, [texts[1]], [0])
    assert_same_run(model, run, 0, texts[1])


@pytest.mark.parametrize("forgotten", ["windows", "residues", "entries", "history", "lengths"])
def test_rollback_notices_what_is_forgotten(forgotten: str) -> None:
    """Negative control: a rollback that leaves one thing as it is gives other logits later."""

    class Forgetful(DenseKV):
        def rollback(self, mark: Mark) -> None:
            now = list(self._state)
            super().rollback(mark)
            self._state = [
                replace(old, **{forgotten: getattr(new, forgotten)})
                for old, new in zip(self._state, now, strict=True)
            ]

    model = model_of("ratio 2 and 1")
    text = plain_text(model, 33, 5)
    run = Run(store=Forgetful(model.config, 1, dtype=torch.float64))
    store = run.store
    assert store is not None
    step(model, run, [text.part(0, 16)], [0])
    mark, before = store.mark(), states(store, model)
    step(model, Run(store=store), [plain_text(model, 3, 77)], [0])
    store.rollback(mark)
    with pytest.raises(AssertionError):
        assert_restored(store, model, before)
    if forgotten == "lengths":
        return  # a store that contradicts itself cannot go on at all
    step(model, run, [text.part(16, 33)], [0])
    with pytest.raises(AssertionError, match="logits"):
        assert_same_run(model, run, 0, text)
