"""The selection kernels in Triton's interpreter: bit for bit the reference's choice."""

import pytest
import torch

from cedar.ops.select import reference as plain
from cedar.ops.select import triton as kernel
from cedar.testing import assert_bitwise
from triton_interpreter import repair

repair()

INF = torch.inf


def scores(
    seed: int, rows: int, width: int, dtype: torch.dtype, *, ties: bool = False
) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g)
    if ties:
        x = (x * 2).round()
        x[x == 0] = torch.where(torch.rand(int((x == 0).sum()), generator=g) < 0.5, 0.0, -0.0)
    x[torch.rand(rows, width, generator=g) < 0.3] = -INF
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("width", "k"), [(1, 3), (37, 8), (300, 5), (300, 300), (129, 200)])
def test_entries(dtype: torch.dtype, ties: bool, width: int, k: int) -> None:
    x = scores(1, 3, width, dtype, ties=ties)
    assert_bitwise(kernel.select_entries(x, k), plain.select_entries(x, k))


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_levels(limited: bool, ties: bool) -> None:
    """Rows cut into parts, and the parts' best into parts again."""
    x = scores(2, 4, 500, torch.bfloat16, ties=ties)
    visible = torch.tensor([500, 250, 33, 0])
    for k, most in ((7, 64), (20, 128)):
        found = kernel._launch(x, k, visible if limited else None, most=most)
        assert_bitwise(found, plain.select_entries(x, k, visible if limited else None))


@pytest.mark.parametrize("ties", [False, True])
def test_by_groups(ties: bool) -> None:
    """The best groups hold the best columns, in ties too; own maxima or somebody's."""
    x = scores(7, 4, 1003, torch.bfloat16, ties=ties)
    visible = torch.tensor([1003, 500, 33, 0])
    want = plain.select_entries(x, 9, visible)
    poisoned = x.where(torch.arange(1003) < visible.unsqueeze(1), INF)
    for group in (4, 16):
        best = kernel.block_maxima(poisoned, group, visible)
        best = best.where(torch.arange(best.shape[1]) * group < visible.unsqueeze(1), INF)
        groups = kernel._launch(best, 9, visible, block=group, pin=False)
        found = kernel._launch(poisoned, 9, visible, groups_TK=groups, group=group)
        assert_bitwise(found, want)
    whole = kernel.block_maxima(x, 16)
    groups = kernel._launch(whole, 9, None)
    found = kernel._launch(x, 9, None, groups_TK=groups, group=16)
    assert_bitwise(found, plain.select_entries(x, 9))


def test_long_rows_take_the_way_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PART", 128)
    x = scores(8, 2, 700, torch.float32)
    visible = torch.tensor([700, 301])
    assert_bitwise(kernel.select_entries(x, 5, visible), plain.select_entries(x, 5, visible))
    assert_bitwise(kernel.select_entries(x, 5), plain.select_entries(x, 5))
    best = plain.select_best  # somebody's maxima of other groups
    held = torch.nn.functional.pad(x, (0, 4), value=-INF).unflatten(1, (-1, 8)).amax(2)
    assert_bitwise(
        kernel.select_entries(x, 5, visible, best_TM=held, group=8),
        plain.select_entries(x, 5, visible),
    )
    assert_bitwise(kernel.select_best(held, visible, 8, 3), best(held, visible, 8, 3))


def test_what_is_behind_is_not_read() -> None:
    x = scores(3, 3, 500, torch.float32)
    visible = torch.tensor([400, 65, 1])
    poisoned = x.clone()
    for row, seen in zip(poisoned, visible.tolist(), strict=True):
        row[seen:] = INF
    want = plain.select_entries(x, 9, visible)
    assert_bitwise(kernel._launch(poisoned, 9, visible, most=64), want)
    assert not torch.equal(kernel.select_entries(poisoned, 9), want)  # negative control


@pytest.mark.parametrize("block", [1, 4, 5])
def test_blocks(block: int) -> None:
    x = scores(4, 4, 203, torch.bfloat16)
    visible = torch.tensor([203, 150, 1, 0])
    hidden = torch.arange(203) >= visible.unsqueeze(1)
    x = x.masked_fill(hidden, -INF)
    for k in (1, 6, 70):
        want = plain.select_blocks(x, visible, block, k)
        assert_bitwise(kernel.select_blocks(x, visible, block, k), want)
        best = kernel.block_maxima(x, block)
        poisoned = best.masked_fill(
            torch.arange(best.shape[1]) * block >= visible.unsqueeze(1), INF
        )
        assert_bitwise(kernel.select_best(poisoned, visible, block, k), want)
        assert_bitwise(plain.select_best(poisoned, visible, block, k), want)
        for row, seen in zip(want.tolist(), visible.tolist(), strict=True):
            assert seen == 0 or (seen - 1) // block in row


def test_pinned_block_beside_infinities() -> None:
    """A pinned block ties with blocks of +∞; the lower number wins, as in the reference."""
    x = torch.tensor([[INF, INF, 1.0, 2.0, 0.0, 3.0]])
    for visible in (5, 6):
        seen = torch.tensor([visible])
        cut = x.masked_fill(torch.arange(6) >= seen, -INF)
        want = plain.select_blocks(cut, seen, 1, 2)
        assert_bitwise(kernel.select_blocks(cut, seen, 1, 2), want)


def test_nothing_to_select() -> None:
    for x in (torch.empty(3, 0), torch.full((2, 5), -INF), torch.empty(0, 5)):
        assert_bitwise(kernel.select_entries(x, 4), plain.select_entries(x, 4))
    assert kernel.select_entries(torch.randn(2, 3), 0).shape == (2, 0)


def test_rows_apart() -> None:
    x = scores(5, 4, 100, torch.float32)
    apart = torch.full((4, 150), INF)
    apart[:, :100] = x
    assert_bitwise(kernel.select_entries(apart[::2, :100], 9), plain.select_entries(x[::2], 9))


def test_what_it_cannot_take_goes_to_the_reference() -> None:
    x = scores(6, 2, 50, torch.float32)
    assert_bitwise(kernel.select_entries(x.double(), 5), plain.select_entries(x, 5))
    assert_bitwise(kernel.select_entries(x.t().contiguous().t(), 5), plain.select_entries(x, 5))
    assert "at most" in (kernel.unsupported(x, 5000) or "")
