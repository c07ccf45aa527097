"""Sparse attention at decode: 64 heads x 512, a window of 128 FP8 rows and 512 FP4 rows a query.

Ours rotates queries and output on the way; ``unrotated`` does not. Where a request has
several tokens (drafts to verify), their windows overlap and their selections differ.

Columns: floor, ours, FlashMLA's Hopper kernel if it can be imported (it reads 584-byte rows of
another format), and plain PyTorch (gather, dequantise, multiply; eager and compiled).
"""

from functools import partial

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
from benchmarks.ops.peers import compiled, flash_mla
from torch import Tensor

from cedar.ops.rope.reference import rotate
from cedar.ops.sparse_attention import PackedRows, Source
from cedar.ops.sparse_attention import reference as plain
from cedar.ops.sparse_attention.triton import AttentionKernels
from cedar.quant import FP4_MAIN, FP8_ROW

HEADS, WIDTH, WINDOW, TOPK, TURNED = 64, 512, 128, 512, 64
FEW = 4  # queries that are compared with float64
ROWS = 1 << 18
SIZES = ((1, 1), (1, 6), (8, 1), (32, 1), (8, 6), (128, 1), (32, 6), (256, 1))
Case = tuple[Tensor, tuple[Source, ...], Tensor, float]
Rotary = tuple[Tensor, Tensor]


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


def inputs(seed: int, queries: int, near: Tensor, far: Tensor, tokens: int = 1) -> Case:
    """``tokens`` neighbouring queries are one request's."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    q = torch.randn(queries, HEADS, WIDTH, generator=g, device="cuda").bfloat16()
    most = len(near) - WINDOW - tokens
    first = torch.randint(0, most, (queries // tokens, 1, 1), generator=g, device="cuda")
    first = (first + torch.arange(tokens, device="cuda").unsqueeze(1)).view(queries, 1)
    window = (first + torch.arange(WINDOW, device="cuda")).int()
    chosen = torch.randint(0, len(far), (queries, TOPK), generator=g, device="cuda")
    chosen = chosen.sort(1).values.int()
    sink = torch.randn(HEADS, generator=g, device="cuda")
    sources = (PackedRows(near, window, FP8_ROW), PackedRows(far, chosen, FP4_MAIN))
    return q, sources, sink, WIDTH**-0.5


def angles(queries: int) -> Rotary:
    g = torch.Generator(device="cuda").manual_seed(5)
    angle = 6 * torch.rand(queries, TURNED // 2, generator=g, device="cuda")
    return angle.cos(), angle.sin()


def exact(case: Case, rotary: Rotary) -> Tensor:
    """The first queries' output; the rotated queries are rounded, everything after is not."""
    q, sources, sink, scale = case
    few = tuple(s._replace(slots_TK=s.slots_TK[:FEW].long()) for s in sources)
    turn = (rotary[0][:FEW], rotary[1][:FEW])
    turned = rotate(q[:FEW], *turn).double()
    return rotate(plain.sparse_attention(turned, few, sink.double(), scale), *turn, inverse=True)


def main() -> None:
    need_gpu()
    near, far = storages()
    report = Report("sparse_attention")
    kernel = AttentionKernels()
    for requests, tokens in SIZES:
        queries = requests * tokens
        moved = queries * (WINDOW * 528 + TOPK * 288 + 2 * HEADS * WIDTH * 2)
        flop = queries * 4 * HEADS * (WINDOW + TOPK) * WIDTH
        cases = [inputs(seed, queries, near, far, tokens) for seed in range(sets_for(moved))]
        rotary = angles(queries)
        found = kernel.rotated_attention(*cases[0], rotary)
        peers = flash_mla.decode(cases) | compiled.compiled(gathered, cases, moved)
        report.line(
            {
                "queries": queries,
                "tokens": tokens,
                "heads": HEADS,
                "width": WIDTH,
                "slots": WINDOW + TOPK,
            },
            floor=floor_us(moved, flop),
            error=relative_error(found[:FEW], exact(cases[0], rotary)),
            bound=1e-2,
            ours=partial(timed, [partial(kernel.rotated_attention, *c, rotary) for c in cases]),
            others={
                "unrotated": partial(timed, [partial(kernel.sparse_attention, *c) for c in cases]),
                **peers.others,
                "pytorch": partial(timed_eager, [partial(gathered, *c) for c in cases[:2]]),
            },
            bytes=moved,
            flop=flop,
            **peers.more,
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
