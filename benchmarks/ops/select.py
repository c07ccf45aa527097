"""Exact top-k of bfloat16 scores, and candidate blocks from block maxima.

Columns: floor (one read of the scores), ours, FlashInfer's top-k if it can be imported (with and
without our rule for ties), torch.topk (which promises nothing about ties).
"""

import torch
from benchmarks.ops.measure import Report, floor_us, need_gpu, sets_for, timed
from benchmarks.ops.peers import compiled, flashinfer

from cedar.ops.select import reference as plain
from cedar.ops.select import triton as kernel


def main() -> None:
    need_gpu()
    report = Report("select")
    for rows, width, k, block in (
        (1, 1 << 13, 512, 0),
        (1, 1 << 14, 512, 0),
        (1, 1 << 17, 512, 0),
        (1, 1 << 20, 512, 0),
        (32, 1 << 14, 512, 0),
        (32, 1 << 17, 512, 0),
        (128, 1 << 17, 512, 0),
        (1, 1 << 17, 2048, 8),
        (32, 1 << 14, 2048, 8),
    ):
        moved = rows * (width * 2 + k * 8)
        count = sets_for(moved, least=2, most=32)
        scores = [torch.randn(rows, width, device="cuda").bfloat16() for _ in range(count)]
        seen = torch.full((rows,), width * max(block, 1), device="cuda")

        def ours(x: torch.Tensor, k: int = k, block: int = block, seen: torch.Tensor = seen):
            if block:
                return kernel.select_best(x, seen, block, k)
            return kernel.select_entries(x, k, seen)

        want = (
            plain.select_best(scores[0], seen, block, k)
            if block
            else plain.select_entries(scores[0], k, seen)
        )
        wrong = float((ours(scores[0]) != want).sum())

        peers = flashinfer.top_k(scores, k) | compiled.float32_top_k(scores, k)
        report.line(
            {"rows": rows, "width": width, "k": k, "block": block},
            floor=floor_us(moved, 0),
            error=wrong,
            bound=0,
            ours=lambda scores=scores, ours=ours: timed([lambda x=x: ours(x) for x in scores]),
            others={
                **peers.others,
                "pytorch": lambda scores=scores, k=k: timed(
                    [lambda x=x: x.topk(k, dim=1) for x in scores], replays=8
                ),
            },
            bytes=moved,
            **peers.more,
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
