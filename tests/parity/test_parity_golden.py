"""Every golden set passes, and nothing in one is passed over in silence."""

import re

import pytest
from golden_files import GOLDEN, take_part, take_whole
from safetensors import safe_open

from cedar.analysis.parity import Kind, run_parity
from cedar.analysis.parity.sets import find_sets

SETS = [one.name for one in find_sets(GOLDEN)[0]]

# The only keys that are not compared and not shown: inputs, and the released decoding.
SKIPPED = re.compile(
    r"input_ids|decode_ids|engram_token_map|edge\.input_ids|image\d\.png_bytes"
    r"|decode_released\.logits|positions|rotate\.in|compressed_ids|alive_mask"
    r"|q|kv|topk_idxs|attn_sink|in\.(bf16|f32)|fp4_e4m3\.(bf16|f32)\.in|gemm\.in|weight\.f32"
    r"|rms\.(weight|f32\.in|bf16\.in)|engram\.(x|key|value|q_weight|k_weight)"
    r"|(mhc|step|hc4|hc2|hc4_it3)\.(fn|base|scale|mixes)|mhc\.x|step\.(bf16|f32)\.x"
)
# Types of a set that are shown and not judged, beside end-to-end bfloat16.
END_TO_END = re.compile(r"(prefill|decode)\.(logits|main_hidden|next_ids|draft_ids|layers\.\d)")


def test_all_sets_are_found():
    assert SETS == [
        "engram", "image_grids", "mhc", "mini_bf16.expect_bf16", "mini_bf16.expect_fp32",
        "mini_dspark", "mini_fp8fp4.expect_bf16", "mini_fp8fp4.expect_fp32", "mini_vision",
        "norm_eps", "quant", "sparse_attn", "yarn",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_golden_set_passes(name):
    report = run_parity(GOLDEN, name)
    assert report.failures == ()
    assert report.sets == (name,)
    summary = report.summary()
    assert summary["compared"] > 0
    assert summary["discrete_mismatches"] == 0
    assert summary["max_abs_fp32"] is not None
    assert summary["max_abs_fp32"] <= 1e-4
    if name == "image_grids":
        assert summary["compared"] == 30
        return
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        keys = set(file.keys())
    silent = keys - {line.tensor for line in report.comparisons}
    assert [key for key in silent if not SKIPPED.fullmatch(key)] == []
    shown = [line.tensor for line in report.comparisons if line.kind is Kind.SHOWN]
    if "bf16" not in name and name not in ("mini_dspark", "mini_vision"):
        assert shown == []
    if name == "mini_fp8fp4.expect_bf16":
        return  # it holds no block inputs
    assert [key for key in shown if not END_TO_END.search(key)] == []
    judged = {line.tensor for line in report.comparisons if line.kind is not Kind.SHOWN}
    if name == "mini_bf16.expect_bf16":
        blocks = {key for key in keys if key.endswith((".out", ".pre_mix", "_cache", ".scores"))}
        assert blocks <= judged


def test_checkpoint_and_float32_expectation_alone_are_enough(tmp_path):
    """Any name, no other file, and the edge cases that happen to be there."""
    take_whole(tmp_path, "mini_bf16.weights", under="other_name.weights")
    take_part(
        tmp_path,
        "mini_bf16.expect_fp32",
        lambda key: not key.startswith("edge.") or ".3." in key,
        under="other_name.expect_fp32",
    )
    report = run_parity(tmp_path)
    assert report.sets == ("other_name.expect_fp32",)
    assert report.failures == ()
    assert "edge.3.decode.logits" in {line.tensor for line in report.comparisons}


@pytest.mark.parametrize("name", ["quant", "mhc", "image_grids", "yarn", "engram"])
def test_prefixed_single_operation_sets(tmp_path, name):
    take_whole(tmp_path, name, under=f"held_{name}")
    report = run_parity(tmp_path, "held")
    assert report.sets == (f"held_{name}",)
    assert report.failures == ()
