"""Faults that other engines shipped: each is put in on purpose, and has to be noticed.

The classes are those of "Faults others shipped" in the specification of inference. A check passes
as it is and fails with the fault; so it would have caught the fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cedar.cache.paged as paged
import cedar.engine.live as live
import cedar.engine.sampler as sampler_module
import cedar.model.contexts as contexts_module
from cedar.cache import DenseKV
from cedar.cache.layout import KVLayout
from cedar.cache.paged import PagedKV, PagedMain
from cedar.cache.prefix import PrefixIndex
from cedar.checkpoint import Checkpoint, fill, save_checkpoint
from cedar.engine.build import load_model
from cedar.engine.images import ImageInput, place_images
from cedar.engine.params import SamplingParams
from cedar.engine.runner import Runner
from cedar.engine.sampler import Sampler
from cedar.errors import CedarError, CheckpointError, ConfigError
from cedar.inputs.images import ImageSettings
from cedar.model import Batch, Model
from cedar.ops import with_operations
from cedar.ops.experts.reference import swiglu
from cedar.quant import FP8_ROW, BlockFormat
from cedar.testing.tiny import random_tokens, tiny_config, tiny_model
from real_engine import (
    PAGE,
    Oracle,
    catalogue,
    drain,
    expected,
    loaded_tiny,
    make_core,
    make_runner,
    picture,
    prefill,
    submit,
    with_image,
)

PROMPT, STEPS = 48, 3
CONFIG = tiny_config()
TEXT = random_tokens(CONFIG, PROMPT + STEPS, seed=1)
NOTICED = (AssertionError, CedarError, IndexError, RuntimeError, ValueError)


def continued(
    runner: Runner,
    chunks: Sequence[int],
    *,
    start: int = 0,
    text: Sequence[int] = TEXT,
    prompt: int = PROMPT,
    images: tuple[ImageInput, ...] = (),
) -> Tensor:
    """Logits from the end of the prompt on, for chunks and then single tokens."""
    rows = []
    for count in [*chunks, *[1] * STEPS]:
        (result,) = runner.execute([prefill(runner, 0, text, start, count, prompt, images=images)])
        start += count
        if result.logits is not None and start >= prompt:
            rows.append(result.logits)
    return torch.cat(rows)


def cold() -> Tensor:
    """The whole prompt at once, in a new runner."""
    runner = make_runner()
    runner.open(0)
    return continued(runner, [PROMPT])


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def check_chunks() -> None:
    runner = make_runner()
    runner.open(0)
    same(continued(runner, [7, 1, 11, 12, 17]), COLD)


def check_hit(hit: int = 24, spoil: Callable[[Runner], None] | None = None) -> None:
    """A slot that was used before, and a hit."""
    runner = make_runner()
    runner.open(0)
    other = [*TEXT[:hit], *random_tokens(CONFIG, 30, seed=9)]
    runner.execute([prefill(runner, 0, other, 0, hit + 30, hit + 30)])
    runner.close(0)
    if spoil is not None:
        spoil(runner)
    runner.open(0)
    runner.restore(0, tuple(range(hit // PAGE)), hit, TEXT[:hit])
    same(continued(runner, [PROMPT - hit], start=hit), COLD)


def check_reuse() -> None:
    """A preempted sequence begins again in a slot that somebody else has used."""
    runner = make_runner()
    runner.open(0)
    runner.execute([prefill(runner, 0, random_tokens(CONFIG, 33, seed=3), 0, 33, 33)])
    runner.open(0)
    same(continued(runner, [20, 28]), COLD)


def check_rejection() -> None:
    """Three wrong drafts behind every token."""
    runner = make_runner()
    runner.open(0)
    (first,) = runner.execute([prefill(runner, 0, TEXT, 0, PROMPT, PROMPT)])
    rows = [first.logits]
    for step in range(STEPS):
        at = PROMPT + step
        wrong = [*TEXT[: at + 1], 9, 8, 7]
        (result,) = runner.execute([prefill(runner, 0, wrong, at, 4, PROMPT, wants="all")])
        assert result.logits is not None
        rows.append(result.logits[:1])
        runner.rollback(0, at + 1)
    same(torch.cat(rows), COLD)  # type: ignore[arg-type]


COLD = cold()


# --- 1: windows and pages -----------------------------------------------------------------------


def stale(self: PagedKV, layer: int, slot: int, real: Any = PagedKV.window) -> Tensor:
    """The rows of one position earlier."""
    rows = real(self, layer, slot)
    return torch.cat((rows[:1], rows[:-1]))


def zero(self: PagedKV, layer: int, slot: int, real: Any = PagedKV.window) -> Tensor:
    return torch.zeros_like(real(self, layer, slot))


def unaligned(self: PagedKV, layer: int, slot: int, real: Any = PagedKV.window) -> Tensor:
    """The ring from its first row on, wherever it begins."""
    count = len(real(self, layer, slot))
    return paged.unpack_rows(self._rings[layer][slot][:count], FP8_ROW, self._dtype)


@pytest.mark.parametrize("check", [check_chunks, check_hit, check_reuse, check_rejection])
@pytest.mark.parametrize("fault", [stale, zero, unaligned])
def test_wrong_windows(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[], None], fault: Any
) -> None:
    check()
    monkeypatch.setattr(PagedKV, "window", fault)
    with pytest.raises(AssertionError):
        check()


def test_windows_that_are_not_rebuilt_after_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Runner, work: Any) -> Any:
        self.store.set_pages(work.slot, work.pages)
        prefix = self._prefixes.pop(work.slot, None)
        if prefix is not None:
            classes = self.model.token_map[torch.tensor(prefix.tokens)]  # type: ignore[index]
            self.store.restore(work.slot, prefix.start, prefix.start, classes)
        return work

    check_hit()
    monkeypatch.setattr(Runner, "_with_replay", forgetful)
    with pytest.raises(AssertionError):
        check_hit()


def test_a_slot_that_is_not_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedKV.open

    def keeps(self: PagedKV, slot: int, pages: Sequence[int] = ()) -> None:
        if self._slots[slot] is None:
            real(self, slot, pages)

    monkeypatch.setattr(PagedKV, "open", keeps)
    with pytest.raises(NOTICED):
        check_reuse()


def test_zeroed_and_foreign_pages_are_noticed() -> None:
    def clear(runner: Runner) -> None:
        runner.write_page(1, bytes(runner.store.layout.page_bytes))

    def swap(runner: Runner) -> None:
        runner.copy_page(0, 1)

    for spoil in (clear, swap):
        with pytest.raises(AssertionError):
            check_hit(spoil=spoil)


def test_a_hit_inside_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are whole groups; where a hit ends inside one all the same, the group is made anew."""
    with pytest.raises(ConfigError, match="page_tokens is 13"):
        KVLayout.from_config(CONFIG, page_tokens=13)

    def check() -> None:
        for hit in (25, 29, 36):
            runner = make_runner()
            runner.open(0)
            other = [*TEXT[:hit], *random_tokens(CONFIG, 30, seed=9)]
            runner.execute([prefill(runner, 0, other, 0, hit + 30, hit + 30)])
            runner.open(0)
            runner.restore(0, tuple(range(-(-hit // PAGE))), hit, TEXT[:hit])
            same(continued(runner, [PROMPT - hit], start=hit), COLD)

    check()
    real = PagedKV.restore
    monkeypatch.setattr(
        PagedKV,
        "restore",
        lambda self, slot, tokens, start, found: real(self, slot, tokens + 1, start, found),
    )
    with pytest.raises(AssertionError):
        check()


def test_an_unfinished_group_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedKV.residue

    def lost(self: PagedKV, layer: int, slot: int) -> Any:
        kv, gate = real(self, layer, slot)
        return torch.zeros_like(kv), torch.zeros_like(gate)

    monkeypatch.setattr(PagedKV, "residue", lost)
    with pytest.raises(AssertionError):
        check_chunks()


# --- 2: n-gram history --------------------------------------------------------------------------


def test_history_after_chunks_hits_and_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: PagedKV, slot: int, real: Any = PagedKV.history) -> Tensor:
        return torch.full_like(real(self, slot), -1)

    def shifted(self: PagedKV, slot: int, real: Any = PagedKV.history) -> Tensor:
        """As if a rejected token were still there."""
        return real(self, slot).roll(1)

    for fault in (lost, shifted):
        with monkeypatch.context() as patch:
            patch.setattr(PagedKV, "history", fault)
            for check in (check_chunks, check_hit, check_rejection):
                with pytest.raises(AssertionError):
                    check()


def seen_ngrams(patch: pytest.MonkeyPatch) -> dict[int, tuple[int, ...]]:
    """What Engram hashes at each position, the last time it was run."""
    real, seen = contexts_module.lookback, {}

    def watch(classes: Tensor, batch: Batch, store: Any, order: int, pad: int) -> Tensor:
        rows = real(classes, batch, store, order, pad)
        start = store.length(batch.slots[0])
        seen.update({start + i: tuple(row) for i, row in enumerate(rows.tolist())})
        return rows

    patch.setattr(contexts_module, "lookback", watch)
    return seen


def test_history_across_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """N-grams written down from the rule: nothing is seen across an image or a beginning."""
    image = picture(8, seed=1)
    tokens = [*with_image(TEXT[: PROMPT - 8], image), *TEXT[PROMPT:]]
    model = loaded_tiny().model
    assert model.token_map is not None
    classes = [int(model.token_map[token]) for token in tokens]
    pad = int(model.token_map[CONFIG.engram_pad_id])
    wanted = {}
    for at in range(len(tokens)):
        row, alive = [], True
        for back in range(CONFIG.engram_max_ngram_size):
            place = at - back
            alive = alive and place >= 0 and not image.start <= place < image.stop
            row.append(classes[place] if alive else pad)
        wanted[at] = tuple(row)

    def check() -> None:
        for chunks in ([48], [9, 39], [12, 4, 32], [17, 31]):
            with monkeypatch.context() as patch:
                seen = seen_ngrams(patch)
                runner = make_runner()
                runner.open(0)
                continued(runner, chunks, text=tokens, images=(image,))
                assert seen == wanted
        # A hit of 36 begins again at 36 − 20, just behind the image.
        for hit in (36, 24):
            with monkeypatch.context() as patch:
                runner = make_runner()
                runner.open(0)
                continued(runner, [48], text=tokens, images=(image,))
                runner.open(0)
                runner.restore(0, tuple(range(hit // PAGE)), hit, tokens[:hit])
                seen = seen_ngrams(patch)
                continued(runner, [48 - hit], start=hit, text=tokens, images=(image,))
                assert seen == {at: wanted[at] for at in seen}

    check()
    real = contexts_module.lookback

    def blind(found: Tensor, *rest: Any) -> Tensor:
        return real(found.clamp_min(0), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(contexts_module, "lookback", blind)
        with pytest.raises(AssertionError):
            check()
    # The same in what a hit restores alone, and other classes.
    restore = PagedKV.restore
    for fault in (lambda found: found.clamp_min(0), lambda found: found.flip(0) + 1):
        with monkeypatch.context() as patch:
            patch.setattr(
                PagedKV,
                "restore",
                lambda self, slot, n, start, found, f=fault: restore(
                    self, slot, n, start, f(found)
                ),
            )
            with pytest.raises(AssertionError):
                check()


# --- 3: neighbours ------------------------------------------------------------------------------


def check_neighbours() -> None:
    """In the middle of three; the last decodes, the first is a prompt."""
    runner = make_runner()
    texts = {slot: random_tokens(CONFIG, 60, seed=40 + slot) for slot in (1, 2)}
    for slot in range(3):
        runner.open(slot)
    runner.execute([prefill(runner, 2, texts[2], 0, 40, 40)])
    rows, at = [], 0
    for turn, count in enumerate([20, 28, 1, 1, 1]):
        work = [
            prefill(runner, 1, texts[1], 9 * turn, 9, 60),
            prefill(runner, 0, TEXT, at, count, PROMPT, wants="last"),
            prefill(runner, 2, texts[2], 40 + turn, 1, 40),
        ]
        found = runner.execute(work)[1].logits
        at += count
        if at >= PROMPT:
            assert found is not None
            rows.append(found)
    same(torch.cat(rows), COLD)


def test_packed_sequences_that_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    check_neighbours()
    select, keys, slots = PagedMain.select, PagedMain.keys, contexts_module.window_slots

    def first_table(self: PagedMain, entries: Tensor) -> Any:
        return select(replace(self, sequence_T=self.sequence_T * 0), entries)

    def first_keys(self: PagedMain, sequence: int, stop: int) -> Tensor:
        return keys(self, 0, stop)

    def no_border(lengths: Any, past: Any, window: int, device: Any) -> Tensor:
        """Windows that reach into the rows of the sequence before."""
        return slots((sum(lengths) + sum(past),), (0,), window, device)[
            torch.cat(
                [
                    torch.arange(n) + before + sum(lengths[:i]) + sum(past[:i])
                    for i, (n, before) in enumerate(zip(lengths, past, strict=True))
                ]
            )
        ]

    for where, name, fault in (
        (PagedMain, "select", first_table),
        (PagedMain, "keys", first_keys),
        (contexts_module, "window_slots", no_border),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fault)
            with pytest.raises(NOTICED):
                check_neighbours()


# --- 4: drafts ----------------------------------------------------------------------------------


DRAFTED = ("hit 24", "penalties")


def check_drafts() -> None:
    core = make_core(draft=True)
    tick = iter(range(10**6))
    Oracle(core, "decoder", lambda: next(tick) % 4 == 0)
    for request in catalogue():
        if request.name in DRAFTED:
            submit(core, request, request.name)
    found = drain(core)
    for name in DRAFTED:
        assert found[name, 0].tokens == expected("decoder", name)[0]
    assert sum(core.stats().accepted) > 0
    assert sum(core.stats().accepted) < sum(core.stats().drafted)


def test_a_rejected_draft_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    check_drafts()
    real = live.verify_keyed

    def generous(sampler: Sampler, rows: Tensor, drafts: Sequence[int], **more: Any) -> Any:
        """Takes the first draft unseen."""
        if drafts:
            spoilt = rows.clone()
            spoilt[0, drafts[0]] = 1e4
            return real(sampler, spoilt, drafts, **more)
        return real(sampler, rows, drafts, **more)

    monkeypatch.setattr(live, "verify_keyed", generous)
    with pytest.raises(AssertionError):
        check_drafts()


def test_draws_that_depend_on_what_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks (or batches) that sample apart: numbers from a generator with a state."""
    for name in DRAFTED:
        expected("decoder", name)  # without the fault
    state = np.random.default_rng(0)
    monkeypatch.setattr(
        sampler_module, "uniforms", lambda seed, sample, at, count, *purpose: state.random(count)
    )
    with pytest.raises(AssertionError):
        check_drafts()


class Grammar:
    """Remembers what it was told; token parity has to alternate with nothing else allowed."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> Tensor:
        parity = len(self.accepted) % 2
        return torch.arange(CONFIG.vocab_size) % 2 == parity

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_a_grammar_hears_of_accepted_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.9, seed=77, max_tokens=15, ignore_eos=True)

    def text(draft: bool) -> list[int]:
        core = make_core(draft=draft)
        if draft:
            drafter = core._drafter
            assert drafter is not None
            # Right by the grammar or not, wrong by the model nearly always.
            drafter.propose = lambda slots, *rest: [(5, 6, 7)] * len(slots)  # type: ignore[method-assign]
        grammars: list[Grammar] = []

        def mask() -> Grammar:
            grammars.append(Grammar())
            return grammars[-1]

        core.submit(core.request(TEXT, params, id="g"), masks=mask)
        tokens = drain(core)["g", 0].tokens
        assert grammars[0].accepted == tokens
        assert [token % 2 for token in tokens] == [k % 2 for k in range(15)]
        return tokens

    assert text(draft=True) == text(draft=False)
    real = live.verify_keyed

    def eager(sampler: Sampler, rows: Tensor, drafts: Sequence[int], **more: Any) -> Any:
        found = real(sampler, rows, drafts, **more)
        for token in drafts[found.accepted :]:
            sampler._mask.accept(token)  # type: ignore[union-attr]
        return found

    monkeypatch.setattr(live, "verify_keyed", eager)
    with pytest.raises(NOTICED):
        text(draft=True)


def test_a_missing_draft_weight(tmp_path: Path) -> None:
    """Loading is strict: the draft head cannot be left at random."""
    model = tiny_model(dtype=torch.float32)
    tensors = dict(model.named_parameters())
    lost = "mtp.0.main_proj.weight"
    assert lost in tensors
    save_checkpoint(tmp_path / "whole", CONFIG, tensors, "bf16", max_shard_bytes=1 << 30)
    target = dict(tiny_model(dtype=torch.float32, seed=5).named_parameters())
    with Checkpoint.open(tmp_path / "whole") as whole:
        fill(target, whole, CONFIG)
        less = SimpleNamespace(
            **{
                name: getattr(whole, name)
                for name in ("storage", "read", "read_rows", "path", "directory")
                if hasattr(whole, name)
            },
            specs={name: spec for name, spec in whole.specs.items() if name != lost},
        )
        with pytest.raises(CheckpointError, match=lost):
            fill(target, less, CONFIG)  # type: ignore[arg-type]
        # The fault itself: whoever skips it gets a model without complaint, with other drafts.
        with torch.no_grad():
            target[lost].zero_()
        fill(target, whole, CONFIG, skip={lost})
        assert float(target[lost].detach().abs().max()) == 0.0


# --- 5: images ----------------------------------------------------------------------------------


def check_two_images(disk: Path | None) -> None:
    """Equal ids, different pixels, one after the other: the first is cached."""
    names = ("image 0", "image 1", "image 0")
    core = make_core(disk_cache=disk)
    for turn, name in enumerate(names):
        if disk is not None:  # a new process each time, that has the disk alone
            core.close()
            core = make_core(disk_cache=disk)
        request = next(each for each in catalogue() if each.name == name)
        submit(core, request, str(turn))
        assert drain(core)[str(turn), 0].tokens == expected("decoder", name)[0], turn
    assert core.stats().cached_tokens > 0  # the third found the first
    core.close()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_two_images_with_equal_ids(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    assert expected("decoder", "image 0") != expected("decoder", "image 1")
    check_two_images(tmp_path / "right" if where == "disk" else None)
    real = PrefixIndex._chain
    monkeypatch.setattr(
        PrefixIndex, "_chain", lambda self, tokens, hashes, count: real(self, tokens, (), count)
    )
    with pytest.raises(AssertionError):
        check_two_images(tmp_path / "wrong" if where == "disk" else None)


def test_pictures_that_look_different_have_different_digests() -> None:
    """Also those whose stored bytes are equal: a palette is part of the picture."""
    image = pytest.importorskip("PIL.Image")
    settings = ImageSettings(min_pixels=0, max_n_token=64)
    red, green = image.new("P", (84, 84)), image.new("P", (84, 84))
    red.putpalette([255, 0, 0] * 256)
    green.putpalette([0, 255, 0] * 256)
    clear = image.new("P", (84, 84))
    clear.putpalette([255, 0, 0] * 256)
    clear.info["transparency"] = 0
    found = [place_images([5, 61], [each], 61, settings)[1][0] for each in (red, green, clear)]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert torch.equal(one.patches, other.patches) == (one.digest == other.digest)
    assert not torch.equal(found[0].patches, found[1].patches)


# --- 6: large numbers ---------------------------------------------------------------------------


def test_pages_behind_two_to_the_31_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of more than 2^31 bytes each; memory is reserved, and touched in a few pages only."""
    model = loaded_tiny().model
    layout = KVLayout.from_config(CONFIG, page_tokens=PAGE)

    def check() -> None:
        store = PagedKV(CONFIG, layout, num_pages=1, num_slots=1, dtype=torch.float64)
        for pools in (store._entries, store._keys):
            for layer, pool in pools.items():
                pages = 2**31 // pool[0].numel() + 20
                pools[layer] = torch.empty((pages, *pool.shape[1:]), dtype=torch.uint8)
        last = min(len(pool) for pool in (*store._entries.values(), *store._keys.values()))
        highest = max(last * p[0].numel() for p in store._entries.values())
        assert highest > 2**31
        store.open(0, [last - 1, 3, last - 2, last - 3])
        with torch.inference_mode():
            model(Batch.pack([TEXT[:20]]), store)
            found = model(Batch.pack([TEXT[20:PROMPT]]), store).logits
            same(found, model(Batch.pack([TEXT[:PROMPT]])).logits[20:])

    check()
    real = PagedMain.select

    def wrapped(self: PagedMain, entries: Tensor) -> Any:
        """Byte offsets modulo 2^31."""
        most = 2**31 // self.entries_PEB[0].numel()
        return real(replace(self, table_BP=self.table_BP % most), entries)

    monkeypatch.setattr(PagedMain, "select", wrapped)
    with pytest.raises(AssertionError):
        check()


def test_more_than_512_selected_entries() -> None:
    """No buffer is sized for the released top-k."""
    model = tiny_model(index_topk=530, candidate_topk_blocks=200).eval().requires_grad_(False)
    config, count = model.config, 620
    tokens = random_tokens(config, count + 1, seed=5)
    layout = KVLayout.from_config(config, page_tokens=PAGE)
    store = PagedKV(config, layout, num_pages=60, num_slots=1, dtype=torch.float64)
    store.open(0, range(60))
    with torch.inference_mode():
        for start in range(0, count, 155):
            model(Batch.pack([tokens[start : start + 155]]), store, logits="last")
        found = model(Batch.pack([tokens[count:]]), store, logits="last").logits
        wanted = model(Batch.pack([tokens]), logits="last").logits
        same(found, wanted)
        fewer = tiny_model(index_topk=512, candidate_topk_blocks=200).eval()
        other = fewer(Batch.pack([tokens]), logits="last").logits
    assert (other - wanted).abs().max() > 1e-6  # 512 would have been noticed


# --- 7: the layout of scales --------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def by_hand(raw: bytes, width: int, cols: int, e8m0: bool) -> np.ndarray[Any, Any]:
    """One stored row from its bytes: nibbles (even element low), then the scales."""
    codes = np.frombuffer(raw[: width // 2], np.uint8)
    values = np.empty(width)
    values[0::2], values[1::2] = E2M1[codes & 15], E2M1[codes >> 4]
    scales = np.frombuffer(raw[width // 2 :], np.uint8).astype(int)
    if e8m0:
        factors = 2.0 ** (scales - 127)
    else:
        exponent, fraction = scales >> 3 & 15, scales & 7
        normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
        factors = np.where(exponent > 0, normal, fraction / 8 * 2.0**-6)
    return values * np.repeat(factors, cols)


def test_scales_stand_where_the_layout_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many pages, each block of a magnitude of its own; read back, and decoded by hand."""
    layer, count = 4, 600
    head, key = CONFIG.head_dim, CONFIG.index_head_dim
    generator = torch.Generator().manual_seed(0)

    def spread(width: int, block: int) -> Tensor:
        size = 2.0 ** torch.randint(-4, 5, (count, width // block, 1), generator=generator)
        noise = torch.randn(count, width // block, block, generator=generator)
        return (noise * size).flatten(1).double()

    rows, keys = spread(head, 16), spread(key, 32)
    pages = torch.randperm(60, generator=generator).tolist()[: count // PAGE]

    def check() -> None:
        runner = make_runner()
        store = runner.store
        store.open(0, pages)
        store.extend_main(layer, 0, rows, keys)
        main = store.main(layer, (0,), torch.zeros(1, dtype=torch.int64))
        got = main.select(torch.arange(count).unsqueeze(0))
        read = got.rows_RH[got.slots_TK[0]].numpy(), main.keys(0, count).numpy()
        where = [(pages[n // PAGE], n % PAGE) for n in range(count)]
        for n, (page, place) in enumerate(where):
            raw = bytes(store._entries[layer][page, place].tolist())
            np.testing.assert_array_equal(read[0][n], by_hand(raw, head, 16, False))
            raw = bytes(store._keys[layer][page, place].tolist())
            np.testing.assert_array_equal(read[1][n], by_hand(raw, key, 32, True))
        # Half a step of the widest gap, and what rounding the scale adds.
        for found, given in ((read[0], rows), (read[1], keys)):
            block = 16 if found is read[0] else 32
            error = np.abs(found - given.numpy()).reshape(count, -1, block).max(-1)
            top = given.abs().numpy().reshape(count, -1, block).max(-1)
            assert (error <= 0.26 * top).all()

    check()
    real_pack, real_unpack = paged.pack_rows, paged.unpack_rows

    def rolled(raw: Tensor, fmt: BlockFormat, dtype: torch.dtype) -> Tensor:
        """From the second page on the scale of the row before."""
        if len(raw) <= PAGE or fmt is FP8_ROW:
            return real_unpack(raw, fmt, dtype)
        width = raw.shape[-1] * fmt.cols // (fmt.cols // 2 + 1) // 2
        raw = raw.clone()
        raw[PAGE:, width:] = raw[PAGE - 1 : -1, width:].clone()
        return real_unpack(raw, fmt, dtype)

    def turned(x: Tensor, fmt: BlockFormat) -> Tensor:
        """Scales of a row in reverse, written by a kernel of another layout."""
        raw = real_pack(x, fmt)
        width = x.shape[-1] // 2
        return raw if fmt is FP8_ROW else torch.cat((raw[:, :width], raw[:, width:].flip(1)), 1)

    for name, fault in (("unpack_rows", rolled), ("pack_rows", turned)):
        with monkeypatch.context() as patch:
            patch.setattr(paged, name, fault)
            with pytest.raises(AssertionError):
                check()


# --- 8: trained weights -------------------------------------------------------------------------


def hidden_peak(model: Model, tokens: list[int]) -> float:
    """The largest hidden element of a shared expert, in root mean squares of its row."""
    peaks: list[float] = []
    ops = model.ops

    def watching(x: Tensor, *args: Any, shared: Any, limit: float, **more: Any) -> Tensor:
        hidden = swiglu(ops.linear(x, shared[0]), ops.linear(x, shared[2]), limit)
        peaks.append(float((hidden.abs().amax(-1) / hidden.pow(2).mean(-1).sqrt()).max()))
        return ops.experts(x, *args, shared=shared, limit=limit, **more)

    mixtures = [layer.ffn for layer in model.backbone()]
    for each in mixtures:
        each.ops = with_operations(ops, experts=watching)
    with torch.inference_mode():
        model(Batch.pack([tokens]))
    for each in mixtures:
        each.ops = ops
    return max(peaks)


def test_trained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model through the engine, in chunks, with drafts and a small pool."""
    loaded = load_model("cedar-tiny", dtype=torch.float64)
    texts = ["We the people of this nation", "Once upon a time there was", "The water"]
    prompts = [loaded.tokenizer.encode(text) for text in texts]
    prompts[1] = prompts[1] * 9
    most = 8

    def plain(prompt: list[int]) -> list[int]:
        store = DenseKV(loaded.model.config, dtype=torch.float64)
        new, text = prompt, []
        with torch.inference_mode():
            while len(text) < most:
                logits = loaded.model(Batch.pack([new]), store, logits="last").logits
                new = [int(logits[0].argmax())]
                text += new
        return text

    wanted = [plain(prompt) for prompt in prompts]

    def check() -> None:
        core = make_core(
            loaded,
            page_tokens=None,
            pool_tokens=512,
            replay="off",
            draft=True,
            token_budget=37,
            max_running=3,
        )
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        for k, prompt in enumerate(prompts):
            core.submit(core.request(prompt, params, id=str(k)))
        found = drain(core)
        assert [found[str(k), 0].tokens for k in range(len(prompts))] == wanted
        assert sum(core.stats().accepted) > 0  # the draft head is trained too

    check()
    check_store(loaded.model, prompts[1])
    # The weights are trained: their hidden elements stand out as random ones do not.
    assert hidden_peak(loaded.model, prompts[1]) > 1.5 * hidden_peak(loaded_tiny().model, TEXT)
    # A fault that the random model cannot show: large scores are clipped, and it has none.
    real = Runner._results

    def clipped(self: Runner, *args: Any) -> list[Any]:
        results = real(self, *args)
        return [
            replace(each, logits=None if each.logits is None else each.logits.clamp(-5.0, 5.0))
            for each in results
        ]

    monkeypatch.setattr(Runner, "_results", clipped)
    check_drafts()
    with pytest.raises(AssertionError):
        check()


def check_store(model: Model, tokens: list[int]) -> None:
    """The packed store against none, in chunks."""
    layout = KVLayout.from_config(model.config)
    store = PagedKV(model.config, layout, num_pages=8, num_slots=1, dtype=torch.float64)
    store.open(0, range(8))
    with torch.inference_mode():
        parts = [tokens[at : at + 11] for at in range(0, len(tokens), 11)]
        found = torch.cat([model(Batch.pack([part]), store).logits for part in parts])
        same(found, model(Batch.pack([tokens])).logits)
