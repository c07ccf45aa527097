"""How the programs of a query in `shared_gluon` join their shares: through L2, in one launch.

Every program has the unnormalised output of its rows for all channels, and finishes ``512 /
SPLITS`` of them for all rows. Each of its two multiplying groups of warps, for its half of the
channels,

* leaves to every other program the channels which that one finishes, as float16, and keeps its own
  as float32 in shared memory;
* adds to the query's counter, and waits until all groups of all programs have;
* reads what was left for it, in the order of the programs, so that the sum is always the same.

Bytes of a program: ``(SPLITS - 1) x 64 x 512 / SPLITS x 2`` left and as many read, 48 KB each way
at 4 shares, and ``SPLITS x 512`` of maxima and sums; they stay in L2.

Why this is no race. A group's writes come before its barrier, that before the addition with release
order by one of its threads; every thread that reads has seen all additions with acquire order, and
reads past L1. The counter is never set back: a launch adds `ARRIVALS` to it, so it is a multiple of
that between launches, whatever their sizes were, and what a group sees before its own addition
tells it for what to wait. It may overflow. Places and counters are used again by the next launch on
the stream only, which waits for the end of this one before it touches memory.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from cedar.ops.sparse_attention.packed_gluon_rows import ROTARY_WIDTH, column_halves, normaliser
from cedar.ops.sparse_attention.packed_triton import LOG2E
from cedar.ops.sparse_attention.prefill_gluon import HEADS, PLAIN, WIDTH, barrier
from cedar.ops.sparse_attention.shared_gluon_rows import most
from cedar.ops.sparse_attention.shared_gluon_scores import HALF, PART

__all__ = ["ARRIVALS", "arrivals_so_far", "finish"]

ARRIVALS = gl.constexpr(32)  # a launch adds so much to a counter, whatever its SPLITS
_LOG2E = gl.constexpr(LOG2E)
_FLAT = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))  # a chunk as it is left
# A rounded pair rotated back; every product is rounded, as in the plain rotation.
_BACK = gl.constexpr(
    """
    {
    .reg .b32 m;
    .reg .f32 x, y, a, b, d;
    shl.b32 m, $1, 16;
    mov.b32 x, m;
    and.b32 m, $1, 0xFFFF0000;
    mov.b32 y, m;
    mul.rn.f32 a, x, $2;
    mul.rn.f32 b, y, $3;
    add.rn.f32 d, a, b;
    mul.rn.f32 a, y, $2;
    mul.rn.f32 b, x, $3;
    sub.rn.f32 b, a, b;
    cvt.rn.bf16x2.f32 $0, b, d;
    }
    """
)


@gluon.constexpr_function
def _chunk_layout(channels):
    """Some channels of an accumulator, in the threads that computed them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], *[[0, n] for n in (8, 16, 32) if n < channels]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, channels],
    )


@gluon.jit
def _chunks(acc, COUNT: gl.constexpr, CHANNELS: gl.constexpr):
    """An accumulator as ``COUNT`` tensors ``[64, CHANNELS]``."""
    if COUNT == 1:
        found = (gl.convert_layout(acc, _chunk_layout(CHANNELS), assert_trivial=True),)
    else:
        first, second = column_halves(acc)
        found = _chunks(first, COUNT // 2, CHANNELS) + _chunks(second, COUNT // 2, CHANNELS)
    return found


@gluon.jit
def _flattened(chunk, CHANNELS: gl.constexpr):
    """``[64, CHANNELS]`` in the order in which a thread holds 8 values: 16 bytes of float16."""
    parts = gl.reshape(chunk, [4, 2, 8, CHANNELS // 16, 2, 4, 2])
    flat = gl.reshape(gl.permute(parts, (3, 0, 2, 5, 4, 1, 6)), [HEADS * CHANNELS])
    return gl.convert_layout(flat, _FLAT, assert_trivial=True)


@gluon.jit
def _restored(flat, CHANNELS: gl.constexpr):
    """The inverse, as float32."""
    parts = gl.reshape(flat.to(gl.float32), [CHANNELS // 16, 4, 8, 4, 2, 2, 2])
    chunk = gl.reshape(gl.permute(parts, (1, 5, 2, 0, 4, 3, 6)), [HEADS, CHANNELS])
    return gl.convert_layout(chunk, _chunk_layout(CHANNELS), assert_trivial=True)


@gluon.jit
def arrivals_so_far(counter):
    """The counter, to be read before the own addition."""
    return gl.load(counter, volatile=True)


@gluon.jit
def _arrived(counter):
    """What a counter is now; whatever was written before it was added to can be read after."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(gl.int64)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _leave(
    accs, own, part, split, SPLITS: gl.constexpr, TILES: gl.constexpr, CHANNELS: gl.constexpr
):  # fmt: skip
    """Wait for the products; their channels to other programs and, float32, to ``own``."""
    SIZE: gl.constexpr = HEADS * CHANNELS
    COUNT: gl.constexpr = HALF // PART
    PER: gl.constexpr = PART // CHANNELS
    lane = gl.arange(0, SIZE, layout=_FLAT)
    for n in gl.static_range(COUNT):
        acc = warpgroup_mma_wait((COUNT - 1 - n) * (1 + TILES), deps=[accs[n]])
        chunks = _chunks(acc, PER, CHANNELS)
        for m in gl.static_range(PER):
            reader = n * PER + m
            place = part + (reader * SPLITS + split) * (2 * SIZE)
            flat = _flattened(chunks[m], CHANNELS)
            gl.store(place + lane, flat.to(gl.float16), mask=(lane >= 0) & (split != reader))
            if split == reader:
                own.store(flat)


@gluon.jit
def _read(part, stats, split, head, SPLITS: gl.constexpr, CHANNELS: gl.constexpr):
    """Ask for what all programs left: tuples of maxima ``[64]``, sums ``[64]`` and shares."""
    SIZE: gl.constexpr = HEADS * CHANNELS
    lane = gl.arange(0, SIZE, layout=_FLAT)
    tops, totals, shares = (), (), ()
    for n in gl.static_range(SPLITS):
        known = stats + n * 128 + head
        tops = tops + (gl.load(known, cache_modifier=".cg"),)
        totals = totals + (gl.load(known + 64, cache_modifier=".cg"),)
        place = part + (split * SPLITS + n) * (2 * SIZE) + lane
        mask = (lane >= 0) & (split != n)
        shares = shares + (gl.load(place, mask=mask, other=0.0, cache_modifier=".cg"),)
    return tops, totals, shares


@gluon.jit
def _joined(
    own, tops, totals, shares, sinks, split, SPLITS: gl.constexpr, CHANNELS: gl.constexpr
):  # fmt: skip
    """The normalised output ``[64, CHANNELS]``, float32."""
    top = most(tops, SPLITS)
    base = gl.where(top == float("-inf"), 0.0, top)
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _chunk_layout(CHANNELS)))
    weights = ()
    kept = total
    for n in gl.static_range(SPLITS):
        weight = gl.exp2(tops[n] - base)
        total += totals[n] * weight
        kept = gl.where(split == n, weight, kept)
        weights = weights + (weight,)
    y = _restored(own.load(_FLAT), CHANNELS) * kept[:, None]
    for n in gl.static_range(SPLITS):
        y += _restored(shares[n], CHANNELS) * weights[n][:, None]
    return y * normaliser(top, total, sinks)[:, None]


@gluon.jit
def _turned_back(both, cos, sin, t, first, pair, CHANNELS: gl.constexpr):
    """Pairs from number ``first`` on; they are rotated back if they are among the last 32."""
    PAIRS: gl.constexpr = both.type.layout
    if first >= (WIDTH - ROTARY_WIDTH) // 2:
        angle = t * (ROTARY_WIDTH // 2) + pair - (WIDTH - ROTARY_WIDTH) // 2
        wide = gl.zeros([HEADS, CHANNELS // 2], gl.float32, PAIRS)
        c = gl.load(cos + angle).to(gl.float32)[None, :] + wide
        s = gl.load(sin + angle).to(gl.float32)[None, :] + wide
        both = gl.inline_asm_elementwise(
            _BACK, "=r,r,f,f", [both, c, s], dtype=gl.int32, is_pure=True, pack=1
        )
    return both


@gluon.jit
def _store(
    y, out, cos, sin, t, split, FIRST: gl.constexpr, CHANNELS: gl.constexpr, ROTARY: gl.constexpr
):  # fmt: skip
    """Round the output, rotate it back where it is to be, and write it."""
    even, odd = gl.split(gl.reshape(y, [HEADS, CHANNELS // 2, 2]))
    PAIRS: gl.constexpr = even.type.layout
    first = (FIRST + split * CHANNELS) // 2
    pair = first + gl.arange(0, CHANNELS // 2, layout=gl.SliceLayout(0, PAIRS))
    both = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip
    if ROTARY and FIRST > 0:
        both = _turned_back(both, cos, sin, t, first, pair, CHANNELS)
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, PAIRS))
    place = out.to(gl.pointer_type(gl.int32)) + row[:, None] * (WIDTH // 2) + pair[None, :]
    gl.store(place, both)


@gluon.jit
def finish(
    accs, FIRST: gl.constexpr, q_smem, counter, before, part, stats, sink, cos, sin, t, split, out,
    SPLITS: gl.constexpr, TILES: gl.constexpr, ROTARY: gl.constexpr,
):  # fmt: skip
    """Exchange channels ``FIRST : FIRST + 256`` and write the ``256 / SPLITS`` own ones of them.

    accs: what `shared_gluon_scores.output` began. before: `arrivals_so_far`.
    """
    CHANNELS: gl.constexpr = HALF // SPLITS
    SIZE: gl.constexpr = HEADS * CHANNELS
    part += FIRST // HALF * SIZE
    # The own channels stay here, where queries were and no probabilities are.
    whole = q_smem._reinterpret(gl.float32, [HEADS * WIDTH // 2 // SIZE, SIZE], PLAIN)
    own = whole.index(HEADS * WIDTH // 8 // SIZE + FIRST // HALF)
    _leave(accs, own, part, split, SPLITS, TILES, CHANNELS)
    barrier()
    gl.atomic_add(counter, ARRIVALS // (2 * SPLITS), sem="release")
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _chunk_layout(CHANNELS)))
    sinks = gl.load(sink + head).to(gl.float32) * _LOG2E
    wanted = (before & -ARRIVALS) + ARRIVALS
    while _arrived(counter) - wanted < 0:
        pass
    tops, totals, shares = _read(part, stats, split, head, SPLITS, CHANNELS)
    y = _joined(own, tops, totals, shares, sinks, split, SPLITS, CHANNELS)
    _store(y, out, cos, sin, t, split, FIRST, CHANNELS, ROTARY)
