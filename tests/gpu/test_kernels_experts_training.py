"""Experts for training on the device: forward and every gradient against the reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cedar.ops.experts import reference as plain
from cedar.quant import FP4_ROW, FP8_ROW
from cedar.testing import assert_bitwise
from trained_experts import TrainedExperts, gradients, reference, trained_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.experts import training

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _poison() -> None:
    """What is allocated next holds NaN."""
    torch.full((1 << 28,), torch.nan, device="cuda")


def distance(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


def assert_good(found: list[Tensor], want: list[Tensor], exact: list[Tensor]) -> None:
    """No further from float64 than plain PyTorch is, up to the order of sums."""
    for a, b, c in zip(found, want, exact, strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) <= 8e-3
        assert distance(a, c) <= 1.1 * distance(b, c) + 1e-6


@pytest.mark.parametrize("limit", [10.0, 0.7])
@pytest.mark.parametrize(
    ("tokens", "dim", "inner", "count", "active", "dtype", "shared"),
    [
        (1, 512, 256, 4, 2, F32, True),
        (5, 200, 136, 9, 3, BF16, False),
        (333, 128, 96, 8, 2, F32, True),
        (3000, 512, 256, 16, 2, F32, True),
        (2000, 512, 256, 64, 6, BF16, False),
        (700, 1040, 784, 3, 2, BF16, True),
        (300, 5120, 2304, 4, 2, BF16, True),
    ],
)
def test_equals_the_reference(
    tokens: int, dim: int, inner: int, count: int, active: int, dtype: torch.dtype, shared: bool,
    limit: float,
) -> None:  # fmt: skip
    case = trained_experts(
        tokens, dim, inner, count, active, dtype=dtype, shared=shared, device="cuda"
    )
    found = gradients(training.dense_experts, case, limit)
    exact = gradients(reference, case.double(), limit)
    assert_good(found, gradients(reference, case, limit), exact)
    other = TrainedExperts((case.experts_TA + 1) % count, case.inputs, case.grad_TD)
    wrong = gradients(training.dense_experts, other, limit)
    assert distance(wrong[0], exact[0]) > 0.1  # negative control


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_weight_gradients_by_hand(dtype: torch.dtype, pair: bool, splits: int) -> None:
    g = torch.Generator(device="cuda").manual_seed(splits)
    first_E1 = torch.tensor([0, 64, 64, 640, 4736, 4800], dtype=torch.int32, device="cuda")
    rows = [
        torch.randn(4800, width, generator=g, device="cuda").bfloat16() for width in (256, 256, 136)
    ]
    left = (rows[0], rows[1] if pair else None)
    found, want = (
        training.weight_gradients(left, rows[2], first_E1, dtype, splits=splits, by_hand=by_hand)
        for by_hand in (True, False)
    )
    first = first_E1.tolist()
    for place, (a, b) in enumerate(zip(found, want, strict=True)):
        assert_bitwise(a, b)
        for expert in range(5):
            own = slice(first[expert], first[expert + 1])
            exact = rows[place][own].double().T @ rows[2][own].double()
            limit = 1e-5 if dtype == F32 else 4e-3
            assert (a[expert].double() - exact).norm() <= limit * exact.norm()


def test_the_same_every_time() -> None:
    case = trained_experts(3000, 512, 256, 16, 4, shared=True, device="cuda")
    first = gradients(training.dense_experts, case, 10.0)
    torch.full((1 << 28,), torch.nan, device="cuda")
    for a, b in zip(first, gradients(training.dense_experts, case, 10.0), strict=True):
        assert_bitwise(a, b)


def test_a_token_does_not_depend_on_the_others() -> None:
    case = trained_experts(900, 512, 256, 8, 3, device="cuda")
    x, routing, *weights = case.inputs
    few = TrainedExperts(case.experts_TA[:70], (x[:70], routing[:70], *weights), case.grad_TD[:70])
    all_of_them = gradients(training.dense_experts, case, 10.0)[:3]
    for a, b in zip(gradients(training.dense_experts, few, 10.0)[:3], all_of_them, strict=True):
        assert_bitwise(a, b[:70])


def test_checkpointing_and_accumulation() -> None:
    case = trained_experts(500, 256, 128, 8, 2, shared=True, device="cuda")
    want = gradients(training.dense_experts, case, 10.0)[1:]
    inputs = [v.detach().requires_grad_() for v in case.inputs]

    def layer(x: Tensor, routing: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *shared: Tensor):
        return training.dense_experts(
            x, case.experts_TA, routing, w1, w2, w3, limit=10.0, shared=(*shared,)
        )

    for _ in range(2):
        checkpoint(layer, *inputs, use_reentrant=False).backward(case.grad_TD)
    for found, gradient in zip(inputs, want, strict=True):
        assert found.grad is not None
        assert distance(found.grad, 2 * gradient) < 1e-6


def test_strides() -> None:
    case = trained_experts(200, 256, 128, 8, 2, device="cuda")
    want = gradients(training.dense_experts, case, 10.0)
    x, routing, *weights = case.inputs

    def spread(v: Tensor) -> Tensor:
        return torch.stack((v, v), 1)[:, 0]

    apart = TrainedExperts(
        spread(case.experts_TA), (spread(x), spread(routing), *weights), spread(case.grad_TD)
    )
    for a, b in zip(gradients(training.dense_experts, apart, 10.0), want, strict=True):
        assert_bitwise(a, b)


def test_in_a_graph() -> None:
    """Nothing is read on the host, so a recorded pass serves other choices."""
    first = trained_experts(500, 256, 128, 8, 2, device="cuda")
    second = trained_experts(501, 256, 128, 8, 2, device="cuda")
    inputs = [v.detach().clone().requires_grad_() for v in first.inputs]
    chosen, grad = first.experts_TA.clone(), first.grad_TD.clone()

    def step() -> list[Tensor]:
        x, routing, *weights = inputs
        out = training.dense_experts(x, chosen, routing, *weights, limit=10.0)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.float())]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    chosen.copy_(second.experts_TA[:500])
    grad.copy_(second.grad_TD[:500])
    with torch.no_grad():
        for place, value in zip(inputs, second.inputs, strict=True):
            place.copy_(value[: len(place)])
    graph.replay()
    x, routing, *weights = second.inputs
    case = TrainedExperts(chosen, (x[:500], routing[:500], *weights), grad)
    for a, b in zip(found, gradients(training.dense_experts, case, 10.0), strict=True):
        assert_bitwise(a, b)


def _last(function: Callable[..., Tensor], case: TrainedExperts, count: int) -> list[Tensor]:
    x, routing, *weights = case.inputs
    part = TrainedExperts(
        case.experts_TA[-count:], (x[-count:], routing[-count:], *weights), case.grad_TD[-count:]
    )
    return [v[-count:] for v in gradients(function, part, 10.0)[:3]]


def test_positions_beyond_two_to_the_31() -> None:
    tokens = 70016
    case = trained_experts(tokens, 5120, 64, 8, 6, dtype=BF16, device="cuda")
    assert tokens * 6 * 5120 > 1 << 31
    found = [v[-100:] for v in gradients(training.dense_experts, case, 10.0)[:3]]
    for a, b in zip(found, _last(reference, case, 100), strict=True):
        assert distance(a, b) < 8e-3


@pytest.mark.parametrize("shape", [(140, 64, 96, 3, 2), (300, 1024, 768, 3, 2)])
def test_inputs_through_fp8(shape: tuple[int, ...]) -> None:
    case = trained_experts(*shape, shared=True, device="cuda")
    want = gradients(reference, case, 1.0, quantise=True)
    for a, b in zip(gradients(training.dense_experts, case, 1.0, quantise=True), want, strict=True):
        # A rounded hidden value may fall on the other side of an FP8 step.
        assert distance(a, b) <= 8e-3
    assert distance(gradients(training.dense_experts, case, 1.0)[0], want[0]) > 1e-2


def test_the_operation() -> None:
    case = trained_experts(50, 128, 64, 4, 2, device="cuda")
    x, routing, *weights = case.inputs
    options = {"limit": 10.0, "input_format": None}
    found = training.experts(x, case.experts_TA, routing, *weights, **options)
    want = training.dense_experts(x, case.experts_TA, routing, *weights, limit=10.0)
    assert_bitwise(found, want)
    # float32 goes to the reference.
    found = training.experts(x.float(), case.experts_TA, routing, *weights, **options)
    assert_bitwise(found, plain.experts(x.float(), case.experts_TA, routing, *weights, **options))


def test_what_is_not_taken() -> None:
    x = torch.randn(3, 64, device="cuda")
    w1, w2 = torch.randn(2, 32, 64, device="cuda"), torch.randn(2, 64, 32, device="cuda")
    w = (w1, w2, w1)
    assert training.taken(x.bfloat16(), w, None)
    assert training.taken(x.bfloat16(), w, FP8_ROW)
    assert not training.taken(x.bfloat16(), w, FP4_ROW)
    assert not training.taken(x, w, None)
    assert not training.taken(x[:0].bfloat16(), w, None)
    assert not training.taken(x.bfloat16(), (w1.half(), w2, w1), None)
    odd = (w1[:, :-1], w2[..., :-1], w1[:, :-1])
    assert not training.taken(x.bfloat16(), odd, None)
    eights = (w1[:, :8], w2[..., :8], w1[:, :8])
    assert training.taken(x.bfloat16(), eights, None)
    assert not training.taken(x.bfloat16(), eights, FP8_ROW)
