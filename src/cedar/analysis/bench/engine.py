"""The packed engine on this machine, as ratios measured side by side in one run.

Prefill with half the layers against full depth; decode against recomputing and against a cached
dense-mask reference; what reindexing costs at different contexts; bytes; batches; threads;
drafting; a prefix hit against a cold start; the disk tier.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from cedar.analysis.bench.decode import against_dense_masks, against_recompute, released_attention
from cedar.analysis.bench.drafting import drafting
from cedar.analysis.bench.rig import Rig
from cedar.engine.build import LoadedModel
from cedar.engine.runner import Replay
from cedar.errors import BackendUnavailable

__all__ = ["measure"]


def measure(loaded: LoadedModel, quick: bool) -> Iterator[tuple[str, float]]:
    """Every figure's name and value, in the order in which they are measured."""
    rig = Rig(loaded, quick)
    yield from _bytes(rig)
    for length in (4096, 8192, 16384):
        yield from _prefill(rig, length)
    yield from _threads(rig)
    yield from against_recompute(rig)
    yield from against_dense_masks(rig)
    wide = Rig(released_attention(loaded), quick)
    yield from against_dense_masks(wide, "_released_attention")
    yield from _batches(rig)
    yield from drafting(rig)
    yield from _prefix_hit(rig)
    yield from _disk(rig)
    # Minutes on a CPU, so it comes last, and a quick run leaves it out there.
    if not quick or loaded.device.type != "cpu":
        yield from _prefill(Rig(loaded, quick=True), 65536)


def _bytes(rig: Rig) -> Iterator[tuple[str, float]]:
    tokens = 64 * rig.layout.page_tokens
    yield "kv_bytes_per_token_measured", rig.runner(tokens).store.global_nbytes / tokens
    yield "kv_bytes_per_token_formula", float(rig.layout.bytes_per_token)


def _prefill(rig: Rig, length: int) -> Iterator[tuple[str, float]]:
    times = {}
    for replay in (Replay.DECODER, Replay.OFF):
        runner = rig.runner(length + 64, replay=replay)
        rig.prefill(runner, 2048)
        times[replay] = rig.once_or_median(partial(rig.prefill, runner, length))
    yield f"prefill_ced_over_full_{length // 1024}k", times[Replay.DECODER] / times[Replay.OFF]
    yield f"prefill_tokens_per_second_{length // 1024}k", length / times[Replay.DECODER]


def _threads(rig: Rig) -> Iterator[tuple[str, float]]:
    """Two threads over one, for the same work."""
    if rig.loaded.device.type != "cpu" or (os.cpu_count() or 1) < 2:
        return
    before = torch.get_num_threads()
    prompt, batch = rig.runner(4096 + 64), rig.filled(2048, slots=16)
    times = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            prefill = rig.median(lambda: rig.prefill(prompt, 4096))
            times[threads] = prefill, rig.step_time(batch, 2048, 16)
    finally:
        torch.set_num_threads(before)
    yield "prefill_4k_2_threads_over_1", times[1][0] / times[2][0]
    yield "decode_batch_16_2_threads_over_1", times[1][1] / times[2][1]


def _batches(rig: Rig) -> Iterator[tuple[str, float]]:
    alone = 0.0
    for slots in (1, 4, 16):
        rate = slots / rig.step_time(rig.filled(2048, slots=slots), 2048, slots)
        alone = alone or rate
        yield f"decode_tokens_per_second_batch_{slots}", rate
        yield f"decode_throughput_batch_{slots}_over_1", rate / alone


def _prefix_hit(rig: Rig) -> Iterator[tuple[str, float]]:
    length = 4096
    pages = rig.layout.pages_for(length)
    hit = (pages - 2) * rig.layout.page_tokens
    runner = rig.runner(length + 64)
    work = rig.work(rig.text[:length], 0, length, length + 64)

    def cold() -> None:
        runner.open(0)
        runner.execute([work])

    def warm() -> None:
        runner.restore(0, range(pages - 2), hit, rig.text[:hit])
        rest = dataclasses.replace(work, tokens=tuple(rig.text[hit:length]), start=hit)
        runner.execute([rest])

    yield "prefix_cold_over_hit_4k", rig.median(cold) / rig.median(warm)


def _disk(rig: Rig) -> Iterator[tuple[str, float]]:
    from cedar.cache.disk import DiskTier

    payloads = [os.urandom(256 * 1024) for _ in range(64 if rig.quick else 256)]
    size = sum(map(len, payloads)) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        try:
            tier = DiskTier(Path(folder), max_bytes=2**31, layout_tag=b"benchmark")
        except BackendUnavailable:
            return  # without the extra `store` there is nothing to measure
        start = time.perf_counter()
        for number, payload in enumerate(payloads):
            tier.put(number.to_bytes(32, "big"), payload)
        tier.flush()
        yield "disk_put_mb_s", size / (time.perf_counter() - start)
        start = time.perf_counter()
        for number, payload in enumerate(payloads):
            if tier.get(number.to_bytes(32, "big")) != payload:
                raise RuntimeError("the disk tier returned other bytes than were put")
        yield "disk_get_mb_s", size / (time.perf_counter() - start)
        tier.close()
