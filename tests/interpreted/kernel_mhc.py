"""The single-pass mHC kernel in Triton's interpreter against the plain reference."""

import pytest
import torch

from cedar.ops.mhc import MhcMix
from cedar.ops.mhc import reference as plain
from cedar.ops.mhc.triton import MhcStepKernel, unsupported
from cedar.testing import assert_bitwise, assert_close
from kernel_cases import mhc_case
from triton_interpreter import repair

repair()

SETTINGS = {"norm_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 5}


def both(case: tuple, **options: int) -> tuple[tuple, tuple]:
    """What the kernel writes over poison, and the reference."""
    x, update, pre, parameters, weight = case
    count, _, width = x.shape
    mix = MhcMix(
        *(torch.full(shape, torch.nan) for shape in ((count, 4), (count, 4), (count, 4, 4)))
    )
    h = torch.full((count, width), torch.nan, dtype=x.dtype)
    out = torch.full_like(x, torch.nan) if update else x
    kernel = MhcStepKernel()
    kernel.launch(x, update, pre, parameters, weight, out, mix, h, **SETTINGS, **options)
    return (out, mix, h), plain.mhc_step(*case, **SETTINGS)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("count", "width"), [(1, 64), (19, 80), (5, 200)])
def test_equals_the_reference(count: int, width: int, splits: int) -> None:
    case = mhc_case(seed=1, count=count, width=width)
    (out, mix, h), (want, want_mix, want_h) = both(case, splits=splits, tokens=16, channels=32)
    assert_close(out, want, "float32 op")
    for found, expected in zip(mix, want_mix, strict=True):
        assert_close(found, expected, "float32 op")
    assert_close(h, want_h, "float32 op")


def test_without_an_update() -> None:
    """The first sublayer: the streams stay, and are not written."""
    case = mhc_case(seed=2, count=5, width=96)
    first = (case[0], None, *case[2:])
    (out, mix, h), (want, want_mix, want_h) = both(first, splits=2, tokens=16)
    assert out is case[0]
    assert_bitwise(out, want)
    for found, expected in zip((*mix, h), (*want_mix, want_h), strict=True):
        assert_close(found, expected, "float32 op")


def test_bfloat16() -> None:
    case = mhc_case(seed=3, count=6, width=128, dtype=torch.bfloat16)
    (out, mix, h), (want, want_mix, want_h) = both(case, splits=2, tokens=16)
    # One rounding of an equal sum in another order: at most one unit in the last place.
    assert_close(out, want.float(), "bfloat16 op")
    for found, expected in zip(mix, want_mix, strict=True):
        assert (found - expected).abs().max() < 2e-3  # streams that differ by that unit
    assert (h.float() - want_h.float()).abs().max() <= 2**-7 * want_h.float().abs().max()


def test_coefficients_of_equal_bfloat16_streams() -> None:
    """Weights cut in two bfloat16 parts are 16 bits good, far better than bfloat16 weights."""
    case = mhc_case(seed=4, count=6, width=128, dtype=torch.bfloat16)
    first = (case[0], None, *case[2:])
    (_, mix, _), _ = both(first, splits=1, tokens=16)
    exact = plain.mhc_coefficients(case[0].double(), *case[3], **SETTINGS)
    rounded = case[3]._replace(fn=case[3].fn.bfloat16().float())
    coarse = plain.mhc_coefficients(case[0].double(), *rounded, **SETTINGS)
    error = max(float((a - b).abs().max()) for a, b in zip(mix, exact, strict=True))
    control = max(float((a - b).abs().max()) for a, b in zip(coarse, exact, strict=True))
    assert error < 1e-4
    assert control > 10 * error


def test_counters_survive_launches() -> None:
    """A second launch of the same instance, split otherwise, gives the same."""
    case = mhc_case(seed=5, count=20, width=96)
    kernel = MhcStepKernel()
    x, _, h = kernel(*case, **SETTINGS)
    again = kernel(*case, **SETTINGS)
    assert_bitwise(again[0], x)
    assert_bitwise(again[2], h)
    assert kernel._counters  # negative control: these were split launches
    for (_, splits), counters in kernel._counters.items():
        assert (counters % splits == 0).all()
        assert counters[0] == 2 * splits


def test_the_orientation_of_comb_matters() -> None:
    """Negative control: streams mixed with the transposed weights differ."""
    case = mhc_case(seed=6, count=3, width=64)
    (out, _, _), _ = both(case)
    x, (y, mix), *rest = case
    turned = mix._replace(comb_TCC=mix.comb_TCC.transpose(1, 2))
    want, _, _ = plain.mhc_step(x, (y, turned), *rest, **SETTINGS)
    assert (out - want).abs().max() > 0.1


def test_what_it_cannot_take_goes_to_the_reference() -> None:
    case = mhc_case(seed=7, count=3, width=64)
    wide = (case[0].double(), *case[1:])
    assert "float64" in (unsupported(wide[0], case[3]) or "")
    found = MhcStepKernel()(*wide, **SETTINGS)
    assert_bitwise(found[2], plain.mhc_step(*wide, **SETTINGS)[2])
    learned = MhcStepKernel()(case[0].requires_grad_(), *case[1:], **SETTINGS)
    assert learned[0].requires_grad
    empty = mhc_case(seed=7, count=0, width=64)
    assert MhcStepKernel()(*empty, **SETTINGS)[2].shape == (0, 64)
