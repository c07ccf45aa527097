"""What each comparison accepts and what not, and how float32 products are made exact."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from cedar.analysis.parity import Kind, Report
from cedar.analysis.parity.exact import ExactProducts
from cedar.analysis.parity.judge import Judge
from cedar.analysis.parity.sets import GoldenFile


def judge_of(tensor: torch.Tensor) -> Judge:
    return Judge(GoldenFile("set", {"key": tensor}, {}))


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(("error", "passes"), [(0.9e-4, True), (1.1e-4, False), (math.nan, False)])
def test_float32_limit_is_absolute(error, passes):
    ours = ONES.clone()
    ours[1, 2] += error
    judge = judge_of(ONES)
    judge.float32("key", ours)
    (line,) = judge.finish()
    assert line.passed is passes
    assert line.where.startswith("[1, 2]: ")


@pytest.mark.parametrize(("ours", "passes"), [(-math.inf, True), (math.inf, False), (-9.0, False)])
def test_infinities_have_to_be_the_same(ours, passes):
    judge = judge_of(torch.tensor([1.0, -math.inf]))
    judge.float32("key", torch.tensor([1.0, ours]))
    assert judge.finish()[0].passed is passes


def test_relative_rms_counts_the_whole_tensor():
    golden = torch.ones(100, dtype=torch.bfloat16)
    ours = golden.clone()
    ours[0] += 2**-7  # one step in one of a hundred: 7.8e-4
    judge = judge_of(golden)
    judge.relative_rms("key", ours)
    assert judge.lines[0].passed
    judge.relative_rms("key", golden * (1 + 2**-7))
    assert not judge.lines[1].passed
    judge.relative_rms("key", torch.full_like(golden, math.nan))
    assert not judge.lines[2].passed


def test_rounding_is_relative_above_one_and_absolute_below():
    judge = judge_of(torch.tensor([1000.0, 0.001]))
    judge.rounding("key", torch.tensor([1000.0005, 0.0010005]))
    assert judge.lines[0].passed
    judge.rounding("key", torch.tensor([1000.005, 0.001]))
    assert not judge.lines[1].passed


def test_one_bfloat16_step():
    golden = torch.tensor([1.0, 100.0], dtype=torch.bfloat16)
    judge = judge_of(golden)
    judge.bfloat16_step("key", torch.tensor([1.0078125, 100.5], dtype=torch.bfloat16))
    assert judge.lines[0].passed
    judge.bfloat16_step("key", torch.tensor([1.015625, 100.0], dtype=torch.bfloat16))
    assert not judge.lines[1].passed


def test_bits_want_the_same_type_and_every_bit():
    judge = judge_of(ONES)
    judge.bits("key", ONES.clone())
    judge.bits("key", ONES.to(torch.float64))
    judge.bits("key", torch.nextafter(ONES, ONES + 1))
    assert [line.passed for line in judge.lines] == [True, False, False]


def test_float8_codes_are_compared_as_bytes():
    golden = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    judge = judge_of(golden)
    judge.bits("key", golden.clone())
    judge.bits("key", torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn))
    assert [line.passed for line in judge.lines] == [True, False]


def test_another_shape_fails_but_is_only_shown_where_nothing_is_judged():
    judge = judge_of(ONES)
    judge.float32("key", torch.ones(3, 2))
    judge.relative_rms("key", torch.ones(2))
    judge.exact("key", torch.ones(2, 1))
    judge.shown("key", torch.ones(2, 1))
    assert [line.passed for line in judge.lines] == [False, False, False, True]
    assert "shape [3, 2], golden [2, 3]" in judge.lines[0].where


def test_key_that_nobody_asks_for_fails():
    (line,) = judge_of(ONES).finish()
    assert not line.passed
    assert "unknown key" in line.where


def test_summary_counts_by_kind_and_is_valid_json():
    judge = judge_of(ONES)
    judge.exact("key", torch.zeros(2, 3))
    judge.float32("key", ONES + 3e-5)
    judge.shown("key", ONES + 100)
    judge.float32("key", ONES + 0.5, kind=Kind.BFLOAT16, limit=1.0)
    summary = Report(("set",), judge.finish()).summary()
    assert summary["sets"] == 1
    assert summary["compared"] == 3
    assert summary["failed"] == 1
    assert summary["discrete_mismatches"] == 6
    assert summary["max_abs_fp32"] == pytest.approx(3e-5, rel=0.01)
    judge.float32("key", ONES * math.nan)
    broken = Report(("set",), tuple(judge.lines)).summary()
    assert broken["max_abs_fp32"] is None
    assert json.loads(json.dumps(broken, allow_nan=False)) == broken


PRODUCTS = {
    "linear": lambda x, w: F.linear(x, w),
    "linear with a bias": lambda x, w: F.linear(x, w, bias=w[:, 0]),
    "matmul": lambda x, w: torch.matmul(x, w.T),
    "operator": lambda x, w: x @ w.T,
    "einsum": lambda x, w: torch.einsum("ti,oi->to", x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w.T[None])[0],
    "addmm": lambda x, w: torch.addmm(w[:, 0], x, w.T),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_float32_products_are_exact_inside_the_mode_only(product):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 300, generator=generator) for n in (40, 50))
    compute = PRODUCTS[product]
    wanted = compute(x.double(), w.double()).float()
    with ExactProducts():
        inside = compute(x, w)
    assert inside.dtype is torch.float32
    assert torch.equal(inside, wanted)
    assert not torch.equal(compute(x, w), wanted), "plain float32 sums round differently"


def test_other_types_stay_as_they_are_inside_the_mode():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    with ExactProducts():
        assert (x @ x.T).dtype is torch.bfloat16
        assert (x.double() @ x.T.double()).dtype is torch.float64
        assert (x.float() + x.float()).dtype is torch.float32
