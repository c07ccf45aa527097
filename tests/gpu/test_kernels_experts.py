"""The experts kernels on the device: equal to the reference, whatever the tile."""

import pytest
import torch

from cedar.ops.experts import reference as plain
from cedar.quant import FP4_ROW, FP8_ROW, QuantTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = {"limit": 10.0, "input_format": FP8_ROW}


def weights(count: int, rows: int, columns: int, seed: int) -> QuantTensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    shape = (count, rows, columns // 2)
    codes = torch.randint(0, 256, shape, generator=g, device="cuda", dtype=torch.uint8)
    shape = (count, rows, columns // 32)
    scale = torch.randint(116, 126, shape, generator=g, device="cuda", dtype=torch.uint8)
    return QuantTensor(codes, scale, FP4_ROW)


def case(
    tokens: int, dim: int, inner: int, count: int, active: int
) -> tuple[torch.Tensor | QuantTensor, ...]:
    g = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, dim, generator=g, device="cuda").bfloat16()
    scores = torch.rand(tokens, count, generator=g, device="cuda")
    routing = torch.rand(tokens, active, generator=g, device="cuda")
    w = (
        weights(count, inner, dim, 1),
        weights(count, dim, inner, 2),
        weights(count, inner, dim, 3),
    )
    return x, scores.topk(active, dim=1).indices, routing, *w


@pytest.mark.parametrize("tokens", [1, 3, 33, 100, 700, 2100])
@pytest.mark.parametrize("portable", [False, True])
def test_sums(tokens: int, portable: bool) -> None:
    from cedar.ops.experts import gluon, triton

    arguments = case(tokens, 256, 384, 16, 3)
    want = plain.experts(*arguments, **OPTIONS)
    kernel = triton.experts if portable else gluon.experts
    found = kernel(*arguments, **OPTIONS)
    # The order of sums differs, and hidden values on the edge of an FP8 step fall either way.
    assert float((found - want).norm() / want.norm()) < 2e-3
    x, chosen, *rest = arguments
    other = kernel(x, (chosen + 1) % 16, *rest, **OPTIONS)
    assert float((other - want).norm() / want.norm()) > 0.1  # negative control


def test_again_bit_for_bit() -> None:
    from cedar.ops.experts import gluon

    arguments = case(300, 256, 384, 16, 3)
    first = gluon.experts(*arguments, **OPTIONS)
    assert torch.equal(first, gluon.experts(*arguments, **OPTIONS))


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    from cedar.ops.experts import gluon

    x, chosen, routing, *w = case(64, 256, 384, 16, 3)
    whole = gluon.experts(x, chosen, routing, *w, **OPTIONS)
    part = gluon.experts(x[:5], chosen[:5], routing[:5], *w, **OPTIONS)
    # 64 tokens and 5 have the same tile of 16.
    assert torch.equal(whole[:5], part)


def test_weights_beyond_two_gibibytes() -> None:
    from cedar.ops.experts import gluon

    arguments = list(case(2, 4096, 2048, 600, 2))
    arguments[1] = torch.tensor([[599, 0], [598, 599]], device="cuda")
    found, want = gluon.experts(*arguments, **OPTIONS), plain.experts(*arguments, **OPTIONS)
    assert float((found - want).norm() / want.norm()) < 2e-3
