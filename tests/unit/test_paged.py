"""The packed store against the dense one, its bytes, and what it must never touch."""

import random
from dataclasses import replace

import pytest
import torch

from cedar.cache import DenseKV
from cedar.cache.layout import KVLayout
from cedar.cache.paged import PagedKV
from cedar.config import released
from cedar.errors import CapacityError
from cedar.model import Batch, Model
from cedar.testing.tiny import random_tokens, tiny_model

PAGES, SLOTS, PAGE = 40, 3, 12


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model().eval().requires_grad_(False)


def packed_store(model: Model, pages: int = PAGES) -> PagedKV:
    layout = KVLayout.from_config(model.config, page_tokens=PAGE)
    return PagedKV(model.config, layout, num_pages=pages, num_slots=SLOTS, dtype=torch.float64)


def opened(model: Model, seed: int = 0) -> PagedKV:
    """Three sequences over ten shuffled pages each; all bytes random, as after other use."""
    store = packed_store(model)
    generator = torch.Generator().manual_seed(seed)
    for pool in (*store._entries.values(), *store._keys.values(), *store._rings.values()):
        pool.copy_(torch.randint(0, 120, pool.shape, generator=generator, dtype=torch.uint8))
    order = torch.randperm(PAGES, generator=generator).tolist()
    for slot in range(SLOTS):
        store.open(slot, order[slot * 10 : slot * 10 + 10])
    return store


@pytest.mark.parametrize("seed", [0, 1])
def test_any_schedule_gives_what_the_dense_store_gives(model: Model, seed: int) -> None:
    """Random chunks of random sequences together, wrong tokens taken back in between, drafts."""
    paged, dense = opened(model, seed), DenseKV(model.config, SLOTS, dtype=torch.float64)
    tokens = [random_tokens(model.config, 80, seed=10 * seed + s) for s in range(SLOTS)]
    place = [0] * SLOTS
    chance = random.Random(seed)
    for _ in range(22):
        chosen = sorted(chance.sample(range(SLOTS), chance.randint(1, SLOTS)))
        parts = [(s, min(chance.randint(1, 9), 80 - place[s])) for s in chosen if place[s] < 80]
        if not parts:
            break
        batch = Batch.pack(
            [tokens[s][place[s] : place[s] + n] for s, n in parts], slots=[s for s, _ in parts]
        )
        ours, theirs = model(batch, paged), model(batch, dense)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-10)
        for output, store in ((ours, paged), (theirs, dense)):
            assert output.taps_TX is not None
            model.draft_write(output.taps_TX, batch, store)
        first = torch.full((len(parts),), 7)
        drafts = [model.draft_propose(first, batch.slots, store) for store in (paged, dense)]
        torch.testing.assert_close(drafts[0].logits_NBV, drafts[1].logits_NBV, rtol=0, atol=1e-10)
        for slot, count in parts:
            place[slot] += count
        wrong = parts[0][0]
        model(Batch.pack([[9, 8, 7][: paged.slack]], slots=[wrong]), paged)
        paged.truncate(wrong, place[wrong])


def test_a_forgotten_truncation_is_noticed(model: Model) -> None:
    """Negative control for the test above."""
    paged, dense = opened(model), DenseKV(model.config, SLOTS, dtype=torch.float64)
    tokens = random_tokens(model.config, 20, seed=1)
    for store in (paged, dense):
        model(Batch.pack([tokens[:15]]), store)
    model(Batch.pack([[9]]), paged)
    ours, theirs = (model(Batch.pack([tokens[15:]]), store).logits for store in (paged, dense))
    assert (ours - theirs).abs().max() > 1e-6


def test_entries_are_the_packed_form_of_the_dense_ones(model: Model) -> None:
    paged, dense = opened(model), DenseKV(model.config, SLOTS, dtype=torch.float64)
    batch = Batch.pack([random_tokens(model.config, 41, seed=2)])
    model(batch, paged)
    model(batch, dense)
    for plan in model.plan:
        if plan.has_compressor:
            rows, keys = dense.entries(plan.index, 0)
            main = paged.main(plan.index, (0,), torch.zeros(1, dtype=torch.int64))
            assert main.counts == (len(rows),)
            got = main.select(torch.arange(len(rows)).unsqueeze(0))
            assert torch.equal(got.rows_RH[got.slots_TK[0]], rows)
            assert torch.equal(main.keys(0, len(rows)), keys)
            some = torch.tensor([[3, 0, 3]])
            part, where = main.keys_at(0, some)
            assert torch.equal(part[where], keys[some])


def test_the_global_part_is_890_bytes_a_token_at_the_released_size() -> None:
    config = replace(released(), engram_layer_ids=(), engram_num_embeddings=())
    layout = KVLayout.from_config(config)
    store = PagedKV(config, layout, num_pages=4, num_slots=1)
    assert store.global_nbytes == 890 * 4 * layout.page_tokens
    assert (layout.entry_bytes, layout.key_bytes, layout.window_row_bytes) == (288, 68, 528)
    for pool in (*store._entries.values(), *store._keys.values(), *store._rings.values()):
        assert pool.dtype == torch.uint8  # no copy in floating point
    rings = 43 * (128 + store.slack) * 528
    assert rings <= store.slot_nbytes < rings + 2**17


def test_a_sequence_writes_its_own_pages_only(model: Model) -> None:
    store = opened(model)
    before = {page: store.read_page(page) for page in range(PAGES)}
    model(Batch.pack([random_tokens(model.config, 50, seed=3)], slots=[1]), store)
    changed = {page for page in range(PAGES) if store.read_page(page) != before[page]}
    mine = store._at(1).pages
    assert changed == set(mine[: -(-50 // PAGE)])


def test_pages_survive_a_copy_and_a_trip_through_bytes(model: Model) -> None:
    store = opened(model)
    tokens = random_tokens(model.config, 60, seed=4)
    model(Batch.pack([tokens[:59]]), store)
    expected = model(Batch.pack([tokens[59:]]), store).logits
    store.truncate(0, 59)
    pages = store._at(0).pages
    fresh = [page for page in range(PAGES) if page not in pages][: len(pages)]
    for old, new in zip(pages, fresh, strict=True):
        if old % 2:
            store.copy_page(old, new)
        else:
            store.write_page(new, store.read_page(old))
    assert len(store.read_page(0)) == store.layout.page_bytes
    store.set_pages(0, fresh)
    assert torch.equal(model(Batch.pack([tokens[59:]]), store).logits, expected)


def test_a_replay_rebuilds_windows_and_writes_no_shared_entry(model: Model) -> None:
    store = opened(model)
    tokens = random_tokens(model.config, 60, seed=5)
    model(Batch.pack([tokens], slots=[0]), store)
    shared = store._at(0).pages[:4]
    before = [store.read_page(page) for page in shared]
    own = store._at(1).pages[:4]
    store.open(1, [*shared, *own])
    start = 24
    store.restore(1, 4 * PAGE, start, torch.tensor(tokens[:start]))
    model(Batch.pack([tokens[start:]], slots=[1]), store)
    assert [store.read_page(page) for page in shared] == before
    assert store.length(1) == 60
    # Negative control: without the protection the same pass does write them.
    store.open(2, [*shared, *own])
    store.restore(2, 0, start, torch.tensor(tokens[:start]))
    store._at(2).stored = dict.fromkeys(store._at(2).stored, 10)
    model(Batch.pack([tokens[start:]], slots=[2]), store)
    assert [store.read_page(page) for page in shared] != before


def test_a_reopened_slot_remembers_nothing(model: Model) -> None:
    tokens = random_tokens(model.config, 20, seed=6)
    store = opened(model)
    model(Batch.pack([random_tokens(model.config, 55, seed=7)]), store)
    pages = store._at(0).pages
    store.close(0)
    store.open(0, pages)
    fresh = opened(model, seed=1)
    ours, theirs = (model(Batch.pack([tokens]), s).logits for s in (store, fresh))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_refusals_name_the_slot(model: Model) -> None:
    store = packed_store(model)
    with pytest.raises(CapacityError, match="slot 1 is not open"):
        store.length(1)
    with pytest.raises(CapacityError, match="slot -1 is not open"):
        store.length(-1)
    store.open(0, [3])
    with pytest.raises(CapacityError, match="slot 0 holds 1 pages of"):
        model(Batch.pack([random_tokens(model.config, 30, seed=1)]), store)
    store.open(0, [3, 4, 5])
    model(Batch.pack([random_tokens(model.config, 30, seed=1)]), store)
    with pytest.raises(ValueError, match="tokens cannot be taken back"):
        store.truncate(0, 2)


def test_rows_are_found_by_64_bit_numbers(model: Model) -> None:
    """An entry's place is page · entries + offset: it must not be computed in 32 bits."""
    store = opened(model)
    model(Batch.pack([random_tokens(model.config, 30, seed=1)]), store)
    main = store.main(4, (0,), torch.zeros(1, dtype=torch.int64))
    assert main.table_BP.dtype == torch.int64
    huge = replace(main, table_BP=torch.tensor([[2**31]]))
    with pytest.raises((IndexError, RuntimeError), match=str(2**31 * PAGE + 5)):
        huge.select(torch.tensor([[5]]))
