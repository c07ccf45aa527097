"""From the sums of gate and up rows to the hidden rows that the second product reads."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cedar.ops.experts.prepare import ordered_place

__all__ = ["paired_row", "store_hidden"]


@gluon.jit
def paired_row(r):
    """Which row of gate or up (that one if ``r & 8``) row ``r`` of a tile is.

    They alternate by eights, as a lane of a tensor core has row r and row r + 8 of sixteen.
    """
    return r // 16 * 8 + r % 8


@gluon.jit
def store_hidden(
    sums, source, weight, hidden, first, limit,
    INNER: gl.constexpr, FLOOR: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """SwiGLU of ``sums [ROWS, TOKENS]`` times ``weight [TOKENS]``, through FP8 per 32.

    It goes to columns ``first`` and the following, in their order, of rows ``source [TOKENS]`` of
    ``hidden``; -1 is no row.
    """
    half: gl.constexpr = ROWS // 2
    pairs = gl.permute(gl.reshape(sums, (ROWS // 16, 2, 8, TOKENS)), (0, 2, 3, 1))
    gate, up = gl.split(gl.reshape(pairs, (half, TOKENS, 2)))
    rows: gl.constexpr = gate.type.layout
    source = gl.convert_layout(source, gl.SliceLayout(0, rows))
    weight = gl.convert_layout(weight, gl.SliceLayout(0, rows))
    gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), limit)
    up = gl.minimum(gl.maximum(up.to(gl.bfloat16).to(gl.float32), -limit), limit)
    y = weight[None, :] * (gate / (1.0 + gl.exp(-gate)) * up)
    values = gl.reshape(y.to(gl.bfloat16).to(gl.float32), (half // 32, 32, TOKENS))
    # A power of two at or above amax / 448, from the bits.
    ratio = gl.maximum(gl.max(gl.maximum(values, -values), axis=1), FLOOR) / 448.0
    exponent = (ratio.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    factor = gl.expand_dims((exponent << 23).to(gl.float32, bitcast=True), 1)
    y = (values / factor).to(gl.float8e4nv).to(gl.float32) * factor * 9223372036854775808.0  # 2^63
    y = gl.convert_layout(gl.reshape(y, (half, TOKENS)), rows)
    f = first + gl.arange(0, half, layout=gl.SliceLayout(1, rows))
    place = ordered_place(f, INNER, ORDER)
    where = hidden + source.to(gl.int64)[None, :] * INNER + place[:, None]
    gl.store(where, y.to(gl.bfloat16), mask=(source >= 0)[None, :])
