"""Index scores from packed keys: scans of whole contexts, and candidate pools; with the selection.

Kinds: scan (scores and maxima), full (scan, then 512 entries, their rows and 2048 blocks), pool
(scores inside 2048 blocks), reindex (pool, then 512 entries and their rows). Columns: floor, ours,
DeepGEMM's FP8 logits if it can be imported (132-byte keys), plain PyTorch (eager and compiled).
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
from benchmarks.ops.peers import compiled, deep_gemm, flashinfer
from torch import Tensor

from cedar.ops.index_score import PagedKeys, Scan
from cedar.ops.index_score import reference as plain
from cedar.ops.index_score import triton as kernel
from cedar.ops.select import Chosen, Place
from cedar.ops.select import reference as plain_selection
from cedar.ops.select import triton as selection

HEADS, WIDTH, PAGE, BLOCK, POOL, TOPK = 32, 128, 64, 8, 2048, 512


def storage(entries: int) -> Tensor:
    """Packed keys with random codes and ordinary scales, ``[pages, 64, 68]``."""
    g = torch.Generator(device="cuda").manual_seed(1)
    pages = -(-entries // PAGE)
    raw = torch.randint(0, 256, (pages, PAGE, 68), generator=g, device="cuda", dtype=torch.uint8)
    raw[..., 64:] = raw[..., 64:] % 3 + 125
    return raw


def queries(seed: int, count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    q = codes[torch.randint(0, 8, (count, HEADS, WIDTH), generator=g, device="cuda")]
    sign = torch.randint(0, 2, q.shape, generator=g, device="cuda") * 2 - 1
    w = torch.randn(count, HEADS, generator=g, device="cuda")
    return (q * sign).bfloat16(), w.bfloat16()


def scan(report: Report, sequences: int, tokens: int, entries: int, block: int) -> None:
    moved = sequences * entries * (68 + 2 * tokens) + sequences * tokens * HEADS * WIDTH * 2
    flop = sequences * tokens * entries * 2 * HEADS * WIDTH
    count = sets_for(sequences * entries * 68, least=2, most=32)
    raw = storage(sequences * entries * count)
    per = entries // PAGE
    g = torch.Generator(device="cuda").manual_seed(2)
    order = torch.randperm(len(raw), generator=g, device="cuda").int()
    first = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * tokens
    seen = torch.full((sequences * tokens,), entries, device="cuda")
    calls = []
    for n in range(count):
        table = order[n * sequences * per : (n + 1) * sequences * per].view(sequences, per)
        calls.append((*queries(n, sequences * tokens), PagedKeys(raw, table, first), seen))
    options = {"capacity": entries, "queries": tokens, "block": block}
    found = kernel.index_scan(*calls[0], **options).scores_TS
    q, w, keys, _ = calls[0]
    few = 4096
    part = PagedKeys(raw, keys.table[:1], first[:2])
    want = plain.index_scan(
        q[:tokens].double(), w[:tokens].double(), part, seen[:tokens].clamp_max(few),
        capacity=few, queries=tokens,
    ).scores_TS  # fmt: skip

    def dense() -> Tensor:
        held = plain.unpack_rows(raw[keys.table.long()].flatten(1, 2), plain.FP4_ROW, q.dtype)
        grouped = q.view(sequences, tokens, HEADS, WIDTH)
        dot = torch.matmul(grouped.flatten(1, 2), held.transpose(1, 2))
        dot = dot.unflatten(1, (tokens, HEADS)).relu() * w.view(sequences, tokens, HEADS, 1)
        return dot.float().sum(2).bfloat16()

    small = sequences * entries * tokens <= 1 << 20
    peers = deep_gemm.index_scan(calls, entries)
    if small:
        peers |= compiled.compiled(dense, [()], moved)
    case = {"sequences": sequences, "tokens": tokens, "entries": entries, "block": block}
    report.line(
        {"kind": "scan", **case},
        floor=floor_us(moved, flop),
        error=relative_error(found[:tokens, :few], want),
        bound=1e-2,
        ours=lambda: timed([lambda c=c: kernel.index_scan(*c, **options) for c in calls]),
        others={
            **peers.others,
            "pytorch": (lambda: timed_eager([dense])) if small else "too large",
        },
        bytes=moved,
        flop=flop,
        **peers.more,
    )  # fmt: skip
    sequence = torch.arange(sequences, device="cuda").repeat_interleave(tokens)

    def full(call: tuple) -> tuple[Scan, Chosen]:
        scores = kernel.index_scan(*call, **options)
        where = Place(call[2].table, sequence, PAGE)
        return scores, selection.select_scan(scores, seen, TOPK, blocks=POOL, place=where)

    scores, chosen = full(calls[0])
    where = Place(keys.table, sequence, PAGE)
    exact = plain_selection.select_scan(scores, seen, TOPK, blocks=POOL, place=where)
    both = flashinfer.scan_top_k(calls, entries, TOPK)
    report.line(
        {"kind": "full", **case},
        floor=floor_us(moved, flop),
        error=float(sum((a != b).sum() for a, b in zip(chosen, exact, strict=True))),
        bound=0,
        ours=lambda: timed([lambda c=c: full(c) for c in calls]),
        others=both.others,
        bytes=moved,
        flop=flop,
        **both.more,
    )


def pool(report: Report, tokens: int, entries: int) -> None:
    size = POOL * BLOCK
    moved = tokens * size * (68 + 2)
    flop = tokens * size * 2 * HEADS * WIDTH
    count = sets_for(moved, least=4, most=64)
    raw = storage(1 << 24)
    per = entries // PAGE
    g = torch.Generator(device="cuda").manual_seed(2)
    tables = torch.randperm(len(raw), generator=g, device="cuda").int().view(-1, per)
    first = torch.arange(tokens + 1, device="cuda", dtype=torch.int32)
    seen = torch.full((tokens,), entries, device="cuda")
    sequence = torch.arange(tokens, device="cuda")
    calls = []
    for n in range(count):
        # Sequences of its own as far as there are: what another set read is of no use.
        table = tables[(torch.arange(tokens, device="cuda") + n * tokens) % len(tables)]
        keys = PagedKeys(raw, table, first)
        blocks = torch.rand(tokens, entries // BLOCK, device="cuda").topk(POOL, dim=1).indices
        calls.append((*queries(n, tokens), keys, sequence, seen, blocks.sort(1).values, BLOCK))
    found, best = kernel.index_pool(*calls[0])
    q, w, *rest = calls[0]
    few = (q[:2].double(), w[:2].double(), rest[0], sequence[:2], seen[:2], rest[3][:2], BLOCK)
    report.line(
        {"kind": "pool", "tokens": tokens, "entries": entries},
        floor=floor_us(moved, flop),
        error=relative_error(found[:2], plain.index_pool(*few)[0]),
        bound=1e-2,
        ours=lambda: timed([lambda c=c: kernel.index_pool(*c) for c in calls]),
        others={},
        bytes=moved,
        flop=flop,
    )

    def reindex(call: tuple) -> Chosen:
        scores, best = kernel.index_pool(*call)
        where = Place(call[2].table, sequence, PAGE)
        return selection.select_pool(scores, best, call[5], BLOCK, TOPK, place=where)

    chosen = reindex(calls[0])
    where = Place(rest[0].table, sequence, PAGE)
    exact = plain_selection.select_pool(found, best, rest[3], BLOCK, TOPK, place=where)
    report.line(
        {"kind": "reindex", "tokens": tokens, "entries": entries},
        floor=floor_us(moved, flop),
        error=float(sum((a != b).sum() for a, b in zip(chosen[:2], exact[:2], strict=True))),
        bound=0,
        ours=lambda: timed([lambda c=c: reindex(c) for c in calls]),
        others={},
        bytes=moved,
        flop=flop,
    )


def main() -> None:
    need_gpu()
    report = Report("index_score")
    for entries in (1 << 13, 1 << 17, 1 << 20):
        scan(report, 1, 1, entries, BLOCK)
    scan(report, 32, 1, 1 << 15, BLOCK)
    scan(report, 4, 6, 1 << 17, BLOCK)
    for tokens, entries in ((1, 1 << 17), (1, 1 << 20), (32, 1 << 17)):
        pool(report, tokens, entries)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
