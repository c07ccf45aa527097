"""Bytes of the packed cache: by hand, against the cost analysis and against real tensors."""

import dataclasses
from fractions import Fraction

import pytest
import torch

from cedar.analysis.cost import cache_bytes
from cedar.cache.layout import KVLayout
from cedar.cache.paged import PagedKV
from cedar.config import ModelConfig, released, tiny
from cedar.errors import ConfigError
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, quantize


def with_ratios(*ratios: int) -> ModelConfig:
    return dataclasses.replace(tiny(), compress_ratios=ratios)


def window_layers_only() -> ModelConfig:
    return dataclasses.replace(
        tiny(),
        compress_ratios=(0,) * 14,
        kv_source_layers=(),
        index_source_layers=(),
        candidate_source_layer=-1,
    )


def test_released_by_hand() -> None:
    layout = KVLayout.from_config(released())
    assert layout.page_tokens == 64
    assert layout.entry_bytes == 512 // 2 + 512 // 16 == 288
    assert layout.key_bytes == 128 // 2 + 128 // 32 == 68
    assert layout.window_row_bytes == 512 + 512 // 32 == 528
    assert layout.bytes_per_token == 890
    assert layout.page_bytes == 890 * 64
    found = [(s.layer, s.ratio, s.entries_per_page) for s in layout.sources]
    assert found == [(2, 2, 32), (8, 2, 32), (14, 2, 32), (20, 1, 64)]
    # A block of 5 drafts and the token before it can be taken back.
    assert layout.slack == 6
    assert layout.ring_bytes == (20 + 20 + 3) * (128 + 6) * 528
    assert layout.residue_bytes == 3 * 2 * (1 + 6) * 512 * 4
    assert layout.history_bytes == (3 + 6) * 8
    assert layout.slot_bytes == 3_128_424


def test_bytes_of_a_long_context() -> None:
    layout = KVLayout.from_config(released())
    assert layout.pages_for(0) == 0
    assert layout.pages_for(1) == layout.pages_for(64) == 1
    assert layout.pages_for(65) == 2
    million = layout.pages_for(1 << 20)
    assert million * layout.page_bytes == 890 << 20
    assert layout.total_bytes(million, 4) == (890 << 20) + 4 * 3_128_424


def without_drafts() -> ModelConfig:
    return dataclasses.replace(
        tiny(), n_mtp_layers=0, dspark_block_size=0, compress_ratios=tiny().compress_ratios[:-2]
    )


CONFIGS = {
    "released": released(),
    "tiny": tiny(),
    "three sources": dataclasses.replace(released(), kv_source_layers=(2, 8, 20)),
    "ratio 3": with_ratios(0, 0, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 0, 0),
    "ratios 8 and 2": with_ratios(0, 0, 8, 8, 8, 8, 2, 2, 2, 2, 2, 2, 0, 0),
    "windows": window_layers_only(),
    "no drafts": without_drafts(),
    "long drafts": dataclasses.replace(tiny(), dspark_block_size=9),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@every_config
def test_the_cost_analysis_agrees(config: ModelConfig) -> None:
    layout, cost = KVLayout.from_config(config), cache_bytes(config)
    assert layout.bytes_per_token == cost.total
    assert [s.layer for s in layout.sources] == [s.layer for s in cost.sources]
    for source in layout.sources:
        assert source.entries_per_page * source.ratio == layout.page_tokens
        assert layout.page_tokens >= 64


def test_one_byte_more_would_be_seen() -> None:
    layout = dataclasses.replace(KVLayout.from_config(released()), key_bytes=69)
    assert layout.bytes_per_token == Fraction(890 * 2 + 5, 2) != cache_bytes(released()).total


@pytest.mark.parametrize("config", [released(), tiny()], ids=["released", "tiny"])
def test_quantised_tensors_have_these_bytes(config: ModelConfig) -> None:
    """One page and one slot made of real tensors."""
    layout = KVLayout.from_config(config)
    page = sum(
        quantize(torch.ones(source.entries_per_page, config.head_dim), FP4_MAIN).nbytes
        + quantize(torch.ones(source.entries_per_page, config.index_head_dim), FP4_ROW).nbytes
        for source in layout.sources
    )
    assert layout.page_bytes == page
    drafts = config.dspark_block_size + 1
    ring = quantize(torch.ones(config.window_size + drafts, config.head_dim), FP8_ROW).nbytes
    assert layout.ring_bytes == (config.n_layers + config.n_mtp_layers) * ring
    residues = sum(
        2 * torch.ones(s.ratio - 1 + drafts, config.head_dim).nbytes
        for s in layout.sources
        if s.ratio > 1
    )
    assert layout.residue_bytes == residues
    history = torch.zeros(config.engram_max_ngram_size - 1 + drafts, dtype=torch.int64)
    assert layout.history_bytes == history.nbytes


def store_bytes(config: ModelConfig, pages: int, slots: int, dtype: torch.dtype) -> tuple[int, int]:
    """What the packed store really holds: all pages, all slots."""
    store = PagedKV(
        config,
        KVLayout.from_config(config),
        num_pages=pages,
        num_slots=slots,
        device="meta",  # sizes alone
        dtype=dtype,
    )
    return store.global_nbytes, store.slot_nbytes


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_store_takes_these_bytes(config: ModelConfig, dtype: torch.dtype) -> None:
    """Pages and slots to the byte, whatever the drafts and the ratios."""
    layout = KVLayout.from_config(config)
    for pages, slots in ((1, 1), (1000, 64)):
        held = store_bytes(config, pages, slots, dtype)
        assert held == (pages * layout.page_bytes, slots * layout.slot_bytes)
        assert layout.total_bytes(pages, slots) == sum(held)


def test_rows_for_drafts_that_are_not_counted_would_be_seen() -> None:
    for config in (released(), tiny()):
        layout = dataclasses.replace(KVLayout.from_config(config), slack=0)
        assert layout.slot_bytes != store_bytes(config, 1, 1, torch.float32)[1]


def test_pages_hold_whole_groups_and_candidate_blocks() -> None:
    assert KVLayout.from_config(tiny()).page_tokens == 64
    assert KVLayout.from_config(tiny(), 4).page_tokens == 4
    wide = with_ratios(0, 0, 6, 6, 6, 6, 3, 3, 3, 3, 3, 3, 0, 0)
    assert KVLayout.from_config(wide).page_tokens == 72  # 4 entries x 3 tokens, groups of 6
    large = dataclasses.replace(tiny(), candidate_block_size=100)
    assert KVLayout.from_config(large).page_tokens == 100


@pytest.mark.parametrize("page_tokens", [0, -4, 2, 63, 66])
def test_other_page_sizes_are_refused(page_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"page_tokens is {page_tokens}; .* multiple of 4"):
        KVLayout.from_config(tiny(), page_tokens)


def test_a_model_of_window_layers_has_empty_pages() -> None:
    layout = KVLayout.from_config(window_layers_only())
    assert (layout.sources, layout.page_bytes, layout.bytes_per_token) == ((), 0, 0)
    assert layout.slot_bytes == layout.ring_bytes + layout.history_bytes
