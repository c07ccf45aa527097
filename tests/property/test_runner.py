"""The runner's prefill: exact, with a bounded decoder replay, after prefix hits, with images."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cedar.cache.layout import KVLayout
from cedar.engine.images import ImageInput
from cedar.engine.runner import Replay, Runner
from cedar.engine.runner_protocol import Work
from cedar.errors import RequestError
from cedar.model import Batch, Model
from cedar.testing.tiny import random_tokens, tiny_model

PROMPT, STEPS, PAGE = 70, 5, 12


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokens(model: Model) -> list[int]:
    return random_tokens(model.config, PROMPT + STEPS, seed=1)


def new_runner(model: Model, replay: Replay, draft: bool = False) -> Runner:
    loaded = SimpleNamespace(model=model, device=torch.device("cpu"))
    layout = KVLayout.from_config(model.config, page_tokens=PAGE)
    return Runner(loaded, layout, num_pages=60, num_slots=4, replay=replay, draft=draft)  # type: ignore[arg-type]


PAGES = tuple(torch.randperm(60, generator=torch.Generator().manual_seed(3)).tolist())


def work(
    slot: int,
    tokens: list[int],
    start: int,
    count: int,
    prompt: int = PROMPT,
    **more: object,
) -> Work:
    stop = start + count
    wants = more.pop("wants", "last" if stop >= prompt else "none")
    return Work(
        slot=slot,
        tokens=tuple(tokens[start:stop]),
        start=start,
        pages=PAGES[slot * 10 : slot * 10 + 10],
        wants_logits=wants,  # type: ignore[arg-type]
        is_last_chunk=stop >= prompt,
        prompt_tokens=prompt,
        **more,  # type: ignore[arg-type]
    )


def continued(runner: Runner, tokens: list[int], chunks: list[int], start: int = 0) -> Tensor:
    """Prefill from ``start`` in chunks, then single tokens: logits from the prompt's end on."""
    found = []
    for count in [*chunks, *([1] * STEPS)]:
        (result,) = runner.execute([work(1, tokens, start, count)])
        start += count
        if result.logits is not None:
            found.append(result.logits)
    assert start == PROMPT + STEPS
    return torch.cat(found)


def fresh(model: Model, replay: Replay, tokens: list[int], chunks: list[int]) -> Tensor:
    runner = new_runner(model, replay)
    runner.open(1)
    return continued(runner, tokens, chunks)


def exact(model: Model, tokens: list[int]) -> Tensor:
    return model(Batch.pack([tokens])).logits[PROMPT - 1 :]


CHUNKS = [[70], [7] * 10, [1] * 70, [33, 37], [69, 1], [64, 1, 5]]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_without_replay_everything_is_exact(
    model: Model, tokens: list[int], chunks: list[int]
) -> None:
    found = fresh(model, Replay.OFF, tokens, chunks)
    torch.testing.assert_close(found, exact(model, tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunks", CHUNKS[1:], ids=str)
def test_decoder_replay_does_not_depend_on_chunks(
    model: Model, tokens: list[int], chunks: list[int]
) -> None:
    whole = fresh(model, Replay.DECODER, tokens, [70])
    torch.testing.assert_close(
        fresh(model, Replay.DECODER, tokens, chunks), whole, rtol=0, atol=1e-10
    )
    # It is an approximation: a test that compared exact runs would see nothing.
    assert (whole - exact(model, tokens)).abs().max() > 1e-3


def test_a_long_enough_replay_makes_the_last_token_exact(model: Model) -> None:
    """(L/2)(W − 1) + 1 tokens through the decoder: here a prompt no longer than that."""
    reach = (model.config.n_layers // 2) * (model.config.window_size - 1) + 1
    wide = tiny_model(window_size=40).eval()
    assert reach <= 40
    short = random_tokens(wide.config, 40, seed=2)
    runner = new_runner(wide, Replay.DECODER)
    runner.open(1)
    with torch.no_grad():
        (found,) = runner.execute([work(1, short, 0, 40, prompt=40)])
        expected = wide(Batch.pack([short])).logits[-1:]
    torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-10)


def test_prefill_runs_half_the_layers(model: Model, tokens: list[int]) -> None:
    """Counted at the layers: every token in the encoder, one window's worth in the decoder."""
    counts = [0] * model.config.n_layers
    hooks = [
        layer.register_forward_hook(
            lambda module, args, out, i=i: counts.__setitem__(i, counts[i] + len(args[0].x_TCD))
        )
        for i, layer in enumerate(model.backbone())
    ]
    runner = new_runner(model, Replay.DECODER)
    runner.open(1)
    for start in range(0, PROMPT, 10):
        runner.execute([work(1, tokens, start, 10)])
    for hook in hooks:
        hook.remove()
    half = model.decoder_start
    assert counts[:half] == [PROMPT] * half
    assert counts[half:] == [model.config.window_size] * (model.config.n_layers - half)


@pytest.mark.parametrize("hit", [12, 36, 60])
def test_a_prefix_hit_equals_a_miss_when_the_encoder_is_exact(
    model: Model, tokens: list[int], hit: int
) -> None:
    miss = fresh(model, Replay.DECODER, tokens, [70])
    for replay, same in ((Replay.DECODER, True), (Replay.ENCODER_DECODER, False)):
        runner = new_runner(model, replay)
        runner.open(1)
        # Someone else with another end left the pages behind.
        other = [*tokens[: hit + 2], 5]
        runner.execute([work(1, other, 0, hit + 3, prompt=hit + 3)])
        runner.close(1)
        shared = PAGES[10 : 10 + hit // PAGE]
        before = [runner.read_page(page) for page in shared]
        runner.restore(1, shared, hit, tokens[:hit])
        found = continued(runner, tokens, [PROMPT - hit], start=hit)
        assert [runner.read_page(page) for page in shared] == before
        if same:
            torch.testing.assert_close(found, miss, rtol=0, atol=1e-10)
        else:  # approximate, and the comparison can tell
            assert (found - miss).abs().max() > 1e-6


def test_replay_off_takes_no_hits(model: Model, tokens: list[int]) -> None:
    with pytest.raises(RequestError, match="replay is off"):
        new_runner(model, Replay.OFF).restore(1, PAGES[:1], PAGE, tokens[:PAGE])


@pytest.mark.parametrize("replay", list(Replay))
def test_neighbours_change_nothing(model: Model, tokens: list[int], replay: Replay) -> None:
    """Four sequences at different places in every pass against one alone."""
    alone = fresh(model, replay, tokens, [20, 20, 30])
    runner = new_runner(model, replay)
    others = {slot: random_tokens(model.config, 90, seed=slot) for slot in (0, 2, 3)}
    place = dict.fromkeys(others, 0)
    for slot in range(4):
        runner.open(slot)
    chance = random.Random(0)
    found, start = [], 0
    for count in [20, 20, 30, *([1] * STEPS)]:
        batch = [work(1, tokens, start, count)]
        for slot, text in others.items():
            n = min(chance.randint(1, 25), 90 - place[slot])
            if n:
                batch.append(work(slot, text, place[slot], n, prompt=50))
                place[slot] += n
        chance.shuffle(batch)
        results = dict(zip((b.slot for b in batch), runner.execute(batch), strict=True))
        start += count
        if results[1].logits is not None:
            found.append(results[1].logits)
    torch.testing.assert_close(torch.cat(found), alone, rtol=0, atol=1e-10)


def test_verification_sees_what_single_steps_see(model: Model, tokens: list[int]) -> None:
    """Right drafts, wrong drafts taken back, and the draft rings afterwards."""
    plain, checked = (new_runner(model, Replay.DECODER, draft=True) for _ in range(2))
    singles = []
    for runner in (plain, checked):
        runner.open(1)
        runner.execute([work(1, tokens, 0, PROMPT)])
    for step in range(3):
        singles.append(plain.execute([work(1, tokens, PROMPT + step, 1)])[0].logits)
    wrong = [*tokens[: PROMPT + 2], 9, 9]
    (first,) = checked.execute([work(1, wrong, PROMPT, 4, wants="all")])
    checked.rollback(1, PROMPT + 2)
    (second,) = checked.execute([work(1, tokens, PROMPT + 2, 1)])
    assert first.logits is not None
    assert second.logits is not None
    torch.testing.assert_close(
        torch.cat((first.logits[:2], second.logits)),
        torch.cat(singles),
        rtol=0,
        atol=1e-10,  # type: ignore[arg-type]
    )
    ours, theirs = checked.draft([1], [7]), plain.draft([1], [7])
    torch.testing.assert_close(ours.logits_NBV, theirs.logits_NBV, rtol=0, atol=1e-10)


def test_an_image_span_may_be_cut_anywhere(model: Model) -> None:
    config = model.config
    size = config.vision_patch_size
    patches = torch.randn(36, 3, size, size, generator=torch.Generator().manual_seed(0))
    patches = patches.to(torch.float64)
    cells = -(-6 // config.vision_downsample_ratio)
    types = (0, *((1,) * cells + (2,)) * cells, 3)
    image = ImageInput(start=9, types=types, patches=patches, grid=(6, 6), digest=b"0" * 32)
    text = random_tokens(config, PROMPT + STEPS, seed=8)
    text[9 : image.stop] = [config.image_token_id] * len(types)
    kinds = [-1] * 9 + list(types) + [-1] * (len(text) - image.stop)
    expected = model(
        Batch.pack([text], image_types=[kinds], images=[patches], image_grids=[(6, 6)])
    ).logits[PROMPT - 1 :]
    for chunks in ([70], [9, 1, 60], [11, 3, 56], [image.stop, 70 - image.stop]):
        runner = new_runner(model, Replay.OFF)
        runner.open(1)
        start, found = 0, []
        for count in [*chunks, *([1] * STEPS)]:
            (result,) = runner.execute([work(1, text, start, count, images=(image,))])
            start += count
            if result.logits is not None:
                found.append(result.logits)
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-10)
    # Negative control: other pixels, other answer.
    runner = new_runner(model, Replay.OFF)
    runner.open(1)
    other = ImageInput(9, types, -patches, (6, 6), b"1" * 32)
    (result,) = runner.execute([work(1, text, 0, PROMPT, images=(other,))])
    assert result.logits is not None
    assert (result.logits - expected[:1]).abs().max() > 1e-6
