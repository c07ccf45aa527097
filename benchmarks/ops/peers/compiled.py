"""torch.compile of plain PyTorch, and torch's own operations in another type."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.ops.measure import relative_error
from benchmarks.ops.peers import Built, Columns, column
from torch import Tensor

__all__ = ["compiled", "float32_top_k"]


def compiled(
    function: Callable[..., Any], cases: Sequence[tuple[Any, ...]], bytes_moved: float
) -> Columns:
    """Column ``pytorch_compiled``, with the argument ``compile`` (it takes its time); none else.

    Its error is the distance from the eager result.
    """
    if "compile" not in sys.argv[1:]:
        return Columns()

    def build() -> Built:
        fast = torch.compile(function)
        error = relative_error(_first(fast(*cases[0])), _first(function(*cases[0])))
        return Built([partial(fast, *case) for case in cases], error, bytes_moved)

    return column("pytorch_compiled", build)


def float32_top_k(scores: Sequence[Tensor], k: int) -> Columns:
    """Column ``pytorch_float32``: torch.topk of the same scores, widened before."""

    def build() -> Built:
        calls = [partial(torch.topk, x.float(), k, dim=1) for x in scores]
        return Built(calls, 0.0, scores[0].numel() * 4 + len(scores[0]) * k * 12)

    return column("pytorch_float32", build)


def _first(found: Any) -> Tensor:
    while not isinstance(found, Tensor):
        found = found[0]
    return found
