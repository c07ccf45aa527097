"""Other people's kernels on our inputs, each in the layout that it asks for.

One module a library. A function there takes the inputs of a benchmark, rewrites them as its
library wants them, compares the library's result with float64 of those rewritten inputs, and
gives `Columns`: what to time, and what to say beside it. A library that is missing, refuses the
device or is wrong becomes a sentence in the line instead of a number.

Wheels that are not on the machine can be brought in a folder that git ignores; the versions are
in ``VERSIONS``. ``python3 -m benchmarks.ops.peers`` tries each one on small inputs.
"""

import contextlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from benchmarks.ops.measure import Sample, timed, timed_eager
from torch import Tensor

__all__ = ["VERSIONS", "Built", "Columns", "backward_of", "column", "versions"]

VERSIONS = {
    "sgl-flash-mla": "1.0.0",
    "sgl-deep-gemm": "0.1.4.post1",
    "apache-tvm-ffi": "0.1.11",
    "flashinfer-python": "0.6.14",
    "liger-kernel": "0.8.5",
    "fla-core": "0.6.0",
    "tilelang": "0.1.9",
    "tile-kernels": "1.0.0",
}


class Built(NamedTuple):
    """A peer ready to be timed.

    calls: one for each set of inputs; error: relative, of its result against float64 of the
    inputs as it holds them; bytes: what it must move for one call.
    """

    calls: Sequence[Callable[[], Any]]
    error: float
    bytes: float


@dataclass
class Columns:
    """``others`` and further keywords of `measure.Report.line`; two are joined by ``|``."""

    others: dict[str, Callable[[], Sample] | str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def __or__(self, other: "Columns") -> "Columns":
        return Columns(self.others | other.others, self.more | other.more)


def column(
    name: str, build: Callable[[], Built], bound: float = 1e-2, *, graph: bool = True
) -> Columns:
    """The column ``name``; a sentence if ``build`` fails or its error is above ``bound``.

    graph: replay its calls as a CUDA graph; else launch them one by one, gaps included.
    """
    try:
        built = build()
    except Exception as problem:  # a peer may lack anything
        reason = f"{type(problem).__name__}: {problem}".replace("\n", " ")
        return Columns({name: f"cannot run: {reason}"[:240]})
    more = {f"{name}_error": built.error, f"{name}_bytes": round(built.bytes)}
    if not built.error <= bound:
        return Columns({name: f"not timed: error above {bound}"}, more)
    if graph:
        return Columns({name: lambda: timed(built.calls, replays=12)}, more)
    return Columns({name: lambda: timed_eager(built.calls, replays=12)}, more)


def backward_of(
    function: Callable[..., Any], leaves: Sequence[Tensor], grads: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """The backward pass of ``function(*leaves)`` alone, with its activations kept.

    Its steps run on the stream of their forward steps, so those run on one that a graph can
    record.
    """
    learned = [x.detach().requires_grad_() for x in leaves]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.enable_grad():
        outputs = function(*learned)
    torch.cuda.current_stream().wait_stream(stream)
    return partial(torch.autograd.grad, outputs, learned, grads, retain_graph=True)


def versions() -> dict[str, str]:
    """Of the peers that are installed here."""
    found = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
