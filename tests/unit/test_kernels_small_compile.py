"""The small kernels compile for Hopper, without a GPU and without spilled registers."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cedar.ops.cast import triton as cast
from cedar.ops.compress import Residues
from cedar.ops.compress import triton as compress
from cedar.ops.dependent_launch import dependent
from cedar.ops.engram_gate import triton as gate
from cedar.ops.engram_hash import History
from cedar.ops.engram_hash import triton as hashing
from cedar.ops.engram_rows import triton as rows
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write import triton as write
from cedar.ops.latent import Append, InPlace
from cedar.ops.latent import triton as latent
from cedar.ops.mhc import backward_gluon, backward_triton
from cedar.ops.mhc import hopper as mhc_hopper
from cedar.ops.norm import triton as norm
from cedar.ops.rope import triton as rope
from cedar.ops.window import triton as window
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW
from triton_compile import Launch, recorded

WIDTH = 5120
SETTINGS = {"norm_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def wide(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def mhc_launches(
    count: int, width: int = WIDTH, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Launch], list[Launch]]:
    """Portable ones of both passes; and those by hand."""
    x, y = empty(count, 4, width, dtype=dtype), empty(count, width, dtype=dtype)
    values = (
        x, y, wide(count, 4), wide(count, 4, 4), wide(count, 4), wide(24, 4 * width), wide(24),
        wide(3), empty(width, dtype=dtype),
    )  # fmt: skip
    grads = (x, wide(count, 4), wide(count, 4), wide(count, 4, 4), y)
    with recorded(backward_triton) as portable, recorded(backward_gluon, mhc_hopper) as tuned:
        _, _, *saved = backward_triton.MhcStepTraining().forward(SETTINGS, values)
        backward_triton.backward(values, tuple(saved), grads, SETTINGS)
    return list(portable), list(tuned)


@pytest.mark.parametrize(("count", "launches"), [(128, 5), (8192, 2)])
def test_mhc_gradients(count: int, launches: int) -> None:
    """Of many tokens the forward pass is one launch."""
    portable, tuned = mhc_launches(count)
    assert len(portable) == launches
    for launch in portable:
        assert launch.compile().stack == 0, launch.kernel
    assert len(tuned) == (2 if launches == 2 else 1)
    for launch in tuned:
        compiled = launch.compile()
        assert compiled.stack <= 8, launch.kernel
        assert compiled.uses("HMMA", "HGMMA")
        assert 2 * (compiled.shared + 1024) <= 228 << 10  # two share a multiprocessor
        assert not compiled.uses("HFMA3")  # negative control: names are looked up


def test_mhc_gradients_in_float32() -> None:
    portable, tuned = mhc_launches(70, 320, torch.float32)
    assert len(portable) == 6
    assert not tuned
    for launch in portable:
        assert launch.compile().registers > 0, launch.kernel


def small_launches() -> Iterator[Launch]:
    with recorded(cast) as launches:
        for fmt in (FP8_ROW, FP4_MAIN, FP4_ROW):
            cast.cast(empty(64, WIDTH), fmt)
    yield from launches
    index = empty(32, dtype=torch.int64)
    table = empty(32, 20, dtype=torch.int32)
    ring = RowWrite(
        empty(32, 512), empty(9, 192, 528, dtype=torch.uint8), FP8_ROW, None, index, index
    )
    entries = RowWrite(
        empty(32, 512), empty(90, 64, 288, dtype=torch.uint8), FP4_MAIN, table, index, index
    )
    keys = RowWrite(
        empty(32, 128), empty(90, 64, 68, dtype=torch.uint8), FP4_ROW, table, index, index
    )
    with recorded(write) as launches:
        write.kv_write((ring,))
        write.kv_write((entries, keys))
        write.kv_write((ring, entries, keys))
    assert len(launches) == 3
    yield from launches
    rotary = wide(32, 32), wide(32, 32)
    with recorded(latent) as launches:
        for fmt in (None, FP8_ROW, FP4_ROW):
            latent.latent(empty(32, 512), empty(512), 1e-6, rotary, fmt)
        latent.rotate(empty(32, 64, 512), *rotary, inverse=True)
        latent.latent_write(ring, empty(512), 1e-6, rotary)
        reuse = InPlace(empty(32, 64, 512), None, rotary), Append(ring, empty(512), rotary)
        latent.latents(reuse, 1e-6)
        full = Append(entries, None, rotary), Append(keys, empty(128), rotary)
        latent.latents((*reuse, *full), 1e-6)
        latent.latents((*reuse, InPlace(empty(32, 32, 128), None, rotary, FP4_ROW)), 1e-6)
    assert len(launches) == 8
    yield from launches
    with recorded(norm) as launches:
        norm.rms_norm(empty(32, 1280), empty(1280), 1e-6)
        norm.rms_norm(empty(32, WIDTH), empty(WIDTH), 1e-6)
    yield from launches
    with recorded(gate) as launches:
        gate.engram_gate(
            empty(8, 4, WIDTH), empty(8, 4, WIDTH), empty(8, WIDTH), empty(4, WIDTH),
            empty(4, WIDTH), 1e-6, empty(8, dtype=torch.bool),
        )  # fmt: skip
    yield from launches


def packed_table() -> tuple[Tensor, Tensor]:
    packed = empty(99, 264, dtype=torch.uint8)
    return packed[:, :256].view(torch.float8_e4m3fn), packed[:, 256:]


def decode_launches() -> Iterator[Launch]:
    """Rings, look-back, windows and look-up of a decode step."""
    at = empty(32, dtype=torch.int64), empty(32, dtype=torch.int64)
    with recorded(compress) as launches:
        residues = Residues(wide(32, 512), wide(32, 512), wide(9, 7, 2, 512), *at)
        compress.compress_ring(residues, 2, torch.bfloat16)
        compress.compress_ring(residues, 2, torch.bfloat16, empty(512), 1e-20)
    yield from launches
    layers = [empty(*shape, dtype=torch.int64) for shape in ((2, 4), (2, 3, 8), (2, 24))]
    with recorded(hashing) as launches:
        hashing.engram_hash(empty(32, 4, dtype=torch.int64), *(part[0] for part in layers))
        classes = empty(32, dtype=torch.int64)
        history = History(classes, empty(9, 9, dtype=torch.int64), *at)
        hashing.engram_ids(history, *layers, pad=2)
    yield from launches
    with recorded(window) as launches:
        window.window_places(*at, at[1], 128, 134)
    yield from launches
    with recorded(rope) as launches:
        rope.rotary_tables(at[1], wide(3, 32), (0, 0, 1))
    yield from launches
    with recorded(rows) as launches:
        rows.engram_rows(*packed_table(), empty(32, 24, dtype=torch.int64), torch.bfloat16)
    yield from launches


def test_small_kernels() -> None:
    compiled = [(launch, launch.compile()) for launch in small_launches()]
    assert len(compiled) == 17
    for launch, result in compiled:
        assert result.stack == 0, launch.kernel
        assert result.registers <= 128, launch.kernel


def test_decode_kernels() -> None:
    compiled = [(launch, launch.compile()) for launch in decode_launches()]
    assert len(compiled) == 7
    for launch, result in compiled:
        # The exact sine of a large angle keeps the angle's digits in memory.
        assert result.stack == (32 if launch.kernel is rope._tables else 0), launch.kernel
        assert result.registers <= 128, launch.kernel


def test_small_kernels_wait_for_those_before_them() -> None:
    """Each before its first access to memory; see `cedar.ops.dependent_launch`."""
    for launch in (*small_launches(), *decode_launches()):
        names = list(launch.compile().operations)  # as they first occur
        memory = [n for n, name in enumerate(names) if name.startswith(("LDG", "STG"))]
        assert memory, launch.kernel
        assert names.index("ACQBULK") < memory[0], launch.kernel
    # What cannot, and what has many programs, is launched as ever.
    assert not any(dependent(torch.device("cpu")).values())
    with recorded(norm) as launches:
        norm.rms_norm(empty(2000, 512), empty(512), 1e-6)
    assert not launches[0].compile().uses("ACQBULK")


def test_rows_are_looked_up_eight_bytes_at_a_time() -> None:
    """264 bytes apart, they are no better aligned."""
    with recorded(rows) as launches:
        rows.engram_rows(*packed_table(), empty(32, 24, dtype=torch.int64), torch.bfloat16)
    loads = [name for name in launches[0].compile().operations if name.startswith("LDG")]
    assert any(".64" in name for name in loads)
    with recorded(rows) as launches:
        odd = empty(99, 265, dtype=torch.uint8)
        table = odd[:, :256].view(torch.float8_e4m3fn), odd[:, 256:264]
        rows.engram_rows(*table, empty(32, 24, dtype=torch.int64), torch.bfloat16)
    loads = [name for name in launches[0].compile().operations if name.startswith("LDG")]
    assert sum(".64" in name for name in loads) == 1  # negative control: the ids alone
