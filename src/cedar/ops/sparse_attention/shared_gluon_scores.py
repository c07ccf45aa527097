"""What the multiplying warps of `shared_gluon` do: queries, scores, probabilities, outputs.

Shapes of a program: queries ``[64, 512]`` bfloat16, 64 KB of shared memory, in whose place the
probabilities are kept later; rows as `shared_gluon_rows` unpacks them, one tile of 32 for the
window and up to two of 64 (or one of 32) for main KV. FLOP: ``2 x 64 x 512`` a row for its scores
and as many for its part of the output, so 21 M at 160 rows.

One group of warps computes all scores. The output's channels are halved between that one and a
second, 256 each, in two accumulators ``[64, 128]``: one is handed on while the other is computed.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cedar.ops.sparse_attention.packed_gluon_rows import ROTARY_WIDTH, turn_queries
from cedar.ops.sparse_attention.prefill_gluon import HEADS, WIDTH
from cedar.ops.sparse_attention.shared_gluon_rows import (
    NEAR_ROWS,
    halved_slots,
    most,
    slots_from,
)
from cedar.ops.triton_unpack import MAIN_SHRINK, WINDOW_SHRINK

__all__ = [
    "HALF", "PART", "begin_queries", "filled_slots", "finish_queries", "masked_scores", "output",
    "probabilities", "scores", "scores_layout", "sum_of_all",
]  # fmt: skip

HALF = gl.constexpr(256)  # channels of one group of warps
PART = gl.constexpr(128)  # channels of an accumulator
_MAIN = gl.constexpr(float(MAIN_SHRINK))
_WINDOW = gl.constexpr(float(WINDOW_SHRINK))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_TURN = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))  # pairs of _COPY
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_OUT = gl.constexpr(
    gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART.value, 16]
    )
)


@gluon.constexpr_function
def scores_layout(rows):
    """Scores ``[64, rows]``: a head is in one quad of threads, so its sums need no memory."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16]
    )


@gluon.constexpr_function
def _probabilities_layout(rows):
    return gl.NVMMASharedLayout(swizzle_byte_width=min(2 * rows, 128), element_bitwidth=16, rank=2)


@gluon.jit
def _copy_queries(heads, q_smem, stride, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Begin to copy channels ``FIRST : FIRST + COUNT`` of 64 heads."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _COPY))
    col = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, _COPY))
    place = heads + (head * stride)[:, None] + col[None, :]
    async_copy.async_copy_global_to_shared(q_smem.slice(FIRST, COUNT, dim=1), place)


@gluon.jit
def _load_turned(heads, stride, cos, sin, t):
    """The last channels of 64 heads of query ``t``, and cosines and sines."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _COPY))
    col = WIDTH - ROTARY_WIDTH + gl.arange(0, ROTARY_WIDTH, layout=gl.SliceLayout(0, _COPY))
    x = gl.load(heads + (head * stride)[:, None] + col[None, :])
    pair = gl.arange(0, ROTARY_WIDTH // 2, layout=gl.SliceLayout(0, _TURN))
    angle = t * (ROTARY_WIDTH // 2) + pair
    return x, gl.load(cos + angle).to(gl.float32), gl.load(sin + angle).to(gl.float32)


@gluon.jit
def begin_queries(heads, q_smem, stride, cos, sin, t, ROTARY: gl.constexpr):
    """Begin to copy 64 heads; gives back what `finish_queries` has to rotate, if anything."""
    _copy_queries(heads, q_smem, stride, 0, 256)
    _copy_queries(heads, q_smem, stride, 256, 128)
    _copy_queries(heads, q_smem, stride, 384, 64)
    if ROTARY:
        turned = _load_turned(heads, stride, cos, sin, t)
    else:
        _copy_queries(heads, q_smem, stride, 448, 64)
        turned = ()
    async_copy.commit_group()
    return turned


@gluon.jit
def finish_queries(turned, q_smem, ROTARY: gl.constexpr):
    """Rotate the last channels on their way to shared memory."""
    if ROTARY:
        x, c, s = turned
        turn_queries(x, c, s, q_smem)


@gluon.jit
def filled_slots(
    near_list, near_width, far_list, far_width, split,
    STEP: gl.constexpr, FAR: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Slots of a program's tiles, as columns of scores: ``[32]`` and a tuple of ``[FAR]``."""
    NEAR_COLUMNS: gl.constexpr = gl.SliceLayout(0, scores_layout(NEAR_ROWS))
    FAR_COLUMNS: gl.constexpr = gl.SliceLayout(0, scores_layout(FAR))
    near = halved_slots(near_list, split * STEP, near_width, STEP, NEAR_COLUMNS)
    far = ()
    for n in gl.static_range(TILES):
        first = (split * TILES + n) * FAR
        far = far + (slots_from(far_list, first, far_width, FAR, FAR, FAR_COLUMNS),)
    return near, far


@gluon.jit
def scores(q_smem, near_tile, far_tiles, full, FAR: gl.constexpr, TILES: gl.constexpr):
    """Begin to multiply queries and rows, each tile as soon as both of its halves are there.

    Gives back ``[64, 32]`` and a tuple of ``[64, FAR]``, all still being computed.
    """
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    zero = gl.zeros([HEADS, NEAR_ROWS], gl.float32, scores_layout(NEAR_ROWS))
    near = warpgroup_mma(q_smem, near_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    far = ()
    for n in gl.static_range(TILES):
        mbarrier.wait(full.index(1 + n), 0)
        fence_async_shared()
        zero = gl.zeros([HEADS, FAR], gl.float32, scores_layout(FAR))
        rows = far_tiles.index(n).permute((1, 0))
        far = far + (warpgroup_mma(q_smem, rows, zero, use_acc=False, is_async=True),)
    return near, far


@gluon.jit
def _scaled(s, slot, scale):
    """Scores of filled slots, as binary logarithms; minus infinity elsewhere."""
    return gl.where((slot >= 0)[None, :], s * scale, float("-inf"))


@gluon.jit
def masked_scores(near, far, near_slot, far_slots, scale, FAR: gl.constexpr, TILES: gl.constexpr):
    """Wait for `scores`; binary logarithms of all tiles, and the largest of every head ``[64]``."""
    near = warpgroup_mma_wait(TILES, deps=[near])
    near = _scaled(near, near_slot, scale * 2.0**_WINDOW)
    near_top = gl.max(near, 1)
    scaled = ()
    for n in gl.static_range(TILES):
        found = warpgroup_mma_wait(TILES - 1 - n, deps=[far[n]])
        scaled = scaled + (_scaled(found, far_slots[n], scale * 2.0**_MAIN),)
    top = gl.max(most(scaled, TILES), 1)
    top = gl.maximum(top, gl.convert_layout(near_top, gl.SliceLayout(1, scores_layout(FAR))))
    return near, scaled, top


@gluon.jit
def _exponentials(s, base, digits, LAYOUT: gl.constexpr):
    """Larger by the digits that the rows are too small by."""
    base = gl.convert_layout(base - digits, gl.SliceLayout(1, LAYOUT))
    return gl.exp2(s - base[:, None])


@gluon.jit
def _places(q_smem, FAR: gl.constexpr):
    """Where the probabilities of the window and of the tiles are kept: in the queries' place.

    The tiles' at its begin, the window's in its last 4 KB; the second and third quarter stay free
    for `shared_gluon_exchange`.
    """
    COUNT: gl.constexpr = WIDTH // FAR
    far = q_smem._reinterpret(gl.bfloat16, [COUNT, HEADS, FAR], _probabilities_layout(FAR))
    near = q_smem._reinterpret(
        gl.bfloat16, [WIDTH // NEAR_ROWS, HEADS, NEAR_ROWS], _probabilities_layout(NEAR_ROWS)
    )
    return near.index(WIDTH // NEAR_ROWS - 1), far


@gluon.jit
def probabilities(
    near, far, top, q_smem, largest, full, FAR: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """Exponentials of `masked_scores`, to shared memory; barrier 4 says that they are there.

    Gives back ``digits``, by which they are larger, so that outputs fill float16 without leaving
    it: what is added up for an output is below 2^8 values, those are below 2^(7 - digits), the sum
    below 2^15. And sums of every head ``[64]``, of the window and of the tiles, for `sum_of_all`.
    """
    NEAR_SCORES: gl.constexpr = scores_layout(NEAR_ROWS)
    FAR_SCORES: gl.constexpr = scores_layout(FAR)
    ROW: gl.constexpr = gl.SliceLayout(1, FAR_SCORES)
    base = gl.where(top == float("-inf"), 0.0, top)
    mbarrier.wait(full.index(3), 0)
    exponent = gl.maximum(largest.index(0).load(_ONE), largest.index(1).load(_ONE))
    digits = (7 - gl.maximum(gl.max(exponent, 0), -73)).to(gl.float32)

    near_p, far_p = _places(q_smem, FAR)
    p = _exponentials(near, base, _WINDOW + digits, NEAR_SCORES)
    near_p.store(p.to(gl.bfloat16))
    near_total = gl.convert_layout(gl.sum(p, 1), ROW) * 2.0**-_WINDOW
    total = gl.zeros([HEADS], gl.float32, ROW)
    for n in gl.static_range(TILES):
        p = _exponentials(far[n], base, _MAIN + digits, FAR_SCORES)
        far_p.index(n).store(p.to(gl.bfloat16))
        total += gl.sum(p, 1)
    return digits, near_total, total


@gluon.jit
def sum_of_all(near_total, total):
    """The sums of `probabilities` in one, larger by the digits as outputs are.

    Apart, because products can begin before it is computed.
    """
    return total * 2.0**-_MAIN + near_total


@gluon.jit
def output(
    q_smem, near_tile, far_tiles, FIRST: gl.constexpr, FAR: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """Begin to add up channels ``FIRST : FIRST + 256``, probabilities times rows: ``[64, 128]``s.

    Each is ``1 + TILES`` products in flight.
    """
    near_p, far_p = _places(q_smem, FAR)
    fence_async_shared()
    accs = ()
    for n in gl.static_range(HALF // PART):
        acc = gl.zeros([HEADS, PART], gl.float32, _OUT)
        rows = near_tile.slice(FIRST + n * PART, PART, dim=1)
        acc = warpgroup_mma(near_p, rows, acc, use_acc=False, is_async=True)
        for m in gl.static_range(TILES):
            rows = far_tiles.index(m).slice(FIRST + n * PART, PART, dim=1)
            acc = warpgroup_mma(far_p.index(m), rows, acc, is_async=True)
        accs = accs + (acc,)
    return accs
