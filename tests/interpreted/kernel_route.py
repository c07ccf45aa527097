"""The router in Triton's interpreter: the reference's experts in its order, its weights."""

import pytest
import torch

from cedar.ops.route import reference as plain
from cedar.ops.route import triton as kernel
from cedar.testing import assert_bitwise
from triton_interpreter import repair

repair()

OPTIONS = {"temp": 1.3, "score_func": "sqrtsoftplus", "normalize": True, "route_scale": 2.5}


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "dim", "count", "active"), [(1, 64, 8, 2), (5, 272, 70, 6), (3, 512, 5, 5)]
)
def test_routing(
    score_func: str, normalize: bool, tokens: int, dim: int, count: int, active: int
) -> None:
    torch.manual_seed(dim)
    x = torch.randn(tokens, dim).bfloat16()
    weight = (torch.randn(count, dim) * dim**-0.5).bfloat16()
    options = OPTIONS | {"score_func": score_func, "normalize": normalize}
    for bias in (torch.randn(count) * 0.1, torch.randn(tokens, count) * 0.1):
        found = kernel.router(x, weight, bias, active, **options)
        want = plain.router(x, weight, bias, active, **options)
        assert_bitwise(found.experts_TA, want.experts_TA)
        torch.testing.assert_close(found.scores_TE, want.scores_TE, rtol=2e-6, atol=1e-30)
        torch.testing.assert_close(found.weights_TA, want.weights_TA, rtol=2e-6, atol=1e-30)
    assert not torch.equal(  # negative control: the bias selects
        kernel.router(x, weight, torch.randn(tokens, count) * 50, active, **options).scores_TE,
        kernel.router(x.flip(1), weight, bias, active, **options).scores_TE,
    )


def test_ties_go_to_the_lowest_number() -> None:
    x = torch.ones(2, 64).bfloat16()
    weight = torch.zeros(300, 64).bfloat16()
    weight[[7, 250, 299]] = 1.0
    found = kernel.router(x, weight, torch.zeros(300), 6, **OPTIONS)
    want = plain.router(x, weight, torch.zeros(300), 6, **OPTIONS)
    assert_bitwise(found.experts_TA, want.experts_TA)
    assert found.experts_TA[0].tolist() == [7, 250, 299, 0, 1, 2]


def test_split_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's routing has the same bits in a large batch as in a small one."""
    torch.manual_seed(0)
    x, weight = torch.randn(40, 1024).bfloat16(), torch.randn(9, 1024).bfloat16()
    few = kernel.router(x[:3], weight, torch.zeros(9), 2, **OPTIONS)
    monkeypatch.setattr(kernel, "_SPLIT_BELOW", 1)
    many = kernel.router(x, weight, torch.zeros(9), 2, **OPTIONS)
    assert_bitwise(many.scores_TE[:3], few.scores_TE)
    assert_bitwise(many.weights_TA[:3], few.weights_TA)


def test_other_inputs_go_to_the_reference() -> None:
    x, weight = torch.randn(2, 64), torch.randn(4, 64)
    for left, right, function in (
        (x, weight, "sigmoid"), (x.bfloat16(), weight, "sigmoid"), (x[:0].bfloat16(), weight, "x"),
    ):  # fmt: skip
        assert kernel.unsupported(left, right, function) is not None
    found = kernel.router(x, weight, torch.zeros(4), 2, **OPTIONS)
    want = plain.router(x, weight, torch.zeros(4), 2, **OPTIONS)
    assert_bitwise(found.weights_TA, want.weights_TA)
