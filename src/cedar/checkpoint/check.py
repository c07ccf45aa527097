"""Comparing the headers of a checkpoint with what its configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cedar.checkpoint.index import collect_headers
from cedar.checkpoint.names import (
    TensorSpec,
    accepted_shapes,
    expected_tensors,
    optional_tensors,
)
from cedar.config import ModelConfig
from cedar.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A tensor of another type or shape than the configuration asks for."""

    name: str
    found: TensorSpec
    expected: TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """Everything that is wrong with a checkpoint, from its headers alone.

    ``damaged`` tells what is wrong with files and index, the others with single tensors.
    """

    path: Path
    storage: str
    tensors: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[Mismatch, ...]
    damaged: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether files and configuration fit."""
        return not (self.missing or self.unexpected or self.misshapen or self.damaged)

    def lines(self) -> list[str]:
        """One line per problem."""
        return [line for group in self._groups() for line in group]

    def raise_if_bad(self, limit: int = 15) -> None:
        """Raise one `CheckpointError` with the problems, at most ``limit`` of each kind."""
        if self.ok:
            return
        shown = [
            f"{self.path}: {len(self.lines())} differences from what the configuration asks for. "
            "Use the config.json of this checkpoint, or get the files again."
        ]
        for group in self._groups():
            shown += group[:limit]
            if len(group) > limit:
                kind = group[0].partition(":")[0]
                shown.append(f"{kind}: ... and {len(group) - limit} more (see cedar check)")
        raise CheckpointError("\n  ".join(shown))

    def _groups(self) -> list[list[str]]:
        return [
            list(self.damaged),
            [f"missing: {name}" for name in self.missing],
            [f"unexpected: {name}" for name in self.unexpected],
            [
                f"misshapen: {m.name}: found {m.found}; expected {m.expected}"
                for m in self.misshapen
            ],
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "ok": self.ok,
            "storage": self.storage,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "misshapen": [
                {"name": m.name, "found": str(m.found), "expected": str(m.expected)}
                for m in self.misshapen
            ],
            "damaged": list(self.damaged),
        }


def check_directory(path: str | os.PathLike[str]) -> CheckReport:
    """Check a checkpoint directory against its own ``config.json``, by headers only.

    Raises `ConfigError` if the configuration itself is unusable.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"{root}: found no directory; expected a checkpoint directory.")
    return check_files(root, ModelConfig.from_file(root / "config.json"))


def check_files(path: str | os.PathLike[str], config: ModelConfig) -> CheckReport:
    """Check the files at ``path`` (a directory or one file) against ``config``."""
    headers, damaged = collect_headers(path)
    found = {name: t.spec for header in headers for name, t in header.tensors.items()}
    report = compare(Path(path), found, config, config.storage, damaged)
    if not (report.missing or report.misshapen or report.unexpected):
        return report
    # Perhaps only the storage form is stated wrongly; thousands of lines would hide that.
    other = "bf16" if config.storage == "fp8fp4" else "fp8fp4"
    note = f'found weights stored as "{other}"; expected "{config.storage}" as config.json says'
    swapped = compare(Path(path), found, config, other, [*damaged, f"{path}: {note}"])
    return swapped if len(swapped.lines()) < len(report.lines()) else report


def compare(
    path: Path,
    found: Mapping[str, TensorSpec],
    config: ModelConfig,
    storage: str,
    damaged: list[str] | None = None,
) -> CheckReport:
    """Compare tensors that were found with those that ``config`` asks for in ``storage``."""
    expected = expected_tensors(config, storage)
    optional = optional_tensors(config)
    misshapen = []
    for name, spec in expected.items():
        got = found.get(name)
        if got is not None and (
            got.dtype != spec.dtype or got.shape not in accepted_shapes(config, name, spec.shape)
        ):
            misshapen.append(Mismatch(name=name, found=got, expected=spec))
    return CheckReport(
        path=path,
        storage=storage,
        tensors=len(found),
        nbytes=sum(spec.nbytes for spec in found.values()),
        missing=tuple(n for n in expected if n not in found and n not in optional),
        unexpected=tuple(n for n in found if n not in expected),
        misshapen=tuple(misshapen),
        damaged=tuple(damaged or ()),
    )
