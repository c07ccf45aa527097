"""The installed command, and everything that can be wrong with a directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden_files import GOLDEN, put, take_part, take_whole
from safetensors.torch import load_file

from cedar.analysis.parity import run_parity
from cedar.analysis.parity.sets import find_sets
from cedar.errors import CedarError

CEDAR = Path(sys.executable).parent / "cedar"


def cedar(*arguments: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CEDAR, "parity", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | settings,
    )


def test_command_passes_and_ends_with_json():
    # Without vector instructions sums add up in another order, which must not matter.
    done = cedar(GOLDEN, "--prefix", "mini_bf16.expect_fp32", ATEN_CPU_CAPABILITY="default")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    last = json.loads(done.stdout.splitlines()[-1])
    assert last.keys() == {"sets", "compared", "failed", "max_abs_fp32", "discrete_mismatches"}
    assert last["sets"] == 1
    assert last["compared"] == 105
    assert last["failed"] == last["discrete_mismatches"] == 0
    assert 0 < last["max_abs_fp32"] <= 1e-4
    assert "prefill.layers.7.attn.indexer.topk_idxs" in done.stdout


def test_command_fails_on_a_wrong_expectation(tmp_path):
    for name in ("quant", "mhc"):
        take_whole(tmp_path, name)
    tensors = load_file(tmp_path / "quant.safetensors")
    tensors["fp8.f32.scales"][3, 1] += 1
    put(tmp_path, "quant", tensors, {})
    done = cedar(tmp_path)
    assert done.returncode == 1
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert "fp8.f32.scales" in rows[0], "failures come first"
    assert "FAILED" in rows[0]
    assert "[3, 1]" in rows[0]
    assert not any("FAILED" in row for row in rows[1:])
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["failed"] == 1
    assert last["discrete_mismatches"] == 1
    assert last["sets"] == 2


def test_directory_without_sets_is_an_error(tmp_path):
    done = cedar(tmp_path)
    assert done.returncode == 2
    assert "found no golden set" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_no_set_of_that_name_and_no_directory_are_errors(tmp_path):
    take_whole(tmp_path, "quant")
    with pytest.raises(CedarError, match="no golden set whose name starts with 'nothing'"):
        run_parity(tmp_path, "nothing")
    with pytest.raises(CedarError, match="cannot be read"):
        run_parity(tmp_path / "absent")


def test_prefix_chooses_by_the_start_of_the_name():
    def names(prefix: str) -> list[str]:
        return [one.name for one in find_sets(GOLDEN, prefix)[0]]

    assert names("norm") == ["norm_eps"]
    assert names("mini_bf16") == ["mini_bf16.expect_bf16", "mini_bf16.expect_fp32"]
    assert len(names("mini")) == 6
    assert len(names("m")) == 7


@pytest.fixture
def small(tmp_path) -> Path:
    """A set of one short prefill."""
    take_whole(tmp_path, "mini_bf16.weights")
    take_part(
        tmp_path,
        "mini_bf16.expect_fp32",
        lambda key: key.startswith(("edge.2.", "input_ids", "engram_token_map")),
    )
    return tmp_path


def rewrite(directory: Path, **tensors: torch.Tensor) -> None:
    name = "mini_bf16.expect_fp32"
    old = load_file(directory / f"{name}.safetensors")
    put(directory, name, old | tensors, json.loads((directory / f"{name}.json").read_text()))


def test_small_set_passes(small):
    assert run_parity(small).failures == ()


@pytest.mark.parametrize(
    "key",
    [
        "something",
        "prefill.layers.3.attn.nothing",
        "prefill.layers.77.attn.out",
        "after_prefill.layers.0.attn.compress_kv_cache",
        "after_prefill.layers.0.attn.spare_cache",
        "decode.layers.0.attn.indexer.topk_idxs",
        "edge.2.prefill.other",
        "edge.two.prefill.logits_full",
    ],
)
def test_unknown_key_fails(small, key):
    rewrite(small, **{key: torch.zeros(2, 3, 4)})
    (failure,) = run_parity(small).failures
    assert failure.tensor == key
    assert "unknown key" in failure.where


def test_value_of_another_shape_fails(small):
    rewrite(small, **{"prefill.layers.3.attn.out": torch.zeros(1, 75, 65)})
    (failure,) = run_parity(small).failures
    assert "shape [1, 75, 64], golden [1, 75, 65]" in failure.where


def test_missing_weights_fail_with_the_file_name(small):
    (small / "mini_bf16.weights.safetensors").unlink()
    take_whole(small, "quant")
    report = run_parity(small)
    (failure,) = report.failures
    assert failure.set_name == "mini_bf16.expect_fp32"
    assert "mini_bf16.weights.safetensors is missing" in failure.where
    assert any(line.set_name == "quant" and line.passed for line in report.comparisons)


def test_missing_configuration_and_token_map_fail(small):
    (small / "mini_bf16.weights.json").write_text("{}")
    (small / "mini_bf16.expect_fp32.json").write_text("{}")
    (failure,) = run_parity(small).failures
    assert 'expected "config" in mini_bf16.weights.json' in failure.where


def test_missing_token_map_fails(tmp_path):
    take_whole(tmp_path, "mini_bf16.weights")
    take_part(
        tmp_path, "mini_bf16.expect_fp32", lambda key: key.startswith(("edge.2.", "input_ids"))
    )
    (failure,) = run_parity(tmp_path).failures
    assert "engram_token_map" in failure.where


def test_damaged_file_and_damaged_sidecar_fail(small):
    take_whole(small, "quant")
    take_whole(small, "mhc")
    path = small / "quant.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (small / "mhc.json").write_text("{")
    failures = {line.set_name: line.where for line in run_parity(small).failures}
    assert failures.keys() == {"quant", "mhc"}
    assert "quant.safetensors" in failures["quant"]
    assert "JSON" in failures["mhc"]


def test_draft_parts_without_their_checkpoint_fail_alone(tmp_path):
    for name in ("mini_bf16.weights", "mini_bf16.expect_fp32"):
        take_whole(tmp_path, name)
    take_part(tmp_path, "mini_dspark", lambda key: "edge" in key)
    report = run_parity(tmp_path, "mini_dspark")
    (failure,) = report.failures
    assert failure.tensor == "fp8fp4.fp32.*"
    assert "mini_fp8fp4.weights.safetensors is missing" in failure.where
    assert any(line.tensor.startswith("bf16.fp32.edge.14.") for line in report.comparisons)


def test_foreign_file_is_named_but_no_failure(tmp_path):
    take_whole(tmp_path, "norm_eps")
    take_whole(tmp_path, "norm_eps", under="model-00001-of-00001")
    report = run_parity(tmp_path)
    assert report.sets == ("norm_eps",)
    assert report.failures == ()
    assert "not a known kind" in report.comparisons[-1].where


def test_implementation_that_stops_is_a_failure_of_its_set(small, monkeypatch):
    take_whole(small, "norm_eps")

    def stop(*args, **kwargs):
        raise ZeroDivisionError("not today")

    monkeypatch.setattr("cedar.model.attention.Attention.forward", stop)
    report = run_parity(small)
    (failure,) = report.failures
    assert "ZeroDivisionError" in failure.where
    assert report.sets == ("mini_bf16.expect_fp32", "norm_eps")
