"""The small kernels compile for Hopper, without a GPU and without spilled registers."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cedar.ops.cast import triton as cast
from cedar.ops.engram_gate import triton as gate
from cedar.ops.engram_rows import triton as rows
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write import triton as write
from cedar.ops.latent import triton as latent
from cedar.ops.mhc import backward_gluon, backward_triton
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW
from triton_compile import Launch, recorded

WIDTH = 5120
SETTINGS = {"norm_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def wide(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def mhc_launches(count: int) -> tuple[list[Launch], list[Launch]]:
    """Of both passes; and the large one of the way back."""
    x, y = empty(count, 4, WIDTH), empty(count, WIDTH)
    values = (
        x, y, wide(count, 4), wide(count, 4, 4), wide(count, 4), wide(24, 4 * WIDTH), wide(24),
        wide(3), empty(WIDTH),
    )  # fmt: skip
    grads = (x, wide(count, 4), wide(count, 4), wide(count, 4, 4), y)
    with recorded(backward_triton) as portable, recorded(backward_gluon) as tuned:
        _, _, *saved = backward_triton.MhcStepTraining.forward(SETTINGS, values)
        backward_triton.backward(values, tuple(saved), grads, SETTINGS)
    return list(portable), list(tuned)


def test_mhc_gradients() -> None:
    portable, tuned = mhc_launches(8192)
    assert len(portable) == 6
    for launch in portable:
        # The solver's 8 bytes are two values, kept for the length of a loop.
        assert launch.compile().stack <= 8, launch.kernel
    (large,) = tuned
    compiled = large.compile()
    assert compiled.stack <= 8
    assert compiled.uses("HMMA", "HGMMA")
    assert compiled.shared <= 227 << 10
    assert not compiled.uses("HFMA3")  # negative control: names are looked up


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
    assert len(launches) == 5
    yield from launches
    with recorded(rows) as launches:
        rows.engram_rows(
            empty(99, 256, dtype=torch.float8_e4m3fn), empty(99, 8, dtype=torch.uint8),
            empty(4, 48, dtype=torch.int64), torch.bfloat16,
        )  # fmt: skip
    yield from launches
    with recorded(gate) as launches:
        gate.engram_gate(
            empty(8, 4, WIDTH), empty(8, 4, WIDTH), empty(8, WIDTH), empty(4, WIDTH),
            empty(4, WIDTH), 1e-6, empty(8, dtype=torch.bool),
        )  # fmt: skip
    yield from launches


def test_small_kernels() -> None:
    compiled = [(launch, launch.compile()) for launch in small_launches()]
    assert len(compiled) == 13
    for launch, result in compiled:
        assert result.stack == 0, launch.kernel
        assert result.registers <= 128, launch.kernel
