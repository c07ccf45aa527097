"""Sets of configurations unlike the mini one: layers, ratios, sources, absent mechanisms.

The expectations are our own, so this checks the comparing: what is where in such files.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_files import put, write_expectation, write_weights
from safetensors.torch import load_file

from cedar.analysis.parity import Kind, run_parity
from cedar.config import presets
from cedar.config.model import ModelConfig

PLAIN = replace(
    presets.tiny(),
    n_mtp_layers=0,
    dspark_target_layer_ids=(),
    compress_ratios=presets.tiny().compress_ratios[:-2],
    engram_layer_ids=(),
    engram_num_embeddings=(),
    vision_n_layers=0,
    candidate_source_layer=-1,
)

CONFIGS: dict[str, ModelConfig] = {
    # Ratio 4, an odd number of layers, two streams, no mechanism that can be absent.
    "sparse": replace(
        PLAIN.with_storage("bf16"),
        n_layers=5,
        compress_ratios=(0, 4, 4, 4, 1),
        kv_source_layers=(1, 4),
        index_source_layers=(1, 3, 4),
        hc_mult=2,
        original_seq_len=0,
    ),
    # Three sources of three ratios, a candidate pool, one Engram layer, packed weights.
    "dense": replace(
        PLAIN,
        n_layers=8,
        compress_ratios=(4, 4, 2, 2, 1, 1, 1, 0),
        kv_source_layers=(0, 2, 4),
        index_source_layers=(0, 2, 3, 4, 6),
        candidate_source_layer=4,
        engram_layer_ids=(3,),
        engram_num_embeddings=(sum((97, 101, 103, 107, 109, 113)),),
        hc_mult=3,
        window_size=8,
    ),
    # Nothing but windows.
    "window": replace(
        PLAIN.with_storage("bf16"),
        n_layers=2,
        compress_ratios=(0, 0),
        kv_source_layers=(),
        index_source_layers=(),
        hc_mult=1,
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("configurations")
    for name, config in CONFIGS.items():
        write_weights(directory, name, config, seed=5)
        write_expectation(directory, name, config, prompt=27, steps=5, edges=(1, 7))
    return directory


@pytest.mark.parametrize("name", CONFIGS)
def test_other_configuration(written, name):
    config = CONFIGS[name]
    report = run_parity(written, name)
    assert report.failures == ()
    assert report.summary()["max_abs_fp32"] == 0.0, "the very same computation"
    lines = {line.tensor: line for line in report.comparisons}
    keys = load_file(written / f"{name}.expect_fp32.safetensors").keys()
    assert keys - lines.keys() == {"input_ids", "engram_token_map"}
    assert f"prefill.layers.{config.n_layers - 1}.out" in lines
    assert all(line.counts for line in report.comparisons)
    for layer in config.index_source_layers:
        assert lines[f"decode.layers.{layer}.attn.indexer.topk_idxs"].kind is Kind.EXACT
    for layer in config.kv_source_layers:
        assert f"after_prefill.layers.{layer}.attn.indexer.k_cache" in lines


def with_weights(written: Path, directory: Path, name: str) -> None:
    for ending in ("safetensors", "json"):
        (directory / f"{name}.weights.{ending}").symlink_to(written / f"{name}.weights.{ending}")


def test_every_changed_value_is_found_and_nothing_else(written, tmp_path):
    changes = {
        "prefill.layers.3.attn.indexer.scores": (1, -1, 0),
        "prefill.layers.4.attn.indexer.candidates": (1, -1, 26),
        "prefill.layers.6.attn.indexer.topk_idxs": (0, 0, 0),
        "prefill.layers.1.ffn.gate.weights": (53, 1),
        "prefill.layers.2.ffn.gate.indices": (53, 0),
        "prefill.layers.7.out": (0, 26, 2, 63),
        "after_prefill.layers.5.attn.window_kv_cache": (1, 7, 63),
        "after_prefill.layers.0.attn.compressor.kv_state": (1, 2, 0),
        "after_prefill.layers.2.attn.indexer.k_cache": (1, -1, 31),
        "decode.layers.0.attn.indexer.topk_idxs": (1, 4, 2),
        "decode.logits": (1, 4, 511),
        "edge.7.prefill.logits_full": (0, 0, 0),
    }
    tensors = load_file(written / "dense.expect_fp32.safetensors")
    for key, at in changes.items():
        value = tensors[key]
        value[at] = ~value[at] if value.dtype is torch.bool else value[at] + 1
    with_weights(written, tmp_path, "dense")
    put(tmp_path, "dense.expect_fp32", tensors, {"prefill_len": 27})
    report = run_parity(tmp_path)
    assert {line.tensor for line in report.failures} == changes.keys()
    assert all("1 of" in line.where or line.worst == 1.0 for line in report.failures)


def test_rest_of_an_unfinished_group_means_nothing(written, tmp_path):
    key = "after_prefill.layers.0.attn.compressor.kv_state"
    tensors = load_file(written / "dense.expect_fp32.safetensors")
    tensors[key][:, 3] = 1e9  # 27 tokens leave three of a group of four
    with_weights(written, tmp_path, "dense")
    put(tmp_path, "dense.expect_fp32", tensors, {"prefill_len": 27})
    assert run_parity(tmp_path).failures == ()
