"""The compiled kernels on a device against the plain reference: numbers, strides, large offsets."""

import pytest
import torch

from cedar.ops.index_score import reference as plain_index
from cedar.ops.mhc import MhcMix
from cedar.ops.mhc import reference as plain_mhc
from cedar.ops.select import reference as plain_select
from cedar.ops.sparse_attention import PackedRows, Rows
from cedar.ops.sparse_attention import reference as plain_attention
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW
from cedar.testing import assert_bitwise, assert_close
from kernel_cases import attention_case, index_case, mhc_case, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.index_score import triton as index
    from cedar.ops.mhc.triton import MhcStepKernel
    from cedar.ops.select import triton as select
    from cedar.ops.sparse_attention import triton as attention

SETTINGS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}


def attended(case: tuple, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel over poison, and the reference in float64."""
    q, sources, sink, scale = case
    out = torch.full_like(q, torch.nan)
    attention.launch(q, sources, sink, scale, out, **options)
    exact = tuple(
        Rows(s.rows_RH.double(), s.slots_TK) if isinstance(s, Rows) else s for s in sources
    )
    return out, plain_attention.sparse_attention(q.double(), exact, sink.double(), scale)


def near(found: torch.Tensor, want: torch.Tensor) -> None:
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
def test_attention(heads: int, width: int, kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    case = attention_case(
        seed=1, queries=5, heads=heads, width=width, kinds=kinds, slots=(37, 130)[: len(kinds)],
        rows=300, dtype=dtype, device="cuda", pitch=32,
    )  # fmt: skip
    for splits in (1, 4):
        out, want = attended(case, splits=splits)
        if dtype is torch.float32:
            assert_close(out, want.float(), "float32 op")
        else:
            near(out, want)
        assert (out[0] == 0).all()


def test_attention_at_released_shapes() -> None:
    """Both kernels, both tiles, few and many queries."""
    for queries in (1, 6, 140):
        case = attention_case(
            seed=2, queries=queries, heads=64, width=512, kinds=("window", "main"),
            slots=(128, 512), rows=5000, dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        for options in (
            {},
            {"by_hand": False},
            {"tile": 64, "splits": 3},
            {"tile": 128, "splits": 1, "overlap": True},
            {"tile": 128, "splits": 2},
        ):
            out, want = attended(case, **options)
            near(out, want)


def test_attention_takes_every_code_bit_for_bit() -> None:
    """One slot and a sink far below: the output is the row itself."""
    g = torch.Generator().manual_seed(3)
    for fmt in (FP4_MAIN, FP8_ROW):
        rows = torch.randn(256, 512, generator=g) * torch.exp2(torch.randn(256, 1, generator=g) * 4)
        raw = pack(rows, fmt).cuda()
        slots = torch.arange(256, dtype=torch.int32, device="cuda").unsqueeze(1)
        q = torch.zeros(256, 3, 512, dtype=torch.bfloat16, device="cuda")
        out = torch.full_like(q, torch.nan)
        sink = torch.full((3,), -1e4, device="cuda")
        attention.launch(q, (PackedRows(raw, slots, fmt),), sink, 1.0, out)
        want = plain_attention.unpack_rows(raw, fmt, torch.bfloat16)
        assert_bitwise(out[:, 1] + 0.0, want + 0.0)


def test_attention_reads_beyond_two_gibibytes() -> None:
    rows = (1 << 31) // 288 + 1000
    far = torch.zeros(rows, 288, dtype=torch.uint8, device="cuda")
    g = torch.Generator().manual_seed(4)
    tail = pack(torch.randn(64, 512, generator=g), FP4_MAIN).cuda()
    far[-64:] = tail
    slots = torch.arange(rows - 64, rows, device="cuda", dtype=torch.int32).expand(3, -1)
    q = torch.randn(3, 64, 512, generator=g).bfloat16().cuda()
    sink = torch.zeros(64, device="cuda")
    out = torch.full_like(q, torch.nan)
    attention.launch(q, (PackedRows(far, slots, FP4_MAIN),), sink, 512**-0.5, out)
    here = PackedRows(tail, slots - (rows - 64), FP4_MAIN)
    want = plain_attention.sparse_attention(q.double(), (here,), sink.double(), 512**-0.5)
    near(out, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "width", "page"), [(32, 128, 64), (4, 32, 16), (3, 64, 8)])
def test_index_scan(heads: int, width: int, page: int, dtype: torch.dtype) -> None:
    visible = ((1000, 1001, 1003, 1004, 1005, 1006), (), (1,), (0, 7), (640,))
    case = index_case(
        seed=1, visible=visible, heads=heads, width=width, page=page, dtype=dtype, device="cuda",
        scales=1,
    )  # fmt: skip
    options = {"capacity": case.capacity, "queries": 6, "block": 8}
    inputs = (case.q_TIJ, case.w_TI, case.keys, case.visible_T)
    found, best = index.index_scan(*inputs, **options)
    if heads == 32 and dtype is torch.bfloat16:
        other, other_best = index.index_scan(*inputs, **options, by_hand=False)
        for n, seen in enumerate(case.visible_T.tolist()):
            error = (found[n, :seen].float() - other[n, :seen].float()).abs()
            assert error.max() <= 2**-6 * found[n, :seen].float().abs().max() if seen else True
        assert other_best.shape == best.shape
    if dtype is torch.float32:
        want, want_best = plain_index.index_scan(
            case.q_TIJ.double(), case.w_TI.double(), *inputs[2:], **options
        )
    else:
        want, want_best = plain_index.index_scan(*inputs, **options)
    newest = torch.stack([case.visible_T[case.sequence_T == n].max() for n in case.sequence_T])
    for a, b, size in ((found, want, 1), (best, want_best, 8)):
        inside = torch.arange(a.shape[1], device="cuda") * size < newest.unsqueeze(1)
        a = a.where(inside, -torch.inf)
        assert ((a == -torch.inf) == (b == -torch.inf)).all()
        error = (a.double() - b.double()).nan_to_num(0.0).abs()
        # A product that rounds the other way moves a sum by a unit of the largest product.
        limit = 1e-5 if dtype is torch.float32 else 2**-6
        assert error.max() <= limit * b[b > -torch.inf].abs().max()
        assert error.mean() <= 0.1 * limit * b[b > -torch.inf].abs().max()


def test_index_pool() -> None:
    case = index_case(
        seed=2, visible=((5000,), (300, 301), (0,)), heads=32, width=128, page=64,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    g = torch.Generator().manual_seed(5)
    blocks = torch.randint(-1, 625, (4, 100), generator=g).sort(1).values.cuda()
    rest = (case.keys, case.sequence_T, case.visible_T, blocks, 8)
    want = plain_index.index_pool(case.q_TIJ.double(), case.w_TI.double(), *rest)
    for by_hand in (None, False):
        found = index.index_pool(case.q_TIJ, case.w_TI, *rest, by_hand=by_hand)
        assert ((found == -torch.inf) == (want == -torch.inf)).all()
        error = (found.double() - want).nan_to_num(0.0).abs()
        assert error.max() <= 2**-6 * want[want > -torch.inf].abs().max()


def test_index_scan_reads_beyond_two_gibibytes() -> None:
    pages = (1 << 31) // (64 * 68) + 100
    raw = torch.zeros(pages, 64, 68, dtype=torch.uint8, device="cuda")
    case = index_case(
        seed=3, visible=((128,),), heads=32, width=128, page=64, dtype=torch.bfloat16, device="cuda"
    )
    raw[-5:] = case.keys.raw[:5]
    moved = case.keys._replace(raw=raw, table=case.keys.table + (pages - 5))
    options = {"capacity": 128, "queries": 1}
    found, _ = index.index_scan(case.q_TIJ, case.w_TI, moved, case.visible_T, **options)
    want, _ = index.index_scan(case.q_TIJ, case.w_TI, case.keys, case.visible_T, **options)
    assert_bitwise(found, want)
    assert raw.numel() > 2**31
    assert FP4_ROW.bytes_per_row(128) == 68


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_select(dtype: torch.dtype) -> None:
    g = torch.Generator(device="cuda").manual_seed(1)
    for rows, width, k in ((3, 100, 512), (2, 20000, 512), (1, 300000, 2048), (1, 1 << 20, 512)):
        x = torch.randn(rows, width, generator=g, device="cuda")
        for ties in (False, True):
            y = ((x * 4).round() if ties else x).to(dtype)
            assert_bitwise(select.select_entries(y, k), plain_select.select_entries(y, k))
            seen = torch.full((rows,), width * 2 // 3, device="cuda")
            found = select.select_entries(y, k, seen)
            assert_bitwise(found, plain_select.select_entries(y, k, seen))
            best = select.block_maxima(y, 8, seen)
            found = select.select_entries(y, k, seen, best_TM=best, group=8)
            assert_bitwise(found, plain_select.select_entries(y, k, seen))
            found = select.select_blocks(y, seen * 0 + width, 8, k)
            assert_bitwise(found, plain_select.select_blocks(y, seen * 0 + width, 8, k))


@pytest.mark.parametrize("count", [1, 7, 60, 130, 2100, 8192, 16400])
def test_mhc(count: int) -> None:
    """The update within one rounding; what follows from the streams as the kernel rounded them."""
    case = mhc_case(seed=1, count=count, width=5120, dtype=torch.bfloat16, device="cuda")
    x, (y, mix), pre, parameters, weight = case
    kernel = MhcStepKernel()
    first = None
    for _ in range(2):  # the second launch finds the counters as the first left them
        out, found, h = kernel(*case, **SETTINGS)
        for few in (slice(0, 70), slice(max(0, count - 40), count)):
            cut = MhcMix(*(v[few].double() for v in mix))
            want = plain_mhc.mhc_expand(x[few].double(), y[few].double(), cut)
            assert_close(out[few], want, "bfloat16 op")
            _, want_mix, want_h = plain_mhc.mhc_step(
                out[few].double(), None, pre[few].double(), parameters, weight, **SETTINGS
            )
            near(h[few], want_h)
            for a, b in zip(found, want_mix, strict=True):
                assert (a[few].double() - b).abs().max() < 1e-4
        if first is not None:  # programs that finish in another order change nothing
            for a, b in zip(first, (out, *found, h), strict=True):
                assert_bitwise(a, b)
        first = (out, *found, h)


def test_mhc_coefficients_are_float32_good() -> None:
    """Of equal streams: far better than with bfloat16 weights."""
    x, _, pre, parameters, weight = mhc_case(
        seed=2, count=64, width=5120, dtype=torch.bfloat16, device="cuda"
    )
    _, mix, _ = MhcStepKernel()(x, None, pre, parameters, weight, **SETTINGS)
    exact = plain_mhc.mhc_coefficients(x.double(), *parameters, **SETTINGS)
    rounded = parameters._replace(fn=parameters.fn.bfloat16().float())
    coarse = plain_mhc.mhc_coefficients(x.double(), *rounded, **SETTINGS)
    error = max(float((a - b).abs().max()) for a, b in zip(mix, exact, strict=True))
    control = max(float((a - b).abs().max()) for a, b in zip(coarse, exact, strict=True))
    assert error < 1e-4
    assert control > 5 * error


def test_mhc_in_float32() -> None:
    case = mhc_case(seed=3, count=33, width=200, device="cuda")
    out, mix, h = MhcStepKernel()(*case, **SETTINGS)
    want, want_mix, want_h = plain_mhc.mhc_step(*case, **SETTINGS)
    for found, expected in zip((out, *mix, h), (want, *want_mix, want_h), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
