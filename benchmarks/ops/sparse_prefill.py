"""Sparse attention for prefill and training: bfloat16 rows, forward and backward.

64 heads x 512 over 640 rows a query: ``model`` sees a window of 128 rows, which neighbouring
queries share, and 512 random ones of a longer context; ``random`` sees random rows of a storage
larger than the L2 cache. ``research`` is 8 heads x 128 over 256 rows.

Columns: floor, ours, the FlashMLA sparse prefill kernel if it can be imported (forward, one
source, no sink), and PyTorch (gather and two products, compiled forward, eager backward). FLOP:
``4 N K H`` a query forward, five products instead of two backward. A floor counts every input
read once and every output written once; the gathered rows are read K times from the L2 cache.
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
    peer,
    relative_error,
    timed,
    timed_eager,
)
from torch import Tensor

from cedar.ops.sparse_attention import Rows, prefill
from cedar.ops.sparse_attention import reference as plain

Case = tuple[Tensor, tuple[Rows, ...], Tensor, float]
CHUNK = 512  # queries that plain PyTorch takes at a time
SIZES = {
    "model": {"queries": 4096, "heads": 64, "width": 512, "slots": (128, 512)},
    "random": {"queries": 4096, "heads": 64, "width": 512, "slots": (128, 512)},
    "research": {"queries": 16384, "heads": 8, "width": 128, "slots": (128, 128)},
}
ROWS = {"model": (4096, 32768), "random": (65536, 65536), "research": (16384, 8192)}


def inputs(name: str, queries: int | None = None) -> Case:
    size = SIZES[name]
    queries = queries or size["queries"]
    g = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    sources = []
    for place, (count, rows) in enumerate(zip(size["slots"], ROWS[name], strict=True)):
        if place == 0 and name != "random":
            back = torch.arange(count - 1, -1, -1, device="cuda")
            slots = torch.arange(queries, device="cuda").unsqueeze(1) - back
            slots = slots.clamp_min(-1)
        else:
            slots = torch.randint(0, rows, (queries, count), generator=g, device="cuda")
            slots = slots.sort(1).values
        sources.append(Rows(normal(rows, size["width"]), slots))
    q = normal(queries, size["heads"], size["width"])
    sink = torch.randn(size["heads"], generator=g, device="cuda")
    return q, tuple(sources), sink, size["width"] ** -0.5


def exact(case: Case, grad: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output, and gradients of q, sinks and rows, in float64."""
    q, sources, sink, scale = case
    leaves = [x.double().requires_grad_() for x in (q, sink, *(s.rows_RH for s in sources))]
    held = tuple(Rows(x, s.slots_TK) for x, s in zip(leaves[2:], sources, strict=True))
    with torch.enable_grad():
        out = plain.sparse_attention(leaves[0], held, leaves[1], scale)
    if grad is None:
        return out.detach(), ()
    return out.detach(), torch.autograd.grad(out, leaves, grad.double())


def gathered(q: Tensor, sources: tuple[Rows, ...], sink: Tensor, scale: float) -> Tensor:
    """What PyTorch does without kernels of ours, for some queries."""
    values = torch.cat(
        [torch.nn.functional.embedding(s.slots_TK.clamp_min(0), s.rows_RH) for s in sources], 1
    )
    filled = torch.cat([s.slots_TK >= 0 for s in sources], 1)
    scores = torch.matmul(q, values.transpose(1, 2)).float() * scale
    scores = scores.masked_fill(~filled.unsqueeze(1), -torch.inf)
    wide = torch.cat((scores, sink.view(1, -1, 1).expand(len(q), -1, 1)), dim=-1)
    return torch.matmul(wide.softmax(-1)[..., :-1].to(q.dtype), values)


def chunks(case: Case) -> list[Case]:
    q, sources, sink, scale = case
    return [
        (
            q[t : t + CHUNK],
            tuple(Rows(s.rows_RH, s.slots_TK[t : t + CHUNK]) for s in sources),
            sink,
            scale,
        )
        for t in range(0, len(q), CHUNK)
    ]


def compiled(case: Case) -> Callable[[], Sample]:
    def run() -> Sample:
        call = torch.compile(gathered, dynamic=False)
        parts = chunks(case)
        return timed_eager([lambda: [call(*part) for part in parts]], replays=4)

    return run


def eager_backward(case: Case, grad: Tensor) -> Callable[[], Sample]:
    """Of the first chunk, times the number of chunks."""

    def run() -> Sample:
        (q, sources, sink, scale), count = chunks(case)[0], len(chunks(case))
        leaves = [x.detach().requires_grad_() for x in (q, sink, *(s.rows_RH for s in sources))]
        held = tuple(Rows(x, s.slots_TK) for x, s in zip(leaves[2:], sources, strict=True))
        with torch.enable_grad():
            out = gathered(leaves[0], held, leaves[1], scale)
        grad_out = grad[:CHUNK]
        one = timed_eager(
            [lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)], replays=3
        )
        return one[0] * count, one[1] * count, one[2] * count

    return run


def flash_mla(case: Case) -> Callable[[], Sample] | str:
    module: Any = peer("flash_mla")
    if module is None:
        return "not importable here"
    q, sources, _, scale = case
    if q.shape[1] != 64:
        return "takes 64 or 128 heads"
    rows = torch.cat([s.rows_RH for s in sources])
    first = [0, len(sources[0].rows_RH)]
    slots = torch.cat(
        [
            torch.where(s.slots_TK >= 0, s.slots_TK + start, -1)
            for s, start in zip(sources, first, strict=True)
        ],
        dim=1,
    )
    slots = slots.int().unsqueeze(1).contiguous()

    def call() -> Any:
        return module.flash_mla_sparse_fwd(
            q, rows.unsqueeze(1), slots, scale, d_v=512, use_legacy=True
        )

    return lambda: timed([call], replays=8)


def measure(report: Report, name: str) -> None:
    case = inputs(name)
    q, sources, sink, scale = case
    size = SIZES[name]
    slots = sum(s.slots_TK.shape[1] for s in sources)
    flop = 4 * size["queries"] * size["heads"] * slots * size["width"]
    rows = sum(s.rows_RH.numel() for s in sources)
    index = sum(s.slots_TK.numel() for s in sources) * 8
    few = inputs(name, 96)
    grad = torch.randn_like(q)
    out, log_sum = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    about = {
        "case": name,
        **size,
        "rows": ROWS[name],
        "kernels": prefill.kernels_for(q, sources).name,
    }
    moved = 2 * (2 * q.numel() + rows) + index
    report.line(
        {"pass": "forward", **about},
        floor=floor_us(moved, flop),
        error=relative_error(prefill.sparse_attention(*few), exact(few)[0]),
        bound=5e-3,
        ours=lambda: timed([lambda: prefill.forward(q, sources, sink, scale, out, log_sum)]),
        others={"flash_mla": flash_mla(case), "pytorch_compiled": compiled(case)},
        bytes=moved,
        flop=flop,
    )
    moved = 2 * (4 * q.numel() + rows) + index + 4 * rows

    def backward(deterministic: bool) -> Sample:
        call = partial(prefill.backward, q, sources, scale, out, log_sum, grad, deterministic)
        return timed([call], replays=8)

    for deterministic in (False, True):
        report.line(
            {"pass": "backward", "deterministic": deterministic, **about},
            floor=floor_us(moved, 2.5 * flop),
            error=backward_error(few, deterministic),
            bound=2e-2,  # the sinks' gradient is a sum of both signs over few queries here
            ours=partial(backward, deterministic),
            others={} if deterministic else {"pytorch": eager_backward(case, grad)},
            bytes=moved,
            flop=2.5 * flop,
        )


def main() -> None:
    need_gpu()
    report = Report("sparse_prefill")
    for name in SIZES:
        measure(report, name)


def backward_error(case: Case, deterministic: bool) -> float:
    """The largest of the relative errors of all gradients."""
    q, sources, sink, scale = case
    leaves = [x.detach().requires_grad_() for x in (q, sink, *(s.rows_RH for s in sources))]
    held = tuple(Rows(x, s.slots_TK) for x, s in zip(leaves[2:], sources, strict=True))
    with torch.enable_grad():
        out = prefill.sparse_attention(
            leaves[0], held, leaves[1], scale, deterministic=deterministic
        )
        g = torch.Generator(device="cuda").manual_seed(3)
        grad = torch.randn(out.shape, generator=g, device="cuda").to(out.dtype)
        found = torch.autograd.grad(out, leaves, grad)
        wanted = exact(case, grad)[1]
    return max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))


if __name__ == "__main__":
    with torch.no_grad():
        main()
