"""`check_directory`: one report with every difference, from headers alone."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_setting import GOLDEN, random_tensors, tiny_without_extras
from safetensors.torch import load_file, save_file

from cedar.checkpoint import check_directory, check_files, save_checkpoint
from cedar.checkpoint.index import INDEX_NAME
from cedar.config import ModelConfig
from cedar.errors import CheckpointError, ConfigError

CONFIG = tiny_without_extras()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG), "bf16", max_shard_bytes=400_000)
    return tmp_path


def shards(root: Path) -> list[Path]:
    found = sorted(root.glob("*.safetensors"))
    assert len(found) > 2
    return found


@pytest.mark.parametrize("storage", ["bf16", "fp8fp4"])
def test_golden_checkpoints_fit(storage: str) -> None:
    sidecar = GOLDEN / f"mini_{storage}.weights.json"
    report = check_files(sidecar.with_suffix(".safetensors"), ModelConfig.from_file(sidecar))
    assert report.ok
    assert report.storage == storage
    assert report.lines() == []
    report.raise_if_bad()


def test_a_good_directory(root: Path) -> None:
    report = check_directory(root)
    assert report.ok
    assert report.tensors == len(json.loads((root / INDEX_NAME).read_text())["weight_map"])


def test_every_difference_in_one_report(root: Path) -> None:
    first = shards(root)[0]
    tensors = load_file(first)
    del tensors["layers.0.attn.wkv.weight"], tensors["layers.0.hc_attn_fn"]
    tensors["surprise"] = torch.zeros(1)
    tensors["layers.0.attn_norm.weight"] = torch.zeros(32, dtype=torch.bfloat16)
    tensors["layers.0.ffn_norm.weight"] = torch.zeros(64)
    save_file(tensors, first)
    index = json.loads((root / INDEX_NAME).read_text())
    for name in ("layers.0.attn.wkv.weight", "layers.0.hc_attn_fn"):
        del index["weight_map"][name]
    index["weight_map"]["surprise"] = first.name
    del index["metadata"]
    (root / INDEX_NAME).write_text(json.dumps(index))

    report = check_directory(root)
    assert not report.ok
    assert report.missing == ("layers.0.attn.wkv.weight", "layers.0.hc_attn_fn")
    assert report.unexpected == ("surprise",)
    assert [(m.name, str(m.found), str(m.expected)) for m in report.misshapen] == [
        ("layers.0.attn_norm.weight", "BF16 [32]", "BF16 [64]"),
        ("layers.0.ffn_norm.weight", "F32 [64]", "BF16 [64]"),
    ]
    assert report.damaged == ()
    assert len(report.lines()) == 5
    assert json.loads(json.dumps(report.to_dict()))["unexpected"] == ["surprise"]
    with pytest.raises(CheckpointError, match="5 differences"):
        report.raise_if_bad()


def test_a_damaged_shard_does_not_hide_the_rest(root: Path) -> None:
    broken = shards(root)[1]
    broken.write_bytes(broken.read_bytes()[:-1])
    report = check_directory(root)
    assert any(broken.name in line for line in report.damaged)
    assert report.missing
    assert not report.misshapen


def test_index_and_shard_that_disagree(root: Path) -> None:
    index = json.loads((root / INDEX_NAME).read_text())
    index["weight_map"]["norm.weight"] = shards(root)[0].name
    (root / INDEX_NAME).write_text(json.dumps(index))
    report = check_directory(root)
    assert len(report.damaged) == 2
    assert not report.ok


def test_only_headers_are_read(root: Path) -> None:
    """Payloads full of NaN are no concern of this check."""
    for file in root.glob("*.safetensors"):
        whole = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(whole[:8], "little")
        whole[start:] = b"\xff" * (len(whole) - start)
        file.write_bytes(whole)
    assert check_directory(root).ok


def test_wrongly_stated_storage_is_one_line(root: Path) -> None:
    (root / "config.json").write_text(CONFIG.with_storage("fp8fp4").nested_json())
    report = check_directory(root)
    assert not report.ok
    assert len(report.lines()) == 1
    assert 'stored as "bf16"' in report.lines()[0]


def test_one_wrong_type_does_not_change_the_storage(root: Path) -> None:
    stray = {"layers.0.attn.wkv.scale": torch.zeros(2, 2, dtype=torch.uint8)}
    save_file(stray, root / "more.safetensors")
    index = json.loads((root / INDEX_NAME).read_text())
    index["weight_map"]["layers.0.attn.wkv.scale"] = "more.safetensors"
    del index["metadata"]
    (root / INDEX_NAME).write_text(json.dumps(index))
    assert check_directory(root).lines() == ["unexpected: layers.0.attn.wkv.scale"]


def test_unusable_configuration_or_path(root: Path) -> None:
    (root / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="vocab_size"):
        check_directory(root)
    (root / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        check_directory(root)
    with pytest.raises(CheckpointError, match="no directory"):
        check_directory(root / INDEX_NAME)
