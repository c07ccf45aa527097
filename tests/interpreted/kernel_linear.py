"""Products on packed weights in Triton's interpreter, against dequantised weights in float64."""

import pytest
import torch
from torch import Tensor

from cedar.ops.linear import kernels
from cedar.ops.linear import reference as plain
from cedar.ops.linear import triton as portable
from cedar.ops.linear.kernels import LinearKernels
from cedar.quant import FP4_ROW, FP8_BLOCK, FP8_ROW, BlockFormat, QuantTensor, quantize
from cedar.testing import assert_bitwise
from triton_interpreter import repair

repair()

SIZES = [(1, 64, 96), (5, 32, 32), (17, 200, 160), (70, 96, 72)]  # tokens, rows, channels


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(rows: int, width: int, seed: int = 1) -> QuantTensor:
    """Blocks of very different size."""
    g = torch.Generator().manual_seed(seed)
    spread = torch.exp2(
        torch.randint(-9, 3, (-(-rows // 32), -(-width // 32)), generator=g).float()
    )
    spread = spread.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :width]
    return quantize(normal(rows, width, seed=seed) * spread, FP8_BLOCK)


def near(found: Tensor, want: Tensor, limit: float) -> None:
    assert found.shape == want.shape
    assert float((found.double() - want.double()).norm() / want.double().norm()) < limit


@pytest.mark.parametrize(("tokens", "rows", "width"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product(tokens: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = normal(tokens, width).to(dtype), packed(rows, width)
    limit = 2e-3 if dtype is torch.bfloat16 else 2e-6
    found = portable.product(x, weight, dtype)
    near(found, plain.linear(x.double(), weight), limit)
    near(portable.product(x, weight.dequantize(), dtype), found, limit)
    other = QuantTensor(weight.codes, weight.scale.roll(1, 1), FP8_BLOCK)
    if width > 32:  # negative control: scales of other blocks are seen
        assert float((portable.product(x, other, dtype) - found).norm() / found.norm()) > 0.1


def test_strides_and_poison() -> None:
    """Rows of x far apart, what lies between them and beside the weight never read."""
    wide = torch.full((9, 200), torch.nan)
    wide[:, :96] = normal(9, 96)
    weight = packed(64, 96)
    found = portable.product(wide[:, :96], weight, torch.float32)
    assert_bitwise(found, portable.product(wide[:, :96].contiguous(), weight, torch.float32))
    assert_bitwise(
        found, portable.product(wide.t().contiguous().t()[:, :96], weight, torch.float32)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense(dtype: torch.dtype) -> None:
    for rows, width in ((64, 96), (40, 72)):
        weight = packed(rows, width)
        assert_bitwise(portable.dense(weight, dtype), weight.dequantize(dtype))
    empty = QuantTensor(weight.codes[:0], weight.scale[:0], FP8_BLOCK)
    assert portable.dense(empty, dtype).shape == (0, 72)
    least = packed(32, 32)
    least.scale.zero_()  # 2^-127
    assert_bitwise(portable.dense(least, torch.float32), least.dequantize(torch.float32))


WEIGHTS = (packed(64, 96), normal(32, 96, seed=3), packed(32, 96, seed=4))


@pytest.mark.parametrize("tokens", [0, 1, 6, 40])
@pytest.mark.parametrize("fmt", [None, FP8_ROW])
@pytest.mark.parametrize("normed", [False, True])
def test_project(tokens: int, fmt: BlockFormat | None, normed: bool) -> None:
    x = normal(tokens, 96, seed=5)
    norm = (1 + 0.1 * normal(96, seed=6), 1e-6) if normed else None
    assert kernels.unsupported(x, WEIGHTS, norm) is None
    found = LinearKernels().project(x, WEIGHTS, input_format=fmt, norm=norm)
    want = plain.project(x, WEIGHTS, input_format=fmt, norm=norm)
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_leading_dimensions() -> None:
    op, x = LinearKernels(), normal(2, 3, 96).bfloat16()
    found = op.project(x, WEIGHTS, input_format=FP8_ROW)
    flat = op.project(x.view(6, 96), WEIGHTS, input_format=FP8_ROW)
    for a, b in zip(found, flat, strict=True):
        assert_bitwise(a.flatten(0, 1), b)


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_project_groups(tokens: int) -> None:
    o, weight = normal(tokens, 3, 64), packed(3 * 40, 64)
    found = LinearKernels().project_groups(o, weight)
    torch.testing.assert_close(found, plain.project_groups(o, weight), rtol=1e-4, atol=1e-4)


def test_wide_linear() -> None:
    op, weight = LinearKernels(), normal(40, 72, seed=1).bfloat16()
    x = normal(2, 3, 72).bfloat16()
    found = op.wide_linear(x, weight)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, plain.wide_linear(x, weight), rtol=1e-5, atol=1e-5)
    narrow = op.project(x, (weight,), input_format=None)[0]
    assert not torch.equal(found, narrow.float())  # negative control: a rounding is seen
    wide = normal(3, 72)
    assert_bitwise(op.wide_linear(wide, weight), plain.wide_linear(wide, weight))


def test_what_no_kernel_takes() -> None:
    x = normal(3, 64)
    other = quantize(normal(32, 64), FP4_ROW)
    cases = [
        (x.double(), (packed(32, 64),)),
        (x, (other,)),
        (x, (normal(32, 64).double(),)),
        (x.requires_grad_(), (packed(32, 64),)),
    ]
    for x, weights in cases:
        assert kernels.unsupported(x, weights) is not None
        (found,) = LinearKernels().project(x, weights, input_format=FP8_ROW)
        assert_bitwise(found, plain.project(x, weights, input_format=FP8_ROW)[0])
    with torch.no_grad():
        assert kernels.unsupported(*cases[3]) is None


@pytest.mark.parametrize("fmt", [FP8_ROW, None])
def test_two_products(fmt: BlockFormat | None) -> None:
    """As one after the other, by kernels and by the reference."""
    o, first, second = normal(3, 2, 64).bfloat16(), packed(128, 64), packed(96, 128, seed=2)
    op = LinearKernels()
    (want,) = op.project(op.project_groups(o, first), (second,), input_format=fmt)
    found = op.project_output(o, first, second, input_format=fmt)
    assert_bitwise(found, want)
    near(found, plain.project_output(o.double(), first, second, input_format=fmt), 4e-2)
