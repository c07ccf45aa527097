"""Sparse attention for few queries on Hopper, heads 512 wide: several programs a query, one launch.

Same mathematics as `window_gluon`, other order of work. With few queries a program has so few rows
that start and end decide. So

* a program takes ``1 / SPLITS`` of the window AND of the selection: all have the same work, all of
  it fits in shared memory at once, and there is no loop and no running maximum;
* three groups of warps: two ask for all packed rows at once and unpack them (`shared_gluon_rows`),
  one reads queries and multiplies them with whatever is unpacked (`shared_gluon_scores`). The
  outputs' channels are halved between that one and one of the unpacking groups;
* the programs of a query leave what they found to each other in L2, wait until all have, and each
  finishes ``1 / SPLITS`` of the channels (`shared_gluon_exchange`). They must be on the device
  together: the launch has no more programs than there are multiprocessors.

What is left to others, not normalised, is float16: 2^-12 of a value is lost, an eighth of what
rounding the output loses. The largest scale of a program's rows bounds its values; by a power of
two less or more the exponentials make the most of float16. So outputs are as exact as others' down
to 2^-22 of the largest value among a program's rows, and lose digits below that.

Between L2 and a multiprocessor at 4 shares: queries 64 KB, rows 53 KB, shares 48 KB each way.
Shared memory: queries 64 KB (later probabilities), rows 1 KB each, at most 160, 224 KB in all.
Shapes, bytes and FLOP of a launch: as `cedar.ops.sparse_attention.triton`.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from cedar.ops.sparse_attention.prefill_gluon import HEADS, PLAIN, SHARED, WIDTH, barrier
from cedar.ops.sparse_attention.shared_gluon_exchange import ARRIVALS, arrivals_so_far, finish
from cedar.ops.sparse_attention.shared_gluon_rows import NEAR_ROWS, load_half, unpack_half
from cedar.ops.sparse_attention.shared_gluon_scores import (
    HALF,
    begin_queries,
    filled_slots,
    finish_queries,
    masked_scores,
    output,
    probabilities,
    scores,
    scores_layout,
    sum_of_all,
)

__all__ = ["ARRIVALS", "MOST_FAR", "MOST_NEAR", "attend"]

MOST_NEAR = gl.constexpr(128)  # slots of the window, of all programs of a query
MOST_FAR = gl.constexpr(512)  # slots of the selection


@gluon.constexpr_function
def _tile_rows(share):
    """FP4 rows of a tile where a program has so many."""
    return min(share, 64)


@gluon.jit
def _said(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait(PDL: gl.constexpr):
    """For the launches before this one; every group, before it touches memory."""
    if PDL:
        _said("griddepcontrol.wait; // $0")


@gluon.jit
def _scored(
    q_smem, near_tile, far_tiles, largest, full, heads, q_stride_N,
    near_list, near_width, far_list, far_width, scale,
    counter, part, stats, sink, cos, sin, t, split, out,
    SPLITS: gl.constexpr, ROTARY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The first group: queries, scores, probabilities, the first half of the output's channels."""
    FAR: gl.constexpr = _tile_rows(MOST_FAR // SPLITS)
    TILES: gl.constexpr = MOST_FAR // SPLITS // FAR
    _wait(PDL)
    if PDL:
        # The next launch is brought up only when every program here has come so far: one that
        # waits for others is never kept from the device by what comes after it.
        _said("griddepcontrol.launch_dependents; // $0")
    turned = begin_queries(heads, q_smem, q_stride_N, cos, sin, t, ROTARY)
    before = arrivals_so_far(counter)
    finish_queries(turned, q_smem, ROTARY)
    near_slot, far_slots = filled_slots(
        near_list, near_width, far_list, far_width, split, MOST_NEAR // SPLITS, FAR, TILES
    )
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    near, far = scores(q_smem, near_tile, far_tiles, full, FAR, TILES)
    near, far, top = masked_scores(near, far, near_slot, far_slots, scale, FAR, TILES)
    digits, near_total, total = probabilities(near, far, top, q_smem, largest, full, FAR, TILES)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index(4), count=1)
    accs = output(q_smem, near_tile, far_tiles, 0, FAR, TILES)
    # As the shares are, larger by the digits, and smaller by them where maxima are compared.
    known = stats + split * 128 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, scores_layout(FAR)))
    gl.store(known, top - digits)
    gl.store(known + 64, sum_of_all(near_total, total))
    finish(
        accs, 0, q_smem, counter, before, part, stats, sink, cos, sin, t, split, out, SPLITS,
        TILES, ROTARY,
    )  # fmt: skip


@gluon.jit
def _unpacked(
    near, near_list, near_stride: gl.constexpr, near_width,
    far, far_list, far_stride: gl.constexpr, far_width,
    split, held, near_tile, far_tiles, largest, full,
    NUMBER: gl.constexpr, SPLITS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The third group: asks for one of two halves of all rows, then unpacks them, tile by tile."""
    FAR: gl.constexpr = _tile_rows(MOST_FAR // SPLITS)
    TILES: gl.constexpr = MOST_FAR // SPLITS // FAR
    _wait(PDL)
    near_codes, near_scales, far_codes, far_scales = load_half(
        near, near_list, near_stride, near_width, far, far_list, far_stride, far_width,
        split, NUMBER, MOST_NEAR // SPLITS, FAR, TILES,
    )  # fmt: skip
    barrier()
    unpack_half(
        near_codes, near_scales, far_codes, far_scales, held, near_tile, far_tiles, largest, full,
        NUMBER, FAR, TILES,
    )  # fmt: skip


@gluon.jit
def _values(
    near, near_list, near_stride: gl.constexpr, near_width,
    far, far_list, far_stride: gl.constexpr, far_width,
    held, q_smem, near_tile, far_tiles, largest, full,
    counter, part, stats, sink, cos, sin, t, split, out,
    SPLITS: gl.constexpr, ROTARY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The second group: unpacks, then computes the second half of the output's channels."""
    FAR: gl.constexpr = _tile_rows(MOST_FAR // SPLITS)
    TILES: gl.constexpr = MOST_FAR // SPLITS // FAR
    _unpacked(
        near, near_list, near_stride, near_width, far, far_list, far_stride, far_width,
        split, held, near_tile, far_tiles, largest, full, 0, SPLITS, PDL,
    )  # fmt: skip
    before = arrivals_so_far(counter)
    mbarrier.wait(full.index(4), 0)
    accs = output(q_smem, near_tile, far_tiles, HALF, FAR, TILES)
    finish(
        accs, HALF, q_smem, counter, before, part, stats, sink, cos, sin, t, split, out, SPLITS,
        TILES, ROTARY,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["near_slot_stride", "near_width", "far_slot_stride", "far_width"])
def attend(
    q, out, part, stats, counters, sink, cos, sin,
    near, near_slots, near_stride: gl.constexpr, near_slot_stride, near_width,
    far, far_slots, far_stride: gl.constexpr, far_slot_stride, far_width,
    q_stride_T, q_stride_N, scale,
    N: gl.constexpr, SPLITS: gl.constexpr, ROTARY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (s, n, t): query t, heads from 64 n on, the s-th share of at most 128 FP8 rows and
    512 FP4 rows. SPLITS: 4, 8 or 16.

    part float16 ``[T x N / 64, SPLITS, SPLITS, 64 x 512 / SPLITS]`` (reader, writer) and stats
    float32 ``[.., SPLITS, 2, 64]`` (maxima as binary logarithms, sums) are places to work in.
    counters int32, 32 apart, one for every 64 heads of a query: multiples of ARRIVALS before and
    after.
    """
    FAR: gl.constexpr = _tile_rows(MOST_FAR // SPLITS)
    TILES: gl.constexpr = MOST_FAR // SPLITS // FAR
    split = gl.program_id(0)
    first_head = gl.program_id(1) * 64
    t = gl.program_id(2)
    item = t * (N // 64) + gl.program_id(1)
    heads = q + t.to(gl.int64) * q_stride_T + first_head * q_stride_N
    near_list = near_slots + t.to(gl.int64) * near_slot_stride
    far_list = far_slots + t.to(gl.int64) * far_slot_stride
    counter = counters + item * 32
    part += item.to(gl.int64) * (SPLITS * 64 * WIDTH)
    stats += item * (SPLITS * 128)
    out += (t.to(gl.int64) * N + first_head) * WIDTH
    sink += first_head
    # All of it is named in the partitions, so nothing of it is given to anything else on the way.
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, WIDTH], SHARED)
    near_tile = gl.allocate_shared_memory(gl.bfloat16, [NEAR_ROWS, WIDTH], SHARED)
    far_tiles = gl.allocate_shared_memory(gl.bfloat16, [TILES, FAR, WIDTH], SHARED)
    held = gl.allocate_shared_memory(gl.int32, [64], PLAIN)
    largest = gl.allocate_shared_memory(gl.int32, [2, 1], PLAIN)
    # Tiles, of the window first; the largest scales; probabilities.
    full = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(4):
        mbarrier.init(full.index(n), count=2)
    mbarrier.init(full.index(4), count=1)
    held.store(gl.full([64], 4, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    barrier()
    gl.warp_specialize(
        [
            (
                _scored,
                (
                    q_smem, near_tile, far_tiles, largest, full, heads, q_stride_N,
                    near_list, near_width, far_list, far_width, scale,
                    counter, part, stats, sink, cos, sin, t, split, out, SPLITS, ROTARY, PDL,
                ),
            ),
            (
                _values,
                (
                    near, near_list, near_stride, near_width,
                    far, far_list, far_stride, far_width,
                    held, q_smem, near_tile, far_tiles, largest, full,
                    counter, part, stats, sink, cos, sin, t, split, out, SPLITS, ROTARY, PDL,
                ),
            ),
            (
                _unpacked,
                (
                    near, near_list, near_stride, near_width,
                    far, far_list, far_stride, far_width,
                    split, held, near_tile, far_tiles, largest, full, 1, SPLITS, PDL,
                ),
            ),
        ],
        [4, 4],
        [184, 128],
    )  # fmt: skip
