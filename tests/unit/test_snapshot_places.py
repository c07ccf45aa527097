"""Where snapshots are taken, which one serves, and what becomes of them; plain numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_setting import PAGE, TAIL, ToyRunner, alone, drain, make_core

from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import PrefixIndex
from cedar.engine.assemble import EngineConfig
from cedar.engine.params import SamplingParams
from cedar.engine.request import Request, Sequence
from cedar.engine.snapshots import Snapshots
from cedar.engine.steps import Item, ItemKind
from cedar.errors import ConfigError

SIZE, WINDOW = 64, 128  # released


def setting(reach: int = 2540) -> tuple[Snapshots, PrefixIndex]:
    index = PrefixIndex(PageAllocator(100), SIZE, b"", max_snapshots=50)
    return Snapshots(index, window=WINDOW, reach=reach), index


def sequence(prompt: int, **state: Any) -> Sequence:
    request = Request(id="a", tokens=(3,) * prompt, params=SamplingParams(max_tokens=5))
    return Sequence(request, (0.0, 0), **state)


def item(of: Sequence, start: int, count: int, kind: ItemKind = ItemKind.PREFILL) -> Item:
    return Item(of, start, (3,) * count, kind, True, True)


@pytest.mark.parametrize(
    ("prompt", "start", "count", "wanted"),
    [
        (1000, 0, 1000, (832, 960)),  # 1000 - 128 = 872
        (1000, 0, 500, ()),
        (1000, 500, 400, (832,)),
        (1000, 832, 168, (960,)),
        (1024, 0, 1024, (896, 1024)),
        (130, 0, 130, (128,)),
        (63, 0, 63, ()),
    ],
)
def test_the_end_of_a_prompt_has_two(
    prompt: int, start: int, count: int, wanted: tuple[int, ...]
) -> None:
    snapshots, _ = setting()
    assert snapshots.wanted(item(sequence(prompt), start, count)) == wanted


def test_so_has_the_place_where_it_parts_from_others() -> None:
    snapshots, _ = setting()
    cold = sequence(1000, match_tokens=512)
    assert snapshots.wanted(item(cold, 0, 1000)) == (384, 512, 832, 960)
    # After a hit the first pass runs some of the prefix again, the later ones do not.
    hit = sequence(1000, match_tokens=512, hit_tokens=512)
    assert snapshots.wanted(item(hit, 512, 100)) == (384, 512)
    assert snapshots.wanted(item(hit, 612, 388)) == (832, 960)


def test_a_known_one_is_not_taken_again() -> None:
    snapshots, index = setting()
    keys = index.insert((3,) * 512, (), index.allocator.allocate(8))
    hit = sequence(1000, match_tokens=512, hit_tokens=512, hit_keys=keys)
    assert index.attach(keys[7], "at 512")
    assert snapshots.wanted(item(hit, 512, 100)) == (384,)


@pytest.mark.parametrize("kind", [ItemKind.DECODE, ItemKind.VERIFY, ItemKind.RECOMPUTE])
def test_generated_tokens_have_one_for_each_window(kind: ItemKind) -> None:
    snapshots, _ = setting()
    of = sequence(100)
    seen = [
        at for start in range(100, 1000, 3) for at in snapshots.wanted(item(of, start, 3, kind))
    ]
    assert seen == list(range(128, 1001, 128))
    # Of many at once the last two.
    assert snapshots.wanted(item(of, 100, 800, kind)) == (768, 896)


def test_two_of_the_generated_ones_and_those_of_the_prompt_are_held() -> None:
    snapshots, _ = setting()
    of = sequence(200)
    for at in (64, 192, 256, 384, 512, 640):
        snapshots.keep(of, {at: str(at)}, at)
    assert of.snapshots == {64: "64", 192: "192", 512: "512", 640: "640"}
    # Behind a rejected draft it is wrong.
    snapshots.keep(of, {768: "768"}, 767)
    assert 768 not in of.snapshots


@pytest.mark.parametrize(
    ("prompt", "places", "reach", "found"),
    [
        (1000, (512,), 2540, 512),
        (1000, (512, 640, 896), 2540, 640),  # the hit ends at 640
        (641, (512, 640), 2540, 512),  # the decoder begins at 513
        (640 + 127, (512, 640), 2540, 512),
        (640 + 128, (512, 640), 2540, 640),
        (1000, (), 2540, 0),
        (1000, (320,), 128, 0),  # further back than a replay, and than two windows
        (1000, (384,), 128, 384),
        (1000, (64,), 2540, 64),
        (100, (64,), 2540, 0),
    ],
)
def test_the_last_one_before_the_decoder_begins_serves(
    prompt: int, places: tuple[int, ...], reach: int, found: int
) -> None:
    snapshots, index = setting(reach)
    keys = index.insert((3,) * 960, (), index.allocator.allocate(15))
    for at in places:
        index.attach(keys[at // SIZE - 1], SimpleNamespace(at=at))
    kept = min(640, (prompt - 1) // SIZE * SIZE) // SIZE
    of = sequence(prompt, hit_tokens=kept * SIZE, hit_keys=keys[:kept])
    served = snapshots.serving(of)
    assert (served.at if served else 0) == found


def test_an_exact_hit_ends_at_a_snapshot() -> None:
    snapshots, index = setting(128)
    keys = index.insert((3,) * 960, (), index.allocator.allocate(15))
    match = index.match((3,) * 1000)
    assert snapshots.exact_hit(sequence(1000), match) == 0
    index.attach(keys[1], "far away")  # however far
    assert snapshots.exact_hit(sequence(1000), match) == 128
    index.attach(keys[14], "behind the decoder's start")
    assert snapshots.exact_hit(sequence(1000), match) == 128
    assert snapshots.exact_hit(sequence(1088), match) == 960


# --- with the toy engine: a snapshot of another text, or of another place, is noticed -----------


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("draft", "pages"), [(False, 64), (True, 64), (True, 14)])
def test_snapshots_are_of_the_text_that_they_serve(exact: bool, draft: bool, pages: int) -> None:
    runner = ToyRunner(pages)
    core = make_core(runner, num_pages=pages, draft=draft, snapshots=9, exact_hits=exact)
    texts = [[5 + k % 3, 6, 7, *range(20, 30 + k)] for k in range(6)]
    params = SamplingParams(seed=4, max_tokens=11)
    for turn in range(3):
        ids = [core.submit(core.request(text, params)) for text in texts]
        found = drain(core)
        for place, (id, text) in enumerate(zip(ids, texts, strict=True)):
            wanted = alone(text, params)
            assert found[id, 0] == wanted, turn
            texts[place] = [*text, *wanted.tokens, 40 + turn, 41]
    assert len(runner.resumed) > (5 if pages == 64 else 0)
    assert all(at % PAGE == 0 for at in runner.resumed)
    stats = core.stats()
    assert stats.snapshot_hits == len(runner.resumed)
    assert 0 < stats.snapshots <= 9
    if exact:  # nothing of a prefix runs again
        assert stats.cached_tokens <= sum(runner.resumed)


def test_a_snapshot_of_another_text_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Negative control for the one above."""
    runner = ToyRunner(64)
    core = make_core(runner, snapshots=9)
    prompt = list(range(20, 50))
    core.submit(core.request(prompt, SamplingParams(max_tokens=2)))
    drain(core)
    index = core._scheduler._pool.index
    assert index is not None
    for key, (at, tail) in list(index._snapshots.items()):  # type: ignore[misc]
        index._snapshots[key] = (at, tail[::-1])
    assert len(tail) == TAIL
    id = core.submit(core.request(prompt, SamplingParams(max_tokens=2)))
    assert drain(core)[id, 0].finish_reason == "error"
    assert "windows of another text" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ring_snapshots": -1}, "ring_snapshots is -1; expected 0 or more"),
        ({"ring_snapshots": 1.5}, "ring_snapshots is 1.5; expected an integer"),
        ({"prefix_hits": "some"}, "prefix_hits is 'some'; expected one of replay, exact"),
        ({"prefix_hits": "exact", "ring_snapshots": 0}, "needs ring_snapshots of 1 or more"),
    ],
)
def test_settings_that_are_wrong_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**wrong)
