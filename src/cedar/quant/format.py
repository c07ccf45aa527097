"""The block formats of the architecture: which element, which scale, over which block.

A block shares one scale; the value of an element is ``code x scale``. The table is section 8
of the architecture description.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["FP4_MAIN", "FP4_ROW", "FP8_BLOCK", "FP8_ROW", "BlockFormat", "Element", "Scale"]


class Element(StrEnum):
    """The type of one code."""

    E4M3 = "e4m3"  # 8 bits, largest value 448
    E2M1 = "e2m1"  # 4 bits, two to a byte, the even element in the low nibble; largest value 6


class Scale(StrEnum):
    """The type of the factor that a block shares."""

    E8M0 = "e8m0"  # 8 bits of exponent: byte b stands for 2^(b - 127)
    E4M3 = "e4m3"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """Codes of type ``element`` in blocks of ``rows x cols`` that share one ``scale``.

    ``amax_floor`` is the smallest block maximum that a scale is computed from; it keeps the
    scale of an all-zero block representable.
    """

    name: str
    element: Element
    scale: Scale
    rows: int
    cols: int
    amax_floor: float

    @property
    def largest(self) -> float:
        """The largest magnitude of a code."""
        return 448.0 if self.element is Element.E4M3 else 6.0

    def bytes_per_row(self, width: int) -> int:
        """Bytes of one row of ``width`` elements, codes and scales together.

        Only for formats with one-row blocks; a two-dimensional block has no bytes per row.
        """
        if self.rows != 1:
            raise ValueError(f"{self.name} shares its scales between {self.rows} rows")
        codes = width if self.element is Element.E4M3 else width // 2
        return codes + -(-width // self.cols)

    def packed_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the codes and of the scales that hold a tensor of ``shape``."""
        *lead, n = shape
        codes = n if self.element is Element.E4M3 else n // 2
        blocks = -(-n // self.cols)
        if self.rows > 1:
            *more, m = lead
            return (*lead, codes), (*more, -(-m // self.rows), blocks)
        return (*lead, codes), (*lead, blocks)


FP8_BLOCK = BlockFormat(
    name="fp8 32x32", element=Element.E4M3, scale=Scale.E8M0, rows=32, cols=32, amax_floor=1e-4
)
"""Dense weights."""

FP8_ROW = BlockFormat(
    name="fp8 per 32", element=Element.E4M3, scale=Scale.E8M0, rows=1, cols=32, amax_floor=1e-4
)
"""Inputs of quantised products, window KV, Engram rows."""

FP4_ROW = BlockFormat(
    name="fp4 per 32",
    element=Element.E2M1,
    scale=Scale.E8M0,
    rows=1,
    cols=32,
    amax_floor=6 * 2.0**-126,
)
"""Routed-expert weights, index queries and index keys."""

FP4_MAIN = BlockFormat(
    name="fp4 per 16",
    element=Element.E2M1,
    scale=Scale.E4M3,
    rows=1,
    cols=16,
    amax_floor=6 * 2.0**-9,
)
"""Global KV entries."""
