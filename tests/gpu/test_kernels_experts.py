"""The experts kernels and the router on the device: equal to the reference, whatever the tile."""

import pytest
import torch

from cedar.ops.experts import reference as plain
from cedar.ops.route import Gating
from cedar.ops.route import reference as plain_route
from cedar.quant import FP4_ROW, FP8_BLOCK, FP8_ROW, QuantTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = {"limit": 10.0, "input_format": FP8_ROW}
Weights = tuple[QuantTensor, QuantTensor, QuantTensor]


def weights(count: int, rows: int, columns: int, seed: int) -> QuantTensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    shape = (count, rows, columns // 2)
    codes = torch.randint(0, 256, shape, generator=g, device="cuda", dtype=torch.uint8)
    shape = (count, rows, columns // 32)
    scale = torch.randint(116, 126, shape, generator=g, device="cuda", dtype=torch.uint8)
    return QuantTensor(codes, scale, FP4_ROW)


def shared_weights(dim: int, inner: int) -> Weights:
    """Every code that is a number, scales as trained weights have them."""
    g = torch.Generator(device="cuda").manual_seed(9)
    found = []
    for rows, columns in ((inner, dim), (dim, inner), (inner, dim)):
        codes = torch.randint(
            0, 127, (rows, columns), generator=g, device="cuda", dtype=torch.uint8
        )
        sign = torch.randint(0, 2, codes.shape, generator=g, device="cuda", dtype=torch.uint8)
        shape = (rows // 32, columns // 32)
        scale = torch.randint(113, 119, shape, generator=g, device="cuda", dtype=torch.uint8)
        codes = (codes | sign << 7).view(torch.float8_e4m3fn)
        found.append(QuantTensor(codes, scale, FP8_BLOCK))
    return found[0], found[1], found[2]


def case(tokens: int, dim: int, inner: int, count: int, active: int) -> tuple:
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


def close(found: torch.Tensor, want: torch.Tensor) -> bool:
    """The order of sums differs, and hidden values on the edge of an FP8 step fall either way."""
    return bool((found.double() - want.double()).norm() < 2e-3 * want.double().norm())


@pytest.mark.parametrize("tokens", [1, 3, 33, 100, 300, 700, 2100])
@pytest.mark.parametrize("kind", ["few", "many", "portable"])
def test_sums(tokens: int, kind: str) -> None:
    from cedar.ops.experts import few, many, triton

    kernel = {"few": few, "many": many, "portable": triton}[kind].experts
    arguments = case(tokens, 256, 384, 16, 3)
    want = plain.experts(*arguments, **OPTIONS)
    found = kernel(*arguments, limit=10.0)
    assert found.dtype == torch.float32
    assert close(found, want)
    x, chosen, *rest = arguments
    other = kernel(x, (chosen + 1) % 16, *rest, limit=10.0)
    assert not close(other, want)  # negative control


@pytest.mark.parametrize("tokens", [1, 6, 40, 100, 900])
def test_with_the_shared_expert(tokens: int) -> None:
    from cedar.ops.experts.packed import experts

    arguments, shared = case(tokens, 512, 256, 16, 3), shared_weights(512, 256)
    want = plain.experts(*arguments, **OPTIONS, shared=shared)
    found = experts(*arguments, **OPTIONS, shared=shared)
    assert found.dtype == torch.bfloat16
    assert close(found, want)
    assert not close(experts(*arguments, **OPTIONS), want)  # negative control
    dense = tuple(w.dequantize(torch.bfloat16) for w in shared)
    assert close(experts(*arguments, **OPTIONS, shared=dense), want)


def test_clamps() -> None:
    from cedar.ops.experts import few, many

    arguments = case(40, 256, 384, 16, 3)
    want = plain.experts(*arguments, limit=0.5, input_format=FP8_ROW)
    assert close(few.experts(*arguments, limit=0.5), want)
    assert close(many.experts(*arguments, limit=0.5), want)
    assert not close(few.experts(*arguments, limit=1.0), want)  # negative control


def test_crowded_experts() -> None:
    """All tokens visit the same experts: tiles are full, and an expert has several."""
    from cedar.ops.experts import few, many

    x, chosen, *rest = case(500, 256, 384, 16, 3)
    chosen = chosen[:1].expand(500, 3)
    want = plain.experts(x, chosen, *rest, **OPTIONS)
    assert close(few.experts(x, chosen, *rest, limit=10.0), want)
    assert close(many.experts(x, chosen, *rest, limit=10.0), want)


@pytest.mark.parametrize("kind", ["few", "many"])
def test_again_bit_for_bit(kind: str) -> None:
    from cedar.ops.experts import few, many

    kernel = {"few": few, "many": many}[kind].experts
    arguments = case(300, 256, 384, 16, 3)
    first = kernel(*arguments, limit=10.0)
    assert torch.equal(first, kernel(*arguments, limit=10.0))


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    from cedar.ops.experts import few

    x, chosen, routing, *w = case(64, 256, 384, 16, 3)
    shared = shared_weights(256, 384)
    whole = few.experts(x, chosen, routing, *w, limit=10.0, shared=shared)
    for count in (1, 5, 30):
        part = few.experts(
            x[:count], chosen[:count], routing[:count], *w, limit=10.0, shared=shared
        )
        assert torch.equal(whole[:count], part)


def test_in_a_graph() -> None:
    """Nothing is read on the host: a replay follows new tokens and new experts."""
    from cedar.ops.experts.packed import experts

    shared = shared_weights(256, 384)
    x, chosen, routing, *w = case(6, 256, 384, 16, 3)
    other = case(7, 256, 384, 16, 3)
    experts(x, chosen, routing, *w, **OPTIONS, shared=shared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, chosen, routing, *w, **OPTIONS, shared=shared)
    for into, new in zip((x, chosen, routing), other[:3], strict=True):
        into.copy_(new[:6])
    graph.replay()
    want = plain.experts(x, chosen, routing, *w, **OPTIONS, shared=shared)
    assert close(out, want)


@pytest.mark.parametrize("kind", ["few", "many"])
def test_weights_beyond_two_gibibytes(kind: str) -> None:
    from cedar.ops.experts import few, many

    arguments = list(case(2, 4096, 2048, 600, 2))
    arguments[1] = torch.tensor([[599, 0], [598, 599]], device="cuda")
    found = {"few": few, "many": many}[kind].experts(*arguments, limit=10.0)
    assert close(found, plain.experts(*arguments, **OPTIONS))


@pytest.mark.parametrize("tokens", [1, 6, 128, 700])
@pytest.mark.parametrize("score_func", ["sqrtsoftplus", "softmax"])
def test_router(tokens: int, score_func: str) -> None:
    from cedar.ops.route import triton

    g = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, 5120, generator=g, device="cuda").bfloat16()
    weight = (torch.randn(384, 5120, generator=g, device="cuda") / 70).bfloat16()
    bias = torch.randn(384, generator=g, device="cuda") * 0.1
    options = {"temp": 1.0, "score_func": score_func, "normalize": True, "route_scale": 2.5}
    found = triton.router(x, weight, bias, 6, **options)
    want = plain_route.router(x, weight, bias, 6, **options)
    torch.testing.assert_close(found.scores_TE, want.scores_TE, rtol=2e-5, atol=1e-7)
    # A choice may differ where two values are as close as the sums' rounding.
    biased = want.scores_TE + bias
    edge = (biased.topk(7).values.diff(dim=1).abs() < 1e-5).any(1)
    assert float(edge.float().mean()) < 0.05
    assert torch.equal(found.experts_TA[~edge], want.experts_TA[~edge])
    torch.testing.assert_close(
        found.weights_TA[~edge], want.weights_TA[~edge], rtol=2e-5, atol=1e-7
    )
    few = triton.router(x[:1], weight, bias, 6, **options)
    assert torch.equal(few.weights_TA, found.weights_TA[:1])
    assert torch.equal(few.experts_TA, found.experts_TA[:1])


def gating(tokens: int, dim: int, count: int) -> Gating:
    g = torch.Generator(device="cuda").manual_seed(tokens)
    weight = (torch.randn(count, dim, generator=g, device="cuda") / dim**0.5).bfloat16()
    bias = torch.randn(tokens, count, generator=g, device="cuda") * 0.1
    return Gating(weight, bias, 3, 1.0, "sqrtsoftplus", True, 2.5)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 32, 60, 64, 65])
@pytest.mark.parametrize("padded", [False, True])
def test_mixture(tokens: int, padded: bool) -> None:
    """Bit for bit what the operations give one after the other, again and again."""
    from cedar.ops.experts.mixture import MixtureKernels
    from cedar.ops.experts.packed import experts
    from cedar.ops.route.triton import router

    dim, inner, count = 4096, 256, 160
    x, _, _, *w = case(tokens, dim, inner, count, 3)
    shared, asked = shared_weights(dim, inner), gating(tokens, dim, count)
    real = None
    if padded:
        g = torch.Generator(device="cuda").manual_seed(tokens)
        real = torch.rand(tokens, generator=g, device="cuda") < 0.6
        real[-1] = tokens == 1  # the last of several stands for no token
    routing = router(x, **asked._asdict(), real_T=real)
    y = experts(x, *routing[:2], *w, **OPTIONS, shared=shared)
    op = MixtureKernels(router, experts)
    for _ in range(20):
        found, also = op.mixture(x, asked, *w, **OPTIONS, shared=shared, real_T=real)
        assert torch.equal(found, y)
        assert all(torch.equal(a, b) for a, b in zip(also, routing, strict=True))
    if padded and tokens > 1:
        other, _ = op.mixture(x, asked, *w, **OPTIONS, shared=shared)
        assert not torch.equal(other, y)  # negative control


def test_mixture_in_a_graph() -> None:
    """A replay follows new tokens, and padding that moves."""
    from cedar.ops.experts.mixture import MixtureKernels
    from cedar.ops.experts.packed import experts
    from cedar.ops.route.triton import router

    dim, inner, count, tokens = 4096, 256, 160, 12
    x, _, _, *w = case(tokens, dim, inner, count, 3)
    shared, asked = shared_weights(dim, inner), gating(tokens, dim, count)
    real = torch.ones(tokens, dtype=torch.bool, device="cuda")
    op = MixtureKernels(router, experts)
    options = {**OPTIONS, "shared": shared, "real_T": real}
    op.mixture(x, asked, *w, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, routing = op.mixture(x, asked, *w, **options)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(tokens, dim, device="cuda"))
        real.copy_(torch.rand(tokens, device="cuda") < 0.6)
        graph.replay()
        want = router(x, **asked._asdict(), real_T=real)
        assert torch.equal(routing.experts_TA, want.experts_TA)
        assert torch.equal(out, experts(x, *want[:2], *w, **OPTIONS, shared=shared))
