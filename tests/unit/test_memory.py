"""Memory of the reference path grows linearly with the text: queries are taken in chunks."""

import json
import os
import subprocess
import sys

import pytest

GIB = 2**30
# What is freed goes back at once: a peak is then of live tensors, not of the C library's pools.
PROMPT_FREEING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}

# Runs alone, so that the peak is its own. Linux hands ru_maxrss on to a child process, so there the
# peak comes from VmHWM, which begins anew with the program. Elsewhere ru_maxrss has to do.
SCRIPT = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
from cedar.cache import DenseKV
from cedar.config import tiny
from cedar.model import Batch, Model, TrainSignals

def peak():
    if sys.platform == "linux":
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

length, mode = int(sys.argv[1]), sys.argv[2]
config = tiny()
model = Model(config, trainable=True, token_map=torch.arange(config.vocab_size)).init(0)
tokens = torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(0)).tolist()
batch, start, began = Batch.pack([tokens]), peak(), time.process_time()
with torch.set_grad_enabled(mode == "train"):
    if mode == "train":
        signals = TrainSignals(index_loss=True, balance_loss=True, checkpoint=True)
        out = model(batch, signals=signals)
        losses = [s.index_loss for s in out.stats if s.index_loss is not None]
        (out.logits.logsumexp(-1).mean() + torch.stack(losses).sum()).backward()
    elif mode == "dense scores":
        class Everything:
            def wants(self, name): return name.endswith("scores")
            def record(self, name, value): pass
        out = model(batch, probe=Everything())
    else:
        out = model(batch, DenseKV(config) if mode == "stored" else None)
assert out.logits.shape == (length, config.vocab_size)
assert out.logits[::997].isfinite().all()
print(json.dumps({"start": start, "peak": peak(), "seconds": time.process_time() - began}))
"""


def measure(length: int, mode: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(length), mode],
        env=os.environ | PROMPT_FREEING,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{mode} {length}: {result['peak'] / GIB:.2f} GiB, {result['seconds']:.1f} CPU s")
    return result


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["plain", "stored"])
def test_32k_tokens_fit_in_6_gib(mode: str) -> None:
    assert measure(32768, mode)["peak"] < 6 * GIB


def growth(mode: str, length: int) -> tuple[list[float], float]:
    """Peaks at one, two and four times ``length``, and how the second step compares to the first.

    Twice the step is linear, four times quadratic. Differences of peaks, because what a process
    needs before it has seen a token varies from machine to machine.
    """
    peaks = [measure(factor * length, mode)["peak"] for factor in (1, 2, 4)]
    assert peaks[1] > peaks[0] + 8 * 2**20  # the text, not the start, makes the peak
    return peaks, (peaks[2] - peaks[1]) / (peaks[1] - peaks[0])


@pytest.mark.parametrize(("mode", "length"), [("plain", 2048), ("train", 1024)])
def test_memory_grows_linearly(mode: str, length: int) -> None:
    peaks, ratio = growth(mode, length)
    assert ratio < 3
    if mode == "plain":
        per_token = (peaks[2] - peaks[0]) / (3 * length)
        assert peaks[2] + per_token * (32768 - 4 * length) < 6 * GIB


def test_quadratic_memory_is_noticed() -> None:
    """Negative control: a probe that asks for all scores makes the memory quadratic."""
    _, ratio = growth("dense scores", 1536)
    assert ratio > 3
