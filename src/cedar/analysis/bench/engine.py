"""The packed engine on this machine, as ratios measured side by side in one run.

Prefill with half the layers against full depth; decode against recomputing and against a cached
dense-mask reference; what reindexing costs at different contexts; bytes; batches; drafting; a
prefix hit against a cold start; the disk tier. Decode contexts are filled with random cache bytes:
what a step costs does not depend on them.
"""

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.cache import DenseKV
from cedar.cache.layout import KVLayout
from cedar.config.plan import Half
from cedar.engine.build import LoadedModel, load_model
from cedar.engine.runner import Replay, Runner
from cedar.engine.runner_protocol import Work
from cedar.errors import BackendUnavailable
from cedar.model import Batch, Model
from cedar.ops import Ops, widen
from cedar.ops.sparse_attention import Rows

_TEXT = "The people of the United States, in order to form a more perfect union, "


def measure(loaded: LoadedModel, quick: bool) -> Iterator[tuple[str, float]]:
    """Every figure's name and value, in the order in which they are measured."""
    yield from Bench(loaded, quick).figures()


class Bench:
    """One loaded model and how thoroughly to measure it."""

    def __init__(self, loaded: LoadedModel, quick: bool) -> None:
        self.loaded, self.quick = loaded, quick
        self.layout = KVLayout.from_config(loaded.model.config)
        piece = loaded.tokenizer.encode(_TEXT)
        self.text = [loaded.model.config.bos_token_id, *(piece * (70000 // len(piece)))]

    def figures(self) -> Iterator[tuple[str, float]]:
        """Names and values, in the order in which they are measured."""
        yield from self._bytes()
        yield from self._prefill()
        yield from self._decode()
        yield from self._batches()
        yield from self._drafting()
        yield from self._prefix_hit()
        yield from self._disk()

    def _runner(self, tokens: int, *, slots: int = 1, **options: Any) -> Runner:
        pages = slots * self.layout.pages_for(tokens)
        return Runner(self.loaded, self.layout, num_pages=pages, num_slots=slots, **options)

    def _work(
        self, tokens: list[int], start: int, prompt: int, capacity: int, slot: int = 0
    ) -> Work:
        """Tokens of a sequence that owns the pages of ``capacity`` tokens."""
        per_slot = self.layout.pages_for(capacity)
        return Work(
            slot=slot,
            tokens=tuple(tokens),
            start=start,
            pages=tuple(range(slot * per_slot, (slot + 1) * per_slot)),
            wants_logits="last",
            is_last_chunk=True,
            prompt_tokens=prompt,
        )

    def _prefill_all(self, runner: Runner, length: int) -> None:
        """A fresh prompt in chunks."""
        runner.open(0)
        for start in range(0, length, 2048):
            part = self.text[start : min(start + 2048, length)]
            runner.execute([self._work(part, start, length, length + 64)])

    def _median(self, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        times = []
        for _ in range(3 if self.quick else 7):
            before()
            start = time.perf_counter()
            work()
            if self.loaded.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def _bytes(self) -> Iterator[tuple[str, float]]:
        tokens = 64 * self.layout.page_tokens
        runner = self._runner(tokens)
        yield "kv_bytes_per_token_measured", runner.store.global_nbytes / tokens
        yield "kv_bytes_per_token_formula", float(self.layout.bytes_per_token)

    def _prefill(self) -> Iterator[tuple[str, float]]:
        for length in (4096, 16384):
            times = {}
            for replay in (Replay.DECODER, Replay.OFF):
                runner = self._runner(length + 64, replay=replay)

                def once(runner: Runner = runner, length: int = length) -> None:
                    self._prefill_all(runner, length)

                times[replay] = self._once_or_median(once)
            name = f"prefill_ced_over_full_{length // 1024}k"
            yield name, times[Replay.DECODER] / times[Replay.OFF]
            yield f"prefill_tokens_per_second_{length // 1024}k", length / times[Replay.DECODER]

    def _once_or_median(self, work: Callable[[], Any]) -> float:
        """Long work is not repeated in a quick run."""
        if not self.quick:
            return self._median(work)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def _filled(self, context: int, slots: int = 1) -> Runner:
        """A runner whose sequences have ``context`` tokens: random pages, real last windows."""
        runner = self._runner(context + 64, slots=slots)
        for page in range(runner.store.num_pages):
            # Bytes from 64 to 119 are finite codes and scales of every format.
            runner.write_page(page, bytes(64 + b % 56 for b in os.urandom(self.layout.page_bytes)))
        for slot in range(slots):
            runner.open(slot)
            runner.store.restore(slot, context, context - 64, torch.tensor([5, 6, 7]))
            runner.execute([self._work(self.text[:64], context - 64, context, context + 64, slot)])
        return runner

    def _dense_step_time(self, context: int) -> float:
        """A step of the same model on a floating-point cache, attending and scoring under masks."""
        config = self.loaded.model.config
        model = masked_model(self.loaded, context)
        store = DenseKV(config, device=self.loaded.device, dtype=model.compute_dtype)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=self.loaded.device, dtype=model.compute_dtype)

        for plan in model.plan:
            count = config.window_size
            store.extend_window(plan.index, 0, random(count, config.head_dim))
            if plan.has_compressor:
                entries = context // plan.compress_ratio
                store.extend_main(
                    plan.index,
                    0,
                    random(entries, config.head_dim),
                    random(entries, config.index_head_dim),
                )
        for half in Half:
            store.advance(0, half, context)
        mark, batch = store.mark(), Batch.pack([[5]], device=self.loaded.device)
        with torch.inference_mode():
            return self._median(
                lambda: model(batch, store, logits="last"), lambda: store.rollback(mark)
            )

    def _step_time(self, runner: Runner, context: int, slots: int = 1) -> float:
        work = [self._work([5], context, context, context + 64, slot) for slot in range(slots)]

        def back() -> None:
            for slot in range(slots):
                if runner.store.length(slot) > context:
                    runner.rollback(slot, context)

        return self._median(lambda: runner.execute(work), back)

    def _decode(self) -> Iterator[tuple[str, float]]:
        length = 8192
        runner = self._runner(length + 64, replay=Replay.OFF)

        whole = self._once_or_median(lambda: self._prefill_all(runner, length))
        yield "decode_8k_speedup_over_recompute", whole / self._step_time(self._filled(8192), 8192)
        steps, reindex = {}, {}
        for context in (16384, 65536):
            steps[context] = self._step_time(self._filled(context), context)
            dense = self._dense_step_time(context)
            yield f"decode_{context // 1024}k_speedup_over_dense_mask", dense / steps[context]
            yield f"decode_tokens_per_second_{context // 1024}k", 1 / steps[context]
            reindex[context] = self._reindex_time(context)
        yield "reindex_cost_64k_over_16k", reindex[65536] / reindex[16384]

    def _reindex_time(self, context: int) -> float:
        """The selections of reindex layers alone, within ordinary steps."""
        runner = self._filled(context)
        spent = [0.0]
        layers = [
            layer.attn.indexer
            for layer in runner.model.backbone()
            if layer.plan.has_indexer and not layer.plan.has_compressor
        ]
        for indexer in layers:
            original = indexer.select

            def timed(*arguments: Any, inner: Any = original) -> Any:
                start = time.perf_counter()
                result = inner(*arguments)
                spent[0] += time.perf_counter() - start
                return result

            indexer.select = timed  # type: ignore[method-assign, assignment]
        times = []
        try:
            for _ in range(8):
                spent[0] = 0.0
                if runner.store.length(0) > context:
                    runner.rollback(0, context)
                runner.execute([self._work([5], context, context, context + 64)])
                times.append(spent[0])
        finally:
            for indexer in layers:
                del indexer.select
        return statistics.median(times[1:])

    def _batches(self) -> Iterator[tuple[str, float]]:
        alone = 0.0
        for slots in (1, 4, 16):
            rate = slots / self._step_time(self._filled(2048, slots=slots), 2048, slots)
            alone = alone or rate
            yield f"decode_tokens_per_second_batch_{slots}", rate
            yield f"decode_throughput_batch_{slots}_over_1", rate / alone

    def _drafting(self) -> Iterator[tuple[str, float]]:
        """Greedy text, drafted and verified: accepted length, and what a round costs in steps."""
        if not self.loaded.model.config.n_mtp_layers:
            return
        prompt, rounds = 256, 16 if self.quick else 64
        capacity = prompt + 8 * rounds + 64
        runner = self._runner(capacity, draft=True)
        runner.open(0)
        (result,) = runner.execute([self._work(self.text[:prompt], 0, prompt, capacity)])
        committed, position = int(_last(result.logits).argmax()), prompt
        emitted, drafting, verifying, single = 0, [], [], []
        for _ in range(rounds):
            start = time.perf_counter()
            drafts = runner.draft([0], [committed]).tokens_NB[0].tolist()
            drafting.append(time.perf_counter() - start)
            start = time.perf_counter()
            work = self._work([committed, *drafts], position, prompt, capacity)
            (result,) = runner.execute([dataclasses.replace(work, wants_logits="all")])
            verifying.append(time.perf_counter() - start)
            truth = _all(result.logits).argmax(-1).tolist()
            good = 0
            while good < len(drafts) and drafts[good] == truth[good]:
                good += 1
            runner.rollback(0, position + 1 + good)
            position, committed = position + 1 + good, truth[good]
            emitted += 1 + good
            start = time.perf_counter()
            runner.execute([self._work([committed], position, prompt, capacity)])
            single.append(time.perf_counter() - start)
            runner.rollback(0, position)
        step = statistics.median(single)
        round_cost = (statistics.median(drafting) + statistics.median(verifying)) / step
        yield "accepted_length", emitted / rounds
        yield "draft_round_over_step", round_cost
        yield "drafting_speedup", emitted / rounds / round_cost

    def _prefix_hit(self) -> Iterator[tuple[str, float]]:
        length = 4096
        pages = self.layout.pages_for(length)
        hit = (pages - 2) * self.layout.page_tokens
        runner = self._runner(length + 64)
        work = self._work(self.text[:length], 0, length, length + 64)

        def cold() -> None:
            runner.open(0)
            runner.execute([work])

        def warm() -> None:
            runner.restore(0, range(pages - 2), hit, self.text[:hit])
            rest = dataclasses.replace(work, tokens=tuple(self.text[hit:length]), start=hit)
            runner.execute([rest])

        yield "prefix_cold_over_hit_4k", self._median(cold) / self._median(warm)

    def _disk(self) -> Iterator[tuple[str, float]]:
        from cedar.cache.disk import DiskTier

        payloads = [os.urandom(256 * 1024) for _ in range(64 if self.quick else 256)]
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


def _last(logits: Tensor | None) -> Tensor:
    return _all(logits)[-1]


def _all(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise RuntimeError("the runner returned no logits")
    return logits


def masked_model(loaded: LoadedModel, context: int) -> Model:
    """The same model as engines without this cache run it: dense scores, dense attention, masks."""
    model = load_model(loaded.directory, device=loaded.device).model
    ops = masked_ops(model.ops)
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = ops  # type: ignore[assignment]
    for layer in model.backbone():
        if layer.plan.has_indexer:
            # A pool as large as the context: reindex layers then score every key.
            layer.attn.indexer.pool_blocks = context // layer.attn.indexer.pool_block + 1
    return model


def masked_ops(ops: Ops) -> Ops:
    """Attention that scores everything it holds under a mask, as engines without this cache do."""

    def attention(q_TNH: Tensor, sources: tuple[Rows, ...], sink_N: Tensor, scale: float) -> Tensor:
        q = widen(q_TNH)
        scores = []
        for rows, slots in sources:
            everything = torch.matmul(q, rows.to(q.dtype).transpose(0, 1)) * scale
            mask = torch.ones((len(q), len(rows) + 1), dtype=torch.bool, device=q.device)
            mask.scatter_(1, torch.where(slots >= 0, slots, len(rows)), False)
            scores.append(everything.masked_fill(mask[:, None, : len(rows)], -torch.inf))
        sink = sink_N.to(q.dtype).view(1, -1, 1).expand(len(q), -1, 1)
        p = torch.cat((*scores, sink), dim=-1).softmax(-1)[..., :-1]
        values = torch.cat([rows for rows, _ in sources]).to(q.dtype)
        return torch.matmul(p, values).to(q_TNH.dtype)

    return dataclasses.replace(ops, sparse_attention=attention)
