"""Rotary embedding: pairs, inverse, relative positions, and the two frequency tables."""

import math

import pytest
import torch
from torch import Tensor

from cedar.ops.rope.reference import frequencies, rotate, yarn_frequencies
from cedar.testing import assert_bitwise, assert_close


def tables(positions: list[int], r: int) -> tuple[Tensor, Tensor]:
    angle = torch.tensor(positions, dtype=torch.float64).unsqueeze(1) * frequencies(r, 1e4).double()
    return angle.cos(), angle.sin()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5, 12), (5, 3, 12), (5, 2, 3, 8)])
def test_inverse_undoes(shape: tuple[int, ...]) -> None:
    x, at = random(*shape), tables([0, 1, 7, 100, 5000], 8)
    turned = rotate(x, *at)
    assert_close(rotate(turned, *at, inverse=True), x, "float64")
    assert_bitwise(turned[..., :-8], x[..., :-8])  # the other channels pass
    assert_bitwise(turned[0], x[0])  # position 0
    assert not torch.allclose(rotate(turned, *at)[1:], x[1:])  # negative control: not its own


def test_pairs_are_adjacent_and_last() -> None:
    x = torch.zeros(1, 10, dtype=torch.float64)
    x[0, 2] = 1.0  # first number of the first pair of eight
    cos, sin = tables([3], 8)
    out = rotate(x, cos, sin)
    assert_close(out[0, 2], cos[0, 0], "float64")
    assert_close(out[0, 3], sin[0, 0], "float64")
    assert (out[0, 4:] == 0).all()  # a half-split rotation would write channel 6


def test_products_depend_on_the_distance_alone() -> None:
    q, k = random(1, 8).expand(4, -1), random(2, 8)[1:].expand(4, -1)
    first = rotate(q, *tables([0, 5, 50, 500], 8)) * rotate(k, *tables([3, 8, 53, 503], 8))
    dots = first.sum(1)
    assert_close(dots[1:], dots[:1].expand(3), "float64")
    other = (rotate(q, *tables([0, 5, 50, 500], 8)) * rotate(k, *tables([4, 9, 54, 504], 8))).sum(1)
    assert not torch.allclose(dots, other)


def test_empty_and_dtype() -> None:
    at = tables([], 8)
    assert rotate(torch.empty(0, 3, 12), *at).shape == (0, 3, 12)
    assert rotate(random(1, 12).bfloat16(), *tables([1], 8)).dtype == torch.bfloat16


def test_plain_frequencies() -> None:
    got = frequencies(8, 100.0)
    assert_close(got, torch.tensor([100.0 ** (-2 * k / 8) for k in range(4)]), "float32 op")


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    kind = {"original": 65536, "factor": 16, "beta_fast": 32, "beta_slow": 1}
    plain, yarn = frequencies(64, 160000.0), yarn_frequencies(64, 160000.0, **kind)
    ratio = yarn / plain

    def pair(turns: float) -> float:
        return 64 * math.log(65536 / (turns * 2 * math.pi)) / (2 * math.log(160000.0))

    low, high = math.floor(pair(32)), math.ceil(pair(1))
    assert 0 < low < high < 32
    assert_close(ratio[: low + 1], torch.ones(low + 1), "float32 op")
    assert_close(ratio[high:], torch.full((32 - high,), 1 / 16), "float32 op")
    middle = ratio[low + 1 : high]
    assert ((middle < 1) & (middle > 1 / 16)).all()
    assert (middle.diff() < 0).all()


def test_yarn_without_stretching_is_plain() -> None:
    kind = {"original": 64, "factor": 1, "beta_fast": 32, "beta_slow": 1}
    assert_close(yarn_frequencies(16, 1e4, **kind), frequencies(16, 1e4), "float32 op")
