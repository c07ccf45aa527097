"""Index scores of the released shape on Hopper, with layouts chosen by hand (Gluon).

Same mathematics as `cedar.ops.index_score.triton`; products as `cedar.ops.index_score
.hopper_product` explains. A program is one warpgroup. It copies keys to a ring in shared memory
ahead of their use, in units of 16 bytes, 17 of which are four keys; four programs of a
multiprocessor hide each other's latency.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from cedar.ops.index_score.hopper_product import (
    KEYS,
    SUM,
    WORDS,
    add_heads,
    block_scales,
    dots,
    keep_query,
    load_query,
    operands,
)
from cedar.ops.index_score.hopper_tiles import column_numbers, maxima_of, row_numbers

__all__ = ["pool", "scan"]

# `WORDS` of 16 keys of each of four groups, and their scale words.
_QUARTERS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 8, 0]],
        lane_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, 1, 16, 16],
    )
)
_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8]],
        lane_bases=[[0], [0], [1], [2], [4]],
        warp_bases=[[16], [32]],
        block_bases=[],
        shape=[64],
    )
)
_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 8]],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 1, 16],
    )
)
_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
_LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _hand_over():
    """As `cedar.ops.dependent_launch.hand_over`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copy(raw, place, ring, line):
    """Begin to copy units from these places to lines of 16 words from ``line`` on.

    Nothing from places below 0: what is read there does not matter, nothing else is masked.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    target = ring.index(line)._reinterpret(gl.int32, [place.shape[0], 4], FLAT)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, _COPY))
    source = gl.expand_dims(raw + place.to(gl.int64) * 4, 1) + gl.expand_dims(word, 0)
    async_copy.async_copy_global_to_shared(target, source, mask=gl.expand_dims(place >= 0, 1))


@gluon.jit
def _copy_all(raw, most, rest, ring, line):
    """Begin to copy so many units, and the rest behind them."""
    _copy(raw, most, ring, line)
    _copy(raw, rest, ring, line + most.shape[0] // 4)
    async_copy.commit_group()


@gluon.jit
def _leave(out, stride, value, place, there, start, stop, Q: gl.constexpr):
    """Store ``value``'s columns to the rows of ``out`` of the tokens from ``start`` to ``stop``."""
    column = column_numbers(value)
    asked = (start + column < stop) & (column < Q)
    gl.store(
        gl.expand_dims(out + (start + column) * stride, 0) + gl.expand_dims(place, 1),
        value.to(gl.bfloat16),
        mask=gl.expand_dims(there, 1) & gl.expand_dims(asked, 0),
    )


@gluon.jit
def _units(
    table, chunk, longest, FIRST: gl.constexpr, COUNT: gl.constexpr, PARTS: gl.constexpr,
    PIECE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Where in storage units of a piece of a chunk lie, from ``FIRST`` on; below 0 if nowhere."""
    POWER: gl.constexpr = PAGE & -PAGE
    RUN: gl.constexpr = POWER if POWER < 16 * PARTS else 16 * PARTS
    EACH: gl.constexpr = RUN // 4 * 17
    unit = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(1, _COPY))
    group, inside = unit // (68 * PARTS), unit % (68 * PARTS) // EACH * RUN
    entry = ((chunk * 4 + group) * 64 + PIECE * 16 * PARTS + inside).to(gl.uint32)
    page = gl.load(table + entry // PAGE, mask=entry < longest, other=-1)
    return page * (PAGE // 4 * 17) + ((entry % PAGE).to(gl.int32) // 4 * 17 + unit % EACH)


@gluon.jit
def _piece(table, chunk, splits, longest, n: gl.constexpr, PARTS: gl.constexpr, PAGE: gl.constexpr):
    """Where the units of the ``n``-th piece from a chunk's first on lie.

    A piece is ``PARTS`` times 16 keys of every group of a chunk.
    """
    PIECES: gl.constexpr = 4 // PARTS
    PIECE: gl.constexpr = n % PIECES
    MOST: gl.constexpr = 256 * PARTS
    chunk += n // PIECES * splits
    most = _units(table, chunk, longest, 0, MOST, PARTS, PIECE, PAGE)
    return most, _units(table, chunk, longest, MOST, 16 * PARTS, PARTS, PIECE, PAGE)


@gluon.jit
def _quarters(ring, stage, part: gl.constexpr, PARTS: gl.constexpr):
    """Words ``[64, 16]`` and scale words ``[64]`` of 16 keys of every group of a piece."""
    CODES: gl.constexpr = gl.PaddedSharedLayout.with_identity_for(
        [[16, 1]], [4, PARTS, 16, 16], [3, 2, 1, 0]
    )
    line = stage * (68 * PARTS)
    view = ring.index(line)._reinterpret(gl.int32, [4, PARTS, 16, 16], CODES)
    codes = gl.reshape(view.slice(part, 1, dim=1).load(_QUARTERS), [64, 16])
    SCALES: gl.constexpr = gl.PaddedSharedLayout.with_identity_for(
        [[1, 16]], [4, PARTS, 16], [2, 1, 0]
    )
    view = ring.index(line + 1)._reinterpret(gl.int32, [4, PARTS, 16], SCALES)
    scales = gl.reshape(view.slice(part, 1, dim=1).load(_SCALES), [64])
    codes = gl.convert_layout(codes, WORDS, assert_trivial=True)
    return codes, gl.convert_layout(scales, _ROWS, assert_trivial=True)


@gluon.jit
def _leave_part(
    total, chunk, part, out, best, out_stride, best_stride, seen, start, stop, longest,
    Q: gl.constexpr,
):  # fmt: skip
    """Store scores ``[64, 8]`` of several queries and maxima of blocks; return those of 16."""
    row = row_numbers(total)
    here = (chunk * 4 + row // 16) * 64 + part * 16 + row % 16
    hidden = gl.expand_dims(here, 1) >= gl.expand_dims(seen, 0)
    score = gl.where(hidden, float("-inf"), total).to(gl.bfloat16)
    _leave(out, out_stride, score, here, here < longest, start, stop, Q)
    most = maxima_of(score.to(gl.float32), 8)
    row = row_numbers(most)
    here = (chunk * 4 + row // 2) * 8 + part * 2 + row % 2
    _leave(best, best_stride, most, here, here * 8 < longest, start, stop, Q)
    return maxima_of(most, 2)


@gluon.jit
def _leave_one(total, chunk, out, best, wide, longest):
    """Store the scores of one query, each part of a chunk in two columns, and all maxima."""
    score, _ = gl.split(gl.reshape(total, [KEYS, 4, 2]))
    row, part = gl.expand_dims(row_numbers(score), 1), gl.expand_dims(column_numbers(score), 0)
    here = (chunk * 4 + row // 16) * 64 + part * 16 + row % 16
    score = gl.where(here >= longest, float("-inf"), score).to(gl.bfloat16)
    gl.store(out + here, score, mask=here < longest)
    most = maxima_of(score.to(gl.float32), 8)
    row, part = gl.expand_dims(row_numbers(most), 1), gl.expand_dims(column_numbers(most), 0)
    here = (chunk * 4 + row // 2) * 8 + part * 2 + row % 2
    gl.store(best + here, most.to(gl.bfloat16), mask=here * 8 < longest)
    most = gl.max(maxima_of(most, 2), 1)
    here = chunk * 4 + gl.arange(0, 4, layout=most.type.layout)
    gl.store(wide + here, most.to(gl.bfloat16), mask=here * 64 < longest)


@gluon.jit
def scan(
    q, w, raw, table, first, visible, out, best, wide, table_stride, q_stride, w_stride,
    out_stride, best_stride, wide_stride, Q: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The chunks ``split``, ``split + programs``, ... of one sequence, for all its query tokens.

    A chunk is four groups of 64 keys, one for each warp, which takes 16 of them at a time: the
    maxima of blocks of 8 and of groups stay within it.
    """
    if PDL:
        _hand_over()
    splits = gl.num_programs(0)
    split = gl.program_id(0)
    sequence = gl.program_id(1).to(gl.int64)
    start = gl.load(first + sequence).to(gl.int64)
    stop = gl.load(first + sequence + 1).to(gl.int64)
    table += sequence * table_stride
    longest = gl.load(visible + stop - 1, mask=stop > start, other=0).to(gl.int32)
    asked = ()
    for token in gl.static_range(Q):
        asked += (load_query(q, w, start + token, stop, q_stride, w_stride),)
    # Keys are copied STAGES - 1 pieces ahead; where they lie is asked for another piece before.
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * 68 * PARTS, 16], _LINES)
    for ahead in gl.static_range(STAGES):
        most, rest = _piece(table, split, splits, longest, ahead, PARTS, PAGE)
        if ahead < STAGES - 1:
            _copy_all(raw, most, rest, ring, ahead * 68 * PARTS)
    queries = gl.allocate_shared_memory(
        gl.float8e4nv, [Q * 4, 32, 32], gl.NVMMASharedLayout(32, 8, rank=2)
    )
    weights = gl.allocate_shared_memory(gl.bfloat16, [Q, 32], _LINES)
    for token in gl.static_range(Q):
        keep_query(asked[token], queries, weights, token)
    fence_async_shared()
    query = start + gl.arange(0, 8, layout=gl.SliceLayout(0, SUM))
    seen = gl.load(visible + query, mask=query < stop, other=0).to(gl.int32)
    if Q == 1:
        out += start * out_stride
        best += start * best_stride
        wide += start * wide_stride
    stage = 0
    for chunk in range(split, gl.cdiv(longest, 256), splits):
        total = gl.zeros([KEYS, 8], gl.float32, SUM)
        for part in gl.static_range(4):
            if part % PARTS == 0:
                async_copy.wait_group(STAGES - 2)
                free = gl.where(stage == 0, STAGES - 1, stage - 1)
                _copy_all(raw, most, rest, ring, free * 68 * PARTS)
                most, rest = _piece(
                    table, chunk, splits, longest, part // PARTS + STAGES, PARTS, PAGE
                )
            codes, scales = _quarters(ring, stage, part % PARTS, PARTS)
            if Q == 1:  # a row of the sum has a key of every part: none may spoil it
                row = gl.arange(0, KEYS, layout=_ROWS)
                here = (chunk * 4 + row // 16) * 64 + part * 16 + row % 16
                scales = gl.where(here < longest, scales, 0)
            keys = operands(codes)
            factors = block_scales(scales)
            if Q == 1:
                total = add_heads(dots(keys, factors, queries, 0, True), weights, 0, total, part, 2)
            else:
                for n in range(Q):
                    dot = dots(keys, factors, queries, n, False)
                    total = add_heads(dot, weights, n, total, n, 1)
                high = _leave_part(
                    total, chunk, part, out, best, out_stride, best_stride, seen, start, stop,
                    longest, Q,
                )  # fmt: skip
                if part == 0:  # noqa: SIM108 - there is no group to name yet
                    group = high
                else:
                    group = gl.maximum(group, high)
                total = gl.zeros([KEYS, 8], gl.float32, SUM)
            if part % PARTS == PARTS - 1:
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if Q == 1:
            _leave_one(total, chunk, out, best, wide, longest)
        else:
            here = chunk * 4 + row_numbers(group)
            _leave(wide, wide_stride, group, here, here * 64 < longest, start, stop, Q)


@gluon.jit
def _members(
    blocks, table, tile, count, seen, FIRST: gl.constexpr, COUNT: gl.constexpr, PAGE: gl.constexpr
):
    """Where units of a tile of eight blocks lie, from ``FIRST`` on; below 0 if nowhere."""
    unit = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(1, _COPY))
    member = tile * 8 + unit // 34
    block = gl.load(blocks + member, mask=member < count, other=-1).to(gl.int32)
    filled = (block >= 0) & (block * 8 < seen)
    entry = gl.where(filled, block * 8, 0).to(gl.uint32)
    page = gl.load(table + entry // PAGE, mask=filled, other=-1)
    return page * (PAGE // 4 * 17) + ((entry % PAGE).to(gl.int32) // 4 * 17 + unit % 34)


@gluon.jit
def _tile(blocks, table, tile, count, seen, PAGE: gl.constexpr):
    """Where the units of a tile lie."""
    most = _members(blocks, table, tile, count, seen, 0, 256, PAGE)
    return most, _members(blocks, table, tile, count, seen, 256, 16, PAGE)


@gluon.jit
def pool(
    q, w, raw, table, sequence, visible, blocks, out, best, table_stride, q_stride, w_stride,
    out_stride, blocks_stride, best_stride, count, PAGE: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The same over the ``count`` candidate blocks of one query, in tiles of eight."""
    if PDL:
        _hand_over()
    splits = gl.num_programs(0)
    split = gl.program_id(0)
    t = gl.program_id(1).to(gl.int64)
    seen = gl.load(visible + t).to(gl.int32)
    table += gl.load(sequence + t).to(gl.int64) * table_stride
    blocks += t * blocks_stride
    query = load_query(q, w, t, t + 1, q_stride, w_stride)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * 68, 16], _LINES)
    for ahead in gl.static_range(STAGES):
        most, rest = _tile(blocks, table, split + ahead * splits, count, seen, PAGE)
        if ahead < STAGES - 1:
            _copy_all(raw, most, rest, ring, ahead * 68)
    queries = gl.allocate_shared_memory(
        gl.float8e4nv, [4, 32, 32], gl.NVMMASharedLayout(32, 8, rank=2)
    )
    weights = gl.allocate_shared_memory(gl.bfloat16, [1, 32], _LINES)
    keep_query(query, queries, weights, 0)
    fence_async_shared()
    CODES: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[16, 1]], [64, 16], [1, 0])
    SCALES: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[1, 16]], [64], [0])
    stage = 0
    for tile in range(split, gl.cdiv(count, 8), splits):
        async_copy.wait_group(STAGES - 2)
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        _copy_all(raw, most, rest, ring, free * 68)
        most, rest = _tile(blocks, table, tile + STAGES * splits, count, seen, PAGE)
        codes = ring.index(stage * 68)._reinterpret(gl.int32, [64, 16], CODES).load(WORDS)
        scales = ring.index(stage * 68 + 1)._reinterpret(gl.int32, [64], SCALES)
        scales = scales.load(_ROWS)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        dot = dots(operands(codes), block_scales(scales), queries, 0, True)
        total = add_heads(dot, weights, 0, gl.zeros([KEYS, 8], gl.float32, SUM), 0, 8)
        total, _ = gl.split(gl.reshape(total, [KEYS, 4, 2]))
        here = tile * KEYS + row_numbers(total)
        block = gl.load(blocks + here // 8, mask=here < count * 8, other=-1).to(gl.int32)
        there = (block >= 0) & (block * 8 + here % 8 < seen)
        score = gl.where(gl.expand_dims(there, 1), total, float("-inf")).to(gl.bfloat16)
        _leave(out, out_stride, score, here, here < count * 8, t, t + 1, 1)
        most_of = maxima_of(score.to(gl.float32), 8)
        here = tile * 8 + row_numbers(most_of)
        _leave(best, best_stride, most_of, here, here < count, t, t + 1, 1)
