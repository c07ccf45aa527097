"""What a comparison with golden files found, as plain data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

__all__ = ["Comparison", "Kind", "Report", "Summary"]


class Kind(StrEnum):
    """How two tensors are compared.

    ``FLOAT32``: largest absolute difference, logic in float32. ``EXACT``: a discrete choice,
    every element. ``BITS``: floating point that has to be equal all the same. ``ROUNDING``:
    float32 rounding, relative. ``BFLOAT16``: a block in bfloat16, relative root mean square or
    absolute. ``SHOWN``: no test; end-to-end bfloat16 is chaotic. ``SET``: the set as a whole.
    """

    FLOAT32 = "float32"
    EXACT = "exact"
    BITS = "bit for bit"
    ROUNDING = "rounding"
    BFLOAT16 = "bfloat16"
    SHOWN = "shown only"
    SET = "set"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One line of the table.

    worst: the largest error in the unit that ``tolerance`` names (for ``EXACT`` and ``BITS`` the
    number of elements that differ); None where nothing could be compared. where: the place of
    the worst element in the golden tensor with both values, or what went wrong.
    """

    set_name: str
    tensor: str
    kind: Kind
    tolerance: str
    worst: float | None
    where: str
    passed: bool

    @property
    def counts(self) -> bool:
        """Whether this line is a test at all."""
        return self.kind is not Kind.SHOWN


class Summary(TypedDict):
    """The last line of `cedar parity`.

    sets: how many sets were compared; compared, failed: how many tensors; max_abs_fp32: the
    largest error of the ``FLOAT32`` lines (None if it is not a number); discrete_mismatches:
    differing elements of the ``EXACT`` and ``BITS`` lines.
    """

    sets: int
    compared: int
    failed: int
    max_abs_fp32: float | None
    discrete_mismatches: int


@dataclass(frozen=True, slots=True)
class Report:
    """All comparisons of some sets, in the order in which they were made."""

    sets: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def failures(self) -> tuple[Comparison, ...]:
        """Every line that failed."""
        return tuple(line for line in self.comparisons if not line.passed)

    @property
    def ordered(self) -> tuple[Comparison, ...]:
        """Failures first, then everything else."""
        return (*self.failures, *(line for line in self.comparisons if line.passed))

    def summary(self) -> Summary:
        """The numbers of the last line."""
        return {
            "sets": len(self.sets),
            "compared": sum(line.counts for line in self.comparisons),
            "failed": len(self.failures),
            "max_abs_fp32": _largest(
                line.worst for line in self.comparisons if line.kind is Kind.FLOAT32
            ),
            "discrete_mismatches": sum(
                int(line.worst)
                for line in self.comparisons
                if line.kind in (Kind.EXACT, Kind.BITS) and line.worst is not None
            ),
        }


def _largest(errors: Iterable[float | None]) -> float | None:
    largest = max((error for error in errors if error is not None), default=0.0)
    return largest if math.isfinite(largest) else None
