"""The small kernels of a decode step in Triton's interpreter: rings, look-back, windows, norms."""

import pytest
import torch
from torch import Tensor

from cedar.ops.compress import Residues
from cedar.ops.compress import reference as plain_compress
from cedar.ops.compress import triton as compress
from cedar.ops.engram_hash import History
from cedar.ops.engram_hash import reference as plain_hash
from cedar.ops.engram_hash import triton as hashing
from cedar.ops.norm import reference as plain_norm
from cedar.ops.norm import triton as norm
from cedar.ops.rope import reference as plain_rope
from cedar.ops.rope import triton as rope
from cedar.ops.window import reference as plain_window
from cedar.ops.window import triton as window
from cedar.testing import assert_bitwise, assert_close
from triton_interpreter import repair

repair()

# Three sequences of 3, 1 and 2 tokens beside each other, with padding between and behind.
SLOTS = [2, 2, 2, -1, 0, 3, 3, -1]
POSITIONS = [4, 5, 6, 0, 9, 0, 1, 7]


def residues(ratio: int, kind: torch.dtype = torch.int64, width: int = 24) -> Residues:
    g = torch.Generator().manual_seed(ratio)
    both = torch.randn(len(SLOTS), 2 * width, generator=g)
    ring = torch.randn(5, ratio - 1 + 3, 2, width, generator=g)
    at = torch.tensor(SLOTS, dtype=kind), torch.tensor(POSITIONS, dtype=kind)
    return Residues(both[:, :width], both[:, width:], ring, *at)


@pytest.mark.parametrize("ratio", [2, 3, 4])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_residue_ring(ratio: int, kind: torch.dtype) -> None:
    case = residues(ratio, kind)
    other = case._replace(ring=case.ring.clone())
    assert compress.unsupported(case, torch.float32, None) is None
    found = compress.compress_ring(case, ratio, torch.float32)
    want = plain_compress.compress_ring(other, ratio, torch.float32)
    assert_close(found, want, "float32 op")
    assert_bitwise(case.ring, other.ring)
    assert found.any(1).tolist() == [
        slot >= 0 and (p + 1) % ratio == 0 for slot, p in zip(SLOTS, POSITIONS, strict=True)
    ]


def test_a_group_of_two_calls_is_that_of_one() -> None:
    case = residues(2)
    kv, gate, ring, slot, position = case
    parts = [
        Residues(kv[rows], gate[rows], ring, slot[rows], position[rows])
        for rows in (slice(0, 1), slice(1, 2))
    ]
    case = case._replace(ring=ring.clone())
    together = compress.compress_ring(case, 2, torch.float32)
    alone = [compress.compress_ring(part, 2, torch.float32) for part in parts]
    assert_bitwise(torch.cat(alone), together[:2])
    assert together[1].any()


def test_the_norm_of_a_residue_ring() -> None:
    case, weight = residues(2), torch.linspace(0.5, 1.5, 24).bfloat16()
    other = case._replace(ring=case.ring.clone())
    found = compress.compress_ring(case, 2, torch.bfloat16, weight, 1e-20)
    want = plain_compress.compress_ring(other, 2, torch.bfloat16, weight, 1e-20)
    assert (found != want).float().mean() < 0.01
    plain = compress.compress_ring(other, 2, torch.bfloat16)
    assert not torch.equal(plain, found)  # negative control
    assert compress.compress_ring(
        Residues(*(v[:0] for v in case[:2]), case.ring, *(v[:0] for v in case[3:])),
        2,
        torch.float32,
    ).shape == (0, 24)


def test_rings_it_cannot_take_go_to_the_reference() -> None:
    case = residues(2)
    wide = Residues(*(v.double() for v in case[:3]), *case[3:])
    assert compress.unsupported(wide, torch.float32, None) is not None
    found = compress.compress_ring(wide, 2, torch.float32)
    assert_close(found, compress.compress_ring(case, 2, torch.float32), "float32 op")


def tables(layers: int, order: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(order)
    multipliers = torch.randint(0, 2**45, (layers, order), generator=g) * 2 + 1
    primes = torch.randint(50, 90, (layers, order - 1, heads), generator=g)
    return multipliers, primes, primes.flatten(1).cumsum(1) - primes.flatten(1)


@pytest.mark.parametrize(("order", "heads"), [(2, 1), (4, 8), (3, 3)])
def test_hash(order: int, heads: int) -> None:
    lookback = torch.randint(0, 99092, (7, order), generator=torch.Generator().manual_seed(1))
    layer = tuple(part[1] for part in tables(2, order, heads))
    found = hashing.engram_hash(lookback, *layer)
    assert_bitwise(found, plain_hash.engram_hash(lookback, *layer))
    assert_bitwise(hashing.engram_hash(lookback.t().contiguous().t(), *layer), found)
    assert hashing.engram_hash(lookback[:0], *layer).shape == (0, (order - 1) * heads)
    assert not torch.equal(hashing.engram_hash(lookback.flip(1), *layer), found)


def test_products_that_wrap() -> None:
    """Never at the released size; still the remainder is what PyTorch says it is."""
    lookback = torch.tensor([[2**40, -3], [2**62, 5]])
    layer = torch.tensor([2**23 + 1, 7]), torch.tensor([[101, 103]]), torch.tensor([0, 101])
    found = hashing.engram_hash(lookback, *layer)
    assert (lookback * layer[0] < 0).any()
    assert_bitwise(found, plain_hash.engram_hash(lookback, *layer))


def history(order: int, kind: torch.dtype = torch.int64) -> History:
    g = torch.Generator().manual_seed(3)
    ring = torch.randint(-1, 40, (5, order - 1 + 3), generator=g)
    classes = torch.tensor([7, -1, 9, 3, 11, 12, 13, 2])
    at = torch.tensor(SLOTS, dtype=kind), torch.tensor(POSITIONS, dtype=kind)
    return History(classes, ring, *at)


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ids_of_all_layers(order: int, kind: torch.dtype) -> None:
    case, layers = history(order, kind), tables(2, order, 3)
    other = case._replace(ring=case.ring.clone())
    found = hashing.engram_ids(case, *layers, pad=5)
    want = plain_hash.engram_ids(other, *layers, pad=5)
    assert_bitwise(found, want)
    assert_bitwise(case.ring, other.ring)
    assert found.shape == (2, len(SLOTS), 3 * (order - 1))
    assert not torch.equal(found[0], found[1])
    again = hashing.engram_ids(case, *layers, pad=6)
    assert (again != found).any()  # negative control: something was padded


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [1, 5, 16])
def test_window(size: int, kind: torch.dtype) -> None:
    slot, position = torch.tensor(SLOTS, dtype=kind), torch.tensor(POSITIONS, dtype=kind)
    start = torch.tensor([3, 3, 3, 0, 0, 0, 0, 0], dtype=kind)
    found = window.window_places(slot, position, start, size, size + 3)
    want = plain_window.window_places(slot, position, start, size, size + 3)
    assert_bitwise(found, want)
    assert (found[slot < 0] == -1).all()
    # In Python integers: the first token stands at 4, its sequence's rows begin at 3.
    seen = [4 - back if 4 - back >= 3 else None for back in range(size)]
    ring = size + 3
    assert found[0].tolist() == [-1 if p is None else 2 * ring + p % ring for p in seen]
    assert window.window_places(slot[:0], position[:0], start[:0], size, 20).shape == (0, size)


@pytest.mark.parametrize("shape", [(3, 80), (2, 3, 64), (1, 1280)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    weight = torch.linspace(0.5, 1.5, shape[-1]).to(dtype)
    found, want = norm.rms_norm(x, weight, 1e-6), plain_norm.rms_norm(x, weight, 1e-6)
    if dtype is torch.float32:
        assert_close(found, want, "float32 op")
    else:
        assert (found != want).float().mean() < 0.01
    wide = torch.cat((x, x), dim=-1)[..., : shape[-1]]
    assert_bitwise(norm.rms_norm(wide, weight, 1e-6), found)
    assert not torch.equal(norm.rms_norm(x, weight, 1.0), found)


def test_norm_leaves_the_rest_to_the_reference() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8, requires_grad=True)
    assert norm.unsupported(x, weight) is not None
    assert norm.rms_norm(x, weight, 1e-6).requires_grad
    assert norm.rms_norm(x[:0], torch.ones(8), 1e-6).shape == (0, 8)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_rotary_tables(kind: torch.dtype) -> None:
    positions = torch.tensor([0, 5, 1023, -1], dtype=kind)
    each = torch.stack([plain_rope.frequencies(24, base) for base in (1e4, 1.6e5)])
    found = rope.rotary_tables(positions, each, (0, 1))
    want = plain_rope.rotary_tables(positions, each, (0, 1))
    for a, b in zip(found, want, strict=True):
        assert a.shape == (2, 4, 12)
        assert_close(a, b, "float32 op")
    assert not torch.equal(found[0][0], rope.rotary_tables(positions, each, (1, 1))[0][0])
    assert rope.rotary_tables(positions[:0], each, (0, 0))[1].shape == (2, 0, 12)
