"""Sparse attention over packed rows compiled for Hopper: registers, spills, instructions."""

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels; this process interprets them", allow_module_level=True)

from cedar.ops.sparse_attention import (  # noqa: E402
    PackedRows,
    Rows,
    Source,
    packed_gluon,
    packed_triton,
    shared_gluon,
    shared_launch,
    window_gluon,
)
from cedar.ops.sparse_attention import triton as attention  # noqa: E402
from cedar.quant import FP4_MAIN, FP8_ROW  # noqa: E402
from triton_compile import Compiled, recorded  # noqa: E402


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of which only the number of multiprocessors is asked."""
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(
    queries: int,
    heads: int = 64,
    width: int = 512,
    *,
    window: str = "packed",
    rotated: bool = True,
    by_hand: bool = True,
    counters: shared_launch.Counters | None = None,
) -> list[Compiled]:
    """What a call launches, compiled; ``rotated`` by the last 64 channels, or all."""

    def slots(count: int) -> Tensor:
        return empty(queries, count, dtype=torch.int32)

    near: Source = Rows(empty(4096, width), slots(128))
    if window == "packed":
        near = PackedRows(empty(4096, width * 33 // 32, dtype=torch.uint8), slots(128), FP8_ROW)
    far = PackedRows(empty(4096, width * 9 // 16, dtype=torch.uint8), slots(512), FP4_MAIN)
    angles = empty(queries, min(64, width) // 2, dtype=torch.float32)
    q = empty(queries, heads, width)
    with recorded(packed_triton, packed_gluon, shared_gluon, window_gluon) as launches:
        attention.launch(
            q, (near, far), empty(heads, dtype=torch.float32), 0.05, empty(*q.shape),
            (angles, angles) if rotated else None, by_hand=by_hand,
            counters=counters,
        )  # fmt: skip
    return [launch.compile() for launch in launches]


def counted(kernel: Compiled, *names: str) -> int:
    """Instructions whose name begins with one of ``names``."""
    return sum(n for name, n in kernel.operations.items() if name.startswith(names))


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("queries", [128, 32])
def test_decode_at_the_released_shape(queries: int, rotated: bool) -> None:
    """A loop for the window and one for main KV, each with its 32 products for the scores."""
    kernel, *combine = compiled(queries, rotated=rotated)
    assert kernel.shared <= 227 << 10
    products = counted(kernel, "HGMMA")
    assert products == (96 if queries == 128 else 80)
    assert len(combine) == (0 if queries == 128 else 1)
    for part in (kernel, *combine):
        assert not part.uses("LDL", "STL")
        assert part.stack == 0


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("queries", "tiles", "rows"), [(32, 2, 160), (12, 1, 96), (8, 1, 64)])
def test_few_queries_at_the_released_shape(
    queries: int, tiles: int, rows: int, rotated: bool
) -> None:
    """One launch: 32 products for the scores of each tile, one of the output for 16 rows."""
    (kernel,) = compiled(queries, rotated=rotated, counters=shared_launch.Counters())
    assert kernel.shared <= 227 << 10
    assert kernel.stack == 0
    assert not kernel.uses("LDL", "STL")
    assert not kernel.overwritten
    # Of the output: two groups of warps, each in two parts.
    assert counted(kernel, "HGMMA") == 32 * (1 + tiles) + 4 * rows // 16
    assert kernel.uses("LDG.E.128")
    assert kernel.uses("STG.E.128")
    # Each of two groups adds once to what all wait for, with all before it written; what it reads
    # afterwards does not come from before: two releases, two acquires.
    assert counted(kernel, "REDG", "ATOMG") == counted(kernel, "MEMBAR.ALL.GPU") == 2
    assert counted(kernel, "CCTL.IVALL") == 2


@pytest.mark.parametrize("rotated", [True, False])
def test_prefill_at_the_released_shape(rotated: bool) -> None:
    """Each group of warps: 32 products for the scores of a tile, 8 for its half of the output."""
    (kernel,) = compiled(4096, window="values", rotated=rotated)
    assert kernel.shared <= 227 << 10
    # The scores of a query's first tile, and of the others; the last tile's output is apart.
    products = counted(kernel, "HGMMA")
    assert products == 2 * (2 * 32 + 2 * 8)
    assert kernel.uses("LDG.E.128")
    # Products run on while warps do something else: nobody waits after each of them.
    assert kernel.operations["WARPGROUP.DEPBAR.LE"] <= 8
    # With a rotation, some words that the unpacking warps need once a query are kept in memory.
    assert kernel.stack <= (64 if rotated else 0)


def test_portable() -> None:
    for kernel in compiled(5, heads=4, width=64, by_hand=False):
        assert kernel.stack == 0
    main, combine = compiled(1, heads=4, width=64, by_hand=False)
    assert main.uses("HMMA", "HGMMA")
    assert combine.stack == 0


def test_a_spill_would_be_seen() -> None:
    """Negative control: the portable kernel at the released shape does spill."""
    main, *_ = compiled(128, by_hand=False)
    assert main.stack > 0
    assert main.uses("LDL")
