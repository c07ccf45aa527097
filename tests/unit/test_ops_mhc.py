"""Stream mixing: Sinkhorn, the two mixes, and which index of ``comb`` is which."""

import pytest
import torch
from torch import Tensor

from cedar.ops.mhc import MhcMix
from cedar.ops.mhc.reference import mhc_coefficients, mhc_collapse, mhc_expand, split_mixes
from cedar.testing import assert_bitwise, assert_close


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coefficients(x: Tensor, iterations: int = 20, hc_eps: float = 1e-6) -> MhcMix:
    m, width = x.shape[-2:]
    return mhc_coefficients(
        x,
        random((2 + m) * m, m * width, seed=1),
        random((2 + m) * m, seed=2),
        torch.tensor([0.5, 0.4, 0.3], dtype=torch.float64),
        norm_eps=1e-20,
        hc_eps=hc_eps,
        sinkhorn_iters=iterations,
    )


def naive(x: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Section 1 of the architecture for one token, step by step."""
    m, width = x.shape
    fn, base = random((2 + m) * m, m * width, seed=1), random((2 + m) * m, seed=2)
    flat = x.flatten()
    z = (fn @ flat) / (flat.square().mean() + 1e-20).sqrt()
    pre = 1 / (1 + (-(z[:m] * 0.5 + base[:m])).exp()) + eps
    post = 2 / (1 + (-(z[m : 2 * m] * 0.4 + base[m : 2 * m])).exp())
    comb = (z[2 * m :] * 0.3 + base[2 * m :]).view(m, m).exp()
    for i in range(m):
        comb[i] = comb[i] / comb[i].sum() + eps
    for step in range(iterations):
        if step:
            comb = torch.stack([row / (row.sum() + eps) for row in comb])
        comb = torch.stack([column / (column.sum() + eps) for column in comb.T]).T
    return pre, post, comb


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_coefficients_step_by_step(streams: int, iterations: int) -> None:
    x = random(3, streams, 5)
    got = coefficients(x, iterations)
    for t in range(3):
        pre, post, comb = naive(x[t], iterations, 1e-6)
        assert_close(got.pre_TC[t], pre, "float64")
        assert_close(got.post_TC[t], post, "float64")
        assert_close(got.comb_TCC[t], comb, "float64")


def test_sinkhorn_ends_on_the_columns() -> None:
    comb = coefficients(random(6, 4, 8), iterations=3, hc_eps=0.0).comb_TCC
    assert_close(comb.sum(-2), torch.ones(6, 4, dtype=torch.float64), "float64")
    rows = (comb.sum(-1) - 1).abs().max()
    assert rows > 1e-6  # negative control: after few steps rows are not exact, so order shows
    many = coefficients(random(6, 4, 8), iterations=200, hc_eps=0.0).comb_TCC
    assert (many.sum(-1) - 1).abs().max() < 1e-9
    assert (many > 0).all()


def test_comb_acts_with_its_first_index_on_the_old_streams() -> None:
    x, y = random(5, 3, 4), random(5, 4, seed=3)
    comb = random(5, 3, 3, seed=4)
    post = random(5, 3, seed=5)
    out = mhc_expand(x, y, MhcMix(post, post, comb))
    for t in range(5):
        for i in range(3):
            want = post[t, i] * y[t] + sum(comb[t, j, i] * x[t, j] for j in range(3))
            assert_close(out[t, i], want, "float64")
    transposed = mhc_expand(x, y, MhcMix(post, post, comb.transpose(1, 2)))
    assert not torch.allclose(out, transposed)


def test_collapse_weighs_streams() -> None:
    x, pre = random(5, 3, 4), random(5, 3, seed=3)
    want = torch.stack([sum(pre[t, j] * x[t, j] for j in range(3)) for t in range(5)])
    assert_close(mhc_collapse(x, pre), want, "float64")
    one_hot = torch.tensor([[1.0, 0, 0]]).expand(5, -1)
    assert_bitwise(mhc_collapse(x.bfloat16(), one_hot), x.bfloat16()[:, 0])


def test_coefficients_ignore_the_size_of_the_streams() -> None:
    """One statistic over all streams: their common size cancels, their ratio does not."""
    x = random(4, 3, 8)
    got, scaled = coefficients(x), coefficients(1e-3 * x)
    for a, b in zip(got, scaled, strict=True):
        assert_close(a, b, "float64")
    x[:, 0] *= 10
    assert not torch.allclose(coefficients(x).pre_TC, got.pre_TC)


def test_constant_streams_and_zeros() -> None:
    """All-zero streams leave the offsets alone: nothing divides by zero."""
    got = coefficients(torch.zeros(2, 3, 4, dtype=torch.float64))
    base = random(15, seed=2)
    assert_close(got.pre_TC[0], base[:3].sigmoid() + 1e-6, "float64")
    assert all(part.isfinite().all() for part in got)


def test_post_has_no_epsilon() -> None:
    z = torch.full((1, 8), -1e4)
    mix = split_mixes(z, torch.zeros(8), torch.ones(3), streams=2, hc_eps=1e-6, sinkhorn_iters=20)
    assert (mix.post_TC == 0).all()
    assert_close(mix.pre_TC, torch.full((1, 2), 1e-6), "float32 op")
