"""Index scores of many queries of one sequence, as prefill makes them; with the selection.

Kinds: scores (with maxima of blocks of 8), select (scores, then 512 entries and 2048 blocks).
The queries are the last ones of the context. Columns: floor of the visible pairs' FLOP, ours,
DeepGEMM's FP8 logits if it can be imported (twice the tensor-core rate; it writes float32), plain
PyTorch, which is what a pass without the kernel does.
"""

import importlib
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
    timed,
    timed_eager,
)
from benchmarks.ops.peers import Built, column
from benchmarks.ops.peers.deep_gemm import cast_rows
from torch import Tensor

from cedar.ops.index_score import Scan, prefill
from cedar.ops.index_score import reference as plain
from cedar.ops.select import reference as plain_selection
from cedar.ops.select import triton as selection

HEADS, WIDTH, BLOCK, POOL, TOPK = 32, 128, 8, 2048, 512
FEW = 128  # rows and columns that are compared with float64
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def values(g: torch.Generator, *shape: int) -> Tensor:
    """Numbers of E2M1 with ordinary block scales."""
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    x = codes[torch.randint(0, 8, shape, generator=g, device="cuda")]
    x *= torch.randint(0, 2, shape, generator=g, device="cuda") * 2 - 1
    blocks = (*shape[:-1], shape[-1] // 32)
    scale = torch.exp2(torch.randint(-2, 1, blocks, generator=g, device="cuda").float())
    return (x.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2).bfloat16()


def inputs(seed: int, tokens: int, entries: int) -> Inputs:
    g = torch.Generator(device="cuda").manual_seed(seed)
    w = torch.randn(tokens, HEADS, generator=g, device="cuda").bfloat16()
    visible = entries - tokens + 1 + torch.arange(tokens, device="cuda")
    return values(g, tokens, HEADS, WIDTH), w, values(g, entries, WIDTH), visible


def logits(calls: list[Inputs], moved: float) -> Built:
    module = importlib.import_module("deep_gemm")

    def call(q: Tensor, w: Tensor, keys: Tensor, visible: Tensor) -> Callable[[], Any]:
        codes, scale = cast_rows(keys, WIDTH)
        start, stop = torch.zeros_like(visible).int(), visible.int()
        kv = (codes, scale.squeeze(1))
        return partial(module.fp8_mqa_logits, q.to(codes.dtype), kv, w.float(), start, stop)

    run = [call(*each) for each in calls]
    q, w, keys, _ = calls[0]
    codes, scale = cast_rows(keys[:FEW], WIDTH)
    held = codes.double() * scale.double()
    want = plain.index_score(q[:FEW].double(), w[:FEW].double(), held)
    return Built(run, relative_error(run[0]()[:FEW, :FEW], want), moved)


def case(report: Report, tokens: int, entries: int) -> None:
    calls = [inputs(n, tokens, entries) for n in range(2)]
    q, w, keys, visible = calls[0]
    pairs = int(visible.sum())
    flop = pairs * 2 * HEADS * WIDTH
    moved = pairs * 2 + entries * WIDTH * 2 + tokens * HEADS * (WIDTH + 1) * 2
    scan = prefill.index_prefill(*calls[0], block=BLOCK)
    want = plain.index_score(q[-FEW:].double(), w[-FEW:].double(), keys[:FEW].double())
    sizes = {"tokens": tokens, "entries": entries}

    def ours(call: Callable[[Inputs], Any]) -> Sample:
        return timed([partial(call, each) for each in calls], replays=8)

    peer = column("deep_gemm", partial(logits, calls, pairs * 4 + entries * 132))
    report.line(
        {"kind": "scores", **sizes},
        floor=floor_us(moved, flop),
        error=relative_error(scan.scores_TS[-FEW:, :FEW], want),
        bound=1e-2,
        ours=lambda: ours(lambda each: prefill.index_prefill(*each, block=BLOCK)),
        others={
            **peer.others,
            "pytorch": lambda: timed_eager([lambda: plain.index_prefill(*calls[0])], 3),
        },
        bytes=moved,
        flop=flop,
        **peer.more,
    )
    last = (*(x[-FEW:].contiguous() for x in scan[:3]), BLOCK)
    found = selection.select_scan(Scan(*last), visible[-FEW:], TOPK, blocks=POOL)
    exact = plain_selection.select_scan(Scan(*last), visible[-FEW:], TOPK, blocks=POOL)
    wrong = sum(float((a != b).sum()) for a, b in zip(found, exact, strict=True) if a is not None)

    def select(each: Inputs) -> None:
        scored = prefill.index_prefill(*each, block=BLOCK)
        selection.select_scan(scored, each[3], TOPK, blocks=POOL)

    report.line(
        {"kind": "select", **sizes},
        floor=floor_us(moved, flop),
        error=wrong,
        bound=0,
        ours=lambda: ours(select),
        others={},
        bytes=moved,
        flop=flop,
    )


def main() -> None:
    need_gpu()
    report = Report("index_prefill")
    for tokens, entries in ((2048, 1 << 13), (2048, 1 << 15), (2048, 1 << 17), (8192, 1 << 13)):
        case(report, tokens, entries)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
