"""An Engram table read by row from its file."""

from pathlib import Path

import pytest
import torch
from checkpoint_setting import GOLDEN, entry, raw_file
from torch import Tensor

from cedar.checkpoint import Checkpoint
from cedar.errors import CheckpointError
from cedar.memory import MappedTable
from cedar.quant import FP8_ROW, QuantTensor

MINI = GOLDEN / "mini_fp8fp4.weights.safetensors"
WEIGHT, SCALE = "layers.4.engram.embed.weight", "layers.4.engram.embed.scale"


class Counting:
    """A row reader that notes what is asked of it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.asked: list[list[int]] = []

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        if name == WEIGHT:
            self.asked.append(rows.tolist())
        return self.checkpoint.read_rows(name, rows)


def whole(checkpoint: Checkpoint) -> Tensor:
    codes, scale = checkpoint.read(WEIGHT), checkpoint.read(SCALE)
    return QuantTensor(codes, scale, FP8_ROW).dequantize(torch.bfloat16)


@pytest.mark.parametrize("cache_rows", [0, 1, 7, 10_000])
def test_equal_to_the_whole_table(cache_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    with Checkpoint.open(MINI) as checkpoint:
        table = MappedTable(checkpoint, WEIGHT, SCALE, cache_rows=cache_rows)
        expected = whole(checkpoint)
        for _ in range(5):
            ids = torch.randint(0, 834, (11, 6), generator=generator)
            rows = table.rows(ids)
            assert rows.dtype == torch.bfloat16
            assert torch.equal(rows, expected[ids])
        assert table.rows(torch.empty(0, 6, dtype=torch.int64)).shape == (0, 6, 32)


def test_rows_are_read_once_while_they_are_kept() -> None:
    with Checkpoint.open(MINI) as checkpoint:
        reader = Counting(checkpoint)
        table = MappedTable(reader, WEIGHT, SCALE, cache_rows=3)
        table.rows(torch.tensor([5, 5, 9]))
        table.rows(torch.tensor([9, 5, 1]))
        assert reader.asked == [[5, 9], [1]]
        assert (table.hits, table.misses) == (2, 3)
        table.rows(torch.tensor([2, 3]))  # now 9, 2 and 3 are kept
        table.rows(torch.tensor([9]))
        assert reader.asked[2:] == [[2, 3]]
        table.rows(torch.tensor([1]))
        assert reader.asked[3:] == [[1]]


def test_a_row_that_does_not_exist() -> None:
    with (
        Checkpoint.open(MINI) as checkpoint,
        pytest.raises(CheckpointError, match="expected 0 to 833"),
    ):
        MappedTable(checkpoint, WEIGHT, SCALE).rows(torch.tensor([834]))


def test_only_damaged_rows_fail(tmp_path: Path) -> None:
    raw = {"w": entry("F8_E4M3", [2, 32], 0, 64), "s": entry("F8_E8M0", [2, 1], 64, 66)}
    path = raw_file(tmp_path / "x.safetensors", raw, bytes([56]) * 64 + bytes([128, 255]))
    with Checkpoint.open(path) as checkpoint:
        table = MappedTable(checkpoint, "w", "s")
        assert table.rows(torch.tensor(0)).tolist() == [2.0] * 32
        with pytest.raises(CheckpointError, match="scale byte of 255"):
            table.rows(torch.tensor(1))
