"""The exact model and its simple store on this machine: prefill and decode.

Times are medians over repeats, after one repeat that is thrown away.
"""

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cedar.cache import DenseKV
from cedar.engine import LoadedModel
from cedar.model import Batch

_TEXT = "The people of the United States, in order to form a more perfect union, "


def measure(loaded: LoadedModel, quick: bool) -> Iterator[tuple[str, float]]:
    """Every figure's name and value, in the order in which they are measured."""
    lengths = (256, 1024) if quick else (256, 1024, 4096)
    config = loaded.model.config
    piece = loaded.tokenizer.encode(_TEXT)
    with torch.inference_mode():
        for length in lengths:
            ids = [config.bos_token_id, *(piece * (length // len(piece) + 1))][:length]
            whole = Batch.pack([ids], device=loaded.device)

            def prefill(batch: Batch = whole) -> None:
                loaded.model(batch, logits="last")

            seconds = _median(prefill, loaded)
            yield f"prefill_tokens_per_second_{length}", length / seconds
            store = DenseKV(config, device=loaded.device, dtype=loaded.model.compute_dtype)
            loaded.model(whole, store, logits="last")
            one = Batch.pack([[5]], device=loaded.device)
            mark = store.mark()

            def step(batch: Batch = one, kept: Any = mark, into: DenseKV = store) -> None:
                into.rollback(kept)
                loaded.model(batch, into, logits="last")

            decode = _median(step, loaded)
            yield f"decode_tokens_per_second_{length}", 1 / decode
            yield f"decode_speedup_over_recompute_{length}", seconds / decode
    # Kilobytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield "peak_resident_gib", peak


def _median(work: Callable[[], Any], loaded: LoadedModel, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if loaded.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
