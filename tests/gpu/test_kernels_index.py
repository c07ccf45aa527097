"""Index scores and selections on a device against the plain reference."""

import pytest
import torch
from torch import Tensor

from cedar.ops.index_score import Scan
from cedar.ops.index_score import reference as plain_index
from cedar.ops.select import Place
from cedar.ops.select import reference as plain_select
from cedar.quant import FP4_ROW
from cedar.testing import assert_bitwise
from kernel_cases import IndexCase, index_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.index_score import triton as index
    from cedar.ops.select import triton as select


def near(found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal where nothing is; a product that rounds the other way moves a sum by a unit of it."""
    assert ((found == -torch.inf) == (want == -torch.inf)).all()
    error = (found.double() - want.double()).nan_to_num(0.0).abs()
    limit = (1e-5 if dtype is torch.float32 else 2**-6) * want[want > -torch.inf].abs().max()
    assert error.max() <= limit
    assert error.mean() <= 0.1 * limit


def readable(case: IndexCase, found: Tensor, size: int) -> Tensor:
    """The defined part of columns of ``size`` entries."""
    newest = torch.stack([case.visible_T[case.sequence_T == n].max() for n in case.sequence_T])
    inside = torch.arange(found.shape[1], device="cuda") * size < newest.unsqueeze(1)
    return found.where(inside, -torch.inf)


@pytest.mark.parametrize(
    ("heads", "width", "page", "queries", "dtype"),
    [
        (32, 128, 64, 1, torch.bfloat16),
        (32, 128, 64, 3, torch.bfloat16),
        (32, 128, 64, 6, torch.bfloat16),
        (32, 128, 64, 8, torch.bfloat16),
        (32, 128, 32, 1, torch.bfloat16),
        (32, 128, 48, 6, torch.bfloat16),
        (32, 128, 64, 6, torch.float32),
        (4, 32, 16, 1, torch.bfloat16),
        (3, 64, 8, 6, torch.float32),
    ],
)
def test_index_scan(heads: int, width: int, page: int, queries: int, dtype: torch.dtype) -> None:
    visible = (tuple(range(5000, 5000 + queries)), (), (1,), (0, 7)[:queries], (640,))
    case = index_case(
        seed=1, visible=visible, heads=heads, width=width, page=page, dtype=dtype, device="cuda",
        scales=1,
    )  # fmt: skip
    wide = torch.float64 if dtype is torch.float32 else dtype
    exact = (case.q_TIJ.to(wide), case.w_TI.to(wide), case.keys, case.visible_T)
    for block in (0, 8) if page == 64 else (8, 4):
        options = {"capacity": case.capacity, "queries": queries, "block": block}
        want = plain_index.index_scan(*exact, **options)
        for by_hand in {index._fits_hopper(case.q_TIJ, case.keys, block), False}:
            found = index.index_scan(case.q_TIJ, case.w_TI, *exact[2:], **options, by_hand=by_hand)
            for a, b, size in zip(found[:3], want[:3], (1, block, 8 * block), strict=True):
                if a is not None:
                    near(readable(case, a, size), b, dtype)


def test_a_query_scores_the_same_beside_others() -> None:
    """Every query has products of its own."""
    visible = ((3000, 3001, 3002, 3003, 3004, 3005),)
    case = index_case(
        seed=4, visible=visible, heads=32, width=128, page=64, dtype=torch.bfloat16, device="cuda"
    )
    options = {"capacity": case.capacity, "block": 8}
    many = index.index_scan(case.q_TIJ, case.w_TI, case.keys, case.visible_T, queries=6, **options)
    one = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    for t in range(6):
        part = slice(t, t + 1)
        alone = index.index_scan(
            case.q_TIJ[part], case.w_TI[part], case.keys._replace(first=one),
            case.visible_T[part], queries=1, **options,
        )  # fmt: skip
        assert_bitwise(alone.scores_TS[0, :3000], many.scores_TS[t, :3000])


@pytest.mark.parametrize("queries", [1, 2])
def test_keys_behind_the_newest_do_not_matter(queries: int) -> None:
    """Whatever bytes the last page holds there, of infinite scales, too."""
    case = index_case(
        seed=9, visible=(tuple(range(1300, 1300 + queries)),), heads=32, width=128, page=64,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    last = case.keys.table[0, (1300 + queries - 1) // 64].long()
    raw = case.keys.raw.clone()
    raw[last, (1300 + queries - 1) % 64 :] = 0xFF
    options = {"capacity": case.capacity, "queries": queries, "block": 8}
    want = index.index_scan(case.q_TIJ, case.w_TI, case.keys, case.visible_T, **options)
    keys = case.keys._replace(raw=raw)
    found = index.index_scan(case.q_TIJ, case.w_TI, keys, case.visible_T, **options)
    for a, b, size in zip(found[:3], want[:3], (1, 8, 64), strict=True):
        assert_bitwise(readable(case, a, size), readable(case, b, size))


def test_index_scan_of_blocks_far_apart() -> None:
    """Scales of a key's blocks differ by up to 2^40, those of a head's by 2^12; some are zero."""
    case = index_case(
        seed=7, visible=((1000,), (1, 700)), heads=32, width=128, page=64, dtype=torch.bfloat16,
        device="cuda", scales=20,
    )  # fmt: skip
    g = torch.Generator().manual_seed(8)
    spread = torch.exp2(torch.randint(-6, 7, (3, 32, 4), generator=g).float())
    spread[0, 0] = spread[1, 5, 2] = 0.0
    q = (case.q_TIJ.cpu().float() * spread.repeat_interleave(32, dim=2)).bfloat16().cuda()
    options = {"capacity": case.capacity, "queries": 2, "block": 8}

    def scores(w: Tensor, by_hand: bool) -> Tensor:
        found = index.index_scan(q, w, case.keys, case.visible_T, **options, by_hand=by_hand)
        return readable(case, found.scores_TS, 1).double()

    found, want = scores(case.w_TI, True), scores(case.w_TI, False)
    size = scores(case.w_TI.abs(), False)  # of what is added
    assert ((found == -torch.inf) == (want == -torch.inf)).all()
    # Sums of products are made in another order: a rounding differs here and there.
    error = (found - want).nan_to_num(0.0).abs()
    assert (error <= 2**-6 * size.clamp_min(0.0)).all()
    assert (error > 0).sum() < 0.01 * (want > -torch.inf).sum()


@pytest.mark.parametrize("page", [64, 32])
def test_index_pool(page: int) -> None:
    case = index_case(
        seed=2, visible=((5000,), (300, 301), (0,)), heads=32, width=128, page=page,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    g = torch.Generator().manual_seed(5)
    blocks = torch.randint(-1, 625, (4, 100), generator=g).sort(1).values.cuda()
    rest = (case.keys, case.sequence_T, case.visible_T, blocks, 8)
    want = plain_index.index_pool(case.q_TIJ.double(), case.w_TI.double(), *rest)
    for by_hand in (None, False):
        found = index.index_pool(case.q_TIJ, case.w_TI, *rest, by_hand=by_hand)
        for a, b in zip(found, want, strict=True):
            near(a, b, torch.bfloat16)


def test_index_scan_reads_beyond_two_gibibytes() -> None:
    pages = (1 << 31) // (64 * 68) + 100
    raw = torch.zeros(pages, 64, 68, dtype=torch.uint8, device="cuda")
    case = index_case(
        seed=3, visible=((128,),), heads=32, width=128, page=64, dtype=torch.bfloat16, device="cuda"
    )
    raw[-5:] = case.keys.raw[:5]
    moved = case.keys._replace(raw=raw, table=case.keys.table + (pages - 5))
    options = {"capacity": 128, "queries": 1}
    found = index.index_scan(case.q_TIJ, case.w_TI, moved, case.visible_T, **options)
    want = index.index_scan(case.q_TIJ, case.w_TI, case.keys, case.visible_T, **options)
    assert_bitwise(found.scores_TS, want.scores_TS)
    assert raw.numel() > 2**31
    assert FP4_ROW.bytes_per_row(128) == 68


def rows(seed: int, count: int, width: int, dtype: torch.dtype, *, ties: bool) -> Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(count, width, generator=g, device="cuda")
    x[torch.rand(count, width, generator=g, device="cuda") < 0.1] = -torch.inf
    return ((x * 4).round() if ties else x).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "width", "k"),
    [
        (torch.bfloat16, 100, 512),
        (torch.bfloat16, 16384, 2048),
        (torch.bfloat16, 300000, 2048),
        (torch.bfloat16, (1 << 20) + 9, 512),
        (torch.float16, 20000, 512),
        (torch.float32, 100, 512),
        (torch.float32, 300000, 2048),
    ],
)
def test_select(dtype: torch.dtype, width: int, k: int) -> None:
    for ties in (False, True):
        x = rows(1, 2, width, dtype, ties=ties)
        assert_bitwise(select.select_entries(x, k), plain_select.select_entries(x, k))
        for seen in ((width, width * 2 // 3), (1, 0)):
            visible = torch.tensor(seen, device="cuda")
            found = select.select_entries(x, k, visible)
            assert_bitwise(found, plain_select.select_entries(x, k, visible))
            found = select.select_best(x, visible * 8, 8, k)
            assert_bitwise(found, plain_select.select_best(x, visible * 8, 8, k))


def scanned(x: Tensor, visible: Tensor) -> Scan:
    x = x.masked_fill(torch.arange(x.shape[1], device="cuda") >= visible.unsqueeze(1), -torch.inf)
    best, wide = select.block_maxima(x, 8)
    return Scan(x, best, wide, 8)


@pytest.mark.parametrize("width", [1000, 1 << 17, 1 << 20])
def test_select_scan(width: int) -> None:
    visible = torch.tensor([width, width // 2 + 3, 700, 0], device="cuda")
    table = torch.randperm(4 * -(-width // 32), device="cuda").view(4, -1).int()
    place = Place(table, torch.arange(4, device="cuda"), 32)
    for ties in (False, True):
        scan = scanned(rows(2, 4, width, torch.bfloat16, ties=ties), visible)
        for blocks in (2048, 0):
            found = select.select_scan(scan, visible, 512, blocks=blocks, place=place)
            want = plain_select.select_scan(scan, visible, 512, blocks=blocks, place=place)
            for a, b in zip(found, want, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert_bitwise(a, b)
        assert_bitwise(select.place(found.entries_TK, place), want.rows_TK)


def test_select_pool() -> None:
    blocks = torch.full((3, 2048), -1, device="cuda")
    for t, count in enumerate((2048, 100, 0)):
        blocks[t, :count] = torch.randperm(9000, device="cuda")[:count].sort().values
    table = torch.randperm(3 * 1200, device="cuda").view(3, -1).int()
    place = Place(table, torch.tensor([2, 0, 1], device="cuda"), 64)
    for ties in (False, True):
        x = rows(3, 3, 16384, torch.bfloat16, ties=ties)
        x = x.masked_fill(blocks.repeat_interleave(8, 1) < 0, -torch.inf)
        best = x.unflatten(1, (-1, 8)).amax(2)
        found = select.select_pool(x, best, blocks, 8, 512, place=place)
        want = plain_select.select_pool(x, best, blocks, 8, 512, place=place)
        assert_bitwise(found.entries_TK, want.entries_TK)
        assert_bitwise(found.rows_TK, want.rows_TK)


def test_everything_is_captured_in_a_graph() -> None:
    """A decode step's calls, replayed with another number of visible entries."""
    case = index_case(
        seed=6, visible=((9000,),), heads=32, width=128, page=64, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    place = Place(case.keys.table, case.sequence_T, 64)

    def step(ops: object) -> tuple[Tensor, Tensor, Tensor]:
        scores, choose = ops
        scan = scores.index_scan(
            case.q_TIJ, case.w_TI, case.keys, case.visible_T, capacity=case.capacity, queries=1,
            block=8,
        )  # fmt: skip
        full = choose.select_scan(scan, case.visible_T, 512, blocks=200, place=place)
        pool, best = scores.index_pool(
            case.q_TIJ, case.w_TI, case.keys, case.sequence_T, case.visible_T, full.blocks_TM, 8
        )
        again = choose.select_pool(pool, best, full.blocks_TM, 8, 512, place=place)
        return full.rows_TK, full.blocks_TM, again.rows_TK

    step((index, select))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step((index, select))
    for seen in (9000, 4321, 30):
        case.visible_T.fill_(seen)
        graph.replay()
        for a, b in zip(found, step((index, select)), strict=True):
            assert_bitwise(a, b)
        if seen == 30:
            assert (found[0] >= 0).sum() == seen
