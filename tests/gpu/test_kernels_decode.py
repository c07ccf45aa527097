"""The small kernels of a decode step on a device: rings, look-back, windows, host-memory tables."""

import pytest
import torch
from torch import Tensor

from cedar.memory import PinnedTable
from cedar.ops.compress import Residues
from cedar.ops.compress import reference as plain_compress
from cedar.ops.engram_hash import History
from cedar.ops.engram_hash import reference as plain_hash
from cedar.ops.engram_rows import reference as plain_rows
from cedar.ops.kv_write import RowWrite
from cedar.ops.latent import Append, InPlace
from cedar.ops.latent import reference as plain_latent
from cedar.ops.norm import reference as plain_norm
from cedar.ops.rope import reference as plain_rope
from cedar.ops.window import reference as plain_window
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, BlockFormat, quantize
from cedar.testing import assert_bitwise, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.compress import triton as compress
    from cedar.ops.engram_hash import triton as hashing
    from cedar.ops.engram_rows import triton as rows
    from cedar.ops.latent import triton as latent
    from cedar.ops.norm import triton as norm
    from cedar.ops.rope import triton as rope
    from cedar.ops.window import triton as window

EPS = 1e-20


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), device="cuda")


def places(sequences: int, each: int) -> tuple[Tensor, Tensor]:
    """Slots and positions of some tokens of each sequence, every fifth sequence padding."""
    slot = torch.randperm(sequences, generator=generator(1), device="cuda")
    slot = torch.where(slot % 5 == 4, -1, slot).repeat_interleave(each)
    first = torch.randint(0, 99, (sequences,), generator=generator(2), device="cuda")
    first[::3] = 0
    return slot, (first.unsqueeze(1) + torch.arange(each, device="cuda")).flatten()


@pytest.mark.parametrize(("sequences", "each"), [(1, 1), (40, 1), (41, 6)])
def test_residue_ring(sequences: int, each: int) -> None:
    at = places(sequences, each)
    kv, gate = normal(2, sequences * each, 512, seed=3)
    ring = normal(sequences, 7, 2, 512, seed=4)
    ours, other = (Residues(kv, gate, ring.clone(), *at) for _ in range(2))
    found = compress.compress_ring(ours, 2, torch.float32)
    want = plain_compress.compress_ring(other, 2, torch.float32)
    assert_close(found, want, "float32 op")
    assert_bitwise(ours.ring, other.ring)
    weight = normal(512, seed=5).bfloat16()
    found = compress.compress_ring(ours, 2, torch.bfloat16, weight, EPS)
    want = plain_compress.compress_ring(other, 2, torch.bfloat16, weight, EPS)
    assert (found != want).float().mean() < 0.01


def engram_layers() -> tuple[Tensor, Tensor, Tensor]:
    g = generator(6)
    multipliers = torch.randint(0, 2**45, (2, 4), generator=g, device="cuda") * 2 + 1
    primes = torch.randint(15_000_000, 16_000_000, (2, 3, 8), generator=g, device="cuda")
    return multipliers, primes, primes.flatten(1).cumsum(1) - primes.flatten(1)


@pytest.mark.parametrize(("sequences", "each"), [(1, 1), (40, 1), (41, 6)])
def test_engram_ids(sequences: int, each: int) -> None:
    g, layers, at = generator(7), engram_layers(), places(sequences, each)
    classes = torch.randint(-1, 99092, (sequences * each,), generator=g, device="cuda")
    classes[::7] = -1
    ring = torch.randint(-1, 99092, (sequences, 9), generator=g, device="cuda")
    ours, other = (History(classes, ring.clone(), *at) for _ in range(2))
    found = hashing.engram_ids(ours, *layers, pad=2)
    assert_bitwise(found, plain_hash.engram_ids(other, *layers, pad=2))
    assert_bitwise(ours.ring, other.ring)
    lookback = torch.randint(0, 99092, (300, 4), generator=g, device="cuda")
    one = tuple(part[0] for part in layers)
    assert_bitwise(hashing.engram_hash(lookback, *one), plain_hash.engram_hash(lookback, *one))


def test_window_places() -> None:
    slot, position = places(50, 3)
    for start in (position - 60, position * 0):
        found = window.window_places(slot, position, start, 128, 134)
        assert_bitwise(found, plain_window.window_places(slot, position, start, 128, 134))


def test_rotary_tables() -> None:
    positions = torch.randint(0, 1 << 20, (300,), generator=generator(1), device="cuda")
    positions[:2] = torch.tensor([-1, 0])
    each = torch.stack([plain_rope.frequencies(64, base) for base in (1e4, 1.6e5)]).cuda()
    found = rope.rotary_tables(positions, each, (0, 1))
    for a, b in zip(found, plain_rope.rotary_tables(positions, each, (0, 1)), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("shape", [(1, 1280), (300, 5120), (33, 4, 512)])
def test_norm(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape).bfloat16(), normal(shape[-1], seed=1).bfloat16()
    found, want = norm.rms_norm(x, weight, EPS), plain_norm.rms_norm(x, weight, EPS)
    assert (found != want).float().mean() < 0.01
    assert_bitwise(norm.rms_norm(x[:1], weight, EPS), found[:1])


def jobs(count: int) -> tuple[InPlace | Append, ...]:
    """Queries, window row, entry, index key and index queries of a full layer."""
    angle = normal(count, 32, seed=2) * 3
    rotary = angle.cos(), angle.sin()
    number = torch.randperm(20 * 64, generator=generator(3), device="cuda")[:count]
    number[::7] = -1
    at = torch.arange(count, device="cuda") % 2, number
    table = torch.randperm(40, generator=generator(4), device="cuda").int().view(2, 20)

    def raw(fmt: BlockFormat, width: int) -> Tensor:
        shape = (40, 64, fmt.bytes_per_row(width))
        return torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda")

    both = normal(count, 1024, seed=5).bfloat16()
    key, weight = normal(count, 128, seed=6).bfloat16(), normal(512, seed=7).bfloat16()
    return (
        InPlace(normal(count, 64, 512, seed=8).bfloat16(), None, rotary),
        Append(RowWrite(both[:, :512], raw(FP8_ROW, 512), FP8_ROW, table, *at), weight, rotary),
        Append(RowWrite(both[:, 512:], raw(FP4_MAIN, 512), FP4_MAIN, table, *at), None, rotary),
        Append(RowWrite(key, raw(FP4_ROW, 128), FP4_ROW, table, *at), weight[:128], rotary),
        InPlace(normal(count, 32, 128, seed=9).bfloat16(), None, rotary, FP4_ROW),
    )


def results(some: tuple[InPlace | Append, ...]) -> list[Tensor]:
    return [job.write.raw if isinstance(job, Append) else job.x for job in some]


@pytest.mark.parametrize("count", [1, 90])
def test_latents(count: int) -> None:
    ours, other, alone = jobs(count), jobs(count), jobs(count)
    latent.latents(ours, EPS)
    plain_latent.latents(other, EPS)
    for job in alone:
        latent.latents((job,), EPS)
    for job, a, b, c in zip(ours, results(ours), results(other), results(alone), strict=True):
        assert_bitwise(a, c)
        assert torch.equal(a, b) if job.weight is None else (a != b).float().mean() < 0.01


def table(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Codes and scales as parts of packed rows."""
    packed = torch.empty(count, 264, dtype=torch.uint8, device="cuda")
    filled = quantize(normal(min(count, 1 << 20), 256, seed=seed), FP8_ROW)
    for part in packed.split(1 << 20):
        part[:, :256] = filled.codes[: len(part)].view(torch.uint8)
        part[:, 256:] = filled.scale[: len(part)]
    return packed[:, :256].view(torch.float8_e4m3fn), packed[:, 256:]


def test_rows_beyond_two_gibibytes() -> None:
    codes, scale = table((1 << 31) // 264 + 1000)
    ids = torch.randint(0, len(codes), (64, 24), generator=generator(8), device="cuda")
    ids[0] = len(codes) - 1
    found = rows.engram_rows(codes, scale, ids, torch.bfloat16)
    assert_bitwise(found, plain_rows.engram_rows(codes, scale, ids, torch.bfloat16))


def pinned(count: int) -> tuple[PinnedTable, tuple[Tensor, Tensor]]:
    filled = table(count)
    found = PinnedTable((count, 256), rows.engram_rows, "cuda")
    found.fill(0, *filled)
    return found, filled


@pytest.mark.parametrize("count", [1, 77, 700])
def test_pinned_table(count: int) -> None:
    held, filled = pinned(5000)
    ids = torch.randint(0, 5000, (count, 24), generator=generator(9), device="cuda")
    want = plain_rows.engram_rows(*filled, ids, torch.bfloat16)
    assert_bitwise(held.rows(ids), want)
    held.prefetch(ids)
    assert_bitwise(held.rows(ids), want)
    held.prefetch(ids)
    assert_bitwise(held.rows(ids[:1]), want[:1])  # other rows than were fetched
    loose = torch.zeros(9, 256, dtype=torch.float8_e4m3fn)  # negative control: not page-locked
    assert rows.unsupported(loose, filled[1], ids, want.dtype) is not None


def test_a_step_in_a_graph() -> None:
    """Everything that a decode step has of these, captured once and replayed with other tokens."""
    count = 24
    held, filled = pinned(20000)
    slot, position = places(count, 1)
    layers = engram_layers()
    layers = (layers[0], layers[1] % 800 + 17, layers[2] % 9000)
    classes = torch.zeros(count, dtype=torch.int64, device="cuda")
    rings = torch.full((count, 9), -1, device="cuda")
    held_rows = torch.zeros(count, 7, 2, 512, device="cuda")
    kv, gate = normal(2, count, 512, seed=3)
    some = jobs(count)[:4]

    def step(ring: Tensor, residues: Tensor) -> tuple[Tensor, ...]:
        ids = hashing.engram_ids(History(classes, ring, slot, position), *layers, pad=2)
        wanted = ids[1]
        held.prefetch(wanted)
        latent.latents(some, EPS)
        pooled = compress.compress_ring(Residues(kv, gate, residues, slot, position), 2, kv.dtype)
        seen = window.window_places(slot, position, position * 0, 128, 134)
        return ids, held.rows(wanted), pooled, seen

    step(rings.clone(), held_rows.clone())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(rings, held_rows)
    other_rings, other_rows = rings.clone(), held_rows.clone()
    for turn in range(4):
        classes.copy_(torch.randint(0, 99092, (count,), generator=generator(turn), device="cuda"))
        kv.add_(0.5)
        graph.replay()
        ids = plain_hash.engram_ids(History(classes, other_rings, slot, position), *layers, pad=2)
        pooled = plain_compress.compress_ring(
            Residues(kv, gate, other_rows, slot, position), 2, kv.dtype
        )
        assert_bitwise(found[0], ids)
        assert_bitwise(found[1], plain_rows.engram_rows(*filled, ids[1], torch.bfloat16))
        assert_close(found[2], pooled, "float32 op")
        position.add_(1)
    assert_bitwise(rings, other_rings)
    assert_bitwise(held_rows, other_rows)
