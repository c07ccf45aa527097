"""How close is close: three classes of comparison and one table of tolerances.

*Bitwise*: casts, hashes, selections from given scores, moves of data. *Close*: anything that
sums floating-point numbers, by the table. *Statistical*: roundings that must not drift.
A failure says where the worst value is. Widening an entry of the table needs a reason beside it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "TOLERANCES",
    "Tolerance",
    "assert_bitwise",
    "assert_close",
    "assert_unbiased",
    "same_bits",
    "worst",
]


class Tolerance(NamedTuple):
    """``|found − expected| ≤ absolute + relative · |expected|``."""

    absolute: float
    relative: float


TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        # One sum in two orders, float64, through all layers of a tiny model.
        "float64": Tolerance(1e-9, 1e-9),
        # One operation in float32 against the same in float64.
        "float32 op": Tolerance(1e-6, 1e-5),
        # A model in float32 against the authors' numbers or against itself in other steps.
        "float32": Tolerance(1e-4, 0.0),
        # One rounding to bfloat16 of otherwise equal arithmetic.
        "bfloat16 op": Tolerance(1e-6, 2**-7),
    }
)


class Worst(NamedTuple):
    """The element that exceeds its tolerance most (or comes nearest to it).

    ``excess`` is its difference over what is allowed.
    """

    place: tuple[int, ...]
    found: float
    expected: float
    excess: float


def worst(found: Tensor, expected: Tensor, tolerance: Tolerance) -> Worst | None:
    """The worst element, by difference over allowance; None for empty tensors.

    A NaN in one tensor alone, or infinities that differ, are infinitely bad.
    """
    if found.shape != expected.shape:
        raise AssertionError(f"shape {tuple(found.shape)}; expected {tuple(expected.shape)}")
    if found.numel() == 0:
        return None
    a, b = found.detach().to(torch.float64).flatten(), expected.detach().to(torch.float64).flatten()
    allowed = tolerance.absolute + tolerance.relative * b.abs()
    equal = (a == b) | (a.isnan() & b.isnan())
    excess = torch.where(equal, 0.0, (a - b).abs() / allowed.clamp_min(1e-300))
    excess = torch.where(excess.isnan(), torch.inf, excess)
    flat = int(excess.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), found.shape))
    return Worst(place, float(a[flat]), float(b[flat]), float(excess[flat]))


def assert_close(found: Tensor, expected: Tensor, tolerance: str, what: str = "values") -> None:
    """Shapes equal, values within ``TOLERANCES[tolerance]``."""
    try:
        bad = worst(found, expected, TOLERANCES[tolerance])
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None
    if bad is not None and bad.excess > 1:
        raise AssertionError(
            f"{what}: at {list(bad.place)} found {bad.found!r}; expected {bad.expected!r}, "
            f"{bad.excess:.3g} times the tolerance ({tolerance})"
        )


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Equal in type, shape and every bit (−0 is not 0; a NaN equals itself)."""
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(_bits(found), _bits(expected))
    )


def assert_bitwise(found: Tensor, expected: Tensor, what: str = "values") -> None:
    """`same_bits`, or say where the first difference is."""
    if same_bits(found, expected):
        return
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise AssertionError(
            f"{what}: found {found.dtype} {tuple(found.shape)}; "
            f"expected {expected.dtype} {tuple(expected.shape)}"
        )
    width = found.element_size()
    differs = (_bits(found) != _bits(expected)).view(-1, width).any(1)
    place = int(differs.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), found.shape)]
    a, b = found.detach().flatten()[place], expected.detach().flatten()[place]
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {found.numel()} values differ, the first at {index}: "
        f"found {a.item()!r}; expected {b.item()!r}"
    )


def assert_unbiased(errors: Tensor, what: str = "rounding", sigmas: float = 5.0) -> None:
    """The mean of independent ``errors`` lies within ``sigmas`` standard errors of zero."""
    e = errors.detach().to(torch.float64).flatten()
    mean = float(e.mean())
    standard_error = float(e.std()) / e.numel() ** 0.5
    if abs(mean) > sigmas * standard_error:
        raise AssertionError(
            f"{what}: the mean error {mean:.3g} is {abs(mean) / standard_error:.1f} standard "
            f"errors from zero; expected at most {sigmas}"
        )
