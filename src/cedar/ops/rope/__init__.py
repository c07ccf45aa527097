"""rope: rotary embedding of the last channels, adjacent pairs (section 2)."""

from typing import Protocol

from torch import Tensor

__all__ = ["RotaryTables", "Rotate"]


class Rotate(Protocol):
    """``rotate(x [T, ..., H], cos [T, r/2], sin [T, r/2], inverse) -> [T, ..., H]``.

    The last ``r`` channels are complex numbers in adjacent pairs, multiplied by
    ``exp(±i·angle)`` of their row; the others pass through. float32, rounded once.
    """

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor: ...


class RotaryTables(Protocol):
    """``rotary_tables(positions [T], frequencies [n, r/2], back) -> (cos, sin) [n, T, r/2]``.

    Table ``i`` is of the positions ``back[i]`` before the given ones: angles are position times
    frequency in float32. Bytes: ``8 n T r/2``.
    """

    def __call__(
        self, positions_T: Tensor, frequencies: Tensor, back: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]: ...
