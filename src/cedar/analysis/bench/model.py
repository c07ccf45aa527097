"""The exact model and its simple store on this machine: prefill and decode.

Times are medians over repeats, after one repeat that is thrown away.
"""

import resource
from collections.abc import Iterator
from functools import partial

import torch

from cedar.analysis.bench.rig import Rig
from cedar.cache import DenseKV
from cedar.engine import LoadedModel
from cedar.model import Batch


def measure(loaded: LoadedModel, quick: bool) -> Iterator[tuple[str, float]]:
    """Every figure's name and value, in the order in which they are measured."""
    lengths = (256, 1024) if quick else (256, 1024, 4096)
    config, rig = loaded.model.config, Rig(loaded, quick)
    with torch.inference_mode():
        for length in lengths:
            whole = Batch.pack([rig.text[:length]], device=loaded.device)

            def prefill(batch: Batch = whole) -> None:
                loaded.model(batch, logits="last")

            seconds = rig.median(prefill)
            yield f"prefill_tokens_per_second_{length}", length / seconds
            store = DenseKV(config, device=loaded.device, dtype=loaded.model.compute_dtype)
            loaded.model(whole, store, logits="last")
            one = Batch.pack([[5]], device=loaded.device)
            mark = store.mark()

            def step(batch: Batch = one, into: DenseKV = store) -> None:
                loaded.model(batch, into, logits="last")

            decode = rig.median(step, partial(store.rollback, mark))
            yield f"decode_tokens_per_second_{length}", 1 / decode
            yield f"decode_speedup_over_recompute_{length}", seconds / decode
    # Kilobytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield "peak_resident_gib", peak
