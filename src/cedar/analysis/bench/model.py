"""The exact model on this machine: prefill, decode and what the window of layers costs.

    python -m benchmarks.model [--device cpu] [--threads 1] [--quick] > figures.jsonl

One JSON line a figure, each with commit, command and hardware; the last line is one document with
all figures. Times are medians over repeats, after one repeat that is thrown away.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cedar.cache import DenseKV
from cedar.engine import LoadedModel, load_model
from cedar.environment import describe_run
from cedar.model import Batch

_TEXT = "The people of the United States, in order to form a more perfect union, "


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoint", default="cedar-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--quick", action="store_true", help="short contexts only")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    run = describe_run()
    loaded = load_model(options.checkpoint, device=options.device)
    figures: dict[str, float] = {}
    for name, value in _figures(loaded, (256, 1024) if options.quick else (256, 1024, 4096)):
        figures[name] = round(value, 4)
        print(json.dumps({"figure": name, "value": figures[name], **run}), flush=True)
    print(json.dumps(figures))


def _figures(loaded: LoadedModel, lengths: tuple[int, ...]) -> Any:
    config = loaded.model.config
    piece = loaded.tokenizer.encode(_TEXT)
    with torch.inference_mode():
        for length in lengths:
            ids = [config.bos_token_id, *(piece * (length // len(piece) + 1))][:length]
            whole = Batch.pack([ids], device=loaded.device)
            seconds = _median(lambda batch=whole: loaded.model(batch, logits="last"), loaded)
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


if __name__ == "__main__":
    main()
