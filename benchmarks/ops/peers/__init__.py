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
from typing import Any, NamedTuple

from benchmarks.ops.measure import Sample, timed

__all__ = ["VERSIONS", "Built", "Columns", "column", "versions"]

VERSIONS = {
    "sgl-flash-mla": "1.0.0",
    "sgl-deep-gemm": "0.1.4.post1",
    "apache-tvm-ffi": "0.1.11",
    "flashinfer-python": "0.6.14",
    "liger-kernel": "0.8.5",
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


def column(name: str, build: Callable[[], Built], bound: float = 1e-2) -> Columns:
    """The column ``name``; a sentence if ``build`` fails or its error is above ``bound``."""
    try:
        built = build()
    except Exception as problem:  # a peer may lack anything
        reason = f"{type(problem).__name__}: {problem}".replace("\n", " ")
        return Columns({name: f"cannot run: {reason}"[:240]})
    more = {f"{name}_error": built.error, f"{name}_bytes": round(built.bytes)}
    if not built.error <= bound:
        return Columns({name: f"not timed: error above {bound}"}, more)
    return Columns({name: lambda: timed(built.calls, replays=12)}, more)


def versions() -> dict[str, str]:
    """Of the peers that are installed here."""
    found = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
