"""One loaded model on this machine, and how work is put on it and timed."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cedar.cache.layout import KVLayout
from cedar.engine.build import LoadedModel
from cedar.engine.runner import Runner
from cedar.engine.runner_protocol import Work

__all__ = ["Rig"]

_TEXT = "The people of the United States, in order to form a more perfect union, "
_CHUNK = 2048  # tokens of a prefill pass


class Rig:
    """quick: few repeats, and long work once."""

    def __init__(self, loaded: LoadedModel, quick: bool) -> None:
        self.loaded, self.quick = loaded, quick
        self.layout = KVLayout.from_config(loaded.model.config)
        piece = loaded.tokenizer.encode(_TEXT)
        self.text = [loaded.model.config.bos_token_id, *(piece * (70000 // len(piece)))]

    def runner(self, tokens: int, *, slots: int = 1, **options: Any) -> Runner:
        """A fresh runner with room for ``tokens`` tokens in each slot."""
        pages = slots * self.layout.pages_for(tokens)
        return Runner(self.loaded, self.layout, num_pages=pages, num_slots=slots, **options)

    def work(
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

    def prefill(self, runner: Runner, length: int) -> None:
        """A fresh prompt in chunks."""
        runner.open(0)
        for start in range(0, length, _CHUNK):
            part = self.text[start : min(start + _CHUNK, length)]
            runner.execute([self.work(part, start, length, length + 64)])

    def filled(self, context: int, slots: int = 1) -> Runner:
        """A runner whose sequences have ``context`` tokens: random pages, real last windows.

        What a step costs does not depend on the bytes that it reads.
        """
        runner = self.runner(context + 64, slots=slots)
        size = self.layout.page_bytes
        for page in range(runner.store.num_pages):
            # Bytes from 64 to 119 are finite codes and scales of every format.
            runner.write_page(
                page, torch.randint(64, 120, (size,), dtype=torch.uint8).numpy().tobytes()
            )
        for slot in range(slots):
            runner.open(slot)
            runner.store.restore(slot, context, context - 64, torch.tensor([5, 6, 7]))
            runner.execute([self.work(self.text[:64], context - 64, context, context + 64, slot)])
        return runner

    def step_time(self, runner: Runner, context: int, slots: int = 1) -> float:
        """Seconds of a decode step of all sequences."""
        work = [self.work([5], context, context, context + 64, slot) for slot in range(slots)]

        def back() -> None:
            for slot in range(slots):
                if runner.store.length(slot) > context:
                    runner.rollback(slot, context)

        return self.median(lambda: runner.execute(work), back)

    def median(self, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        """Median seconds, after one repeat that is thrown away."""
        return statistics.median(
            [self.seconds(work, before) for _ in range(4 if self.quick else 8)][1:]
        )

    def once_or_median(self, work: Callable[[], Any]) -> float:
        """Work of many seconds: once in a quick run, else the median of three."""
        return statistics.median([self.seconds(work) for _ in range(1 if self.quick else 3)])

    def seconds(self, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        """Seconds of one run of ``work``."""
        before()
        start = time.perf_counter()
        work()
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start
