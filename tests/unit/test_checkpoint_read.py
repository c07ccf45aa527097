"""Reading: values, rows, the index, and damage inside the payload."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_setting import GOLDEN, entry, raw_file
from safetensors.torch import load_file, save_file

from cedar.checkpoint import Checkpoint
from cedar.checkpoint.index import INDEX_NAME
from cedar.errors import CheckpointError

MINI = GOLDEN / "mini_fp8fp4.weights.safetensors"
TABLE, SCALE = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", ["mini_fp8fp4.weights", "mini_bf16.weights", "engram"])
def test_equal_to_the_official_reader(name: str) -> None:
    path = GOLDEN / f"{name}.safetensors"
    expected = load_file(path)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.specs.keys() == expected.keys()
        for key, tensor in expected.items():
            got = checkpoint.read(key)
            assert got.shape == tensor.shape
            assert torch.equal(as_bytes(got), as_bytes(tensor)), key
            is_scale = checkpoint.specs[key].dtype == "F8_E8M0"
            assert got.dtype == (torch.uint8 if is_scale else tensor.dtype)


def test_storage() -> None:
    with Checkpoint.open(MINI) as checkpoint:
        assert checkpoint.storage == "fp8fp4"
    with Checkpoint.open(GOLDEN / "mini_bf16.weights.safetensors") as checkpoint:
        assert checkpoint.storage == "bf16"


def test_rows_are_those_of_the_whole_tensor() -> None:
    with Checkpoint.open(MINI) as checkpoint:
        whole = checkpoint.read(TABLE)
        rows = torch.tensor([[5, 0], [629, 5]])
        got = checkpoint.read_rows(TABLE, rows)
        assert got.shape == (2, 2, 32)
        assert torch.equal(got.float(), whole.float()[rows])
        assert checkpoint.read_rows(TABLE, torch.empty(0, dtype=torch.int64)).shape == (0, 32)
        assert torch.equal(checkpoint.read_slice(TABLE, 3, 7).float(), whole[3:7].float())
        assert checkpoint.read_rows(SCALE, rows).shape == (2, 2, 1)


@pytest.mark.parametrize("row", [-1, 630])
def test_rows_out_of_range(row: int) -> None:
    with (
        Checkpoint.open(MINI) as checkpoint,
        pytest.raises(CheckpointError, match=r"engram\.embed\.weight.*expected 0 to 629"),
    ):
        checkpoint.read_rows(TABLE, torch.tensor([0, row]))


def test_tensors_outlive_the_checkpoint_and_are_writable() -> None:
    with Checkpoint.open(MINI) as checkpoint:
        tensor = checkpoint.read("norm.weight")
    before = tensor.clone()
    tensor += 1
    assert not torch.equal(tensor, before)
    with Checkpoint.open(MINI) as checkpoint:
        assert torch.equal(checkpoint.read("norm.weight"), before)


def test_unknown_name() -> None:
    with (
        Checkpoint.open(MINI) as checkpoint,
        pytest.raises(CheckpointError, match=r"no tensor 'norm\.wait'"),
    ):
        checkpoint.read("norm.wait")


@pytest.mark.parametrize(
    ("dtype", "byte", "words"),
    [
        ("F8_E8M0", 255, "scale byte of 255"),
        ("F8_E4M3", 127, "0x7f or 0xff"),
        ("F8_E4M3", 255, "0x7f or 0xff"),
    ],
)
def test_nan_codes_and_scales(tmp_path: Path, dtype: str, byte: int, words: str) -> None:
    payload = bytes([1, 2, byte, 3])
    raw = {"some.scale": entry(dtype, [4, 1], 0, 4)}
    with Checkpoint.open(raw_file(tmp_path / "x.safetensors", raw, payload)) as checkpoint:
        reads: list[Callable[[], torch.Tensor]] = [
            lambda: checkpoint.read("some.scale"),
            lambda: checkpoint.read_slice("some.scale", 1, 3),
            lambda: checkpoint.read_rows("some.scale", torch.tensor([2])),
        ]
        for read in reads:
            with pytest.raises(CheckpointError) as caught:
                read()
            assert words in str(caught.value)
            assert "x.safetensors: tensor 'some.scale'" in str(caught.value)
        assert checkpoint.read_rows("some.scale", torch.tensor([0, 1, 3])).shape == (3, 1)


def test_all_other_codes_are_numbers(tmp_path: Path) -> None:
    payload = bytes(b for b in range(256) if b & 127 != 127) + bytes(range(255))
    raw = {"w": entry("F8_E4M3", [254], 0, 254), "s": entry("F8_E8M0", [255], 254, 509)}
    with Checkpoint.open(raw_file(tmp_path / "x.safetensors", raw, payload)) as checkpoint:
        assert torch.isfinite(checkpoint.read("w").float()).all()
        assert checkpoint.read("s").tolist() == list(range(255))


def test_unaligned_payload(tmp_path: Path) -> None:
    raw = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}
    payload = b"x" + as_bytes(torch.tensor([1.5, -2.0])).numpy().tobytes()
    with Checkpoint.open(raw_file(tmp_path / "x.safetensors", raw, payload)) as checkpoint:
        assert checkpoint.read("b").tolist() == [1.5, -2.0]


def test_file_that_changed_after_opening(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"a": entry("U8", [4], 0, 4)}, bytes(4))
    checkpoint = Checkpoint.open(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="changed its size"):
        checkpoint.read("a")


class TestIndex:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "one.safetensors")
        save_file({"c": torch.full((4,), 2.0)}, tmp_path / "two.safetensors")
        self.write(tmp_path, {})
        return tmp_path

    @staticmethod
    def write(root: Path, changes: dict[str, Any], **metadata: Any) -> None:
        names = {"a": "one", "b": "one", "c": "two"} | changes
        weight_map = {k: f"{v}.safetensors" for k, v in names.items() if v is not None}
        raw = {"metadata": {"total_size": 36} | metadata, "weight_map": weight_map}
        (root / INDEX_NAME).write_text(json.dumps(raw))

    def test_good(self, root: Path) -> None:
        with Checkpoint.open(root) as checkpoint:
            assert checkpoint.specs.keys() == {"a", "b", "c"}
            assert checkpoint.read("c").tolist() == [2.0] * 4
            assert checkpoint.file_of("c").name == "two.safetensors"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"d": "two"}, "'d' is not in two.safetensors, where the index puts it"),
            ({"b": None}, "'b' is not in the index under this file"),
            ({"a": "two"}, "'a' is not in two.safetensors"),
            ({"d": "three"}, "three.safetensors: cannot be read"),
            ({"a": "../one"}, "plain names"),
            ({"a": "/etc/one"}, "plain names"),
        ],
    )
    def test_disagreement(self, root: Path, changes: dict[str, Any], words: str) -> None:
        self.write(root, changes)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(root)
        assert words in str(caught.value)

    def test_all_disagreements_at_once(self, root: Path) -> None:
        self.write(root, {"d": "two", "b": None, "e": "three"})
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(root)
        assert len(str(caught.value).splitlines()) == 3

    def test_wrong_total(self, root: Path) -> None:
        self.write(root, {}, total_size=35)
        with pytest.raises(CheckpointError, match="total_size of 35; expected 36"):
            Checkpoint.open(root)

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"a":1,"a":1}']
    )
    def test_no_index_at_all(self, root: Path, text: str) -> None:
        (root / INDEX_NAME).write_text(text)
        with pytest.raises(CheckpointError, match=INDEX_NAME):
            Checkpoint.open(root)

    def test_without_an_index_all_files_count(self, root: Path) -> None:
        (root / INDEX_NAME).unlink()
        with Checkpoint.open(root) as checkpoint:
            assert checkpoint.specs.keys() == {"a", "b", "c"}
        save_file({"c": torch.zeros(1)}, root / "more.safetensors")
        with pytest.raises(CheckpointError, match=r"'c' is in more\.safetensors as well"):
            Checkpoint.open(root)

    def test_shards_without_their_index_are_incomplete(self, root: Path) -> None:
        (root / INDEX_NAME).unlink()
        (root / "one.safetensors").rename(root / "model-00001-of-00002.safetensors")
        with pytest.raises(CheckpointError, match="incomplete"):
            Checkpoint.open(root)
