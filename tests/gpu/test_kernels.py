"""The compiled kernels on a device against the plain reference: numbers, strides, large offsets."""

import pytest
import torch

from cedar.ops.mhc import MhcMix
from cedar.ops.mhc import reference as plain_mhc
from cedar.testing import assert_bitwise, assert_close
from kernel_cases import mhc_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.mhc.triton import MhcStepKernel

SETTINGS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}


def near(found: torch.Tensor, want: torch.Tensor) -> None:
    """Exponentials and outputs rounded to bfloat16 each once, relative to the largest value."""
    assert found.isfinite().all()
    assert (found.double() - want).abs().max() <= 2**-7 * want.abs().max()
    assert (found.double() - want).norm() <= 2**-8 * want.norm()


@pytest.mark.parametrize("count", [1, 7, 60, 130, 2100, 8192, 16400])
def test_mhc(count: int) -> None:
    """The update within one rounding; what follows from the streams as the kernel rounded them."""
    case = mhc_case(seed=1, count=count, width=5120, dtype=torch.bfloat16, device="cuda")
    x, (y, mix), pre, parameters, weight = case
    kernel = MhcStepKernel()
    first = None
    for _ in range(2):  # the second launch finds the counters as the first left them
        out, found, h = kernel(*case, **SETTINGS)
        for few in (slice(0, 70), slice(max(0, count - 40), count)):
            cut = MhcMix(*(v[few].double() for v in mix))
            want = plain_mhc.mhc_expand(x[few].double(), y[few].double(), cut)
            assert_close(out[few], want, "bfloat16 op")
            _, want_mix, want_h = plain_mhc.mhc_step(
                out[few].double(), None, pre[few].double(), parameters, weight, **SETTINGS
            )
            near(h[few], want_h)
            for a, b in zip(found, want_mix, strict=True):
                assert (a[few].double() - b).abs().max() < 1e-4
        if first is not None:  # programs that finish in another order change nothing
            for a, b in zip(first, (out, *found, h), strict=True):
                assert_bitwise(a, b)
        first = (out, *found, h)


def test_mhc_coefficients_are_float32_good() -> None:
    """Of equal streams: far better than with bfloat16 weights."""
    x, _, pre, parameters, weight = mhc_case(
        seed=2, count=64, width=5120, dtype=torch.bfloat16, device="cuda"
    )
    _, mix, _ = MhcStepKernel()(x, None, pre, parameters, weight, **SETTINGS)
    exact = plain_mhc.mhc_coefficients(x.double(), *parameters, **SETTINGS)
    rounded = parameters._replace(fn=parameters.fn.bfloat16().float())
    coarse = plain_mhc.mhc_coefficients(x.double(), *rounded, **SETTINGS)
    error = max(float((a - b).abs().max()) for a, b in zip(mix, exact, strict=True))
    control = max(float((a - b).abs().max()) for a, b in zip(coarse, exact, strict=True))
    assert error < 1e-4
    assert control > 5 * error


def test_mhc_in_float32() -> None:
    case = mhc_case(seed=3, count=33, width=200, device="cuda")
    out, mix, h = MhcStepKernel()(*case, **SETTINGS)
    want, want_mix, want_h = plain_mhc.mhc_step(*case, **SETTINGS)
    for found, expected in zip((out, *mix, h), (want, *want_mix, want_h), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
