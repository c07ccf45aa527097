"""The index-score kernels in Triton's interpreter against the plain reference."""

import pytest
import torch

from cedar.ops.index_score import Scan
from cedar.ops.index_score import reference as plain
from cedar.ops.index_score import triton as kernel
from cedar.testing import assert_bitwise, assert_close
from kernel_cases import IndexCase, index_case
from triton_interpreter import repair

repair()

VISIBLE = ((130, 131, 140), (), (1,), (0, 7), (64,))
INF = torch.inf


def exact(case: IndexCase) -> IndexCase:
    return case._replace(q_TIJ=case.q_TIJ.double(), w_TI=case.w_TI.double())


def scan(module: object, case: IndexCase, block: int = 0) -> Scan:
    return module.index_scan(  # type: ignore[attr-defined]
        case.q_TIJ, case.w_TI, case.keys, case.visible_T, capacity=case.capacity,
        queries=max(case.keys.first.diff().tolist(), default=0), block=block,
    )  # fmt: skip


def readable(case: IndexCase, scores: torch.Tensor, block: int = 1) -> torch.Tensor:
    """The defined part: columns below what the newest token of the sequence sees."""
    newest = torch.stack([case.visible_T[case.sequence_T == n].max() for n in case.sequence_T])
    columns = torch.arange(scores.shape[1]) * block
    return scores.where(columns < newest.unsqueeze(1), -INF)


@pytest.mark.parametrize(("heads", "width", "page"), [(4, 32, 16), (3, 64, 8), (32, 128, 64)])
def test_scan_equals_the_reference(heads: int, width: int, page: int) -> None:
    case = index_case(seed=1, visible=VISIBLE, heads=heads, width=width, page=page, scales=1)
    found, best, wide, _ = scan(kernel, case, block=8)
    want, want_best, want_wide, _ = scan(plain, exact(case), block=8)
    assert_close(readable(case, found), want.float(), "float32 op")
    assert_close(readable(case, best, 8), want_best.float(), "float32 op")
    assert_close(readable(case, wide, 64), want_wide.float(), "float32 op")
    assert (want > -INF).sum() == case.visible_T.sum()


def test_a_query_scores_its_own_sequence() -> None:
    """Negative control for the page table: exchanged tables give other scores."""
    case = index_case(seed=2, visible=((40,), (40,)), heads=4, width=32, page=8)
    found = scan(kernel, case).scores_TS
    swapped = case._replace(keys=case.keys._replace(table=case.keys.table.flip(0)))
    other = scan(kernel, swapped).scores_TS
    assert (readable(case, found)[:, :40] != readable(case, other)[:, :40]).all()


def test_bfloat16_rounds_as_the_reference() -> None:
    """All sums of products are exact in float32 here, so every rounding must agree bit for bit."""
    case = index_case(
        seed=3,
        visible=((50,), (20, 33)),
        heads=4,
        width=32,
        page=16,
        dtype=torch.bfloat16,
        scales=0,
    )
    found = scan(kernel, case).scores_TS
    want = scan(plain, case).scores_TS
    assert_bitwise(readable(case, found), want)
    wide = scan(plain, case._replace(q_TIJ=case.q_TIJ.float(), w_TI=case.w_TI.float())).scores_TS
    assert not torch.equal(wide.bfloat16(), want)  # the roundings inside do matter


def test_extreme_scales_of_one_key() -> None:
    """Blocks of a key whose scales are 2^100 apart."""
    case = index_case(seed=4, visible=((9,),), heads=2, width=64, page=16)
    raw = case.keys.raw.clone()
    raw[..., -2], raw[..., -1] = 100, 200
    case = case._replace(keys=case.keys._replace(raw=raw))
    found = scan(kernel, case).scores_TS
    want = scan(plain, exact(case)).scores_TS
    assert_close(readable(case, found), want.float(), "float32 op")
    assert found[0, :9].abs().max() > 2.0**60


@pytest.mark.parametrize(("heads", "width", "page"), [(4, 32, 8), (32, 128, 64)])
def test_pool_equals_the_reference(heads: int, width: int, page: int) -> None:
    case = index_case(seed=5, visible=((150, 151), (3,), (0,)), heads=heads, width=width, page=page)
    g = torch.Generator().manual_seed(6)
    blocks = torch.full((4, 5), -1)
    for t, seen in enumerate(case.visible_T.tolist()):
        there = torch.randperm(-(-seen // 8), generator=g)[:4].sort().values
        blocks[t, : len(there)] = there
    # A block may be behind what the query sees, and a pool may begin with absent blocks.
    blocks[1] = torch.tensor([-1, 2, -1, 18, 17])
    rest = (case.sequence_T, case.visible_T, blocks, 8)
    found, best = kernel.index_pool(case.q_TIJ, case.w_TI, case.keys, *rest)
    want, want_best = plain.index_pool(case.q_TIJ.double(), case.w_TI.double(), case.keys, *rest)
    assert_close(found, want.float(), "float32 op")
    assert_close(best, want_best.float(), "float32 op")
    assert (found > -INF).any()
    # The same entries score the same in a scan.
    whole = scan(kernel, case).scores_TS
    entries = (blocks[0].unsqueeze(1) * 8 + torch.arange(8)).flatten()
    inside = (entries >= 0) & (entries < 150)
    assert_close(found[0][inside], whole[0][entries[inside]], "float32 op")


def test_nothing_to_score() -> None:
    case = index_case(seed=7, visible=((5,),), heads=4, width=32, page=8)
    found, best = kernel.index_pool(
        case.q_TIJ, case.w_TI, case.keys, case.sequence_T, case.visible_T, torch.full((1, 3), -1), 8
    )
    assert (found == -INF).all()
    assert (best == -INF).all()
    found, best = kernel.index_pool(
        case.q_TIJ[:0], case.w_TI[:0], case.keys, case.sequence_T[:0], case.visible_T[:0],
        torch.empty(0, 3, dtype=torch.int64), 8,
    )  # fmt: skip
    assert found.shape == (0, 24)
    assert best.shape == (0, 3)


def test_what_it_cannot_take_goes_to_the_reference() -> None:
    case = index_case(seed=8, visible=(tuple(range(20, 29)),), heads=2, width=32, page=8)
    found = scan(kernel, case).scores_TS  # nine queries
    want = scan(plain, case).scores_TS
    assert_bitwise(found, want)
    assert "float64" in (kernel.unsupported(case.q_TIJ.double(), case.keys) or "")
