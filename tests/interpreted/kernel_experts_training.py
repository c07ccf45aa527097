"""Experts for training in Triton's interpreter: order of visits, sums, every gradient."""

import pytest
import torch
from torch import Tensor

from cedar.ops.experts import reference as plain
from cedar.ops.experts import training
from cedar.ops.experts.training_plan import PAD, gather_rows, plan_visits, sum_visits
from cedar.ops.experts.training_swiglu import swiglu
from cedar.ops.experts.training_triton import Tiling
from cedar.testing import assert_bitwise
from trained_experts import gradients, reference, trained_experts
from triton_interpreter import repair

repair()

# A tile may reach beyond its expert's rows into memory that nobody wrote; those sums are dropped.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")

SMALL, LARGE = training.SMALL, training.LARGE


def choices(tokens: int, count: int, active: int) -> Tensor:
    return torch.stack([torch.randperm(count)[:active] for _ in range(tokens)])


@pytest.mark.parametrize(
    ("tokens", "count", "active", "per_tile"),
    [(1, 1, 1, 128), (5, 8, 3, 128), (300, 3, 2, 192), (700, 70, 4, 128)],
)
def test_plan(tokens: int, count: int, active: int, per_tile: int) -> None:
    """Visits stand behind one another, sorted by expert and in their order; tiles cover all."""
    torch.manual_seed(tokens)
    chosen = choices(tokens, count, active)
    plan = plan_visits(chosen, count, per_tile)
    load = chosen.flatten().bincount(minlength=count)
    padded = (load + PAD - 1) // PAD * PAD
    first = torch.cat((padded.new_zeros(1), padded.cumsum(0)))
    assert torch.equal(plan.first_E1.long(), first)
    assert int(first[-1]) <= len(plan.source_R)
    source = plan.source_R[: int(first[-1])].long()
    want = torch.full_like(source, -1)
    order = chosen.flatten().argsort(stable=True).split(load.tolist())
    for start, visits in zip(first.tolist(), order, strict=False):
        want[start : start + len(visits)] = visits
    assert torch.equal(source, want)
    assert torch.equal(source[plan.place_V.long()], torch.arange(tokens * active))
    tiles = [
        (expert, int(first[expert]) + start, int(padded[expert]) - start)
        for expert in range(count)
        for start in range(0, int(padded[expert]), per_tile)
    ]
    assert plan.tile_M3[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    assert not bool(plan.tile_M3[len(tiles) :, 2].any())


def test_rows() -> None:
    torch.manual_seed(0)
    x, chosen = torch.randn(37, 72).bfloat16(), choices(37, 5, 3)
    plan = plan_visits(chosen, 5, 128)
    rows = gather_rows(x, plan, 3)[: int(plan.first_E1[-1])]
    source = plan.source_R[: len(rows)].long()
    filled = (source >= 0)[:, None]
    assert_bitwise(rows, torch.where(filled, x[source.clamp(min=0) // 3], 0.0))
    more = torch.randn(37, 72).bfloat16()
    want = 3.0 * x.float()
    assert_bitwise(sum_visits(rows, plan, 3, None, torch.float32), want)
    assert_bitwise(
        sum_visits(rows, plan, 3, more, torch.bfloat16), (want + more.float()).bfloat16()
    )


@pytest.mark.parametrize(
    ("tokens", "dim", "inner", "count", "active", "dtype", "shared", "tiling"),
    [
        (1, 64, 64, 3, 1, torch.bfloat16, False, LARGE),
        (5, 64, 32, 8, 3, torch.float32, False, SMALL),
        (40, 72, 136, 4, 2, torch.bfloat16, True, SMALL),
        (210, 72, 40, 2, 2, torch.float32, True, LARGE),
    ],
)
def test_equals_the_reference(
    tokens: int, dim: int, inner: int, count: int, active: int, dtype: torch.dtype, shared: bool,
    tiling: Tiling, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(training, "tiling", lambda *_: tiling)
    case = trained_experts(tokens, dim, inner, count, active, dtype=dtype, shared=shared)
    # The limit is low, so that gates and ups are clamped.
    found = gradients(training.dense_experts, case, 0.5)
    want = gradients(reference, case, 0.5)
    exact = gradients(reference, case.double(), 0.5)
    for a, b, c in zip(found, want, exact, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= 6e-3 * c.norm()
        # No further from float64 than plain PyTorch is.
        assert (a.double() - c).norm() <= 1.05 * (b.double() - c).norm() + 1e-6 * c.norm()
    other = gradients(training.dense_experts, case, 0.6)
    assert (other[0].double() - exact[0]).norm() > 2e-2 * exact[0].norm()  # negative control


def test_experts_without_visits_get_zeros() -> None:
    case = trained_experts(6, 32, 24, 9, 1)
    found = gradients(training.dense_experts, case, 10.0)
    idle = torch.ones(9).index_fill(0, case.experts_TA.flatten(), 0.0).bool()
    assert bool(idle.any())
    for gradient in found[3:6]:
        assert not bool(gradient[idle].any())
        assert bool(gradient[~idle].flatten(1).any(1).all())


def test_only_what_is_asked_for() -> None:
    case = trained_experts(6, 32, 24, 4, 2)
    x, routing, *weights = case.inputs
    with torch.no_grad():
        plain_out = training.dense_experts(x, case.experts_TA, routing, *weights, limit=10.0)
    full = gradients(training.dense_experts, case, 10.0)
    assert_bitwise(plain_out, full[0])
    for place in range(5):
        inputs = [v.detach().requires_grad_(i == place) for i, v in enumerate(case.inputs)]
        out = training.dense_experts(inputs[0], case.experts_TA, *inputs[1:], limit=10.0)
        (gradient,) = torch.autograd.grad(out, inputs[place], case.grad_TD)
        assert_bitwise(gradient, full[1 + place])


@pytest.mark.parametrize("splits", [1, 3])
def test_weight_gradients_in_parts(splits: int) -> None:
    torch.manual_seed(3)
    chosen = choices(500, 3, 1)
    plan = plan_visits(chosen, 3, 128)
    left = gather_rows(torch.randn(500, 40).bfloat16(), plan, 1)
    right = gather_rows(torch.randn(500, 24).bfloat16(), plan, 1)
    (found,) = training.weight_gradients(
        (left, None), right, plan.first_E1, torch.float32, splits=splits
    )
    first = plan.first_E1.tolist()
    for expert in range(3):
        own = slice(first[expert], first[expert + 1])
        want = left[own].double().T @ right[own].double()
        torch.testing.assert_close(found[expert].double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3000])
def test_swiglu(count: int) -> None:
    torch.manual_seed(count)
    values = [torch.randn(count).bfloat16() for _ in range(3)]
    # Values at the limit itself pass their gradient on.
    values[0][0] = values[1][0] = 1.0
    results = []
    for function in (swiglu, plain.swiglu):
        gate, up = (v.clone().requires_grad_() for v in values[:2])
        out = function(gate, up, 1.0).bfloat16()
        results.append((out, *torch.autograd.grad(out, (gate, up), values[2])))
    for found, want in zip(*results, strict=True):
        torch.testing.assert_close(found, want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("tiling", [SMALL, LARGE])
def test_inputs_through_fp8(tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantisation-aware training: both inputs of an expert lie on the grid, gradients pass."""
    monkeypatch.setattr(training, "tiling", lambda *_: tiling)
    case = trained_experts(140, 64, 96, 3, 2, shared=True)
    found = gradients(training.dense_experts, case, 1.0, quantise=True)
    want = gradients(reference, case, 1.0, quantise=True)
    for a, b in zip(found, want, strict=True):
        # A rounded hidden value may fall on the other side of an FP8 step.
        assert (a.double() - b.double()).norm() <= 6e-3 * b.double().norm()
    other = gradients(training.dense_experts, case, 1.0)
    assert (other[0].double() - want[0].double()).norm() > 1e-2 * want[0].double().norm()
