"""Products on packed weights on the device, against dequantised weights in float64."""

import pytest
import torch
from torch import Tensor

from cedar.ops.linear import reference as plain
from cedar.quant import FP8_BLOCK, FP8_ROW, QuantTensor, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.linear import kernels
    from cedar.ops.linear.kernels import LinearKernels

ROUNDED = 2.5e-3  # bfloat16 results
WIDE = 2e-6  # float32 results of exact products


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=g, device="cuda").bfloat16()


def packed(rows: int, width: int, seed: int = 1) -> QuantTensor:
    """Blocks of very different size, subnormal codes among them."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    spread = torch.randint(-8, 3, (rows // 32, width // 32), generator=g, device="cuda").float()
    spread = torch.exp2(spread).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return quantize(normal(rows, width, seed=seed).float() ** 3 * spread, FP8_BLOCK)


def error(found: Tensor, want: Tensor) -> float:
    assert found.shape == want.shape
    return float((found.double() - want.double()).norm() / want.double().norm())


def exact(x: Tensor, weight: Tensor | QuantTensor, cast: bool, norm: Tensor | None) -> Tensor:
    """float64 behind the same norm and cast."""
    (ready,) = plain.project(
        x, (torch.eye(x.shape[-1], device="cuda", dtype=x.dtype),),
        input_format=FP8_ROW if cast else None, norm=None if norm is None else (norm, 1e-6),
    )  # fmt: skip
    return plain.linear(ready.double(), weight)


@pytest.mark.parametrize(
    ("width", "rows", "normed", "counts"),
    [
        (1280, (4096, 256), True, (1, 6, 8, 32, 33)),
        (5120, (1280, 512), False, (1, 3, 8, 11, 32, 150)),
        (8192, (512,), False, (2, 8, 32)),
        (2304, (256,), False, (1, 32)),
        (6144, (320,), False, (6,)),
        (96, (64,), True, (1, 5, 32)),
        (32, (32, 96, 64, 32), False, (1, 9)),
        (160, (128, 32), True, (6, 17)),
        (512, (128,), True, (8,)),
    ],
)
def test_project(width: int, rows: tuple[int, ...], normed: bool, counts: tuple[int, ...]) -> None:
    op = LinearKernels()
    weights = tuple(packed(n, width, seed=n + i) for i, n in enumerate(rows))
    norm = 1 + 0.1 * normal(width, seed=9) if normed else None
    options = {"norm": None if norm is None else (norm, 1e-6)}
    for tokens in counts:
        x = normal(tokens, width, seed=tokens)
        found = op.project(x, weights, input_format=FP8_ROW, **options)
        for y, weight in zip(found, weights, strict=True):
            assert y.is_contiguous()
            assert error(y, exact(x, weight, True, norm)) < ROUNDED, tokens
        again = op.project(x, weights, input_format=FP8_ROW, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    x = normal(counts[0], width)
    (other,) = op.project(x, weights[:1], input_format=None, **options)
    assert error(other, exact(x, weights[0], False, norm)) < ROUNDED
    (cast,) = op.project(x, weights[:1], input_format=FP8_ROW, **options)
    assert not torch.equal(other, cast)  # negative control: the cast is seen


def test_other_weights() -> None:
    op = LinearKernels()
    x = normal(6, 256)
    weights = (normal(64, 256, seed=1), packed(96, 256), normal(32, 256, seed=2))
    for fmt in (None, FP8_ROW):
        found = op.project(x, weights, input_format=fmt)
        for y, weight in zip(found, weights, strict=True):
            assert error(y, exact(x, weight, fmt is not None, None)) < ROUNDED
    wide = op.project(x.float(), weights[1:2], input_format=FP8_ROW)[0]
    assert wide.dtype is torch.float32
    assert error(wide, exact(x.float(), weights[1], True, None)) < WIDE
    assert op.project(x[:0], weights, input_format=FP8_ROW)[1].shape == (0, 96)
    shaped = op.project(x.view(2, 3, 256), weights, input_format=FP8_ROW)[0]
    assert torch.equal(shaped.view(6, 64), op.project(x, weights, input_format=FP8_ROW)[0])


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    op = LinearKernels()
    for width, rows, norm in ((1280, 4096, True), (5120, 1280, False)):
        options = {"norm": (1 + 0.1 * normal(width, seed=9), 1e-6) if norm else None}
        weight, x = packed(rows, width), normal(8, width)
        (whole,) = op.project(x, (weight,), input_format=FP8_ROW, **options)
        for tokens in (1, 2, 3, 6):
            (part,) = op.project(x[:tokens], (weight,), input_format=FP8_ROW, **options)
            assert torch.equal(part, whole[:tokens])
        (last,) = op.project(x[7:], (weight,), input_format=FP8_ROW, **options)
        assert torch.equal(last, whole[7:])


@pytest.mark.parametrize(("groups", "width", "rows"), [(8, 4096, 1024), (2, 128, 64), (3, 96, 32)])
def test_project_groups(groups: int, width: int, rows: int) -> None:
    op = LinearKernels()
    weight = packed(groups * rows, width)
    for tokens in (1, 8, 17, 70):
        x = normal(tokens, groups, width, seed=tokens)
        found = op.project_groups(x, weight)
        assert error(found, plain.project_groups(x.double(), weight)) < ROUNDED
        other = op.project_groups(x.roll(1, 1), weight)
        assert error(other, found) > 0.1  # negative control: groups differ


@pytest.mark.parametrize(("width", "rows"), [(5120, 384), (5120, 512), (512, 2560), (160, 32)])
def test_wide_linear(width: int, rows: int) -> None:
    op = LinearKernels()
    weight = normal(rows, width, seed=1)
    for tokens in (1, 8, 20, 128):
        x = normal(tokens, width, seed=tokens)
        found = op.wide_linear(x, weight)
        assert found.dtype is torch.float32
        assert error(found, plain.linear(x.double(), weight.double())) < WIDE
    assert torch.equal(op.wide_linear(x.float(), weight), plain.wide_linear(x.float(), weight))


def test_rows_far_apart_and_unaligned() -> None:
    op = LinearKernels()
    weight = packed(64, 160)
    held = torch.full((9, 400), torch.nan, device="cuda").bfloat16()
    want = op.project(normal(9, 160), (weight,), input_format=FP8_ROW)[0]
    for start in (0, 8, 3):
        x = held[:, start : start + 160]
        x.copy_(normal(9, 160))
        assert torch.equal(op.project(x, (weight,), input_format=FP8_ROW)[0], want)
        held.fill_(torch.nan)


def test_gradients_go_to_the_reference() -> None:
    op = LinearKernels()
    x, weight = normal(4, 64).requires_grad_(), packed(32, 64)
    assert kernels.unsupported(x, (weight,)) == "a gradient is wanted"
    (y,) = op.project(x, (weight,), input_format=FP8_ROW)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert error(grad, weight.dequantize().sum(0).expand(4, 64)) < 1e-2


def test_in_a_graph() -> None:
    op = LinearKernels()
    weights, norm = (packed(1280, 5120), packed(512, 5120)), (1 + 0.1 * normal(5120), 1e-6)
    second, router = packed(5120, 1280), normal(384, 5120, seed=3)
    x = normal(6, 5120)

    def step() -> tuple[Tensor, ...]:
        a, b = op.project(x, weights, input_format=FP8_ROW, norm=norm)
        (c,) = op.project(a, (second,), input_format=FP8_ROW)
        return a, b, c, op.wide_linear(c, router), op.project_groups(c.view(6, 4, 1280), second)

    want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for seed in (0, 1, 2):
        x.copy_(normal(6, 5120, seed=seed))
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        want = step()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_beyond_two_gibibytes() -> None:
    op = LinearKernels()
    rows, width = 450_560, 5120
    codes = torch.zeros(rows, width, dtype=torch.uint8, device="cuda")
    last = packed(64, width)
    codes[-64:] = last.codes.view(torch.uint8)
    scale = torch.full((rows // 32, width // 32), 127, dtype=torch.uint8, device="cuda")
    scale[-2:] = last.scale
    weight = QuantTensor(codes.view(torch.float8_e4m3fn), scale, FP8_BLOCK)
    x = normal(3, width)
    (found,) = op.project(x, (weight,), input_format=FP8_ROW)
    assert not found[:, :-64].any()
    assert error(found[:, -64:], exact(x, last, True, None)) < ROUNDED


@pytest.mark.parametrize("tokens", [1, 8, 9, 32, 40, 100, 128, 129])
@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**10])
def test_one_product_prepares_the_next(tokens: int, scale: float) -> None:
    """Bit for bit both products by themselves; the smallest results meet the least scale."""
    op = LinearKernels()
    first, second = packed(8192, 4096), packed(5120, 8192, seed=2)
    o = normal(tokens, 8, 4096) * scale
    grouped = op.project_groups(o, first)
    (want,) = op.project(grouped, (second,), input_format=FP8_ROW)
    for _ in range(2):
        assert torch.equal(op.project_output(o, first, second, input_format=FP8_ROW), want)
    (other,) = op.project(grouped, (second,), input_format=None)
    assert torch.equal(op.project_output(o, first, second, input_format=None), other)
    assert not torch.equal(other, want)  # negative control
