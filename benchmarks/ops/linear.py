"""Products on packed FP8 weights, and wide ones on bfloat16, at released shapes.

Columns: floor (codes, scales, tokens and results moved once), ours, cuBLAS on weights that were
decoded to bfloat16 before (twice the bytes; input neither normalised nor cast), plain PyTorch,
which decodes the weights on every call. Launches follow one another in a graph as in a decode
step: where a kernel of ours is next, its weights are on their way before the last one has ended.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from benchmarks.ops.measure import (
    L2_BYTES,
    Report,
    floor_us,
    need_gpu,
    relative_error,
    sets_for,
    timed,
)
from torch import Tensor

from cedar.ops.linear import reference as plain
from cedar.ops.linear.kernels import LinearKernels
from cedar.quant import FP8_BLOCK, FP8_ROW, QuantTensor

Weight = Tensor | QuantTensor
TOKENS = (1, 6, 32, 128)
FEW = 1024  # rows of a weight that are compared with float64


class Case(NamedTuple):
    """Weights that share an input; groups: 0, or each has an input of its own; wide: float32."""

    name: str
    width: int
    rows: tuple[int, ...]
    normed: bool = False
    groups: int = 0
    wide: bool = False


CASES = [
    Case("wq_a and wkv", 5120, (1280, 512)),
    Case("norm and wq_b", 1280, (32768,), normed=True),
    Case("norm, wq_b and the indexer's", 1280, (32768, 4096), normed=True),
    Case("wo_a", 4096, (8192,), groups=8),
    Case("wo_b", 8192, (5120,)),
    Case("shared expert w1 and w3", 5120, (2304, 2304)),
    Case("shared expert w2", 2304, (5120,)),
    Case("engram wkv", 6144, (25600,)),
    Case("router", 5120, (384,), wide=True),
    Case("compressor wkv", 5120, (512,), wide=True),
    Case("head", 5120, (129280,), wide=True),
]


def packed(rows: int, width: int, seed: int) -> QuantTensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randn(rows, width, generator=g, device="cuda", dtype=torch.float16) * 60
    shape = (rows // 32, width // 32)
    scale = torch.randint(114, 120, shape, generator=g, device="cuda", dtype=torch.uint8)
    return QuantTensor(values.clamp_(-448, 448).to(torch.float8_e4m3fn), scale, FP8_BLOCK)


def weights(case: Case, seed: int) -> tuple[Weight, ...]:
    if not case.wide:
        return tuple(packed(n, case.width, seed * 8 + i) for i, n in enumerate(case.rows))
    g = torch.Generator(device="cuda").manual_seed(seed)
    shape = (case.rows[0], case.width)
    return (torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16) * 0.02,)


def inputs(case: Case, tokens: int, seed: int) -> Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    shape = (tokens, case.groups, case.width) if case.groups else (tokens, case.width)
    return torch.randn(shape, generator=g, device="cuda").bfloat16()


def call(op: Any, case: Case, norm: Tensor, x: Tensor, held: tuple[Weight, ...]) -> Any:
    """The operation of ``op`` (kernels, or the reference) that the case is one of."""
    if case.wide:
        return (op.wide_linear(x, *held),)
    if case.groups:
        return (op.project_groups(x, *held),)
    return op.project(x, held, input_format=FP8_ROW, norm=(norm, 1e-6) if case.normed else None)


def exact(case: Case, norm: Tensor, x: Tensor, weight: Weight) -> Tensor:
    """float64, behind the same norm and cast, of the last rows of a weight."""
    if case.groups:
        assert isinstance(weight, QuantTensor)
        group = case.rows[0] // case.groups
        last = part(weight, group)
        return plain.linear(x[:, -1].double(), last)[:, -FEW:]
    if not case.wide:
        one = torch.eye(case.width, device="cuda").bfloat16()
        options = {"norm": (norm, 1e-6) if case.normed else None}
        (x,) = plain.project(x, (one,), input_format=FP8_ROW, **options)
    last = part(weight, FEW)
    return plain.linear(x.double(), last.double() if isinstance(last, Tensor) else last)


def part(weight: Weight, rows: int) -> Weight:
    """The last rows."""
    if isinstance(weight, QuantTensor):
        return QuantTensor(weight.codes[-rows:], weight.scale[-rows // 32 :], weight.format)
    return weight[-rows:]


def cublas(case: Case, x: Tensor, dense: list[Tensor]) -> list[Tensor]:
    if case.groups:
        return [torch.einsum("tgk,grk->tgr", x, dense[0].view(case.groups, -1, case.width))]
    if case.wide:
        return [torch.mm(x, dense[0].t(), out_dtype=torch.float32)]
    return [F.linear(x, weight) for weight in dense]


def measure(report: Report, case: Case, tokens: int, held: list[tuple[Weight, ...]]) -> None:
    op = LinearKernels()
    sets = [inputs(case, tokens, seed) for seed in range(len(held))]
    norm = 1 + 0.1 * torch.randn(case.width, device="cuda").bfloat16()
    cells = sum(case.rows) * case.width
    columns = case.width * (case.groups or 1)
    weight_bytes = cells * 2 if case.wide else cells + cells // 1024
    moved = weight_bytes + 2 * tokens * columns + tokens * sum(case.rows) * (4 if case.wide else 2)
    flop = 2 * tokens * cells
    found = call(op, case, norm, sets[0], held[0])[-1]
    want = exact(case, norm, sets[0], held[0][-1])

    def every(function: Callable[..., Any], second: list[Any]) -> Any:
        return timed([partial(function, x, w) for x, w in zip(sets, second, strict=False)])

    dense = [
        [w.dequantize(torch.bfloat16) if isinstance(w, QuantTensor) else w for w in each]
        for each in held[: max(2, int(L2_BYTES // cells))]
    ]
    others: dict[str, Any] = {"cublas_bf16": lambda: every(partial(cublas, case), dense)}
    if tokens == 1:
        others["pytorch"] = lambda: every(partial(call, plain, case, norm), held[:2])
    report.line(
        {"case": case.name, "in": case.width, "out": list(case.rows), "tokens": tokens},
        floor=floor_us(moved, flop),
        error=relative_error(found[:, -want.shape[1] :], want),
        bound=2e-6 if case.wide else 2.5e-3,
        ours=lambda: every(partial(call, op, case, norm), held),
        others=others,
        bytes=moved,
        flop=flop,
    )


def main() -> None:
    """All shapes."""
    need_gpu()
    report = Report("linear")
    for case in CASES:
        size = sum(case.rows) * case.width * (2 if case.wide else 1)
        held = [weights(case, seed) for seed in range(sets_for(size, least=2, most=16))]
        for tokens in TOKENS:
            if case.name == "head" and tokens > 128:
                continue
            measure(report, case, tokens, held)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
