"""Index scores of the released shape on Hopper, with layouts chosen by hand (Gluon).

Same mathematics as `cedar.ops.index_score.triton`, for 32 heads of 128 bfloat16 channels. A warp
unpacks the words of 16 keys in the registers where the tensor cores want the left operand: a thread
takes the words 0, 4, 8, 12 past its own of two keys, so the order of channels inside the product is
another one, and the queries in shared memory follow it. The rounded and weighted heads are summed
by a second product, with ones. No shared memory for keys: a program is one warpgroup, asks for keys
a tile ahead, and programs hide each other's latency.

All scales of a key's blocks are applied with a common factor of 2^-60, which the score makes up
for: exact for block scales from 2^-66 to 2^61.
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

__all__ = ["pool", "scan"]

_KEYS = gl.constexpr(64)
_GROW = gl.constexpr(2.0**60)
# 64 keys by 16 words: lanes take 4 neighbouring words of 8 keys.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
_ROWS = gl.constexpr(gl.SliceLayout(1, _WORDS))

# Eight bfloat16 of a word of eight E2M1 codes, with the scale of their block in both halves of $9.
# Order: channels 0, 4 (a register's halves), 1, 5, 2, 6, 3, 7.
_UNPACK = gl.constexpr(
    """
    {
    .reg .b32 m, upper;
    shr.u32 upper, $8, 8;
    and.b32 m, $8, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 m, m, $9;
    mov.b32 {$0, $1}, m;
    and.b32 m, $8, 0x00F000F0;
    mul.lo.u32 m, m, 0x0104;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 m, m, $9;
    mov.b32 {$2, $3}, m;
    and.b32 m, upper, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 m, m, $9;
    mov.b32 {$4, $5}, m;
    and.b32 m, upper, 0x00F000F0;
    mul.lo.u32 m, m, 0x0104;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 m, m, $9;
    mov.b32 {$6, $7}, m;
    }
    """
)

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
def _load_keys(raw, row):
    """Words ``[64, 16]`` and scale words ``[64]`` of the keys of 17 words in these rows."""
    offset = row.to(gl.int64) * 17
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, _WORDS))
    codes = gl.load(gl.expand_dims(raw + word, 0) + gl.expand_dims(offset, 1))
    return codes, gl.load(raw + 16 + offset)


@gluon.jit
def _left_operand(codes, scales, MMA: gl.constexpr):
    """bfloat16 ``[64, 128]`` of keys, 2^-60 of the values, channels in the order of `_channel`."""
    block = gl.arange(0, 16, layout=gl.SliceLayout(0, _WORDS)) // 4
    byte = (gl.expand_dims(scales, 1) >> gl.expand_dims(block * 8, 0)) & 255
    lift = gl.minimum(byte + 66, 254) * 0x00800080
    a0, b0, a1, b1, a2, b2, a3, b3 = gl.inline_asm_elementwise(
        _UNPACK,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [codes, lift],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    lower = gl.join(gl.join(a0, a1), gl.join(a2, a3))
    upper = gl.join(gl.join(b0, b1), gl.join(b2, b3))
    # key, block, word of the block, bits 0, 1 and 2 of the channel in the word
    parts = gl.reshape(gl.join(lower, upper), [64, 4, 4, 2, 2, 2])
    operand = gl.reshape(gl.permute(parts, (0, 1, 4, 3, 2, 5)), [64, 128])
    return gl.convert_layout(operand, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _channel(k):
    """The channel at place ``k`` of a product: the inverse of `_left_operand`'s order."""
    bit2, word, bit0, bit1, block = k & 1, (k >> 1) & 3, (k >> 3) & 1, (k >> 4) & 1, k >> 5
    return 32 * block + 8 * word + 4 * bit2 + 2 * bit1 + bit0


@gluon.jit
def _load_queries(q, start, stop, q_stride, target, COLUMNS: gl.constexpr):
    """Queries of the heads of a few tokens to shared memory, zeros from token ``stop`` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LAYOUT))
    token = start + column // 32
    channel = _channel(gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT)))
    place = token * q_stride + column % 32 * 128
    target.store(
        gl.load(
            gl.expand_dims(q + place, 1) + gl.expand_dims(channel, 0),
            mask=gl.expand_dims(token < stop, 1),
            other=0.0,
        )
    )


@gluon.jit
def _load_weights(w, start, stop, w_stride, COLUMNS: gl.constexpr, MMA: gl.constexpr):
    """Head weights ``[COLUMNS]`` of a few tokens, where the products are."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    token = start + column // 32
    return gl.load(w + token * w_stride + column % 32, mask=token < stop, other=0.0)


@gluon.jit
def _add_heads(dot, weight, total, GROUP: gl.constexpr, MMA: gl.constexpr, SUM: gl.constexpr):
    """Add the weighted heads of a group's queries to their columns of ``total`` ``[64, 8]``.

    One query alone is added to all columns. The sum is a product with ones: exact but for the
    order in which its float32 additions are made.
    """
    COLUMNS: gl.constexpr = dot.shape[1]
    dot, weight = gl.broadcast(dot, gl.expand_dims(weight, 0))
    weighted = gl.inline_asm_elementwise(
        _WEIGH, "=r,r,r,r", [dot, weight], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    weighted = gl.convert_layout(weighted, gl.DotOperandLayout(0, SUM, 2), assert_trivial=True)
    ONES: gl.constexpr = gl.DotOperandLayout(1, SUM, 2)
    head = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, ONES))
    query = gl.arange(0, 8, layout=gl.SliceLayout(0, ONES))
    if COLUMNS == 32:
        query = query * 0
    ones = gl.expand_dims(head // 32 + GROUP * 2, 1) == gl.expand_dims(query, 0)
    return mma_v2(weighted, ones.to(gl.bfloat16), total)


@gluon.jit
def _score_tile(codes, scales, queries, weights, MMA: gl.constexpr, SUM: gl.constexpr):
    """float32 ``[64, 8]``: scores of 64 keys for up to eight queries, in `_add_heads`'s columns."""
    GROUPS: gl.constexpr = queries.shape[0]
    COLUMNS: gl.constexpr = queries.shape[1]
    keys = _left_operand(codes, scales, MMA)
    none = gl.zeros([_KEYS, COLUMNS], gl.float32, MMA)
    total = gl.zeros([_KEYS, 8], gl.float32, SUM)
    # One group's products run while another's heads are added; the keys stay where they are.
    dot = warpgroup_mma(keys, queries.index(0).permute((1, 0)), none, is_async=True)
    for group in gl.static_range(GROUPS - 1):
        after = warpgroup_mma(keys, queries.index(group + 1).permute((1, 0)), none, is_async=True)
        dot, keys = warpgroup_mma_wait(1, deps=[dot, keys])
        total = _add_heads(dot, weights[group], total, group, MMA, SUM)
        dot = after
    dot, keys = warpgroup_mma_wait(0, deps=[dot, keys])
    return _add_heads(dot, weights[GROUPS - 1], total, GROUPS - 1, MMA, SUM) * _GROW


@gluon.jit
def _alone(total, Q: gl.constexpr):
    """``[64, 4]`` of one query's scores, which are in all columns; ``[64, 8]`` of more as it is."""
    if Q == 1:
        total, _ = gl.split(gl.reshape(total, [_KEYS, 4, 2]))
    return total


@gluon.jit
def _rows(value):
    return gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))


@gluon.jit
def _columns(value):
    return gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))


@gluon.jit
def _leave(out, stride, value, place, there, start, stop, Q: gl.constexpr):
    """Store ``value``'s columns to the rows of ``out`` of the tokens from ``start`` to ``stop``."""
    column = _columns(value)
    asked = (start + column < stop) & (column < Q)
    gl.store(
        gl.expand_dims(out + (start + column) * stride, 0) + gl.expand_dims(place, 1),
        value.to(gl.bfloat16),
        mask=gl.expand_dims(there, 1) & gl.expand_dims(asked, 0),
    )


@gluon.jit
def _maxima(score, BLOCK: gl.constexpr):
    """float32 ``[64 / BLOCK, columns]``: maxima of blocks of rows, within a warp each."""
    COUNT: gl.constexpr = score.shape[0] // BLOCK
    return gl.max(gl.reshape(score, [COUNT, BLOCK, score.shape[1]]), 1)


@gluon.jit
def _entry(chunk, part, row, WIDE: gl.constexpr, ROWS: gl.constexpr):
    """Entries of the rows of a tile: each quarter of ``ROWS`` takes ``ROWS`` of its own group."""
    QUARTER: gl.constexpr = ROWS // 4
    return (chunk * 4 + row // QUARTER) * WIDE + part * 16 + row % QUARTER * (16 // QUARTER)


@gluon.jit
def _places(table, entry, filled, PAGE: gl.constexpr):
    """First rows of the pages that hold these entries; for those that there are not, of any page.

    What keys are read there does not matter, and nothing else has to be masked.
    """
    return gl.load(table + entry // PAGE, mask=filled, other=0) * PAGE


@gluon.jit
def _ahead(chunk, splits, part: gl.constexpr, WIDE: gl.constexpr):
    """Entries of the tile that follows ``part`` tiles after a chunk's first."""
    PARTS: gl.constexpr = WIDE // 16
    row = gl.arange(0, _KEYS, layout=_ROWS)
    entry = _entry(chunk + part // PARTS * splits, part % PARTS, row, WIDE, _KEYS)
    return entry.to(gl.uint32)


@gluon.jit
def scan(
    q, w, raw, table, first, visible, out, best, wide, table_stride, q_stride, w_stride,
    out_stride, best_stride, wide_stride, Q: gl.constexpr, PAGE: gl.constexpr,
    BLOCK: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The chunks ``split``, ``split + programs``, ... of one sequence, for all its query tokens.

    A chunk is four groups of ``WIDE`` keys, one for each warp, which takes 16 of them at a time:
    the maxima of blocks and groups stay within it.
    """
    splits = gl.num_programs(0)
    COLUMNS: gl.constexpr = 32 if Q == 1 else 64
    GROUPS: gl.constexpr = (Q + 1) // 2
    PARTS: gl.constexpr = WIDE // 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]
    )
    split = gl.program_id(0)
    sequence = gl.program_id(1).to(gl.int64)
    start = gl.load(first + sequence).to(gl.int64)
    stop = gl.load(first + sequence + 1).to(gl.int64)
    table += sequence * table_stride
    longest = gl.load(visible + stop - 1, mask=stop > start, other=0).to(gl.int32)
    # Bytes are asked for one tile ahead, and their page another tile before: nothing waits.
    entry = _ahead(split, splits, 0, WIDE)
    row = _places(table, entry, entry < longest, PAGE) + entry % PAGE
    codes, scales = _load_keys(raw, row)
    entry = _ahead(split, splits, 1, WIDE)
    place = _places(table, entry, entry < longest, PAGE)
    queries = gl.allocate_shared_memory(
        gl.bfloat16, [GROUPS, COLUMNS, 128], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    weights = ()
    for pair in gl.static_range(GROUPS):
        token = start + 2 * pair
        _load_queries(q, token, stop, q_stride, queries.index(pair), COLUMNS)
        weights += (_load_weights(w, token, stop, w_stride, COLUMNS, MMA),)
    fence_async_shared()
    query = start + _columns(_alone(gl.zeros([_KEYS, 8], gl.float32, SUM), Q))
    seen = gl.load(visible + query, mask=query < stop, other=0).to(gl.int32)
    for chunk in range(split, gl.cdiv(longest, 4 * WIDE), splits):
        for part in gl.static_range(PARTS):
            entry = _ahead(chunk, splits, part + 1, WIDE)
            next_codes, next_scales = _load_keys(raw, place + entry % PAGE)
            if PAGE & (PAGE - 1) or (part + 2) % PARTS * 16 % PAGE == 0:
                entry = _ahead(chunk, splits, part + 2, WIDE)
                place = _places(table, entry, entry < longest, PAGE)
            total = _alone(_score_tile(codes, scales, queries, weights, MMA, SUM), Q)
            codes, scales = next_codes, next_scales
            here = _entry(chunk, part, _rows(total), WIDE, _KEYS)
            hidden = gl.expand_dims(here, 1) >= gl.expand_dims(seen, 0)
            score = gl.where(hidden, float("-inf"), total).to(gl.bfloat16)
            _leave(out, out_stride, score, here, here < longest, start, stop, Q)
            if BLOCK > 0:
                most = _maxima(score.to(gl.float32), BLOCK)
                here = _entry(chunk, part, _rows(most), WIDE, most.shape[0])
                _leave(best, best_stride, most, here // BLOCK, here < longest, start, stop, Q)
                high = _maxima(most, 16 // BLOCK)
                if part == 0:  # noqa: SIM108 - there is no group to name yet
                    group = high
                else:
                    group = gl.maximum(group, high)
        if BLOCK > 0:
            here = chunk * 4 + _rows(group)
            _leave(wide, wide_stride, group, here, here * WIDE < longest, start, stop, Q)


@gluon.jit
def _members(blocks, member, count, BLOCK: gl.constexpr):
    """Block numbers of members of a pool."""
    return gl.load(blocks + member // BLOCK, mask=member < count, other=-1).to(gl.int32)


@gluon.jit
def _member_entries(block, member, seen, BLOCK: gl.constexpr):
    """Their entries, and which of those exist."""
    entry = block * BLOCK + member % BLOCK
    filled = (block >= 0) & (entry < seen)
    return gl.where(filled, entry, 0).to(gl.uint32), filled


@gluon.jit
def pool(
    q, w, raw, table, sequence, visible, blocks, out, best, table_stride, q_stride, w_stride,
    out_stride, blocks_stride, best_stride, count, PAGE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The same over the candidate blocks of one query, in tiles of 64 members."""
    splits = gl.num_programs(0)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]
    )
    split = gl.program_id(0)
    t = gl.program_id(1).to(gl.int64)
    seen = gl.load(visible + t).to(gl.int32)
    table += gl.load(sequence + t).to(gl.int64) * table_stride
    blocks += t * blocks_stride
    # As in `scan`; the blocks are asked for yet another tile before.
    lane = gl.arange(0, _KEYS, layout=_ROWS)
    member = split * _KEYS + lane
    step = splits * _KEYS
    entry, filled = _member_entries(_members(blocks, member, count, BLOCK), member, seen, BLOCK)
    row = _places(table, entry, filled, PAGE) + entry % PAGE
    codes, scales = _load_keys(raw, row)
    block = _members(blocks, member + step, count, BLOCK)
    entry, filled = _member_entries(block, member + step, seen, BLOCK)
    place = _places(table, entry, filled, PAGE)
    block = _members(blocks, member + 2 * step, count, BLOCK)
    queries = gl.allocate_shared_memory(
        gl.bfloat16, [1, 32, 128], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    _load_queries(q, t, t + 1, q_stride, queries.index(0), 32)
    weights = (_load_weights(w, t, t + 1, w_stride, 32, MMA),)
    fence_async_shared()
    for tile in range(split, gl.cdiv(count, _KEYS), splits):
        row = place + entry % PAGE
        next_codes, next_scales = _load_keys(raw, row)
        member += step
        entry, filled = _member_entries(block, member + step, seen, BLOCK)
        place = _places(table, entry, filled, PAGE)
        block = _members(blocks, member + 2 * step, count, BLOCK)
        total = _alone(_score_tile(codes, scales, queries, weights, MMA, SUM), 1)
        codes, scales = next_codes, next_scales
        here = tile * _KEYS + _rows(total)
        group = gl.load(blocks + here // BLOCK, mask=here < count, other=-1).to(gl.int32)
        there = (group >= 0) & (group * BLOCK + here % BLOCK < seen)
        score = gl.where(gl.expand_dims(there, 1), total, float("-inf")).to(gl.bfloat16)
        _leave(out, out_stride, score, here, here < count, t, t + 1, 1)
        most = _maxima(score.to(gl.float32), BLOCK)
        here = tile * most.shape[0] + _rows(most)
        _leave(best, best_stride, most, here, here * BLOCK < count, t, t + 1, 1)
