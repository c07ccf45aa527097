"""A whole decoding step of 40 layers at released shapes: one CUDA graph for every context length.

Synthetic weights, experts aliased (see `synthetic.py`). Columns: floor (weights of the experts that
this step really visits, all other weights, cache rows, index keys), ours, and with ``--plain`` the
same step on plain PyTorch operations, which no graph can hold. First argument: batches, like 1,32.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.ops.measure import COPY, need_gpu
from benchmarks.step.synthetic import full_cache, synthetic_model

from cedar.cache.paged import PagedKV
from cedar.config.plan import Half
from cedar.engine.stepping import record
from cedar.environment import describe_run
from cedar.model import Model
from cedar.model.context import Shared, Streams
from cedar.model.step import StepInput
from cedar.ops import select_ops

CONTEXTS = {"8K": 1 << 13, "128K": 1 << 17, "1M": (1 << 20) - 8}
CARD = 134 << 30
REPLAYS = 20


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"{time.perf_counter():7.1f} s {text}", file=sys.stderr, flush=True)


def step_input(sequences: int, queries: int, context: int) -> StepInput:
    """The last ``queries`` tokens of contexts of a length; random tokens."""
    place, count = "cuda", sequences * queries
    sequence = torch.arange(sequences, device=place).repeat_interleave(queries)
    back = torch.arange(queries, device=place).repeat(sequences)
    return StepInput(
        tokens_T=torch.randint(100, 120000, (count,), device=place),
        positions_T=context - queries + back,
        slots_T=sequence,
        sequence_T=sequence,
        first=torch.arange(0, count + 1, queries, device=place, dtype=torch.int32),
        sequence_slot=torch.arange(sequences, device=place),
        starts=torch.zeros(len(Half), count, dtype=torch.int64, device=place),
    )


def visited(model: Model, run: Callable[[], Any]) -> list[int]:
    """How many experts each layer visits in a step."""
    found: list[int] = []
    hooks = [
        layer.ffn.register_forward_hook(
            lambda _, args, out: found.append(int(out[1].experts_TA.unique().numel()))
        )
        for layer in model.backbone()
    ]
    run()
    for hook in hooks:
        hook.remove()
    return found


def floor_bytes(
    model: Model, store: PagedKV, experts: list[int], tokens: int, batch: int, n: int
) -> dict[str, float]:
    """What has to be read at least, and written: performance.md, section 2.1."""
    config = model.config
    fixed = sum(
        p.nbytes
        for name, p in model.named_parameters()
        if ".ffn.experts." not in name and not name.startswith("embed")
    )
    expert = sum(
        p.nbytes / config.n_routed_experts
        for name, p in model.named_parameters()
        if name.startswith("layers.0.ffn.experts.")
    )
    layout, entries = store.layout, 0.0
    attended = 0
    scanned = 0.0
    for plan in model.plan:
        attended += min(config.window_size, n) * layout.window_row_bytes
        if plan.kv_source is not None:
            attended += min(config.index_topk, n // plan.compress_ratio) * layout.entry_bytes
        if plan.has_indexer:
            seen = n // plan.compress_ratio
            pool = config.candidate_topk_blocks * config.candidate_block_size
            scanned += layout.key_bytes * (
                min(seen, pool) * tokens if plan.candidate_source is not None else seen * batch
            )
    streams = tokens * 2 * config.n_layers * (2 * config.hc_mult + 2) * config.dim * 2
    queries = tokens * config.n_layers * 2 * config.n_heads * config.head_dim * 2
    entries = tokens * attended + queries + streams
    return {"weights": fixed, "experts": expert * sum(experts), "rows": entries, "keys": scanned}


def kernels_of(layer: Any, model: Model, store: PagedKV, step: StepInput, limits: Any) -> int:
    """Launches of one layer, alone."""
    ctx = model.step_context(step, store.arrays, **limits)
    plan = layer.plan
    streams = Streams.fresh(model.embed_tokens(step.tokens_T), model.config.hc_mult)
    streams, shared, _ = model.backbone()[plan.kv_source](streams, Shared(), ctx)
    layer(streams, shared, ctx)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        layer(streams, shared, ctx)
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_time_total > 0)


def milliseconds(run: Callable[[], Any], times: int = REPLAYS) -> list[float]:
    samples = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    need_gpu()
    ops = select_ops("cuda")
    model = synthetic_model(ops)
    say(f"weights {torch.cuda.memory_allocated() / 1e9:.1f} GB")
    with torch.inference_mode():
        for batch in map(int, arguments.batches.split(",")):
            measure(model, batch, arguments)


def measure(model: Model, batch: int, arguments: argparse.Namespace) -> None:
    """All contexts that fit, on one graph."""
    free = CARD - torch.cuda.memory_allocated() - batch * (1 << 28)
    contexts = {k: n for k, n in CONTEXTS.items() if n * batch * 900 < free}
    longest = -(-max(contexts.values()) // 64) * 64
    store = full_cache(model, batch, longest)
    limits = {"most_queries": arguments.queries, "most_tokens": longest}
    numbers = step_input(batch, arguments.queries, 1 << 13)

    def step() -> Any:
        return model.step(numbers, store.arrays, **limits)

    say(f"cache for {batch} x {longest} tokens")
    reuse = next(
        layer
        for layer in model.backbone()
        if layer.plan.kv_source is not None and not layer.plan.has_indexer and not layer.plan.engram
    )
    launches = kernels_of(reuse, model, store, numbers, limits)
    replay = record(step, torch.device("cuda"))
    engrams = [layer.engram for layer in model.backbone()]
    for layer in model.backbone():
        layer.engram = None
    say("recorded")
    bare = record(step, torch.device("cuda"))
    for layer, engram in zip(model.backbone(), engrams, strict=True):
        layer.engram = engram
    if arguments.profile:
        show_profile(replay)
    for name, context in contexts.items():
        for old, new in zip(numbers, step_input(batch, arguments.queries, context), strict=True):
            old.copy_(new)
        experts = visited(model, step)
        parts = floor_bytes(model, store, experts, batch * arguments.queries, batch, context)
        for each in (replay, bare):
            milliseconds(each, 3)
        # Side by side, so that a slow moment meets both.
        pairs = [(milliseconds(replay, 1)[0], milliseconds(bare, 1)[0]) for _ in range(REPLAYS)]
        ours = [pair[0] for pair in pairs]
        finite = bool(replay().logits.isfinite().all())
        middle = statistics.median(ours)
        floor = 1e3 * sum(parts.values()) / COPY
        line = {
            "op": "step",
            "batch": batch,
            "queries": arguments.queries,
            "context": name,
            "weights": "synthetic, experts aliased (4 sets), Engram rows folded, host memory",
            "floor_us": round(1e3 * floor, 1),
            "ours_us": round(1e3 * middle, 1) if finite else "not timed: not finite",
            "spread_us": [round(1e3 * min(ours), 1), round(1e3 * max(ours), 1)],
            "floor_over_ours": round(floor / middle, 3),
            "kernels_per_reuse_layer": launches,
            "engram_share": round(middle / statistics.median(pair[1] for pair in pairs) - 1, 4),
            "experts_per_layer": round(statistics.mean(experts), 1),
            "gigabytes": {key: round(value / 1e9, 3) for key, value in parts.items()},
        }
        if arguments.plain and context < 1 << 14:
            line |= plain(model, step, replay)
        print(json.dumps({**line, **describe_run()}), flush=True)


def plain(model: Model, step: Callable[[], Any], replay: Callable[[], Any]) -> dict[str, Any]:
    """The same step on plain operations, once, and how far apart both are."""
    fast, slow = model.ops, select_ops("cuda", kernels=False)
    logits = replay().logits.double().clone()
    for module in model.modules():
        if getattr(module, "ops", None) is fast:
            module.ops = slow
    try:
        step()
        times = milliseconds(step, 2)
        error = float((step().logits.double() - logits).norm() / logits.norm())
    finally:
        for module in model.modules():
            if getattr(module, "ops", None) is slow:
                module.ops = fast
    return {"pytorch_us": round(1e3 * min(times), 1), "difference_from_pytorch": error}


def show_profile(replay: Callable[[], Any]) -> None:
    """Where a step's time goes, on stderr."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    for event in found[:45]:
        print(
            f"{event.device_time_total:9.1f} us {event.count:5d} {event.key[:90]}", file=sys.stderr
        )


if __name__ == "__main__":
    main()
