"""Sparse attention over packed rows on a device against the plain reference in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.ops.rope.reference import rotate
from cedar.ops.sparse_attention import PackedRows, Rows, Source
from cedar.ops.sparse_attention import reference as plain
from cedar.quant import FP4_MAIN, FP8_ROW
from cedar.testing import assert_bitwise, assert_close
from kernel_cases import attention_case, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.sparse_attention import shared_launch
    from cedar.ops.sparse_attention import triton as attention

    COUNTERS = shared_launch.Counters()
    KERNELS = attention.AttentionKernels()

Case = tuple[Tensor, tuple[Source, ...], Tensor, float]
Rotary = tuple[Tensor, Tensor]


def case_of(**named: object) -> Case:
    named = {
        "seed": 1, "queries": 5, "heads": 64, "width": 512, "kinds": ("window", "main"),
        "slots": (128, 512), "rows": 700, "dtype": torch.bfloat16, "device": "cuda", **named,
    }  # fmt: skip
    return attention_case(**named)  # type: ignore[arg-type]


def angles(queries: int, pairs: int) -> Rotary:
    g = torch.Generator(device="cuda").manual_seed(7)
    angle = 6 * torch.rand(queries, pairs, generator=g, device="cuda")
    return angle.cos(), angle.sin()


def attended(case: Case, rotary: Rotary | None = None, **options: Any) -> Tensor:
    """Two launches over poison that agree bit for bit, whatever finishes first."""
    q, sources, sink, scale = case
    first, second = (torch.full_like(q, torch.nan) for _ in range(2))
    for out in (first, second):
        attention.launch(q, sources, sink, scale, out, rotary, **options)
    assert_bitwise(first, second)
    return first


def shared(case: Case, rotary: Rotary | None = None) -> Tensor:
    """The same of programs that join their shares themselves."""
    return attended(case, rotary, by_hand=True, counters=COUNTERS)


def exact(case: Case) -> Tensor:
    q, sources, sink, scale = case
    wide = tuple(
        Rows(s.rows_RH.double(), s.slots_TK) if isinstance(s, Rows) else s for s in sources
    )
    return plain.sparse_attention(q.double(), wide, sink.double(), scale)


def near(found: Tensor, want: Tensor) -> None:
    """Exponentials and outputs rounded to bfloat16 each once, relative to the largest value."""
    assert found.isfinite().all()
    assert (found.double() - want).abs().max() <= 2**-7 * want.abs().max()
    assert (found.double() - want).norm() <= 2**-8 * want.norm()


@pytest.mark.parametrize(
    ("heads", "width", "kinds", "dtype"),
    [
        (64, 512, ("window", "main"), torch.bfloat16),
        (64, 512, ("values", "main"), torch.bfloat16),
        (128, 512, ("window",), torch.bfloat16),
        (4, 64, ("window", "main"), torch.bfloat16),
        (3, 32, ("window", "main"), torch.bfloat16),
        (5, 96, ("main", "window"), torch.bfloat16),
        (70, 256, ("values", "values"), torch.bfloat16),
        (4, 64, ("window", "main"), torch.float32),
        (16, 128, ("values", "main"), torch.float32),
    ],
)
def test_any_size(heads: int, width: int, kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    case = case_of(
        heads=heads, width=width, kinds=kinds, slots=(37, 130)[: len(kinds)], dtype=dtype, pitch=32
    )
    rotary = angles(5, width // 4 if width < 512 else 32)
    want = exact(case)
    for splits in (1, 4):
        out = attended(case, splits=splits)
        if dtype is torch.float32:
            assert_close(out, want.float(), "float32 op")
        else:
            near(out, want)
        assert (out[0] == 0).all()
        q, *rest = case
        apart = attended((rotate(q, *rotary), *rest), splits=splits)
        assert_bitwise(attended(case, rotary, splits=splits), rotate(apart, *rotary, inverse=True))


@pytest.mark.parametrize("queries", [1, 6, 12, 32, 60, 140, 300])
@pytest.mark.parametrize("kinds", [("window", "main"), ("values", "main"), ("values", "values")])
def test_released_sizes(queries: int, kinds: tuple[str, str]) -> None:
    """Split or not; the rotation is the plain one bit for bit."""
    case = case_of(queries=queries, kinds=kinds)
    out = attended(case, by_hand=True)
    near(out, exact(case))
    rotary = angles(queries, 32)
    q, *rest = case
    apart = attended((rotate(q, *rotary), *rest), by_hand=True)
    turned = attended(case, rotary, by_hand=True)
    assert_bitwise(turned, rotate(apart, *rotary, inverse=True))
    assert (turned != out).any()
    if queries == 6:
        near(attended(case, by_hand=False), exact(case))


@pytest.mark.parametrize(
    ("heads", "kinds", "slots"),
    [
        (80, ("window", "main"), (100, 37)),  # two groups of heads
        (33, ("window", "main"), (1, 70)),
        (64, ("window",), (128,)),
        (64, ("main",), (500,)),
        (64, ("values",), (70,)),
        (128, ("values", "main"), (128, 129)),
    ],
)
@pytest.mark.parametrize("queries", [3, 150])
def test_odd_sizes_at_the_released_width(
    heads: int, kinds: tuple[str, ...], slots: tuple[int, ...], queries: int
) -> None:
    case = case_of(queries=queries, heads=heads, kinds=kinds, slots=slots, pitch=64)
    for splits in (None, 1, 2):
        out = attended(case, splits=splits, by_hand=True)
        near(out, exact(case))
        assert (out[0] == 0).all()


@pytest.mark.parametrize("queries", [1, 6, 8, 9, 16, 17, 32, 33])
def test_few_queries(queries: int) -> None:
    """Every number of shares; which program is last does not matter; the rotation bit for bit."""
    case, rotary = case_of(queries=queries, pitch=64), angles(queries, 32)
    out = shared(case)
    near(out, exact(case))
    q, *rest = case
    turned = shared(case, rotary)
    apart = shared((rotate(q, *rotary), *rest))
    assert_bitwise(turned, rotate(apart, *rotary, inverse=True))
    for _ in range(200):
        assert_bitwise(KERNELS.rotated_attention(*case, rotary), turned)


@pytest.mark.parametrize(
    ("queries", "heads", "slots"),
    [(9, 64, (100, 37)), (3, 128, (1, 300)), (16, 128, (77, 511)), (7, 64, (128, 1))],
)
def test_few_queries_with_empty_slots(queries: int, heads: int, slots: tuple[int, int]) -> None:
    """Some shares have no row at all, the first query none in any."""
    case = case_of(queries=queries, heads=heads, slots=slots, pitch=64)
    out = shared(case)
    near(out, exact(case))
    assert (out[0] == 0).all()
    q, (window, main), sink, scale = case
    for sources in (
        (window._replace(slots_TK=torch.full_like(window.slots_TK, -1)), main),
        (window, main._replace(slots_TK=torch.full_like(main.slots_TK, -1))),
    ):
        near(shared((q, sources, sink, scale)), exact((q, sources, sink, scale)))


def test_few_queries_after_others() -> None:
    """Launches of all sizes, one after the other, each waiting for its own programs only."""
    cases = [case_of(queries=n, seed=n) for n in (33, 1, 16, 6, 32, 8, 17, 9)]
    rotaries = [angles(len(c[0]), 32) for c in cases]
    want = [shared(c, r) for c, r in zip(cases, rotaries, strict=True)]
    for _ in range(50):
        found = [KERNELS.rotated_attention(*c, r) for c, r in zip(cases, rotaries, strict=True)]
        for one, other in zip(found, want, strict=True):
            assert_bitwise(one, other)


def test_few_queries_in_graphs() -> None:
    """Two graphs with launches of several sizes, in turns, and launches between their replays."""
    sizes = ((1, 32, 6), (16, 8, 33))
    cases = [[case_of(queries=n, seed=n) for n in some] for some in sizes]
    want = [[shared(c) for c in some] for some in cases]
    graphs, found = [], []
    for some in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append([KERNELS.sparse_attention(*c) for c in some])
        graphs.append(graph)
    for _ in range(50):
        for graph, outs, values in zip(graphs, found, want, strict=True):
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            for one, other in zip(outs, values, strict=True):
                assert_bitwise(one, other)
        assert_bitwise(KERNELS.sparse_attention(*cases[0][1]), want[0][1])


@pytest.mark.parametrize("digits", [-60, -20, 20])
@pytest.mark.parametrize("queries", [2, 12, 30])
def test_shares_of_any_size(queries: int, digits: int) -> None:
    """What programs leave to each other keeps its precision, however large the rows are."""
    g = torch.Generator().manual_seed(5)
    values = torch.randn(300, 512, generator=g) * torch.exp2(-torch.arange(300.0) % 9).unsqueeze(1)
    raw = pack(values, FP8_ROW).cuda()
    raw[:, 512:] += digits  # the scales, which are powers of two
    q, (window, main), sink, _ = case_of(queries=queries)
    sources = (
        PackedRows(raw, window.slots_TK.clamp(max=299), FP8_ROW),
        main._replace(slots_TK=torch.full_like(main.slots_TK, -1)),
    )
    case = (q, sources, sink, 2.0**-digits / 32)
    near(shared(case), exact(case))


def test_in_a_graph() -> None:
    cases = [case_of(queries=n) for n in (1, 30, 60, 7)]
    rotaries = [angles(len(c[0]), 32) for c in cases]
    for case, rotary in zip(cases, rotaries, strict=True):
        KERNELS.rotated_attention(*case, rotary)
    want = [KERNELS.rotated_attention(*c, r) for c, r in zip(cases, rotaries, strict=True)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [KERNELS.rotated_attention(*c, r) for c, r in zip(cases, rotaries, strict=True)]
    for _ in range(50):
        graph.replay()
    for one, other in zip(found, want, strict=True):
        assert_bitwise(one, other)


def test_long_selections() -> None:
    """More slots than fit in the shared memory of the kernel for decode."""
    case = case_of(queries=2, slots=(128, 2100))
    near(attended(case, by_hand=True), exact(case))
    case = case_of(queries=140, slots=(128, 2100))
    near(attended(case, by_hand=True), exact(case))


def test_all_slots_empty_gives_zeros() -> None:
    for queries in (2, 140):
        q, sources, sink, scale = case_of(queries=queries)
        empty = tuple(s._replace(slots_TK=torch.full_like(s.slots_TK, -1)) for s in sources)
        out = attended((q, empty, sink, scale), angles(queries, 32))
        assert (out == 0).all()


def test_every_code_bit_for_bit() -> None:
    """One slot and a sink far below: the output is the row itself."""
    g = torch.Generator().manual_seed(3)
    for heads in (3, 64):
        for fmt in (FP4_MAIN, FP8_ROW):
            spread = torch.exp2(torch.randn(256, 1, generator=g) * 4)
            raw = pack(torch.randn(256, 512, generator=g) * spread, fmt).cuda()
            slots = torch.arange(256, dtype=torch.int32, device="cuda").unsqueeze(1)
            q = torch.zeros(256, heads, 512, dtype=torch.bfloat16, device="cuda")
            sink = torch.full((heads,), -1e4, device="cuda")
            out = attended((q, (PackedRows(raw, slots, fmt),), sink, 1.0))
            want = plain.unpack_rows(raw, fmt, torch.bfloat16)
            assert_bitwise(out[:, 1] + 0.0, want + 0.0)


def test_rows_beyond_two_gibibytes() -> None:
    rows = (1 << 31) // 288 + 1000
    far = torch.zeros(rows, 288, dtype=torch.uint8, device="cuda")
    g = torch.Generator().manual_seed(4)
    tail = pack(torch.randn(64, 512, generator=g), FP4_MAIN).cuda()
    far[-64:] = tail
    slots = torch.arange(rows - 64, rows, device="cuda").expand(3, -1)
    q = torch.randn(3, 64, 512, generator=g).bfloat16().cuda()
    sink = torch.zeros(64, device="cuda")
    found = attended((q, (PackedRows(far, slots, FP4_MAIN),), sink, 512**-0.5))
    near(found, exact((q, (PackedRows(tail, slots - (rows - 64), FP4_MAIN),), sink, 512**-0.5)))
