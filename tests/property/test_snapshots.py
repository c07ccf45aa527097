"""Snapshots of the encoder's windows: a hit that ends at one is a cold run, and runs nothing again.

In float64 on the small model: window 6, pages of 12 tokens, an encoder that reaches back 20 tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.cache.snapshots import RingSnapshot
from cedar.engine.core import EngineCore
from cedar.engine.images import ImageInput
from cedar.engine.params import SamplingParams
from cedar.engine.runner import Replay, Runner
from cedar.testing.tiny import random_tokens
from real_engine import (
    PAGE,
    Oracle,
    catalogue,
    drain,
    expected,
    index_of,
    loaded_tiny,
    make_core,
    make_runner,
    picture,
    prefill,
    submit,
    with_image,
)

PROMPT, STEPS = 70, 4
CONFIG = loaded_tiny().model.config
WINDOW = CONFIG.window_size
TEXT = random_tokens(CONFIG, PROMPT + STEPS, seed=1)
START = PROMPT - WINDOW  # of the decoder
PLACES = (12, 36, 60)
MODES = (Replay.DECODER, Replay.ENCODER_DECODER)


def continued(
    runner: Runner,
    start: int,
    chunks: Sequence[int],
    *,
    text: Sequence[int] = TEXT,
    images: tuple[ImageInput, ...] = (),
) -> Tensor:
    """Logits from the end of the prompt on: the rest of it in chunks, then single tokens."""
    rows = []
    for count in [*chunks, *[1] * STEPS]:
        work = prefill(runner, 0, text, start, count, PROMPT, images=images)
        (result,) = runner.execute([work])
        start += count
        if result.logits is not None and start >= PROMPT:
            rows.append(result.logits)
    return torch.cat(rows)


def cold(text: Sequence[int] = TEXT, images: tuple[ImageInput, ...] = ()) -> Tensor:
    runner = make_runner()
    runner.open(0)
    return continued(runner, 0, [PROMPT], text=text, images=images)


def taken(
    runner: Runner,
    chunks: Sequence[int],
    places: Sequence[int],
    text: Sequence[int] = TEXT,
    images: tuple[ImageInput, ...] = (),
) -> dict[int, RingSnapshot]:
    """What cold chunks of a longer text leave behind."""
    runner.open(0)
    found: dict[int, RingSnapshot] = {}
    start = 0
    for count in chunks:
        work = prefill(runner, 0, text, start, count, 200, images=images)
        here = tuple(at for at in places if start < at <= start + count)
        (result,) = runner.execute([replace(work, snapshots=here)])
        assert set(result.snapshots) == set(here)
        found.update(result.snapshots)
        start += count
    return found


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@contextmanager
def counted(runner: Runner) -> Iterator[list[int]]:
    """Tokens that the encoder's first layer sees."""
    counts = [0]

    def hook(module: Any, args: Any, output: Any) -> None:
        counts[0] += len(args[0].x_TCD)

    handle = runner.model.backbone()[0].register_forward_hook(hook)
    yield counts
    handle.remove()


COLD = cold()


@pytest.mark.parametrize("replay", MODES)
@pytest.mark.parametrize("at", PLACES)
def test_a_hit_at_a_snapshot_is_a_cold_run(replay: Replay, at: int) -> None:
    runner = make_runner(replay)
    snapshot = taken(runner, [72], [at])[at]
    for hit in range(at, 61, PAGE):  # what is cached may reach further than the snapshot
        pages = tuple(range(hit // PAGE))
        before = [runner.read_page(page) for page in pages]
        runner.open(0)
        runner.restore(0, pages, hit, TEXT[:hit], snapshot)
        with counted(runner) as counts:
            rest = PROMPT - hit
            same(continued(runner, hit, [rest] if hit < 60 else [1, 3, rest - 4]), COLD)
        assert counts == [PROMPT - at + STEPS]
        assert [runner.read_page(page) for page in pages] == before


@pytest.mark.parametrize(
    "chunks", [[30, 42], [7] * 10 + [2], [12] * 6, [34, 1, 1, 1, 35], [11, 2, 59]], ids=str
)
def test_snapshots_do_not_depend_on_chunks(chunks: list[int]) -> None:
    places = tuple(range(PAGE, 73, PAGE))
    whole = taken(make_runner(), [72], places)
    for at, snapshot in taken(make_runner(), chunks, places).items():
        assert torch.equal(snapshot.rings_LRB, whole[at].rings_LRB)
        assert torch.equal(snapshot.classes_R, whole[at].classes_R)
        assert snapshot.rings_LRB.shape == (4, WINDOW - 1, CONFIG.head_dim + CONFIG.head_dim // 32)
        assert snapshot.nbytes == snapshot.rings_LRB.nbytes + 8 * 2
        assert snapshot.position == at


def test_rejected_drafts_leave_no_trace_in_a_snapshot() -> None:
    """A place that is crossed by drafts of which those behind it are taken back."""
    whole = taken(make_runner(), [72], [36])[36]
    runner = make_runner()
    runner.open(0)
    runner.execute([prefill(runner, 0, TEXT, 0, 33, 33)])
    wrong = [*TEXT[:34], 9, 9, 9]
    for text, keeps in ((wrong, 34), (TEXT, 37)):
        start = runner.store.length(0)
        work = prefill(runner, 0, text, start, 4, 33, wants="all")
        (result,) = runner.execute([replace(work, snapshots=(36,))])
        runner.rollback(0, keeps)
        assert torch.equal(result.snapshots[36].rings_LRB, whole.rings_LRB) == (keeps == 37)
    assert torch.equal(result.snapshots[36].classes_R, whole.classes_R)


@pytest.mark.parametrize("replay", MODES)
def test_a_poisoned_snapshot_changes_the_answer(replay: Replay) -> None:
    """Negative control: what is in a snapshot is used, its windows and its history."""
    runner = make_runner(replay)
    good = taken(runner, [72], [60])[60]
    worse = good.rings_LRB.clone()
    worse[0] = worse[0].flip(0)
    for bad in (replace(good, rings_LRB=worse), replace(good, classes_R=good.classes_R.flip(0))):
        runner.open(0)
        runner.restore(0, range(5), 60, TEXT[:60], bad)
        assert (continued(runner, 60, [PROMPT - 60]) - COLD).abs().max() > 1e-6
    runner.open(0)
    runner.restore(0, range(5), 60, TEXT[:60], good)
    same(continued(runner, 60, [PROMPT - 60]), COLD)


def test_a_snapshot_behind_the_decoders_start_does_not_serve() -> None:
    """Its encoder outputs are needed; the prefix runs again instead."""
    prompt = 64
    assert prompt - WINDOW < 60
    runner = make_runner()
    runner.open(0)
    (wanted,) = runner.execute([prefill(runner, 0, TEXT, 0, prompt, prompt)])
    snapshot = taken(runner, [72], [60])[60]
    runner.open(0)
    runner.restore(0, range(5), 60, TEXT[:60], snapshot)
    with counted(runner) as counts:
        (found,) = runner.execute([prefill(runner, 0, TEXT, 60, prompt - 60, prompt)])
    assert found.logits is not None
    assert wanted.logits is not None
    same(found.logits, wanted.logits)
    assert counts[0] > 4 + WINDOW


@pytest.mark.parametrize("replay", MODES)
def test_only_exact_windows_are_taken(replay: Replay) -> None:
    """After a replay: from where its windows are those of a cold run, if they ever are."""
    places = (24, 36, 48, 60)
    whole = taken(make_runner(), [72], places)
    runner = make_runner(replay)
    taken(runner, [72], [])
    runner.open(0)
    runner.restore(0, range(4), 48, TEXT[:48])
    work = prefill(runner, 0, TEXT, 48, PROMPT - 48, PROMPT)
    (result,) = runner.execute([replace(work, snapshots=places)])
    if replay is Replay.ENCODER_DECODER:
        assert result.snapshots == {}
        return
    assert set(result.snapshots) == {48, 60}
    for at, snapshot in result.snapshots.items():
        assert torch.equal(snapshot.rings_LRB, whole[at].rings_LRB)
    # Negative control: the windows of a place that the replay begins before are not right.
    runner.open(0)
    runner.restore(0, range(4), 48, TEXT[:48])
    runner._exact_from = NeverInexact()
    (result,) = runner.execute([replace(work, snapshots=places)])
    assert not torch.equal(result.snapshots[36].rings_LRB, whole[36].rings_LRB)


class NeverInexact(dict[int, float]):
    def __setitem__(self, key: int, value: float) -> None:
        super().__setitem__(key, 0)


def test_a_snapshot_inside_an_image() -> None:
    """Its history says that nothing is seen across the image."""
    image = picture(32, seed=1)
    text = [*with_image(TEXT[: PROMPT - 8], image), *TEXT[PROMPT:]]
    wanted = cold(text, (image,))
    for at in (36, 48):
        runner = make_runner()
        snapshot = taken(runner, [31, 41], [at], text, (image,))[at]
        assert bool((snapshot.classes_R == -1).any()) == (at == 36)
        runner.open(0)
        runner.restore(0, range(at // PAGE), at, text[:at], snapshot)
        same(continued(runner, at, [PROMPT - at], text=text, images=(image,)), wanted)


# --- in the engine ------------------------------------------------------------------------------


def core_of(**options: Any) -> EngineCore:
    return make_core(**{"pool_tokens": 1200, "replay": "encoder+decoder"} | options)


def scored(core: EngineCore, prompt: Sequence[int], most: int = 4) -> tuple[list[int], Tensor]:
    """Greedy tokens and their log-probabilities."""
    wanted = SamplingParams(temperature=0.0, max_tokens=most, logprobs=0, ignore_eos=True)
    core.submit(core.request(prompt, wanted))
    tokens, scores = [], []
    while core.has_work:
        for output in core.step():
            assert output.error is None
            tokens += output.tokens
            scores += [each.logprob for each in output.logprobs or ()]
    return tokens, torch.tensor(scores, dtype=torch.float64)


def check_same(found: tuple[list[int], Tensor], wanted: tuple[list[int], Tensor]) -> None:
    assert found[0] == wanted[0]
    same(found[1], wanted[1])


@pytest.mark.parametrize(("draft", "later"), [(False, 1), (False, 40), (True, 9)])
def test_the_next_turn_of_a_chat_is_a_cold_run(draft: bool, later: int) -> None:
    """Its prompt is the one before, the answer and what the user says then."""
    first = random_tokens(CONFIG, 50, seed=4)
    core = core_of(draft=draft)
    answer, _ = scored(core, first, 30)
    second = [*first, *answer, *random_tokens(CONFIG, later, seed=later)]
    wanted = scored(core_of(prefix_cache=False), second)
    with counted(core._runner) as counts:
        check_same(scored(core, second), wanted)
    assert core.stats().snapshot_hits == 1
    assert core.stats().cached_tokens == (50 + 30 - 1) // PAGE * PAGE
    if not draft:  # the prompt from the snapshot on, and each generated token but the last
        assert counts[0] <= later + 2 + 3 * PAGE + 3
    # Negative control: without snapshots it is an approximation.
    plain = core_of(ring_snapshots=0)
    scored(plain, first, 30)
    assert (scored(plain, second)[1] - wanted[1]).abs().max() > 1e-6


@pytest.mark.parametrize("length", [20, 48, 49, 60])
def test_the_same_prompt_again_is_a_cold_run(length: int) -> None:
    prompt = random_tokens(CONFIG, length, seed=length)
    core = core_of()
    wanted = scored(core, prompt)
    for turn in (1, 2):
        with counted(core._runner) as counts:
            check_same(scored(core, prompt), wanted)
        assert core.stats().snapshot_hits == turn
        assert counts[0] <= WINDOW + PAGE - 1 + 3


@pytest.mark.parametrize("replay", [Replay.DECODER, Replay.ENCODER_DECODER])
@pytest.mark.parametrize("own", [3, 30])
def test_many_users_of_one_long_beginning(replay: Replay, own: int) -> None:
    """The second finds out where they part, and from then on nothing runs twice."""
    system = random_tokens(CONFIG, 59, seed=6)
    prompts = [[*system, 3 + k, *random_tokens(CONFIG, own, seed=100 + k)] for k in range(4)]
    wanted = [scored(core_of(replay=replay, prefix_cache=False), each, 4) for each in prompts]
    core = core_of(replay=replay, prefix_hits="exact")
    for k, each in enumerate(prompts):
        with counted(core._runner) as counts:
            check_same(scored(core, each, 4), wanted[k])
        if k >= 2:
            assert core.stats().snapshot_hits >= k - 1
            assert counts[0] <= len(each) - 48 + PAGE + 3
    if replay is Replay.DECODER:  # the same with replay, which is exact but runs more at first
        core = core_of(replay=replay)
        for k, each in enumerate(prompts):
            with counted(core._runner) as counts:
                check_same(scored(core, each, 4), wanted[k])
            assert core.stats().cached_tokens == k * 48
            if k >= 2:
                assert core.stats().snapshot_hits >= k - 1
                assert counts[0] <= len(each) - 48 + PAGE + 3


def test_exact_hits_are_used_up_to_a_snapshot_only() -> None:
    trunk = random_tokens(CONFIG, 100, seed=7)
    core = core_of(prefix_hits="exact")
    scored(core, trunk, 2)
    # Parts in the middle, where there is none.
    middle = [*trunk[:50], *random_tokens(CONFIG, 40, seed=8)]
    check_same(scored(core, middle, 4), scored(core_of(prefix_cache=False), middle, 4))
    assert core.stats().cached_tokens == core.stats().snapshot_hits == 0
    # Parts near the end.
    near = [*trunk[:97], *random_tokens(CONFIG, 40, seed=9)]
    check_same(scored(core, near, 4), scored(core_of(prefix_cache=False), near, 4))
    assert core.stats().cached_tokens == 96
    assert core.stats().snapshot_hits == 1
    # Where it parted before there is one now.
    again = [*trunk[:50], *random_tokens(CONFIG, 30, seed=10)]
    check_same(scored(core, again, 4), scored(core_of(prefix_cache=False), again, 4))
    assert core.stats().cached_tokens == 96 + 48
    # Negative control: with replay the same prompts are approximate.
    core = core_of(ring_snapshots=0)
    scored(core, trunk, 2)
    wanted = scored(core_of(prefix_cache=False), middle, 4)
    assert (scored(core, middle, 4)[1] - wanted[1]).abs().max() > 1e-6


def test_poison_in_the_engine_is_noticed() -> None:
    prompt = random_tokens(CONFIG, 70, seed=11)
    core = core_of()
    wanted = scored(core, prompt, 4)
    index = index_of(core)
    assert index is not None
    for key, snapshot in list(index._snapshots.items()):
        assert isinstance(snapshot, RingSnapshot)
        index._snapshots[key] = replace(snapshot, rings_LRB=snapshot.rings_LRB.flip(1))
    assert (scored(core, prompt, 4)[1] - wanted[1]).abs().max() > 1e-6


@pytest.mark.parametrize(("draft", "most"), [(False, 64), (True, 3)])
def test_exact_hits_in_a_full_engine(draft: bool, most: int) -> None:
    """Preemption, several samples, images and drafts, all at once and twice."""
    some = catalogue()[1::2]
    core = core_of(
        prefix_hits="exact",
        ring_snapshots=most,
        draft=draft,
        pool_tokens=PAGE * 7,
        max_running=4,
        token_budget=33,
    )
    if draft:
        tick = iter(range(10**6))
        Oracle(core, "decoder", lambda: next(tick) % 3 == 0)
    for turn in range(2):
        for request in some:
            submit(core, request, f"{turn} {request.name}")
        found: dict[tuple[str, int], Any] = {}
        while core.has_work:
            drain(core, found, steps=1)
            assert core.stats().snapshots <= most
            for sequence in core._scheduler.sequences():
                assert len(sequence.snapshots) <= 6
                assert all(at <= sequence.computed for at in sequence.snapshots)
        for request in some:
            for k, text in enumerate(expected("decoder", request.name)):
                assert found[f"{turn} {request.name}", k].tokens == text, request.name
    assert core.stats().snapshot_hits > 3
    assert core.stats().preemptions > 0
