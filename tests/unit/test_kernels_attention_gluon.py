"""The kernel for few queries at decode, computed on a CPU: equal to the reference."""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

from cedar.ops.rope.reference import rotate
from cedar.ops.sparse_attention import PackedRows, Source, shared_gluon, shared_launch
from cedar.ops.sparse_attention import reference as plain
from cedar.ops.sparse_attention.packed_triton import LOG2E
from cedar.ops.sparse_attention.sources import Argument, argument
from cedar.quant import FP4_MAIN, FP8_ROW
from gluon_together import launch
from kernel_cases import attention_case, pack

Case = tuple[Tensor, tuple[Source, ...], Tensor, float]


def case_of(queries: int, heads: int, slots: tuple[int, int]) -> Case:
    return attention_case(
        seed=3, queries=queries, heads=heads, width=512, kinds=("window", "main"), slots=slots,
        rows=300, dtype=torch.bfloat16, pitch=32,
    )  # fmt: skip


def storage(raw: Tensor) -> Tensor:
    """All of the memory that rows lie in."""
    return raw.as_strided((raw.untyped_storage().nbytes(),), (1,), 0)


def counted(items: int) -> Tensor:
    """Counters as launches leave them; after the next one they are beyond int32."""
    return torch.full((items, 32), 2**31 - shared_gluon.ARRIVALS.value, dtype=torch.int32)


def attended(
    case: Case,
    splits: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Poisoned places to work in; each query in use adds one launch to its counter."""
    q, sources, sink, scale = case
    count, heads, width = q.shape
    items = count * heads // 64
    out = torch.full_like(q, torch.nan)
    part = torch.full((items, splits, 64, width), torch.nan, dtype=torch.float16)
    stats = torch.full((items, splits, 2, 64), torch.nan)
    counters = counted(items) if counters is None else counters
    before = counters.clone()
    cos, sin = rotary if rotary is not None else (None, None)
    rows = {}
    for name, source in zip(("near", "far"), sources, strict=True):
        assert isinstance(source, PackedRows)
        rows |= {
            name: storage(source.raw_RB), f"{name}_slots": source.slots_TK,
            f"{name}_stride": source.raw_RB.stride(0),
            f"{name}_slot_stride": source.slots_TK.stride(0),
            f"{name}_width": source.slots_TK.shape[1],
        }  # fmt: skip
    launch(
        shared_gluon.attend, (splits, heads // 64, count), q=q, out=out, part=part, stats=stats,
        counters=counters, sink=sink, cos=cos, sin=sin, **rows, q_stride_T=q.stride(0),
        q_stride_N=q.stride(1), scale=scale * LOG2E, N=heads, SPLITS=splits,
        ROTARY=0 if rotary is None else 64, PDL=True,
    )  # fmt: skip
    before[:items, 0] += shared_gluon.ARRIVALS.value
    assert torch.equal(counters, before)
    return out


def near(found: Tensor, want: Tensor) -> bool:
    return bool((found.double() - want).norm() < 2**-8 * want.norm())


def exact(case: Case) -> Tensor:
    q, sources, sink, scale = case
    return plain.sparse_attention(q.double(), sources, sink.double(), scale)


@pytest.mark.parametrize(
    ("splits", "queries", "heads", "slots"),
    [(4, 2, 64, (128, 512)), (8, 2, 128, (100, 300)), (16, 2, 64, (5, 511))],
)
def test_shares(splits: int, queries: int, heads: int, slots: tuple[int, int]) -> None:
    case = case_of(queries, heads, slots)
    q, *rest = case
    angle = 6 * torch.rand(queries, 32, generator=torch.Generator().manual_seed(4))
    rotary = (angle.cos(), angle.sin())
    found = attended(case, splits)
    assert near(found, exact(case))
    assert (found[0] == 0).all()
    turned = attended(case, splits, rotary)
    apart = attended((rotate(q, *rotary), *rest), splits)
    assert torch.equal(turned, rotate(apart, *rotary, inverse=True))
    assert not near(turned, exact(case))


@pytest.mark.parametrize("digits", [-60, 20])
def test_rows_of_any_size(digits: int) -> None:
    q, (window, main), sink, _ = case_of(2, 64, (128, 512))
    raw = pack(torch.randn(300, 512, generator=torch.Generator().manual_seed(5)), FP8_ROW)
    raw[:, 512:] += digits  # the scales, which are powers of two
    empty = main._replace(slots_TK=torch.full_like(main.slots_TK, -1))
    sources = (PackedRows(raw, window.slots_TK, FP8_ROW), empty)
    case = (q, sources, sink, 2.0**-digits / 32)
    assert near(attended(case, 4), exact(case))


def test_a_far_larger_row_without_weight() -> None:
    """It bounds what float16 has to hold, and leaves enough for the other rows."""
    _, (window, main), _, scale = case_of(2, 64, (128, 512))
    g = torch.Generator().manual_seed(5)
    q = torch.randn(2, 1, 512, generator=g).expand(2, 64, 512).bfloat16().contiguous()
    values = torch.randn(300, 512, generator=g)
    values[7] = -(2.0**20) * q[1, 0].float()  # opposite to the query
    slots = window.slots_TK.clone()
    slots[1, 3] = 7
    empty = main._replace(slots_TK=torch.full_like(main.slots_TK, -1))
    sources = (PackedRows(pack(values, FP8_ROW), slots, FP8_ROW), empty)
    case = (q, sources, torch.full((64,), -1e4), scale)
    assert near(attended(case, 4), exact(case))


def test_launches_of_other_sizes_find_their_counters() -> None:
    """More queries after fewer and the other way round, other numbers of shares, the same ones."""
    counters = counted(4)
    for queries, splits in ((1, 16), (3, 4), (2, 8), (2, 8), (4, 4)):
        case = case_of(queries, 64, (40, 130))
        assert near(attended(case, splits, counters=counters), exact(case))
    assert counters[:, 0].tolist() == [32 * n - 2**31 for n in (4, 3, 1, 0)]


def arguments(
    queries: int, heads: int, slots: tuple[int, int]
) -> tuple[Tensor, Argument, Argument]:
    near, far = (
        PackedRows(
            torch.empty(9, width, dtype=torch.uint8),
            torch.zeros(queries, n, dtype=torch.int32),
            fmt,
        )
        for width, n, fmt in zip((528, 288), slots, (FP8_ROW, FP4_MAIN), strict=True)
    )
    kinds = (argument(source, torch.bfloat16, True) for source in (near, far))
    return torch.empty(queries, heads, 512, dtype=torch.bfloat16, device="meta"), *kinds


@pytest.mark.parametrize(
    ("queries", "splits"),
    [(1, 16), (6, 16), (8, 16), (9, 8), (16, 8), (17, 4), (32, 4), (33, 4), (34, 0)],
)
def test_all_programs_of_a_launch_fit(queries: int, splits: int) -> None:
    given = arguments(queries, 64, (128, 512))
    assert shared_launch.splits_for(*given, 132) == splits
    assert shared_launch.splits_for(*given, 4 * queries) == 4
    assert shared_launch.splits_for(*given, 4 * queries - 1) == 0


def test_other_inputs_are_left_to_other_kernels() -> None:
    for heads, slots in ((80, (128, 512)), (64, (129, 512)), (64, (128, 513))):
        assert shared_launch.splits_for(*arguments(2, heads, slots), 132) == 0
    q, near, far = arguments(2, 64, (128, 512))
    assert shared_launch.splits_for(q, far, near, 132) == 0
    assert shared_launch.splits_for(q, near, argument(None, q.dtype, True), 132) == 0
    # One counter for every 64 heads of a query, wherever there are multiprocessors for all.
    assert shared_launch.splits_for(*arguments(65, 64, (128, 512)), 1000) == 0
