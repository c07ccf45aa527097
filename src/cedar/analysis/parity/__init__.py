"""Parity: this implementation against golden files, tensor by tensor.

`run_parity` compares every golden set of a directory; the command and the tests call it alike.
The files' format, and where the tolerances come from, is described next to the golden data.
"""

import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from cedar.analysis.parity.draft_sets import compare_drafts
from cedar.analysis.parity.judge import Judge
from cedar.analysis.parity.model_sets import compare_expectation
from cedar.analysis.parity.report import Comparison, Kind, Report, Summary
from cedar.analysis.parity.sets import GRIDS, Golden, GoldenFile, GoldenSet, find_sets
from cedar.analysis.parity.unit_sets import UNIT_SETS
from cedar.analysis.parity.vision_sets import compare_grids, compare_vision
from cedar.errors import CedarError
from cedar.ops import Ops, select_ops

__all__ = ["Comparison", "Kind", "Report", "Summary", "run_parity"]


def run_parity(
    directory: Path,
    prefix: str = "",
    *,
    ops: Ops | None = None,
    device: torch.device | str = "cpu",
    on_set: Callable[[str], None] | None = None,
) -> Report:
    """Compare with every golden set of ``directory`` whose name starts with ``prefix``.

    device: where models run and values are compared. ops: what the models are built with (None:
    what `select_ops` chooses for the device). on_set is told the name of each set before it is
    compared. Raises `DataError` where there is no set; everything that is wrong with a set is a
    failed line of the report.
    """
    sets, unknown = find_sets(directory, prefix)
    golden = Golden(directory, ops or select_ops(device), torch.device(device))
    lines: list[Comparison] = []
    for which in sets:
        if on_set is not None:
            on_set(which.name)
        lines += _compare_set(golden, which)
    for name in unknown:
        judge = Judge(GoldenFile(name, {}, {}))
        judge.note("-", "not a known kind of golden set: not compared")
        lines += judge.finish()
    return Report(tuple(which.name for which in sets), tuple(lines))


def _compare_set(golden: Golden, which: GoldenSet) -> tuple[Comparison, ...]:
    empty = GoldenFile(which.name, {}, {})
    judge = Judge(empty)
    try:
        grids = which.kind == GRIDS
        file = GoldenFile(which.name, {}, golden.sidecar(which.name)) if grids else None
        judge = Judge(file or golden.file(which.name))
        with torch.no_grad(), golden.device:
            _dispatch(judge, golden, which)
    except CedarError as error:
        judge.fail("(the set)", str(error))
        judge.open.clear()
    except Exception as error:
        # A changed model may stop anywhere; the other sets are still worth comparing.
        place = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(place.filename).name}:{place.lineno}"
        judge.fail("(the set)", f"stopped by {type(error).__name__} at {at}: {error}")
        judge.open.clear()
    return judge.finish()


def _dispatch(judge: Judge, golden: Golden, which: GoldenSet) -> None:
    if which.kind == GRIDS:
        compare_grids(judge, golden)
    elif which.kind == "dspark":
        compare_drafts(judge, golden, which)
    elif which.kind == "vision":
        compare_vision(judge, golden, which)
    elif which.kind in UNIT_SETS:
        UNIT_SETS[which.kind](judge, golden, golden.ops)
    else:
        compare_expectation(judge, golden, which)
