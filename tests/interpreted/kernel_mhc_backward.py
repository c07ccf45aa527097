"""The gradient kernels of single-pass mHC in Triton's interpreter against the plain reference."""

import pytest
import torch
from torch import Tensor

from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc import reference as plain
from cedar.ops.mhc.backward_triton import MhcStepTraining, backward, untrainable
from kernel_cases import mhc_case
from triton_interpreter import repair

repair()

SETTINGS = {"norm_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 5}
NAMES = ("x", "y", "post", "comb", "pre", "fn", "base", "scale", "weight")


def flat(case: tuple) -> tuple[Tensor | None, ...]:
    x, update, pre, parameters, weight = case
    y, mix = update if update is not None else (None, None)
    return x, y, *((None, None) if mix is None else mix[1:]), pre, *parameters, weight


def call(step: object, values: tuple, **settings: float) -> list[Tensor]:
    x, y, post, comb, pre, fn, base, scale, weight = values
    update = None if y is None else (y, MhcMix(pre, post, comb))
    out = step(x, update, pre, MhcParameters(fn, base, scale), weight, **settings)
    return [*([] if y is None else [out[0]]), *out[1], out[2]]


def gradients(
    step: object, case: tuple, dtype: torch.dtype | None = None, **settings: float
) -> dict[str, Tensor]:
    """Of a random combination of all outputs."""
    values = tuple(
        None if v is None else v.detach().to(dtype or v.dtype).requires_grad_() for v in flat(case)
    )
    g = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=dtype or torch.float32)
    for out in call(step, values, **{**SETTINGS, **settings}):
        seed = torch.randn(out.shape, generator=g, dtype=torch.float32)
        total = total + (out * seed.to(out.dtype)).sum().to(total.dtype)
    names = [name for name, value in zip(NAMES, values, strict=True) if value is not None]
    found = torch.autograd.grad(total, [v for v in values if v is not None])
    return dict(zip(names, found, strict=True))


def worst(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each gradient relative to its largest value."""
    assert found.keys() == want.keys()
    assert all(found[n].isfinite().all() for n in found)
    return {
        n: float((found[n].double() - want[n].double()).abs().max() / want[n].double().abs().max())
        for n in found
    }


@pytest.mark.parametrize(("count", "width"), [(1, 64), (35, 80), (5, 200)])
def test_equals_the_reference(count: int, width: int) -> None:
    case = mhc_case(seed=1, count=count, width=width)
    found = gradients(MhcStepTraining(), case)
    errors = worst(found, gradients(plain.mhc_step, case, torch.float64))
    assert max(errors.values()) < 2e-5, errors


def test_many_sinkhorn_steps() -> None:
    """Going back through 40 half steps loses nothing."""
    case = mhc_case(seed=2, count=3, width=64)
    found = gradients(MhcStepTraining(), case, sinkhorn_iters=20)
    want = gradients(plain.mhc_step, case, torch.float64, sinkhorn_iters=20)
    assert max(worst(found, want).values()) < 2e-5
    # Negative control: fewer steps are another function.
    other = gradients(plain.mhc_step, case, torch.float64, sinkhorn_iters=2)
    assert max(worst(found, other).values()) > 1e-3


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_few_sinkhorn_steps(iterations: int) -> None:
    """Fewer than are asked for ahead."""
    case = mhc_case(seed=2, count=3, width=64)
    found = gradients(MhcStepTraining(), case, sinkhorn_iters=iterations)
    want = gradients(plain.mhc_step, case, torch.float64, sinkhorn_iters=iterations)
    assert max(worst(found, want).values()) < 2e-5


def test_without_an_update() -> None:
    case = mhc_case(seed=3, count=5, width=96)
    first = (case[0], None, *case[2:])
    found = gradients(MhcStepTraining(), first)
    assert "y" not in found
    errors = worst(found, gradients(plain.mhc_step, first, torch.float64))
    assert max(errors.values()) < 2e-5, errors


def test_bfloat16() -> None:
    """As near to float64 as plain PyTorch in the same type, but for a factor."""
    case = mhc_case(seed=4, count=35, width=128, dtype=torch.bfloat16)
    want = gradients(plain.mhc_step, case, torch.float64)
    errors = worst(gradients(MhcStepTraining(), case), want)
    other = worst(gradients(plain.mhc_step, case), want)
    assert all(errors[n] < 2 * other[n] + 2**-8 for n in errors), (errors, other)


@pytest.mark.parametrize(("tokens", "channels", "times"), [(16, 64, 3), (32, 32, 1), (16, 128, 2)])
def test_however_it_is_cut(tokens: int, channels: int, times: int) -> None:
    """Poisoned partial results, several slices and times, gradients reproducible bit for bit."""
    case = mhc_case(seed=5, count=40, width=112)
    values = flat(case)
    step = MhcStepTraining()
    x_out, mix, *saved = step.forward(SETTINGS, values)
    g = torch.Generator().manual_seed(6)
    grads = tuple(torch.randn(v.shape, generator=g) for v in (x_out, *mix, saved[0]))
    want = backward(values, tuple(saved), grads, SETTINGS)
    cut = {"tokens": tokens, "channels": channels, "times": times}
    found = backward(values, tuple(saved), grads, SETTINGS, **cut)
    again = backward(values, tuple(saved), grads, SETTINGS, **cut)
    for a, b, c in zip(found, want, again, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        assert torch.equal(a, c)


def test_strided_gradients() -> None:
    """A gradient that is a view of something larger."""
    case = mhc_case(seed=7, count=6, width=64)
    values = tuple(v.detach().requires_grad_() for v in flat(case))
    outs = call(MhcStepTraining(), values, **SETTINGS)
    wide = [torch.randn(*o.shape[:-1], 2 * o.shape[-1])[..., ::2] for o in outs]
    found = torch.autograd.grad(outs, values, wide)
    outs = call(plain.mhc_step, values, **SETTINGS)
    for a, b in zip(found, torch.autograd.grad(outs, values, wide), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_it_cannot_take_goes_to_the_reference() -> None:
    case = mhc_case(seed=8, count=3, width=32)
    assert "width 32" in (untrainable(case[0], case[3]) or "")
    found = gradients(MhcStepTraining(), case)
    for name, value in gradients(plain.mhc_step, case).items():
        assert torch.equal(found[name], value)
    with torch.no_grad():
        out = MhcStepTraining()(*mhc_case(seed=8, count=3, width=64), **SETTINGS)
    assert not out[2].requires_grad
    empty = mhc_case(seed=8, count=0, width=64)
    learned = MhcStepTraining()(empty[0].requires_grad_(), *empty[1:], **SETTINGS)
    assert learned[2].shape == (0, 64)
