"""The portable kernel of index scores of many queries in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from cedar.ops.index_score import prefill
from cedar.ops.index_score import reference as plain
from cedar.quant import FP4_ROW, fake_quantize
from cedar.testing import assert_bitwise, assert_close
from triton_interpreter import repair

repair()

F32, BF16 = torch.float32, torch.bfloat16
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def case(
    visible: list[int], entries: int, heads: int, width: int, dtype: torch.dtype = F32
) -> Inputs:
    """Rows of larger tensors: whole numbers, so all sums are exact in float32."""
    g = torch.Generator().manual_seed(entries)

    def rounded(*shape: int) -> Tensor:
        x = fake_quantize(torch.randn(*shape, generator=g), FP4_ROW) * 16
        return torch.cat((x, torch.full_like(x, torch.nan))).to(dtype)[: shape[0]]

    w = torch.randint(-9, 10, (len(visible), heads + 3), generator=g).to(dtype)
    return (
        rounded(len(visible), heads, width), w[:, :heads], rounded(entries, width),
        torch.tensor(visible),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("visible", "entries", "heads", "width"),
    [
        ([0, 1, 5, 130, 131, 300], 300, 4, 32),
        (list(range(33)), 129, 3, 64),
        ([64], 64, 32, 128),
        ([0, 0], 1, 1, 16),
    ],
)
def test_it_equals_the_reference(
    visible: list[int], entries: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    inputs = case(visible, entries, heads, width, dtype)
    for block in (8, 16, 0):
        found = prefill.index_prefill(*inputs, block=block)
        want = plain.index_prefill(*inputs, block=block)
        for a, b in zip(found[:3], want[:3], strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_bitwise(a, b)


def test_roundings_inside_matter() -> None:
    """Negative control: scores of wider inputs, rounded at the end, are others."""
    inputs = case([50, 60], 60, 4, 32, BF16)
    found = prefill.index_prefill(*inputs).scores_TS
    q, w, keys, visible = inputs
    other = plain.index_prefill(q.float(), w.float(), keys.float(), visible).scores_TS
    assert not torch.equal(found, other.bfloat16())


def test_maxima_are_those_of_the_scores() -> None:
    q, w, keys, visible = case([7, 100, 256], 256, 2, 32)
    scores, best, wide, block = prefill.index_prefill(q, w, keys, visible, block=8)
    assert best is not None
    assert wide is not None
    assert block == 8
    assert_bitwise(best, scores.unflatten(1, (-1, 8)).amax(2))
    assert_bitwise(wide, scores.unflatten(1, (-1, 64)).amax(2))
    assert (best[0, 1:] == -torch.inf).all()


def test_nothing_to_score() -> None:
    q, w, keys, visible = case([3, 4], 9, 2, 32)
    none = prefill.index_prefill(q[:0], w[:0], keys, visible[:0], block=8)
    assert none.scores_TS.shape == (0, 9)
    assert none.best_TM is not None
    assert none.best_TM.shape == (0, 2)
    assert prefill.index_prefill(q, w, keys[:0], visible * 0, block=8).scores_TS.shape == (2, 0)


def test_what_it_cannot_take_goes_to_the_reference() -> None:
    q, w, keys, visible = case([3, 9], 9, 2, 32)
    wide = (q.double(), w.double(), keys.double())
    found = prefill.index_prefill(*wide, visible, block=8)
    assert_close(found.scores_TS, plain.index_prefill(q, w, keys, visible).scores_TS, "float32 op")
    assert "float64" in (prefill.unsupported(*wide) or "")
    assert "gradient" in (prefill.unsupported(q.requires_grad_(), w, keys) or "")
    assert "width 48" in (prefill.unsupported(torch.ones(2, 2, 48), w, torch.ones(9, 48)) or "")
