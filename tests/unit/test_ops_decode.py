"""What a decode step does on rings, against the same over whole sequences."""

import pytest
import torch
from torch import Tensor

from cedar.memory import PinnedTable
from cedar.ops.compress import Residues
from cedar.ops.compress.reference import compress, compress_ring
from cedar.ops.engram_hash import History
from cedar.ops.engram_hash.reference import engram_hash, engram_ids
from cedar.ops.engram_rows.reference import engram_rows
from cedar.ops.window.reference import window_places
from cedar.quant import FP8_ROW, quantize
from cedar.testing import assert_bitwise, assert_close

LENGTH, SLOTS = 17, 4


def passes(each: int) -> list[tuple[Tensor, Tensor]]:
    """Slots and positions of passes over two sequences, ``each`` tokens at a time, and padding."""
    found = []
    for first in range(0, LENGTH, each):
        position = torch.arange(first, min(first + each, LENGTH))
        slot = torch.full_like(position, 3)
        both = torch.cat((slot, -torch.ones(2, dtype=slot.dtype), slot - 2))
        found.append((both, torch.cat((position, position[:1].repeat(2), position))))
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("each", [1, 2, 5])
@pytest.mark.parametrize("ratio", [2, 3])
def test_groups_come_out_as_at_once(ratio: int, each: int) -> None:
    kv, gate = random(SLOTS, LENGTH, 8), random(SLOTS, LENGTH, 8, seed=1)
    ring = torch.full((SLOTS, ratio - 1 + each, 2, 8), torch.nan, dtype=torch.float64)
    found: dict[tuple[int, int], Tensor] = {}
    for slot, position in passes(each):
        rows = Residues(kv[slot, position], gate[slot, position], ring, slot, position)
        out = compress_ring(rows, ratio, torch.float64)
        for s, p, latent in zip(slot.tolist(), position.tolist(), out, strict=True):
            if s >= 0 and (p + 1) % ratio == 0:
                found[s, p // ratio] = latent
            else:
                assert not latent.any()
    count = LENGTH // ratio
    for slot in (3, 1):
        want = compress(*(v[slot, : count * ratio].view(count, ratio, 8) for v in (kv, gate)))
        assert_close(torch.stack([found[slot, j] for j in range(count)]), want, "float64")
    assert ring[0].isnan().all()  # no token was of this slot, and padding writes nothing


@pytest.mark.parametrize("each", [1, 2, 5])
def test_ids_come_out_as_at_once(each: int) -> None:
    g = torch.Generator().manual_seed(2)
    order, pad = 3, 5
    classes = torch.randint(-1, 9, (SLOTS, LENGTH), generator=g)
    layers = (
        torch.randint(0, 2**40, (2, order), generator=g) * 2 + 1,
        torch.randint(50, 90, (2, order - 1, 2), generator=g),
        torch.arange(8).view(2, 4) * 90,
    )
    ring = torch.full((SLOTS, order - 1 + each), -1)
    for slot, position in passes(each):
        history = History(classes[slot, position], ring, slot, position)
        found = engram_ids(history, *layers, pad)
        for n, (s, p) in enumerate(zip(slot.tolist(), position.tolist(), strict=True)):
            row, alive = [], s >= 0
            for back in range(order):
                alive = alive and p >= back and int(classes[s, p - back]) >= 0
                row.append(int(classes[s, p - back]) if alive else pad)
            for layer in range(2):
                want = engram_hash(torch.tensor([row]), *(part[layer] for part in layers))
                assert_bitwise(found[layer, n], want[0])


def test_window_places_in_python_integers() -> None:
    slot, position = torch.tensor([2, -1, 0]), torch.tensor([9, 9, 3])
    found = window_places(slot, position, torch.tensor([7, 0, 0]), 5, 8)
    assert found.tolist() == [[17, 16, 23, -1, -1], [-1] * 5, [3, 2, 1, 0, -1]]
    assert found.dtype == torch.int32


class Slices:
    """A checkpoint of two tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def read_slice(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][start:stop]


def test_a_table_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cedar.memory.pinned._READ_ROWS", 7)
    filled = quantize(random(30, 64), FP8_ROW)
    checkpoint = Slices(weight=filled.codes, scale=filled.scale)
    table = PinnedTable.load(checkpoint, "weight", "scale", (30, 64), engram_rows, "cpu")
    ids = torch.tensor([[29, 0, 7], [6, 6, 14]])
    want = filled.dequantize(torch.bfloat16)[ids]
    assert_bitwise(table.rows(ids), want)
    table.prefetch(ids)
    assert_bitwise(table.rows(ids), want)
    assert not torch.equal(table.rows(ids.flip(1)), want)  # negative control
    assert PinnedTable((0, 64), engram_rows, "cpu").rows(ids[:0]).shape == (0, 3, 64)
