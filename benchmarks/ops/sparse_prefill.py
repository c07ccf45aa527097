"""Sparse attention for prefill and training: bfloat16 rows, forward and backward.

64 heads x 512 over 640 rows a query: ``model`` sees a window of 128 rows, which neighbouring
queries share, and 512 random ones of a longer context; ``random`` sees random rows of a storage
larger than the L2 cache. ``research`` is 8 heads x 128 over 256 rows. ``blocks`` is 64 heads x 128
over 8 blocks of 64 rows, a query's own and earlier ones, as fla's NSA takes them. ``packed`` is the
engine's prefill, forward only: a window of bfloat16 rows, FP4 rows of a packed storage, and the
rotation of queries and output in the same launch. Names as arguments choose some of them, and
``forward`` or ``backward``.

Columns: floor, ours, FlashMLA's sparse prefill kernel (forward, one source) or for ``blocks`` fla's
kernels if they can be imported, and PyTorch (gather and two products, compiled forward, eager
backward). FLOP: ``4 N K H`` a query forward, five products instead of two backward. A floor counts
every input read once and every output written once; the gathered rows are read K times from the L2
cache.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.ops.measure import (
    Report,
    Sample,
    floor_us,
    need_gpu,
    relative_error,
    timed,
    timed_eager,
)
from benchmarks.ops.peers import Columns, fla, flash_mla
from torch import Tensor

from cedar.ops.packed import pack_rows
from cedar.ops.rope.reference import rotate
from cedar.ops.sparse_attention import PackedRows, Rows, prefill
from cedar.ops.sparse_attention import reference as plain
from cedar.ops.sparse_attention.triton import AttentionKernels
from cedar.quant import FP4_MAIN

Case = tuple[Tensor, tuple[Rows, ...], Tensor, float]
PASSES = {"forward", "backward"}
CHUNK = 512  # queries that plain PyTorch takes at a time
SIZES = {
    "model": {"queries": 4096, "heads": 64, "width": 512, "slots": (128, 512)},
    "random": {"queries": 4096, "heads": 64, "width": 512, "slots": (128, 512)},
    "research": {"queries": 16384, "heads": 8, "width": 128, "slots": (128, 128)},
    "blocks": {"queries": 8192, "heads": 64, "width": 128, "slots": (512,)},
}
ROWS = {
    "model": (4096, 32768), "random": (65536, 65536), "research": (16384, 8192), "blocks": (8192,),
}  # fmt: skip


def selected_blocks(queries: int, count: int = 8) -> Tensor:
    """A query's own block and random earlier ones, ascending; -1 where there are no more."""
    g = torch.Generator(device="cuda").manual_seed(2)
    own = torch.arange(queries, device="cuda").unsqueeze(1) // fla.BLOCK
    blocks = torch.arange(max(count, -(-queries // fla.BLOCK)), device="cuda")
    score = torch.rand(queries, len(blocks), generator=g, device="cuda")
    score = score.where(blocks <= own, -1.0).where(blocks != own, 2.0)
    best = score.topk(count, dim=1)
    return best.indices.where(best.values >= 0, -1).sort(1).values


def inputs(name: str, queries: int | None = None) -> Case:
    size = SIZES[name]
    queries = queries or size["queries"]
    g = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    sources = []
    for place, (count, rows) in enumerate(zip(size["slots"], ROWS[name], strict=True)):
        if name == "blocks":
            slots = fla.block_slots(selected_blocks(queries))
        elif place == 0 and name != "random":
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


def measure(report: Report, name: str, passes: set[str]) -> None:
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

    def peers_of(grad: Tensor | None) -> Columns:
        if name == "blocks":
            return fla.blocks(q, sources[0].rows_RH, selected_blocks(len(q)), grad)
        return Columns() if grad is not None else flash_mla.prefill(case)

    ours = partial(prefill.forward, q, sources, sink, scale, out, log_sum)
    ours()  # what the backward pass reads
    if "forward" in passes:
        peers = peers_of(None)
        report.line(
            {"pass": "forward", **about},
            floor=floor_us(moved, flop),
            error=relative_error(prefill.sparse_attention(*few), exact(few)[0]),
            bound=5e-3,
            ours=partial(timed, [ours]),
            others={**peers.others, "pytorch_compiled": compiled(case)},
            bytes=moved,
            flop=flop,
            **peers.more,
        )
    if "backward" not in passes:
        return
    moved = 2 * (4 * q.numel() + rows) + index + 4 * rows

    def backward(deterministic: bool) -> Sample:
        call = partial(prefill.backward, q, sources, scale, out, log_sum, grad, deterministic)
        return timed([call], replays=8)

    for deterministic in (False, True):
        peers = Columns() if deterministic else peers_of(grad)
        report.line(
            {"pass": "backward", "deterministic": deterministic, **about},
            floor=floor_us(moved, 2.5 * flop),
            error=backward_error(few, deterministic),
            bound=2e-2,  # the sinks' gradient is a sum of both signs over few queries here
            ours=partial(backward, deterministic),
            others={} if deterministic else {**peers.others, "pytorch": eager_backward(case, grad)},
            bytes=moved,
            flop=2.5 * flop,
            **peers.more,
        )


def measure_packed(report: Report, queries: int) -> None:
    q, (near, far), sink, scale = inputs("model", queries)
    packed = PackedRows(pack_rows(far.rows_RH, FP4_MAIN), far.slots_TK.int(), FP4_MAIN)
    size = {**SIZES["model"], "queries": queries}
    flop = 4 * queries * 64 * 640 * 512
    angle = 6 * torch.rand(queries, 32, device="cuda")
    rotary = (angle.cos(), angle.sin())
    call = partial(AttentionKernels().rotated_attention, q, (near, packed), sink, scale, rotary)
    last = slice(queries - 8, queries)
    turn = (rotary[0][last], rotary[1][last])
    sources = (
        Rows(near.rows_RH.double(), near.slots_TK[last]),
        packed._replace(slots_TK=packed.slots_TK[last]),
    )
    turned = rotate(q[last], *turn).double()
    exact_out = plain.sparse_attention(turned, sources, sink.double(), scale)
    moved = 4 * q.numel() + near.rows_RH.nbytes + packed.raw_RB.nbytes
    moved += near.slots_TK.nbytes + packed.slots_TK.nbytes
    report.line(
        {"pass": "forward", "case": "packed", **size, "rows": ROWS["model"]},
        floor=floor_us(moved, flop),
        error=relative_error(call()[last], rotate(exact_out, *turn, inverse=True)),
        bound=5e-3,
        ours=partial(timed, [call]),
        others={},
        bytes=moved,
        flop=flop,
    )


def main() -> None:
    need_gpu()
    report = Report("sparse_prefill")
    passes = PASSES & set(sys.argv[1:]) or PASSES
    chosen = [name for name in sys.argv[1:] if name not in PASSES] or [*SIZES, "packed"]
    for name in chosen:
        if name == "packed":
            for queries in (128, 512, 2048, 4096):
                measure_packed(report, queries)
        else:
            measure(report, name, passes)


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
