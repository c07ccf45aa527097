"""Routed experts on packed FP4 weights at the released size: 384 experts, 6 a token.

Columns: floor, ours, the portable Triton version, a grouped product on bfloat16 weights
(`torch._grouped_mm`, four times the bytes), plain PyTorch for few tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from benchmarks.ops.measure import Report, Sample, floor_us, need_gpu, relative_error, timed
from torch import Tensor

from cedar.ops.experts import gluon, triton
from cedar.ops.experts import reference as plain
from cedar.quant import FP4_ROW, FP8_ROW, QuantTensor

EXPERTS, ACTIVE, DIM, INNER, LIMIT = 384, 6, 5120, 2304, 10.0
FIXED = {"limit": LIMIT, "input_format": FP8_ROW}
Weights = tuple[QuantTensor, QuantTensor, QuantTensor]
Case = tuple[Tensor, Tensor, Tensor]


def weights(rows: int, columns: int, seed: int) -> QuantTensor:
    """Random codes, scales as trained weights have them."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    shape = (EXPERTS, rows, columns // 2)
    codes = torch.randint(0, 256, shape, generator=g, device="cuda", dtype=torch.uint8)
    shape = (EXPERTS, rows, columns // 32)
    scale = torch.randint(118, 124, shape, generator=g, device="cuda", dtype=torch.uint8)
    return QuantTensor(codes, scale, FP4_ROW)


def case(tokens: int, seed: int) -> Case:
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, DIM, generator=g, device="cuda").bfloat16()
    scores = torch.rand(tokens, EXPERTS, generator=g, device="cuda")
    return (
        x,
        scores.topk(ACTIVE, dim=1).indices,
        torch.rand(tokens, ACTIVE, generator=g, device="cuda"),
    )


def exact(x: Tensor, experts_TA: Tensor, weights_TA: Tensor, w: Weights) -> Tensor:
    """A few tokens in float64, through the same casts."""
    pick = [QuantTensor(each.codes, each.scale, each.format) for each in w]
    return plain.experts(x.double(), experts_TA, weights_TA.double(), *pick, **FIXED)


def grouped(x: Tensor, experts_TA: Tensor, weights_TA: Tensor, dense: list[Tensor]) -> Tensor:
    """On bfloat16 weights, sorted by expert."""
    order = experts_TA.flatten().argsort()
    token = order // ACTIVE
    ends = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device)
    ends = ends.scatter_add(0, experts_TA.flatten(), torch.ones_like(order)).cumsum(0).int()
    rows = x[token]
    gate = torch._grouped_mm(rows, dense[0].transpose(1, 2), offs=ends)
    up = torch._grouped_mm(rows, dense[2].transpose(1, 2), offs=ends)
    hidden = plain.swiglu(gate, up, LIMIT) * weights_TA.flatten()[order, None]
    down = torch._grouped_mm(hidden.bfloat16(), dense[1].transpose(1, 2), offs=ends)
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, down.float())


def main() -> None:
    """All shapes."""
    need_gpu()
    report = Report("experts")
    w = (weights(INNER, DIM, 1), weights(DIM, INNER, 2), weights(INNER, DIM, 3))
    dense = [each.dequantize(torch.bfloat16) for each in w]
    for tokens in (1, 8, 32, 128, 2048, 8192):
        cases = [case(tokens, seed) for seed in range(4 if tokens <= 128 else 2)]
        visited = sum(len(torch.unique(each[1])) for each in cases) / len(cases)
        moved = visited * 3 * DIM * INNER * (0.5 + 1 / 32) + tokens * DIM * 6
        flop = tokens * ACTIVE * 6 * DIM * INNER
        few = min(tokens, 32)
        x, e, v = cases[0]
        found = gluon.experts(x, e, v, *w, **FIXED)[:few]
        want = exact(x[:few], e[:few], v[:few], w)
        # Rounded to bfloat16, a gate can take a hidden value across an FP8 step; so does this.
        same = plain.experts(x[:few], e[:few], v[:few], *w, **FIXED)

        def calls(
            function: Callable[..., Tensor],
            *last: object,
            cases: list[Case] = cases,
            **options: object,
        ) -> Sample:
            return timed([partial(function, *each, *last, **options) for each in cases])

        report.line(
            {"tokens": tokens},
            floor=floor_us(moved, flop),
            error=relative_error(found, want),
            bound=1.1 * relative_error(same, want),
            ours=partial(calls, gluon.experts, *w, **FIXED),
            others={
                "portable": partial(calls, triton.experts, *w, **FIXED)
                if tokens <= 2048
                else "not run",
                "grouped_mm_bf16": partial(calls, grouped, dense),
                "pytorch": "reads sizes on the host, cannot be captured",
            },
            error_of_pytorch=relative_error(same, want),
            bytes=round(moved),
            flop=flop,
        )


if __name__ == "__main__":
    main()
