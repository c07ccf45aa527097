"""Selection: what is kept, in which order, and what happens at ties and edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.ops.select.reference import select_best, select_entries

INF = torch.inf
few = settings(max_examples=80, deadline=None, derandomize=True)


def naive_entries(scores: list[float], k: int) -> list[int]:
    """By sorting: the larger score first, then the smaller number."""
    seen = [i for i, score in enumerate(scores) if score > -INF]
    kept = sorted(sorted(seen, key=lambda i: (-scores[i], i))[:k])
    return kept + [-1] * (k - len(kept))


def naive_blocks(scores: list[float], visible: int, block: int, k: int) -> list[int]:
    best = [max(scores[i : i + block]) for i in range(0, len(scores), block)]
    if visible:
        best[(visible - 1) // block] = INF
    return naive_entries(best, k)


# Few different values, so that ties are everywhere.
scores = st.sampled_from([-INF, -2.0, -0.5, 0.0, 0.5, 1.0, 3.0])


@st.composite
def tables(draw: st.DrawFn) -> list[list[float]]:
    width = draw(st.integers(1, 12))
    return draw(st.lists(st.lists(scores, min_size=width, max_size=width), min_size=1, max_size=4))


def select_blocks(x: Tensor, visible: Tensor, block: int, k: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=-INF)
    return select_best(padded.unflatten(1, (-1, block)).amax(2), visible, block, k)


@few
@given(tables(), st.integers(1, 14))
def test_entries_equal_sorting(table: list[list[float]], k: int) -> None:
    got = select_entries(torch.tensor(table), k)
    assert got.dtype == torch.int64
    assert got.tolist() == [naive_entries(row, k) for row in table]


@few
@given(tables(), st.integers(1, 5), st.integers(1, 6), st.data())
def test_blocks_equal_sorting(
    table: list[list[float]], block: int, k: int, data: st.DataObject
) -> None:
    width = len(table[0])
    visible = [data.draw(st.integers(0, width)) for _ in table]
    for row, count in zip(table, visible, strict=True):
        row[count:] = [-INF] * (width - count)
    got = select_blocks(torch.tensor(table), torch.tensor(visible), block, k)
    want = [naive_blocks(r, n, block, k) for r, n in zip(table, visible, strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_ties_go_to_the_lowest_number(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1000, dtype=dtype)
    assert select_entries(x, 5).tolist() == [[0, 1, 2, 3, 4]]
    x[0, 700] = 1
    assert select_entries(x, 5).tolist() == [[0, 1, 2, 3, 700]]
    # Negative control: torch.topk alone does not promise this order.
    x[0, 900:] = 1
    assert select_entries(x, 50).tolist() == [[700, *range(900, 949)]]


def test_wide_random_scores() -> None:
    x = torch.randn(64, 3000, generator=torch.Generator().manual_seed(0))
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = -INF
    for k in (1, 17, 500, 4000):
        want = torch.tensor([naive_entries(row, k) for row in x.tolist()])
        assert torch.equal(select_entries(x, k), want)


def test_nothing_to_select() -> None:
    assert select_entries(torch.empty(3, 0), 4).tolist() == [[-1] * 4] * 3
    assert select_entries(torch.full((2, 5), -INF), 4).tolist() == [[-1] * 4] * 2
    assert select_entries(torch.empty(0, 5), 4).shape == (0, 4)
    none = torch.zeros(3, dtype=torch.int64)
    assert select_blocks(torch.empty(3, 0), none, 4, 2).tolist() == [[-1, -1]] * 3
    assert select_blocks(torch.full((3, 9), -INF), none, 4, 2).tolist() == [[-1, -1]] * 3


def test_fewer_entries_than_k() -> None:
    x = torch.tensor([[1.0, -INF, 0.5], [-INF, -INF, 2.0]])
    assert select_entries(x, 5).tolist() == [[0, 2, -1, -1, -1], [2, -1, -1, -1, -1]]


def test_the_newest_block_is_pinned() -> None:
    """The worst block stays in the pool if it holds the newest visible entry, and only then."""
    x = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0, 4.0, -9.0]])
    assert select_blocks(x, torch.tensor([7]), 2, 2).tolist() == [[0, 3]]
    x[0, 6] = -INF
    assert select_blocks(x, torch.tensor([6]), 2, 2).tolist() == [[0, 2]]
    assert select_blocks(x, torch.tensor([6]), 2, 1).tolist() == [[2]]
    # Negative control: by score alone the first blocks would win.
    assert select_entries(torch.tensor([[9.0, 7.0, 5.0]]), 2).tolist() == [[0, 1]]


def test_selection_carries_no_gradient() -> None:
    x = torch.randn(2, 6, requires_grad=True)
    visible: Tensor = torch.tensor([6, 6])
    assert not select_entries(x, 3).requires_grad
    assert not select_blocks(x, visible, 2, 2).requires_grad
