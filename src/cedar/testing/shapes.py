"""The check of the shape letters.

A tensor called ``q_TNH`` has three dimensions, and every other ``T`` of the same function is as
long as its first. `check_shapes` watches the functions of the model and of the reference
operations return, and collects the names that lie.

Letters are: ``B`` requests, ``T`` packed tokens, ``S`` entries, ``K`` selected entries, ``N``
heads, ``H`` head width, ``D`` model width, ``C`` streams, ``I`` index heads, ``J`` index width,
``E`` experts, ``A`` active experts, ``F`` expert width, ``R`` low rank, ``U`` Engram rows per
token, ``V`` vocabulary, ``P`` page size, ``Z`` image patches. What a letter stands for is not
checked, only that it stands for one size.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

__all__ = ["ShapeReport", "check_shapes"]

_LETTERS = re.compile(r"[a-z0-9]_([A-Z]+)$")
_WATCHED = ("cedar.model", "cedar.ops")


@dataclass(slots=True)
class ShapeReport:
    """What was seen: ``violations`` once each, and how much was looked at."""

    violations: list[str] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)

    def _add(self, violation: str) -> None:
        if violation not in self.violations:
            self.violations.append(violation)


@contextmanager
def check_shapes(*modules: str) -> Iterator[ShapeReport]:
    """Watch every function of ``modules`` (default: the model and the operations).

    On return of a function its local tensors are checked against one another, and the fields of
    the records among its locals against other fields of the same record. An `AssertionError` at
    the end lists every violation, unless the block itself raised.
    """
    watched = modules or _WATCHED
    report = ShapeReport()
    known: dict[str, bool] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "return":
            return
        module = frame.f_globals.get("__name__", "")
        if module not in known:
            known[module] = any(module == w or module.startswith(f"{w}.") for w in watched)
        if known[module]:
            _check_frame(frame, module, report)

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield report
    finally:
        sys.setprofile(previous)
    if report.violations:
        raise AssertionError("names that lie about shapes:\n  " + "\n  ".join(report.violations))


def _check_frame(frame: FrameType, module: str, report: ShapeReport) -> None:
    where = f"{module}.{frame.f_code.co_qualname}"
    values = dict(frame.f_locals)
    _check_names(values, where, report)
    for name, value in values.items():
        names = getattr(value, "_fields", None) or getattr(type(value), "__slots__", ())
        if isinstance(names, tuple) and type(value).__module__.startswith(_WATCHED):
            fields = {n: getattr(value, n, None) for n in names if isinstance(n, str)}
            _check_names(fields, f"{where}: {name} ({type(value).__name__})", report)


def _check_names(values: Mapping[str, Any], where: str, report: ShapeReport) -> None:
    sizes: dict[str, tuple[int, str]] = {}
    for name, value in values.items():
        match = _LETTERS.search(name)
        if match is None or not isinstance(value, Tensor):
            continue
        letters = match[1]
        report.checked.add(f"{where}: {name}")
        if value.dim() != len(letters):
            report._add(f"{where}: {name} has {value.dim()} dimensions {tuple(value.shape)}")
            continue
        for letter, size in zip(letters, value.shape, strict=True):
            first, owner = sizes.setdefault(letter, (size, name))
            if size != first:
                report._add(f"{where}: {letter} is {size} in {name} but {first} in {owner}")
