"""The selection kernels in Triton's interpreter: bit for bit the reference's choice."""

import pytest
import torch

from cedar.ops.index_score import Scan
from cedar.ops.select import Place
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


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps so short and cheap that small rows take several."""
    monkeypatch.setattr(kernel, "_STEP", 128)
    monkeypatch.setattr(kernel, "_MOST", 16)
    monkeypatch.setattr(kernel, "_steps", lambda width, k, levels: (levels, start(width, levels)))


def start(width: int, levels: int) -> int:
    return max(16, 1 << (-(-width // 8 ** (levels - 1)) - 1).bit_length())


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ties", [False, True])
def test_groups_of_groups(dtype: torch.dtype, ties: bool) -> None:
    """The best groups hold the best columns, in ties too; what is behind is not read."""
    x = scores(2, 5, 1003, dtype, ties=ties)
    visible = torch.tensor([1003, 500, 33, 1, 0])
    poisoned = x.where(torch.arange(1003) < visible.unsqueeze(1), INF)
    for k in (1, 9, 16):
        assert_bitwise(kernel.select_entries(x, k), plain.select_entries(x, k))
        want = plain.select_entries(x, k, visible)
        assert_bitwise(kernel.select_entries(poisoned, k, visible), want)
        assert_bitwise(kernel.select_best(poisoned, visible * 8, 8, k),
                       plain.select_best(poisoned, visible * 8, 8, k))  # fmt: skip


def scanned(x: torch.Tensor, visible: torch.Tensor) -> tuple[Scan, Scan]:
    """A scan as a kernel may leave it, poison behind what is visible; and without the poison."""
    x = x.masked_fill(torch.arange(x.shape[1]) >= visible.unsqueeze(1), -INF)
    parts = [x]
    for _ in range(2):
        padded = torch.nn.functional.pad(parts[-1], (0, -parts[-1].shape[1] % 8), value=-INF)
        parts.append(padded.unflatten(1, (-1, 8)).amax(2))
    poisoned = [
        part.where(torch.arange(part.shape[1]) * 8**n < visible.unsqueeze(1), INF)
        for n, part in enumerate(parts)
    ]
    return Scan(*poisoned, 8), Scan(*parts, 8)


def where(queries: int, entries: int, per_page: int) -> Place:
    g = torch.Generator().manual_seed(9)
    pages = -(-entries // per_page)
    table = torch.randperm(3 * pages, generator=g).view(3, pages).int()
    return Place(table, torch.arange(queries) % 3, per_page)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_scans(ties: bool, short: bool, request: pytest.FixtureRequest) -> None:
    """Entries, their rows and candidate blocks in one launch."""
    if short:
        request.getfixturevalue("short_steps")
    x = scores(3, 5, 1003, torch.bfloat16, ties=ties)
    visible = torch.tensor([1003, 700, 33, 1, 0])
    scan, clean = scanned(x, visible)
    for k, blocks, per_page in ((9, 16, 64), (5, 3, 24), (16, 0, 64)):
        place = where(5, 1003, per_page)
        found = kernel.select_scan(scan, visible, k, blocks=blocks, place=place)
        want = plain.select_scan(clean, visible, k, blocks=blocks, place=place)
        assert_bitwise(found.entries_TK, want.entries_TK)
        assert_bitwise(found.rows_TK, want.rows_TK)
        assert found.rows_TK.dtype == torch.int32
        assert (found.blocks_TM is None) == (blocks == 0)
        if blocks:
            assert_bitwise(found.blocks_TM, want.blocks_TM)
        assert kernel.select_scan(scan, visible, k).rows_TK is None


@pytest.mark.parametrize("short", [False, True])
def test_pools(short: bool, request: pytest.FixtureRequest) -> None:
    """Columns of a pool become entries of the sequence, in order."""
    if short:
        request.getfixturevalue("short_steps")
    g = torch.Generator().manual_seed(4)
    blocks = torch.full((4, 30), -1)
    for t, count in enumerate((30, 17, 1, 0)):
        blocks[t, :count] = torch.randperm(90, generator=g)[:count].sort().values
    x = scores(4, 4, 240, torch.bfloat16, ties=True)
    x = x.masked_fill(blocks.repeat_interleave(8, 1) < 0, -INF)
    best = x.unflatten(1, (-1, 8)).amax(2)
    place = where(4, 720, 32)
    for k in (5, 16):
        found = kernel.select_pool(x, best, blocks, 8, k, place=place)
        want = plain.select_pool(x, best, blocks, 8, k, place=place)
        assert_bitwise(found.entries_TK, want.entries_TK)
        assert_bitwise(found.rows_TK, want.rows_TK)
        for row, held in zip(found.entries_TK.tolist(), blocks.tolist(), strict=True):
            assert all(entry < 0 or entry // 8 in held for entry in row)


def test_places() -> None:
    entries = torch.tensor([[0, 63, 64, -1], [5, 100, 101, 719], [-1, -1, -1, -1]])
    for per_page in (64, 24):
        place = where(3, 720, per_page)
        found = kernel.place(entries, place)
        assert_bitwise(found, plain.place(entries, place))
        assert found[1, 3] == place.table[1, 719 // per_page] * per_page + 719 % per_page
    assert kernel.place(entries[:0], where(0, 720, 64)).shape == (0, 4)


def test_what_scans_it_cannot_take_go_to_the_reference() -> None:
    x = scores(5, 2, 100, torch.float32)
    visible = torch.tensor([100, 50])
    _, clean = scanned(x, visible)
    odd = clean._replace(block=4, best_TM=x.unflatten(1, (-1, 4)).amax(2))
    for scan in (odd, Scan(x)):
        found = kernel.select_scan(scan, visible, 5)
        assert_bitwise(found.entries_TK, plain.select_entries(x, 5, visible))
    with pytest.raises(ValueError, match="scan with a block"):
        kernel.select_scan(Scan(x), visible, 5, blocks=2)


def test_what_is_behind_is_not_read() -> None:
    x = scores(3, 3, 500, torch.float32)
    visible = torch.tensor([400, 65, 1])
    poisoned = x.clone()
    for row, seen in zip(poisoned, visible.tolist(), strict=True):
        row[seen:] = INF
    want = plain.select_entries(x, 9, visible)
    assert_bitwise(kernel.select_entries(poisoned, 9, visible), want)
    assert not torch.equal(kernel.select_entries(poisoned, 9), want)  # negative control


@pytest.mark.parametrize("block", [1, 4, 5])
def test_blocks(block: int) -> None:
    x = scores(4, 4, 203, torch.bfloat16)
    visible = torch.tensor([203, 150, 1, 0])
    hidden = torch.arange(203) >= visible.unsqueeze(1)
    x = x.masked_fill(hidden, -INF)
    for k in (1, 6, 70):
        best, _ = kernel.block_maxima(x, block)
        padded = torch.nn.functional.pad(x, (0, -203 % block), value=-INF)
        assert_bitwise(best, padded.unflatten(1, (-1, block)).amax(2))
        want = plain.select_best(best, visible, block, k)
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
        want = plain.select_best(cut, seen, 1, 2)
        assert_bitwise(kernel.select_best(cut, seen, 1, 2), want)


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
