"""How products are cut: within the limits of the kernels, and alike for a step and its drafts."""

import pytest

from cedar.ops.linear.plans import MANY_TOKENS, plan_for

ROWS = [(32,), (512,), (1280, 512), (2304, 2304), (5120,), (32768, 4096)]


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_plans(rows: tuple[int, ...], fp8: bool) -> None:
    for width in (32, 96, 128, 160, 512, 1280, 2304, 4096, 5120, 6144, 8192, 12288, 15360):
        plans = {tokens: plan_for(width, rows, tokens, fp8) for tokens in (1, 4, 5, 8, 9, 32, 100)}
        few = [plans[tokens] for tokens in (1, 4, 5, 8)]
        # One order of every sum for up to eight tokens.
        assert len({None if p is None else (p.warps, p.splits) for p in few}) == 1
        for tokens, plan in plans.items():
            if plan is None:
                assert tokens > 32 or not fp8
                continue
            pieces = -(-width // (64 if fp8 else 32))
            if plan.many:
                assert fp8
                assert tokens > 8
                assert width % (128 * plan.splits) == 0
                assert pieces // 2 // plan.splits <= 16  # unrolled
                continue
            turns = -(-pieces // (plan.warps * plan.splits))
            assert turns <= 24
            if plan.hold:
                held = turns * plan.warps * (128 if fp8 else 64) << (tokens - 1).bit_length()
                assert held <= 160 << 10
    assert MANY_TOKENS == 64


def test_large_wide_products_are_left_to_pytorch() -> None:
    assert plan_for(5120, (129280,), 1, False) is None
    assert plan_for(5120, (384,), 1, False) is not None
