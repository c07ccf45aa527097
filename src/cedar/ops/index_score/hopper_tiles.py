"""Places and maxima within a tile of scores that is held in registers (Gluon)."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["column_numbers", "maxima_of", "row_numbers"]


@gluon.jit
def row_numbers(value):
    """Numbers of the rows of a tile."""
    return gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))


@gluon.jit
def column_numbers(value):
    """Numbers of its columns."""
    return gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))


@gluon.jit
def maxima_of(value, SIZE: gl.constexpr):
    """Maxima of ``SIZE`` neighbouring rows, within a warp each."""
    return gl.max(gl.reshape(value, [value.shape[0] // SIZE, SIZE, value.shape[1]]), 1)
