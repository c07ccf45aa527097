"""Products of few rows are computed as those of four, so that batches change no row."""

import pytest
import torch
import torch.nn.functional as F

from cedar.ops.linear.reference import linear
from cedar.ops.linear.rows import MIN_ROWS, pad_rows, product
from cedar.testing import assert_bitwise


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_few_rows_are_padded(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((rows, 96), (40, 96), (40,)))
    whole = torch.cat((x, torch.zeros(max(MIN_ROWS - rows, 0), 96, dtype=dtype)))
    assert_bitwise(product(x, weight, bias), F.linear(whole, weight, bias)[:rows])
    assert product(x, weight).shape == (rows, 40)
    expected = MIN_ROWS if 0 < rows < MIN_ROWS else rows
    assert pad_rows(x.view(rows, 2, 48)).shape == (expected, 2, 48)


def test_any_leading_shape_and_gradients() -> None:
    x = torch.randn(1, 2, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    assert torch.autograd.gradcheck(product, (x, weight))
