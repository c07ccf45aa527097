"""Sparse attention at decode: 64 heads x 512, a window of 128 FP8 rows and 512 FP4 rows a query.

Columns: floor, ours, the FlashMLA legacy kernel if it can be imported (it reads 584-byte rows of
another format), and plain PyTorch (gather, dequantise, multiply).
"""

import torch
from benchmarks.ops.measure import (
    Report,
    floor_us,
    need_gpu,
    relative_error,
    sets_for,
    timed,
    timed_eager,
)
from torch import Tensor

from cedar.ops.sparse_attention import PackedRows, Source
from cedar.ops.sparse_attention import reference as plain
from cedar.ops.sparse_attention import triton as kernel
from cedar.quant import FP4_MAIN, FP8_ROW

HEADS, WIDTH, WINDOW, TOPK = 64, 512, 128, 512
ROWS = 1 << 18
Case = tuple[Tensor, tuple[Source, ...], Tensor, float]


def storages() -> tuple[Tensor, Tensor]:
    """Packed window rows and main rows with random codes and ordinary scales."""
    g = torch.Generator(device="cuda").manual_seed(1)

    def bytes_(rows: int, count: int, low: int, high: int) -> Tensor:
        return torch.randint(
            low, high, (rows, count), generator=g, device="cuda", dtype=torch.uint8
        )

    window = bytes_(1 << 16, WIDTH, 0, 256)
    window[window & 0x7F == 0x7F] = 0  # NaN codes
    near = torch.cat((window, bytes_(1 << 16, WIDTH // 32, 116, 119)), dim=1)
    far = torch.cat((bytes_(ROWS, WIDTH // 2, 0, 256), bytes_(ROWS, WIDTH // 16, 40, 56)), dim=1)
    return near, far


def inputs(seed: int, queries: int, near: Tensor, far: Tensor) -> Case:
    g = torch.Generator(device="cuda").manual_seed(seed)
    q = torch.randn(queries, HEADS, WIDTH, generator=g, device="cuda").bfloat16()
    first = torch.randint(0, len(near) - WINDOW, (queries, 1), generator=g, device="cuda")
    window = (first + torch.arange(WINDOW, device="cuda")).int()
    chosen = torch.randint(0, len(far), (queries, TOPK), generator=g, device="cuda")
    chosen = chosen.sort(1).values.int()
    sink = torch.randn(HEADS, generator=g, device="cuda")
    sources = (PackedRows(near, window, FP8_ROW), PackedRows(far, chosen, FP4_MAIN))
    return q, sources, sink, WIDTH**-0.5


def exact(case: Case) -> Tensor:
    q, sources, sink, scale = case
    few = tuple(s._replace(slots_TK=s.slots_TK[:4].long()) for s in sources)
    return plain.sparse_attention(q[:4].double(), few, sink.double(), scale)


def main() -> None:
    need_gpu()
    near, far = storages()
    report = Report("sparse_attention")
    for queries in (1, 8, 32, 128, 256):
        moved = queries * (WINDOW * 528 + TOPK * 288 + 2 * HEADS * WIDTH * 2)
        flop = queries * 4 * HEADS * (WINDOW + TOPK) * WIDTH
        count = sets_for(moved)
        cases = [inputs(seed, queries, near, far) for seed in range(count)]
        found = kernel.sparse_attention(*cases[0])
        report.line(
            {"queries": queries, "heads": HEADS, "width": WIDTH, "slots": WINDOW + TOPK},
            floor=floor_us(moved, flop),
            error=relative_error(found[:4], exact(cases[0])),
            bound=1e-2,
            ours=lambda cases=cases: timed(
                [lambda c=c: kernel.sparse_attention(*c) for c in cases]
            ),
            others={
                "flash_mla": "not compared here: other row formats; see the performance page",
                "pytorch": lambda cases=cases: timed_eager(
                    [lambda c=c: gathered(*c) for c in cases[:2]]
                ),
            },
            bytes=moved,
            flop=flop,
        )


def gathered(q: Tensor, sources: tuple[Source, ...], sink: Tensor, scale: float) -> Tensor:
    """Plain PyTorch without a look at the device: gather, dequantise, two products."""
    rows = []
    for source in sources:
        raw = source.raw_RB[source.slots_TK.long()]
        rows.append(plain.unpack_rows(raw, source.format, q.dtype))
    values = torch.cat(rows, dim=1)
    scores = torch.matmul(q, values.transpose(1, 2)).float() * scale
    wide = torch.cat((scores, sink.view(1, -1, 1).expand(len(q), -1, 1)), dim=-1)
    return torch.matmul(wide.softmax(-1)[..., :-1].to(q.dtype), values)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
