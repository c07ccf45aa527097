"""Experts in training: forward, and the gradients of tokens, routing weights and expert weights.

Shapes: the released one, and two of research size. Columns: floor (weights, tokens and results
once; backward also gate, up and the gradients of all weights), ours, a grouped product of plain
PyTorch (`torch._grouped_mm`, sorting and SwiGLU by autograd), Liger's fused experts if they can be
imported (no clamp, routing weight after the last product, reads a size on the host), and plain
PyTorch. Launched one by one as training does, gaps included.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.ops.measure import (
    Report,
    Sample,
    floor_us,
    need_gpu,
    relative_error,
    timed_eager,
)
from benchmarks.ops.peers import liger
from torch import Tensor

from cedar.ops.experts import reference as plain
from cedar.ops.experts import training

LIMIT = 10.0
SHAPES = (  # tokens, D, F, experts, of which a token visits
    (8192, 5120, 2304, 384, 6),
    (32768, 512, 256, 64, 6),
    (65536, 512, 256, 16, 2),
)
FEW = 8
Values = tuple[Tensor, ...]


def inputs(tokens: int, dim: int, inner: int, count: int, active: int) -> tuple[Tensor, Values]:
    """Choices; x, routing weights, w1, w2, w3."""
    g = torch.Generator(device="cuda").manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)

    chosen = torch.rand(tokens, count, generator=g, device="cuda").topk(active, 1).indices
    routing = torch.rand(tokens, active, generator=g, device="cuda")
    shapes = ((count, inner, dim), (count, dim, inner), (count, inner, dim))
    weights = [normal(*shape).mul_((2 / shape[-1]) ** 0.5) for shape in shapes]
    return chosen, (normal(tokens, dim), routing, *weights)


def reference(chosen: Tensor, values: Values) -> Tensor:
    x, routing, *weights = values
    return plain.experts(x, chosen, routing, *weights, limit=LIMIT, input_format=None)


def ours(chosen: Tensor, values: Values) -> Tensor:
    x, routing, *weights = values
    return training.dense_experts(x, chosen, routing, *weights, limit=LIMIT)


def grouped(chosen: Tensor, values: Values) -> Tensor:
    x, routing, w1, w2, w3 = values
    order = chosen.flatten().argsort()
    token = order // chosen.shape[1]
    ends = torch.zeros(len(w1), dtype=torch.int64, device=x.device)
    ends = ends.scatter_add(0, chosen.flatten(), torch.ones_like(order)).cumsum(0).int()
    rows = x[token]
    gate = torch._grouped_mm(rows, w1.transpose(1, 2), offs=ends)
    up = torch._grouped_mm(rows, w3.transpose(1, 2), offs=ends)
    hidden = plain.swiglu(gate, up, LIMIT) * routing.flatten()[order, None]
    down = torch._grouped_mm(hidden.bfloat16(), w2.transpose(1, 2), offs=ends)
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, down.float())


def backward(
    function: Callable[[Tensor, Values], Tensor], chosen: Tensor, values: Values, grad: Tensor
) -> tuple[Tensor, Callable[[], Any]]:
    """The result, and the backward pass alone; the graph is kept for every call."""
    learned = tuple(v.detach().requires_grad_() for v in values)
    out = function(chosen, learned)
    return out.detach(), partial(
        torch.autograd.grad, out, learned, grad.to(out.dtype), retain_graph=True
    )


def part(chosen: Tensor, values: Values, grad: Tensor, dtype: torch.dtype) -> Values:
    """By plain PyTorch: a few tokens' results and gradients, those of the first expert's weights.

    dtype: of all but routing weights, which are float64 if the others are.
    """
    x, routing, *weights = values
    wide = torch.promote_types(dtype, torch.float32)
    seen = chosen[:FEW].unique()
    place = torch.searchsorted(seen, chosen[:FEW])
    few = [x[:FEW].to(dtype).requires_grad_(), routing[:FEW].to(wide).requires_grad_()]
    out = reference(place, (*few, *(w[seen].to(dtype) for w in weights)))
    own = torch.autograd.grad(out, few, grad[:FEW].to(out.dtype))
    token, place = (chosen == 0).nonzero(as_tuple=True)
    first = [w[:1].to(dtype).requires_grad_() for w in weights]
    last = reference(
        torch.zeros_like(token)[:, None],
        (x[token].to(dtype), routing[token, place, None].to(wide), *first),
    )
    return (out.detach(), *own, *torch.autograd.grad(last, first, grad[token].to(last.dtype)))


def errors(found: Values, want: Values) -> list[float]:
    return [relative_error(a[: len(b)], b) for a, b in zip(found, want, strict=True)]


def measured(function: Callable[[Tensor, Values], Tensor], chosen: Tensor, values: Values,
             grad: Tensor, replays: int = 8) -> list[Sample]:  # fmt: skip
    """Forward with everything kept that backward needs; backward alone."""
    learned = tuple(v.detach().requires_grad_() for v in values)
    forward = timed_eager([partial(function, chosen, learned)], replays)
    _, back = backward(function, chosen, values, grad)
    return [forward, timed_eager([back], replays)]


def liger_experts(chosen: Tensor, values: Values, grad: Tensor) -> list[Sample]:
    """As `measured`."""
    apply = liger.fused_experts()
    x, routing, w1, w2, w3 = values
    chosen = chosen.int()

    def call(chosen: Tensor, values: Values) -> Tensor:
        x, routing, both, w2 = values
        return apply(x, both, w2, chosen, routing)

    return measured(call, chosen, (x, routing, torch.cat((w1, w3), 1), w2), grad)


def attempt(call: Callable[[], list[Sample]]) -> list[Sample] | str:
    """What is measured, or why nothing is."""
    try:
        return call()
    except Exception as problem:  # a peer may lack anything
        return f"cannot run: {type(problem).__name__}: {problem}".replace("\n", " ")[:200]


def lines(shape: tuple[int, ...]) -> None:
    """One line forward, one backward."""
    tokens, dim, inner, count, active = shape
    chosen, values = inputs(*shape)
    grad = torch.randn_like(values[0])
    out, back = backward(ours, chosen, values, grad)
    want = part(chosen, values, grad, torch.float64)
    error = errors((out, *back()), want)
    same = errors(part(chosen, values, grad, torch.bfloat16), want)
    del out, back, want
    loop: list[Sample] | str = "not run: zeros as large as all weights for each expert"
    if values[2].nbytes < 1 << 30:
        loop = attempt(lambda: measured(reference, chosen, values, grad, replays=2))
    columns = {
        "ours": measured(ours, chosen, values, grad),
        "grouped_mm": attempt(lambda: measured(grouped, chosen, values, grad)),
        "liger": attempt(lambda: liger_experts(chosen, values, grad)),
        "pytorch": loop,
    }
    flop = 6 * tokens * active * dim * inner
    weights = 6 * count * dim * inner
    moved = {
        "forward": (weights + 6 * tokens * dim, flop),
        "backward": (2 * weights + 8 * tokens * dim + 4 * tokens * active * inner, 2 * flop),
    }
    report = Report("experts_training")
    for place, (direction, (size, work)) in enumerate(moved.items()):
        own: Any = columns["ours"]
        places = slice(1) if direction == "forward" else slice(1, None)
        report.line(
            {"pass": direction, "tokens": tokens, "dim": dim, "inner": inner, "experts": count,
             "active": active},
            floor=floor_us(size, work),
            error=max(error[places]),
            bound=1.1 * max(same[places]),
            ours=lambda sample=own[place]: sample,
            others={
                name: found if isinstance(found, str) else (lambda sample=found[place]: sample)
                for name, found in columns.items() if name != "ours"
            },
            tflops=round(work / own[place][0] / 1e6),
            error_of_pytorch=max(same[places]),
            bytes=size,
            flop=work,
        )  # fmt: skip


def main() -> None:
    """All shapes."""
    need_gpu()
    for shape in SHAPES:
        lines(shape)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
