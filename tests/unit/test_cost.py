"""Parameter counts, cache bytes and inventory against the published totals."""

import dataclasses

from cedar.analysis.cost import cache_bytes, count_inventory, count_parameters
from cedar.checkpoint import weights
from cedar.config import Half, released, tiny


def test_released_parameters() -> None:
    counts = count_parameters(released())
    assert counts.backbone == 551_566_180_464
    assert counts.engram == 196_613_849_600
    assert round((counts.engram + counts.engram_projections) / 1e9, 1) == 196.9
    assert round(counts.draft / 1e9, 1) == 14.2
    assert round(counts.vision / 1e9, 2) == 0.49
    assert round(counts.active_decode / 1e9, 1) == 16.1
    assert round(counts.active_prefill / 1e9, 1) == 7.9
    assert counts.prefill_layers == 20


def test_released_active_parameters_by_hand() -> None:
    """The same numbers from the shapes of checkpoint and architecture description."""
    dim, rank, heads = 5120, 1280, 64 * 512
    attention = 1280 * dim + heads * rank + 512 * dim + 8192 * 4096 + dim * 8192
    small = 2 * dim + rank + 512 + 64 + 2 * (24 * 4 * dim + 24 + 3) + 384 * dim + 2 * 384
    layer = attention + small + 7 * 3 * 2304 * dim
    engram = 25600 * 6144 + 2 * 4 * dim
    projection = 512 * dim + 512
    keys = 128 * 512 + 128
    queries = 32 * 128 * rank + 32 * dim
    encoder = 20 * layer + 3 * (projection + 512 * dim + keys + queries) + 2 * engram
    assert count_parameters(released()).active_prefill == encoder + projection + keys + dim
    decoder = 20 * layer + projection + keys + 5 * queries
    head = 129280 * dim + dim
    assert count_parameters(released()).active_decode == encoder + decoder + head


def test_parts_cover_every_weight_once() -> None:
    for config in (tiny(), released()):
        counts = count_parameters(config)
        parts = counts.backbone + counts.engram + counts.engram_projections
        assert parts + counts.draft + counts.vision == sum(w.numel for w in weights(config))


def test_released_cache_bytes() -> None:
    cache = cache_bytes(released())
    assert cache.to_dict() == {
        "total": 890,
        "main": 720,
        "index": 170,
        "encoder": 534,
        "decoder": 356,
    }
    assert [(s.layer, s.main_entry, s.index_entry) for s in cache.sources] == [
        (2, 288, 68),
        (8, 288, 68),
        (14, 288, 68),
        (20, 288, 68),
    ]
    assert cache.of_half(Half.DRAFT) == 0


def test_cache_bytes_of_an_odd_ratio_are_a_fraction() -> None:
    ratios = (0, 0, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 0, 0)
    cache = cache_bytes(dataclasses.replace(tiny(), compress_ratios=ratios))
    assert cache.to_dict()["main"] == 36 / 3 * 2 + 36
    assert cache.to_dict()["encoder"] == 2 * 53 / 3


def test_cache_follows_the_sources() -> None:
    fewer = dataclasses.replace(released(), kv_source_layers=(2, 8, 20))
    assert cache_bytes(fewer).to_dict()["total"] == 890 - 178


def test_released_inventory() -> None:
    inventory = count_inventory(released())
    assert inventory.tensors == 96_085
    assert inventory.bytes == 510_286_023_000
    found = {name: (part.tensors, part.bytes) for name, part in inventory.by_dtype.items()}
    assert found == {
        "I8": (47_232, 278_585_671_680),
        "F8_E4M3": (357, 204_015_223_296),
        "F8_E8M0": (47_589, 23_563_015_184),
        "BF16": (520, 3_952_883_712),
        "F32": (387, 169_229_128),
    }


def test_inventory_of_bf16_keeps_only_the_table_scales() -> None:
    by_dtype = count_inventory(tiny(), "bf16").by_dtype
    assert by_dtype["F8_E8M0"].tensors == by_dtype["F8_E4M3"].tensors == 2
    assert "I8" not in by_dtype


def test_prefill_goes_as_far_as_the_last_writer() -> None:
    later = dataclasses.replace(tiny(), kv_source_layers=(2, 4, 6, 8))
    assert count_parameters(later).prefill_layers == 8
    sooner = dataclasses.replace(
        tiny(),
        kv_source_layers=(2,),
        index_source_layers=(2, 4),
        candidate_source_layer=-1,
        compress_ratios=(0, 0) + (2,) * 10 + (0, 0),
    )
    assert count_parameters(sooner).prefill_layers == 6
    assert count_parameters(sooner).active_prefill < count_parameters(later).active_prefill
