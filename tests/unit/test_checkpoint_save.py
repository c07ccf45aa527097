"""Writing: bit-equal when read again, quantised where asked, atomic, strict."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from checkpoint_setting import random_tensors, tiny_without_extras
from safetensors.torch import load_file
from torch import Tensor

import cedar.checkpoint.save as save_module
from cedar.checkpoint import (
    Checkpoint,
    Kind,
    check_directory,
    convert_checkpoint,
    expected_tensors,
    fill,
    parameter_map,
    save_checkpoint,
    weights,
)
from cedar.checkpoint.index import INDEX_NAME
from cedar.config import ModelConfig, tiny
from cedar.errors import CheckpointError
from cedar.quant import FP4_ROW, FP8_BLOCK, FP8_ROW, QuantTensor, quantize

CONFIG = tiny_without_extras()


def all_bytes(root: Path) -> dict[str, bytes]:
    with Checkpoint.open(root) as checkpoint:
        return {
            name: checkpoint.read(name).reshape(-1).view(torch.uint8).numpy().tobytes()
            for name in checkpoint.specs
        }


def files(root: Path) -> set[str]:
    return {file.name for file in root.iterdir()}


@pytest.fixture(scope="module")
def masters() -> dict[str, Tensor]:
    return random_tensors(CONFIG)


@pytest.mark.parametrize("storage", ["fp8fp4", "bf16"])
def test_everything_is_there(tmp_path: Path, storage: str) -> None:
    config = tiny()
    save_checkpoint(tmp_path, config, random_tensors(config), storage)
    assert check_directory(tmp_path).ok
    assert ModelConfig.from_file(tmp_path) == config.with_storage(storage)
    assert (tmp_path / "config.json").read_text() == config.with_storage(storage).nested_json()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.specs == expected_tensors(config, storage)
        assert checkpoint.storage == storage
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    total = sum(spec.nbytes for spec in expected_tensors(config, storage).values())
    assert index["metadata"]["total_size"] == total
    assert files(tmp_path) == {"config.json", INDEX_NAME, "model-00001-of-00001.safetensors"}


def test_plain_weights_come_back_bit_for_bit(tmp_path: Path, masters: dict[str, Tensor]) -> None:
    save_checkpoint(tmp_path, CONFIG, masters, "bf16")
    again = {
        w.name: torch.zeros(w.shape, dtype=masters[w.name].dtype)
        for w in weights(CONFIG)
        if w.kind is not Kind.TABLE
    }
    tables = {w.name for w in weights(CONFIG) if w.kind is Kind.TABLE}
    with Checkpoint.open(tmp_path) as checkpoint:
        fill(again, checkpoint, CONFIG, skip=tables)
    for name, tensor in again.items():
        assert torch.equal(tensor, masters[name]), name


def test_readable_by_the_official_library(tmp_path: Path, masters: dict[str, Tensor]) -> None:
    save_checkpoint(tmp_path, CONFIG, masters, "bf16")
    loaded = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert loaded.keys() == expected_tensors(CONFIG, "bf16").keys()
    assert torch.equal(loaded["head.weight"], masters["head.weight"])
    expert = masters["layers.2.ffn.experts.w2.weight"][3]
    assert torch.equal(loaded["layers.2.ffn.experts.3.w2.weight"], expert)


def test_quantised_weights_are_those_of_the_quantiser(
    tmp_path: Path, masters: dict[str, Tensor]
) -> None:
    save_checkpoint(tmp_path, CONFIG, masters, "fp8fp4")
    cases = {
        "layers.0.attn.wo_a.weight": (masters["layers.0.attn.wo_a.weight"], FP8_BLOCK),
        "layers.5.ffn.experts.7.w3.weight": (masters["layers.5.ffn.experts.w3.weight"][7], FP4_ROW),
        "layers.4.engram.embed.weight": (masters["layers.4.engram.embed.weight"], FP8_ROW),
    }
    with Checkpoint.open(tmp_path) as checkpoint:
        for name, (tensor, fmt) in cases.items():
            expected = quantize(tensor, fmt)
            codes = checkpoint.read(name).view(torch.uint8)
            assert torch.equal(codes, expected.codes.view(torch.uint8)), name
            scale = checkpoint.read(name.removesuffix("weight") + "scale")
            assert torch.equal(scale, expected.scale), name
            assert not torch.equal(codes.float(), torch.zeros_like(codes).float())


def test_codes_are_written_as_they_are(tmp_path: Path, masters: dict[str, Tensor]) -> None:
    save_checkpoint(tmp_path / "first", CONFIG, masters, "fp8fp4")
    packed: dict[str, Tensor] = {}
    with Checkpoint.open(tmp_path / "first") as checkpoint:
        for entry in parameter_map(CONFIG, "fp8fp4"):
            parts = [checkpoint.read(name) for name in entry.official_names]
            stacked = ".ffn.experts." in entry.module_name
            packed[entry.module_name] = torch.stack(parts) if stacked else parts[0]
    save_checkpoint(tmp_path / "second", CONFIG, packed, "fp8fp4")
    assert all_bytes(tmp_path / "first") == all_bytes(tmp_path / "second")
    save_checkpoint(tmp_path / "plain", CONFIG, packed, "bf16")
    name = "layers.2.ffn.experts.w1"
    numbers = QuantTensor(packed[f"{name}.weight"], packed[f"{name}.scale"], FP4_ROW).dequantize()
    with Checkpoint.open(tmp_path / "plain") as checkpoint:
        got = checkpoint.read("layers.2.ffn.experts.6.w1.weight")
    assert torch.equal(got.float(), numbers[6])


def test_shards(tmp_path: Path, masters: dict[str, Tensor]) -> None:
    save_checkpoint(tmp_path / "one", CONFIG, masters, "fp8fp4")
    limit = 100_000
    save_checkpoint(tmp_path / "many", CONFIG, masters, "fp8fp4", max_shard_bytes=limit)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 10
    assert shards[-1].name == f"model-{len(shards):05}-of-{len(shards):05}.safetensors"
    assert all(len(load_file(s)) == 1 or s.stat().st_size < 2 * limit for s in shards)
    assert check_directory(tmp_path / "many").ok
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "many")


def test_saving_again_replaces_all_shards(tmp_path: Path, masters: dict[str, Tensor]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    save_checkpoint(tmp_path, CONFIG, masters, "fp8fp4", max_shard_bytes=100_000)
    other = random_tensors(CONFIG, seed=1)
    save_checkpoint(tmp_path, CONFIG, other, "bf16")
    assert files(tmp_path) == {
        "config.json",
        INDEX_NAME,
        "model-00001-of-00001.safetensors",
        "tokenizer.json",
    }
    assert check_directory(tmp_path).ok


def test_a_failure_leaves_the_old_checkpoint(
    tmp_path: Path, masters: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, CONFIG, masters, "bf16")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    bad = dict(masters) | {"norm.weight": torch.full((64,), torch.nan, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"norm\.weight.*NaN"):
        save_checkpoint(tmp_path, CONFIG, bad, "bf16")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before

    def no_room(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_module, "_sync", no_room)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG, seed=2), "bf16")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_crash_while_publishing_is_visible(
    tmp_path: Path, masters: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, CONFIG, masters, "bf16", max_shard_bytes=500_000)
    replace = Path.replace

    def crash(self: Path, target: Path) -> Path:
        if target.name.startswith("model-00002"):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, CONFIG, masters, "bf16", max_shard_bytes=500_000)
    with pytest.raises(CheckpointError, match="incomplete"):
        Checkpoint.open(tmp_path)


def test_all_problems_of_the_tensors_at_once(tmp_path: Path, masters: dict[str, Tensor]) -> None:
    bad = dict(masters)
    del bad["embed.weight"]
    bad["extra"] = torch.zeros(1)
    bad["head.weight"] = torch.zeros(2, 2)
    bad["norm.weight"] = torch.zeros(64, dtype=torch.uint8)
    bad["layers.0.attn.wkv.scale"] = torch.zeros(1, 1, dtype=torch.uint8)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "new", CONFIG, bad, "fp8fp4")
    message = str(caught.value)
    for words in (
        "embed.weight: missing",
        "extra: unexpected",
        "head.weight: found shape [2, 2]",
        "norm.weight: found torch.uint8 without a scale",
        "layers.0.attn.wkv.weight: found torch.bfloat16 with torch.uint8",
        "layers.0.attn.wkv.scale: found shape [1, 1]",
    ):
        assert words in message
    assert not (tmp_path / "new").exists()


def test_widths_that_cannot_be_quantised(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG.with_storage("bf16"), moe_inter_dim=48)
    save_checkpoint(tmp_path, config, random_tensors(config), "bf16")
    assert check_directory(tmp_path).ok


class TestConvert:
    def test_there_and_back(self, tmp_path: Path, masters: dict[str, Tensor]) -> None:
        save_checkpoint(tmp_path / "plain", CONFIG, masters, "bf16")
        convert_checkpoint(tmp_path / "plain", tmp_path / "packed", "fp8fp4")
        convert_checkpoint(tmp_path / "packed", tmp_path / "numbers", "bf16")
        convert_checkpoint(tmp_path / "numbers", tmp_path / "again", "fp8fp4")
        convert_checkpoint(tmp_path / "again", tmp_path / "numbers again", "bf16")
        for name in ("plain", "packed", "numbers", "again", "numbers again"):
            assert check_directory(tmp_path / name).ok
        save_checkpoint(tmp_path / "direct", CONFIG, masters, "fp8fp4")
        direct = all_bytes(tmp_path / "direct")
        packed = all_bytes(tmp_path / "packed")
        table = "layers.1.engram.embed.weight"
        assert packed == direct
        # Numbers on the grid stay what they are, though a block may choose a finer scale.
        assert all_bytes(tmp_path / "numbers again") == all_bytes(tmp_path / "numbers")
        assert all_bytes(tmp_path / "numbers")[table] == packed[table]
        # Rounding to 8 and 4 bits loses something, so the numbers are not the first ones.
        assert all_bytes(tmp_path / "numbers") != all_bytes(tmp_path / "plain")

    def test_same_storage_copies(self, tmp_path: Path, masters: dict[str, Tensor]) -> None:
        save_checkpoint(tmp_path / "a", CONFIG, masters, "fp8fp4", max_shard_bytes=200_000)
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "fp8fp4")
        assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")

    def test_target_must_be_new(self, tmp_path: Path, masters: dict[str, Tensor]) -> None:
        save_checkpoint(tmp_path / "a", CONFIG, masters, "bf16")
        with pytest.raises(CheckpointError, match="not empty"):
            convert_checkpoint(tmp_path / "a", tmp_path / "a", "fp8fp4")

    def test_source_must_fit(self, tmp_path: Path, masters: dict[str, Tensor]) -> None:
        save_checkpoint(tmp_path / "a", CONFIG, masters, "bf16")
        config = dataclasses.replace(CONFIG, vocab_size=510).with_storage("bf16")
        (tmp_path / "a" / "config.json").write_text(config.nested_json())
        with pytest.raises(CheckpointError, match=r"misshapen: embed\.weight"):
            convert_checkpoint(tmp_path / "a", tmp_path / "b", "fp8fp4")
        assert not (tmp_path / "b").exists()
