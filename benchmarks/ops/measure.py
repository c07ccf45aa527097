"""How kernels are timed: cold caches, graph replay, medians, and correctness before any number.

A case has several sets of inputs, together larger than the L2 cache. All its calls, one for each
set, go into one CUDA graph; a replay's time over the number of sets is one sample. Nothing is
timed before its result was compared with float64.
"""

import importlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.environment import describe_run

__all__ = [
    "COPY",
    "GEMM",
    "Report",
    "floor_us",
    "need_gpu",
    "peer",
    "relative_error",
    "sets_for",
    "timed",
    "timed_eager",
]

COPY = 4.3e12  # bytes a second that a copy moves on an H200, measured
GEMM = 7.9e14  # bfloat16 FLOP a second of a large product there, measured
REPLAYS = 24
L2_BYTES = 60 << 20

Sample = tuple[float, float, float]


def need_gpu() -> None:
    """Leave with a message where there is nothing to measure."""
    if not torch.cuda.is_available():
        sys.exit("This needs a CUDA device: torch.cuda.is_available() is False here.")


def floor_us(bytes_moved: float, flop: float) -> float:
    """No version runs faster: the larger of both times, in microseconds."""
    return 1e6 * max(bytes_moved / COPY, flop / GEMM)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖ in float64; NaN if anything is not finite."""
    difference = found.double() - exact.double()
    return float(difference.norm() / exact.double().norm())


def timed(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> Sample:
    """Median, lowest and highest microseconds of one call, over replays of all in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles and allocates
            call()
    stream.synchronize()
    # A replay costs some 10 us by itself; twenty calls and more make that small.
    calls = list(calls) * -(-20 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(samples), min(samples), max(samples)


def timed_eager(calls: Sequence[Callable[[], Any]], replays: int = 8) -> Sample:
    """The same without a graph, launch gaps included: for what cannot be captured."""
    samples = []
    for call in calls:
        call()
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        stop.record()
        stop.synchronize()
        samples.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(samples), min(samples), max(samples)


def sets_for(bytes_each: float, least: int = 8, most: int = 64) -> int:
    """So many input sets that together they are twice the L2 cache, within bounds."""
    return int(min(max(2 * L2_BYTES // max(bytes_each, 1) + 1, least), most))


def peer(name: str) -> Any:
    """A module to compare with, or None; the caller reports which."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


class Report:
    """Prints one JSON line a case."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.run = describe_run()
        self.run["command"] = ["python3", "-m", f"benchmarks.ops.{Path(sys.argv[0]).stem}"]

    def line(
        self,
        case: dict[str, Any],
        *,
        floor: float,
        error: float,
        bound: float,
        ours: Callable[[], Sample],
        others: dict[str, Callable[[], Sample] | str],
        **more: Any,
    ) -> None:
        """Time ``ours`` if its error is within ``bound``; others that fail say why."""
        found: dict[str, Any] = {"op": self.op, **case, "floor_us": round(floor, 2), "error": error}
        if not error <= bound:
            found["ours_us"] = f"not timed: error above {bound}"
        else:
            middle, low, high = ours()
            found["ours_us"] = round(middle, 2)
            found["spread_us"] = [round(low, 2), round(high, 2)]
            found["floor_over_ours"] = round(floor / middle, 3)
        for name, measure in others.items():
            if isinstance(measure, str):
                found[name] = measure
                continue
            try:
                found[f"{name}_us"] = round(measure()[0], 2)
            except Exception as error_of_peer:  # a peer may lack anything
                found[name] = f"{type(error_of_peer).__name__}: {error_of_peer}"[:200]
        print(json.dumps({**found, **more, **self.run}), flush=True)
