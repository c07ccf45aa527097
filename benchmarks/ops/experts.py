"""Experts on packed FP4 weights at the released size, 384 with 6 a token, and their router.

Columns: floor, ours, the portable Triton version, a grouped product on bfloat16 weights
(`torch._grouped_mm`, four times the bytes), DeepGEMM's two grouped FP8 products (twice the bytes)
and Liger's fused experts (four times) if they can be imported; of the router plain PyTorch. Lines
with ``shared`` hold the shared expert, too, and its sum with the routed ones. Lines of ``mixture``
hold the router as well; beside them both operations by themselves. Arguments choose kinds of lines
and numbers of tokens.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.ops.measure import Report, Sample, floor_us, need_gpu, relative_error, timed
from benchmarks.ops.peers import deep_gemm, liger
from torch import Tensor

from cedar.ops.experts import packed, triton
from cedar.ops.experts import reference as plain
from cedar.ops.experts.mixture import MixtureKernels
from cedar.ops.route import Gating
from cedar.ops.route import reference as plain_route
from cedar.ops.route import triton as route
from cedar.quant import FP4_ROW, FP8_BLOCK, FP8_ROW, QuantTensor

EXPERTS, ACTIVE, DIM, INNER, LIMIT = 384, 6, 5120, 2304, 10.0
FIXED = {"limit": LIMIT, "input_format": FP8_ROW}
KINDS = {
    "shared": (1, 6, 8, 32, 128),
    "router": (1, 6, 32, 128, 8192),
    "mixture": (1, 6, 8),
    "routed": (1, 6, 8, 32, 128, 2048, 8192),
}
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

    replays = 24 if tokens <= 128 else 3  # of milliseconds each

    def calls(function: Callable[..., Tensor], *last: object, **options: object) -> Sample:
        return timed([partial(function, *each, *last, **options) for each in cases], replays)

    def ours() -> Sample:
        pairs = zip(cases, shared, strict=True)
        return timed(
            [partial(packed.experts, *each, *w, **FIXED, shared=one) for each, one in pairs],
            replays,
        )

    peers = deep_gemm.experts([each[1] for each in cases], EXPERTS, DIM, INNER) if dense else None
    if dense and tokens in (32, 128, 8192):
        peers |= liger.experts(cases, *dense)
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


def gatings(count: int, seed: int) -> list[Gating]:
    """Routers of as many layers."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    bias = torch.randn(EXPERTS, generator=g, device="cuda") * 0.1
    shape = (EXPERTS, DIM)
    weights = [torch.randn(shape, generator=g, device="cuda") / DIM**0.5 for _ in range(count)]
    return [Gating(w.bfloat16(), bias, ACTIVE, 1.0, "sqrtsoftplus", True, 2.5) for w in weights]


def router_line(report: Report, tokens: int) -> None:
    """Both launches: products, and scores with bias, choice and weights."""
    g = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, DIM, generator=g, device="cuda").bfloat16()
    gates = gatings(32, tokens)
    wide = gates[0]._replace(weight_ED=gates[0].weight_ED.double())
    want = plain_route.router(x.double(), **wide._asdict())
    found = route.router(x, **gates[0]._asdict())
    moved, flop = 2 * DIM * (EXPERTS + tokens) + 4 * tokens * EXPERTS, 2 * tokens * DIM * EXPERTS

    def calls(function: Callable[..., object]) -> Sample:
        return timed([partial(function, x, **gate._asdict()) for gate in gates])

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


def mixture_line(report: Report, tokens: int, w: Weights) -> None:
    """Router, routed experts and the shared one."""
    cases = [
        (case(tokens, seed)[0], gate, shared_weights(seed))
        for seed, gate in enumerate(gatings(4, tokens))
    ]
    op = MixtureKernels(route.router, packed.experts)

    def both(x: Tensor, gate: Gating, shared: Weights) -> Tensor:
        chosen = route.router(x, **gate._asdict())
        return packed.experts(x, *chosen[:2], *w, **FIXED, shared=shared)

    def ours(x: Tensor, gate: Gating, shared: Weights) -> Tensor:
        return op.mixture(x, gate, *w, **FIXED, shared=shared)[0]

    def calls(function: Callable[..., Tensor]) -> Sample:
        return timed([partial(function, *each) for each in cases])

    routings = [route.router(x, **gate._asdict()) for x, gate, _ in cases]
    visited = sum(len(torch.unique(each.experts_TA)) for each in routings) / len(cases)
    moved = visited * 3 * DIM * INNER * (0.5 + 1 / 32) + 3 * DIM * INNER * (1 + 1 / 1024)
    moved += 2 * DIM * (EXPERTS + 2 * tokens)
    flop = tokens * (6 * DIM * INNER * (ACTIVE + 1) + 2 * DIM * EXPERTS)
    x, gate, shared = cases[0]
    few = (x[:32], routings[0].experts_TA[:32], routings[0].weights_TA[:32])
    want = exact(few, w, shared)
    report.line(
        {"tokens": tokens},
        floor=floor_us(moved, flop),
        error=relative_error(ours(x, gate, shared)[:32], want),
        bound=1.1 * relative_error(plain.experts(*few, *w, **FIXED, shared=shared), want),
        ours=partial(calls, ours),
        others={
            "apart": partial(calls, both),
            "pytorch": "reads sizes on the host, cannot be captured",
        },
        bytes=round(moved),
        flop=flop,
        experts=visited,
    )


def main() -> None:
    """All shapes, or those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--tokens", help="like 1,32")
    arguments = parser.parse_args()
    need_gpu()
    w = (weights(INNER, DIM, 1), weights(DIM, INNER, 2), weights(INNER, DIM, 3))
    dense: list[Tensor] = []
    for kind in arguments.kinds.split(","):
        few = arguments.tokens and [int(n) for n in arguments.tokens.split(",")]
        for tokens in few or KINDS[kind]:
            if kind == "shared":
                experts_line(Report("experts"), tokens, w, None)
            elif kind == "router":
                router_line(Report("router"), tokens)
            elif kind == "mixture":
                mixture_line(Report("mixture"), tokens, w)
            else:
                dense = dense or [each.dequantize(torch.bfloat16) for each in w]
                experts_line(Report("experts"), tokens, w, dense)


if __name__ == "__main__":
    main()
