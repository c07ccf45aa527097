"""Experts on packed FP4 weights at the released size, 384 with 6 a token, and their router.

Columns: floor, ours, the portable Triton version, a grouped product on bfloat16 weights
(`torch._grouped_mm`, four times the bytes), DeepGEMM's two grouped FP8 products if it can be
imported (twice the bytes); of the router plain PyTorch. Lines with ``shared`` hold the shared
expert, too, and its sum with the routed ones.
"""

from collections.abc import Callable
from functools import partial

import torch
from benchmarks.ops.measure import Report, Sample, floor_us, need_gpu, relative_error, timed
from benchmarks.ops.peers import deep_gemm
from torch import Tensor

from cedar.ops.experts import packed, triton
from cedar.ops.experts import reference as plain
from cedar.ops.route import reference as plain_route
from cedar.ops.route import triton as route
from cedar.quant import FP4_ROW, FP8_BLOCK, FP8_ROW, QuantTensor

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


def shared_weights(seed: int) -> Weights:
    """Random codes that are numbers, scales as trained weights have them."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    found = []
    for rows, columns in ((INNER, DIM), (DIM, INNER), (INNER, DIM)):
        codes = torch.randint(
            0, 127, (rows, columns), generator=g, device="cuda", dtype=torch.uint8
        )
        sign = torch.randint(0, 2, codes.shape, generator=g, device="cuda", dtype=torch.uint8)
        shape = (rows // 32, columns // 32)
        scale = torch.randint(112, 116, shape, generator=g, device="cuda", dtype=torch.uint8)
        codes = (codes | sign << 7).view(torch.float8_e4m3fn)
        found.append(QuantTensor(codes, scale, FP8_BLOCK))
    return found[0], found[1], found[2]


def exact(case: Case, w: Weights, shared: Weights | None) -> Tensor:
    """A few tokens in float64, through the same casts."""
    x, experts_TA, weights_TA = case
    return plain.experts(x.double(), experts_TA, weights_TA.double(), *w, **FIXED, shared=shared)


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


def experts_line(report: Report, tokens: int, w: Weights, dense: list[Tensor] | None) -> None:
    """With ``dense`` the routed experts beside others, else the shared one, too."""
    count = 4 if tokens <= 128 else 2
    cases = [case(tokens, seed) for seed in range(count)]
    shared = [None if dense else shared_weights(seed) for seed in range(count)]
    visited = sum(len(torch.unique(each[1])) for each in cases) / count
    moved = visited * 3 * DIM * INNER * (0.5 + 1 / 32) + tokens * DIM * 6
    flop = tokens * ACTIVE * 6 * DIM * INNER
    if not dense:
        moved += 3 * DIM * INNER * (1 + 1 / 1024)
        flop += tokens * 6 * DIM * INNER
    few = (cases[0][0][:32], cases[0][1][:32], cases[0][2][:32])
    found = packed.experts(*cases[0], *w, **FIXED, shared=shared[0])[:32]
    want = exact(few, w, shared[0])
    # Rounded to bfloat16, a gate can take a hidden value across an FP8 step; so does this.
    same = plain.experts(*few, *w, **FIXED, shared=shared[0])

    replays = 24 if tokens <= 128 else 6  # of milliseconds each

    def calls(function: Callable[..., Tensor], *last: object, **options: object) -> Sample:
        return timed([partial(function, *each, *last, **options) for each in cases], replays)

    def ours() -> Sample:
        pairs = zip(cases, shared, strict=True)
        return timed(
            [partial(packed.experts, *each, *w, **FIXED, shared=one) for each, one in pairs],
            replays,
        )

    peers = deep_gemm.experts([each[1] for each in cases], EXPERTS, DIM, INNER) if dense else None
    report.line(
        {"tokens": tokens, "shared": dense is None},
        floor=floor_us(moved, flop),
        error=relative_error(found, want),
        bound=1.1 * relative_error(same, want),
        ours=ours,
        others={
            "portable": partial(calls, triton.experts, *w, limit=LIMIT)
            if tokens <= 8
            else "not run",
            **peers.others,
            "grouped_mm_bf16": partial(calls, grouped, dense),
            "pytorch": "reads sizes on the host, cannot be captured",
        }
        if peers
        else {},
        error_of_pytorch=relative_error(same, want),
        bytes=round(moved),
        flop=flop,
        **(peers.more if peers else {}),
    )


def router_line(report: Report, tokens: int) -> None:
    """Both launches: products, and scores with bias, choice and weights."""
    g = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, DIM, generator=g, device="cuda").bfloat16()
    bias = torch.randn(EXPERTS, generator=g, device="cuda") * 0.1
    gates = [
        (torch.randn(EXPERTS, DIM, generator=g, device="cuda") / DIM**0.5).bfloat16()
        for _ in range(32)
    ]
    fixed = {"temp": 1.0, "score_func": "sqrtsoftplus", "normalize": True, "route_scale": 2.5}
    want = plain_route.router(x.double(), gates[0].double(), bias, ACTIVE, **fixed)
    found = route.router(x, gates[0], bias, ACTIVE, **fixed)
    moved, flop = 2 * DIM * (EXPERTS + tokens) + 4 * tokens * EXPERTS, 2 * tokens * DIM * EXPERTS

    def calls(function: Callable[..., object]) -> Sample:
        return timed([partial(function, x, gate, bias, ACTIVE, **fixed) for gate in gates])

    report.line(
        {"tokens": tokens},
        floor=floor_us(moved, flop),
        error=relative_error(found.scores_TE, want.scores_TE),
        bound=1e-5,  # float32 sums of 5120 products
        ours=partial(calls, route.router),
        others={"pytorch": partial(calls, plain_route.router)},
        bytes=moved,
        flop=flop,
    )


def main() -> None:
    """All shapes."""
    need_gpu()
    w = (weights(INNER, DIM, 1), weights(DIM, INNER, 2), weights(INNER, DIM, 3))
    report = Report("experts")
    for tokens in (1, 6, 8, 32, 128):
        experts_line(report, tokens, w, None)
    for tokens in (1, 6, 32, 128, 8192):
        router_line(Report("router"), tokens)
    dense = [each.dequantize(torch.bfloat16) for each in w]
    for tokens in (1, 6, 8, 32, 128, 2048, 8192):
        experts_line(report, tokens, w, dense)


if __name__ == "__main__":
    main()
