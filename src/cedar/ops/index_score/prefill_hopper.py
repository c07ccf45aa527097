"""Index scores of many queries on Hopper, with layouts chosen by hand (Gluon).

Same mathematics as `cedar.ops.index_score.prefill`, for 32 heads of 128 bfloat16 channels. A
program keeps all heads of 16 queries in shared memory, where every warp reads them, and goes over
keys in tiles of 128: a warp loads 16 keys straight into the registers where the tensor cores want
the left operand. A thread takes 16 bytes of a key at a time, so the order of channels inside the
product is another one, and the queries in shared memory follow it. A step takes two queries: their
64 heads are the columns of its product. While it runs, the heads of the step before are rounded,
weighted and summed by a second product, with ones. Warps never wait for each other.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cedar.ops.index_score.hopper_tiles import column_numbers, maxima_of, row_numbers

__all__ = ["CHUNK", "QUERIES", "WARPS", "prefill"]

WARPS = gl.constexpr(8)
QUERIES = gl.constexpr(16)  # of a program
_WIDE = gl.constexpr(64)  # keys that a warp takes one after the other, 16 at a time
_PARTS = gl.constexpr(_WIDE // 16)
CHUNK = gl.constexpr(WARPS * _WIDE)  # keys that a program takes in so many tiles
_KEYS = gl.constexpr(WARPS * 16)  # of a tile
_COLUMNS = gl.constexpr(64)  # heads of the queries of a step
_STEPS = gl.constexpr(QUERIES * 32 // _COLUMNS)

# Triton renamed it.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16])
)
_SUM = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1], instr_shape=[16, 8])
)
# 128 keys by 128 channels: a thread holds 8 neighbouring channels of each 32, of two keys.
_LEFT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 128],
    )
)
_RIGHT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_FILL = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0]))

# Two products, rounded to bfloat16 behind their ReLU, times their weights, rounded again.
_WEIGH = gl.constexpr(
    """
    {
    .reg .b32 m;
    cvt.rn.relu.bf16x2.f32 m, $2, $1;
    mul.rn.bf16x2 $0, m, $3;
    }
    """
)


@gluon.jit
def _entry(tile, row, split, splits, ROWS: gl.constexpr):
    """First entries of the rows of a tile, each of ``_KEYS / ROWS`` entries of one warp."""
    PER_WARP: gl.constexpr = ROWS // WARPS
    chunk = split + tile // _PARTS * splits
    place = tile % _PARTS * 16 + row % PER_WARP * (16 // PER_WARP)
    return (chunk * WARPS + row // PER_WARP) * _WIDE + place


@gluon.jit
def _in_order(rows):
    """Channels of both operands in the order of the product."""
    # row, block of 32 channels, thread, bits 2, 1 and 0 of the channel in the thread
    parts = gl.reshape(rows, [rows.shape[0], 4, 4, 2, 2, 2])
    return gl.reshape(gl.permute(parts, (0, 1, 3, 4, 2, 5)), [rows.shape[0], 128])


@gluon.jit
def _load_keys(keys, key_stride, entries, tile, split, splits):
    """A tile of the left operand; what a thread loads stays where it is."""
    row = gl.arange(0, _KEYS, layout=gl.SliceLayout(1, _LEFT))
    # Behind the last key it is the last again: what is scored there is not stored.
    entry = gl.minimum(_entry(tile, row, split, splits, _KEYS), entries - 1)
    channel = gl.arange(0, 128, layout=gl.SliceLayout(0, _LEFT))
    place = keys + entry.to(gl.int64) * key_stride
    held = _in_order(gl.load(gl.expand_dims(place, 1) + gl.expand_dims(channel, 0)))
    return gl.convert_layout(held, gl.DotOperandLayout(0, _MMA, 2), assert_trivial=True)


@gluon.jit
def _load_queries(q, w, left, q_stride, w_stride, queries, weights):
    """Queries and head weights to shared memory, zeros where no tokens are ``left``."""
    channel = gl.arange(0, 128, layout=gl.SliceLayout(0, _RIGHT))
    lane = gl.arange(0, _COLUMNS, layout=_LINE)
    rows, row_weights = (), ()
    for step in gl.static_range(_STEPS):  # everything is asked for before anything is awaited
        column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, _RIGHT))
        token = (_COLUMNS * step + column) // 32
        place = gl.expand_dims(q + token * q_stride + column % 32 * 128, 1)
        there = gl.expand_dims(token < left, 1)
        rows += (gl.load(place + gl.expand_dims(channel, 0), mask=there, other=0.0),)
        token = (_COLUMNS * step + lane) // 32
        place = w + token * w_stride + lane % 32
        row_weights += (gl.load(place, mask=token < left, other=0.0),)
    for step in gl.static_range(_STEPS):
        queries.index(step).store(_in_order(rows[step]))
        weights.index(step).store(row_weights[step])
    fence_async_shared()
    _barrier()


@gluon.jit
def _product(keys, queries, step):
    none = gl.zeros([_KEYS, _COLUMNS], gl.float32, _MMA)
    right = queries.index(step).permute((1, 0))
    return warpgroup_mma(keys, right, none, use_acc=False, is_async=True)


@gluon.jit
def _add_heads(dot, weight, totals, QUERY: gl.constexpr):
    """Add the weighted heads of the queries ``QUERY`` and on to their columns of ``[128, 8]``.

    The sum is a product with ones: exact but for the order of its float32 additions. Each half of
    the queries has its own total, with zeros for the others, so that neither waits for the other.
    """
    HALF: gl.constexpr = _COLUMNS // 2
    LEFT: gl.constexpr = gl.DotOperandLayout(0, _SUM, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, _SUM, 2)
    dot, weight = gl.broadcast(dot, gl.expand_dims(weight, 0))
    weighted = gl.inline_asm_elementwise(
        _WEIGH, "=r,r,r,r", [dot, weight], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    halves = gl.split(gl.permute(gl.reshape(weighted, [_KEYS, 2, HALF]), (0, 2, 1)))
    query = QUERY + gl.arange(0, HALF, layout=gl.SliceLayout(1, RIGHT)) // 32
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, RIGHT))
    found = ()
    for half in gl.static_range(2):
        ones = gl.expand_dims(query + half * (HALF // 32), 1) == gl.expand_dims(column, 0)
        left = gl.convert_layout(halves[half], LEFT, assert_trivial=True)
        found += (mma_v2(left, ones.to(gl.bfloat16), totals[half]),)
    return found


@gluon.jit
def _leave(out, stride, value, place, width, left):
    """Store ``value``'s columns to rows of ``out``, as long as there are tokens ``left``."""
    token = column_numbers(value)
    gl.store(
        out + (gl.expand_dims(token * stride, 0) + gl.expand_dims(place, 1)),
        value.to(gl.bfloat16),
        mask=gl.expand_dims(place < width, 1) & gl.expand_dims(token < left, 0),
    )


@gluon.jit
def _finish(
    total, seen, group, out, best, wide, out_stride, best_stride, wide_stride, entries, tile,
    split, splits, left, BLOCK: gl.constexpr,
):  # fmt: skip
    """Mask and store the scores of 8 queries; the running maxima of the warps' groups.

    Rounding keeps order, so maxima are taken before it.
    """
    here = _entry(tile, row_numbers(total), split, splits, _KEYS)
    score = gl.where(gl.expand_dims(here, 1) < gl.expand_dims(seen, 0), total, float("-inf"))
    _leave(out, out_stride, score, here, entries, left)
    if BLOCK > 0:
        most = maxima_of(score, BLOCK)
        here = _entry(tile, row_numbers(most), split, splits, most.shape[0]) // BLOCK
        _leave(best, best_stride, most, here, gl.cdiv(entries, BLOCK), left)
        high = maxima_of(most, 16 // BLOCK)
        group = gl.where(tile % _PARTS == 0, high, gl.maximum(group, high))
        if tile % _PARTS == _PARTS - 1:
            place = _entry(tile, row_numbers(group), split, splits, WARPS) // _WIDE
            _leave(wide, wide_stride, group, place, gl.cdiv(entries, _WIDE), left)
    return group


@gluon.jit
def _hide(out, stride, start, width, left):
    """Nothing is visible to any query from column ``start`` on."""
    token = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, _FILL))
    lane = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, _FILL))
    none = gl.full([QUERIES, CHUNK], float("-inf"), gl.bfloat16, _FILL)
    width = gl.cdiv(width, 8) * 8  # rows end with room for whole vectors
    for begin in range(start, width, CHUNK):
        place = begin + lane
        there = gl.expand_dims(token < left, 1) & gl.expand_dims(place < width, 0)
        gl.store(
            out + (gl.expand_dims(token * stride, 1) + gl.expand_dims(place, 0)), none, mask=there
        )


@gluon.jit
def prefill(
    q, w, keys, visible, out, best, wide, tokens, entries, q_stride, w_stride, key_stride,
    out_stride, best_stride, wide_stride, BLOCK: gl.constexpr,
):  # fmt: skip
    """The chunks ``split``, ``split + splits``, ... of 16 queries, the last queries first."""
    split, splits = gl.program_id(0), gl.num_programs(0)
    first = ((gl.num_programs(1) - 1 - gl.program_id(1)) * QUERIES).to(gl.int64)
    left = (tokens - first).to(gl.int32)
    q += first * q_stride
    w += first * w_stride
    visible += first
    out += first * out_stride
    best += first * best_stride
    wide += first * wide_stride
    token = gl.arange(0, QUERIES, layout=_LINE)
    seen = gl.load(visible + token, mask=token < left, other=0)
    longest = gl.minimum(gl.max(seen, 0).to(gl.int32), entries)
    chunks = gl.cdiv(longest, CHUNK)
    tiles = gl.maximum((chunks - split + splits - 1) // splits, 0) * _PARTS
    queries = gl.allocate_shared_memory(
        gl.bfloat16, [_STEPS, _COLUMNS, 128], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    weights = gl.allocate_shared_memory(
        gl.bfloat16, [_STEPS, _COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    _load_queries(q, w, left, q_stride, w_stride, queries, weights)
    token = gl.arange(0, 8, layout=gl.SliceLayout(0, _SUM))
    low_seen = gl.load(visible + token, mask=token < left, other=0).to(gl.int32)
    high_seen = gl.load(visible + token + 8, mask=token + 8 < left, other=0).to(gl.int32)
    low_group = maxima_of(maxima_of(gl.zeros([_KEYS, 8], gl.float32, _SUM), 8), 2)
    high_group = low_group
    none = gl.zeros([_KEYS, 8], gl.float32, _SUM)
    held = _load_keys(keys, key_stride, entries, 0, split, splits)
    for tile in range(tiles):
        left_operand = held
        totals = (none, none)
        zero = tile >> 30  # which the compiler does not know: addresses are not kept in registers
        dot = _product(left_operand, queries, zero)
        for step in gl.static_range(_STEPS):
            weight = weights.index(step).load(gl.SliceLayout(0, _MMA))
            if step + 1 < _STEPS:
                ahead = _product(left_operand, queries, zero + step + 1)
                dot, left_operand = warpgroup_mma_wait(1, deps=[dot, left_operand])
            else:
                ahead = dot
                dot, left_operand = warpgroup_mma_wait(0, deps=[dot, left_operand])
            totals = _add_heads(dot, weight, totals, step * _COLUMNS // 32 % 8)
            dot = ahead
            if step == _STEPS // 2 - 1:
                low_group = _finish(
                    totals[0] + totals[1], low_seen, low_group, out, best, wide, out_stride,
                    best_stride, wide_stride, entries, tile, split, splits, left, BLOCK,
                )  # fmt: skip
                totals = (none, none)
                after = _load_keys(keys, key_stride, entries, tile + 1, split, splits)
        high_group = _finish(
            totals[0] + totals[1], high_seen, high_group, out + 8 * out_stride,
            best + 8 * best_stride, wide + 8 * wide_stride, out_stride, best_stride, wide_stride,
            entries, tile, split, splits, left - 8, BLOCK,
        )  # fmt: skip
        held = after
    if split == 0:
        hidden = chunks * CHUNK
        _hide(out, out_stride, hidden, entries, left)
        if BLOCK > 0:
            _hide(best, best_stride, hidden // BLOCK, gl.cdiv(entries, BLOCK), left)
            _hide(wide, wide_stride, hidden // _WIDE, gl.cdiv(entries, _WIDE), left)
