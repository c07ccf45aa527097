"""Index scores of the released shape on Hopper, with layouts chosen by hand (Gluon).

Same mathematics as `cedar.ops.index_score.triton`, for 32 heads of 128 bfloat16 channels. A warp
reads the packed words of 16 keys straight into the registers where the tensor cores want the left
operand: a thread takes the words 0, 4, 8, 12 past its own of two keys, so the order of channels
inside the product is another one, and the queries in shared memory follow it. No shared memory
for keys and no barrier in the loop: warpgroups run on their own and hide each other's latency.

All scales of a key's blocks are applied with a common factor of 2^-60, which the score makes up
for: exact for block scales from 2^-66 to 2^61.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
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
# Order: channels 0, 2 (even of bytes 0, 1), 4, 6, then 1, 3, 5, 7.
_UNPACK = gl.constexpr(
    """
    {
    .reg .b32 a, b, m;
    prmt.b32 a, $8, 0, 0x4140;
    prmt.b32 b, $8, 0, 0x4342;
    and.b32 m, a, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 m, m, $9;
    mov.b32 {$0, $1}, m;
    and.b32 m, b, 0x000F000F;
    mul.lo.u32 m, m, 0x1040;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 m, m, $9;
    mov.b32 {$2, $3}, m;
    and.b32 m, a, 0x00F000F0;
    mul.lo.u32 m, m, 0x0104;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 m, m, $9;
    mov.b32 {$4, $5}, m;
    and.b32 m, b, 0x00F000F0;
    mul.lo.u32 m, m, 0x0104;
    and.b32 m, m, 0x81C081C0;
    mul.rn.bf16x2 m, m, $9;
    mov.b32 {$6, $7}, m;
    }
    """
)

# Two products, rounded to bfloat16, through ReLU and their weights, rounded again; as float32.
_WEIGH = gl.constexpr(
    """
    {
    .reg .b32 m, zero;
    mov.b32 zero, 0;
    cvt.rn.bf16x2.f32 m, $3, $2;
    max.bf16x2 m, m, zero;
    mul.rn.bf16x2 m, m, $4;
    shl.b32 $0, m, 16;
    and.b32 $1, m, 0xFFFF0000;
    }
    """
)


@gluon.jit
def _load_keys(raw, row, filled):
    """Words ``[64, 16]`` and scale words ``[64]`` of keys of 17 words."""
    offset = row.to(gl.int64) * 17
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, _WORDS))
    codes = gl.load(
        gl.expand_dims(raw + word, 0) + gl.expand_dims(offset, 1),
        mask=gl.expand_dims(filled, 1),
        other=0,
    )
    return codes, gl.load(raw + 16 + offset, mask=filled, other=0)


@gluon.jit
def _left_operand(codes, scales, OPERAND: gl.constexpr):
    """bfloat16 ``[64, 128]`` of keys, 2^-60 of the values, channels in the order of `_channel`."""
    block = gl.arange(0, 16, layout=gl.SliceLayout(0, _WORDS)) // 4
    byte = (gl.expand_dims(scales, 1) >> gl.expand_dims(block * 8, 0)) & 255
    lift = gl.minimum(byte + 66, 254) * 0x00800080
    e0, e1, e2, e3, o0, o1, o2, o3 = gl.inline_asm_elementwise(
        _UNPACK,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [codes, lift],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    first = gl.join(gl.join(e0, e2), gl.join(o0, o2))
    second = gl.join(gl.join(e1, e3), gl.join(o1, o3))
    # key, block, word of the block, bytes 0-1 or 2-3, even or odd, first or second
    parts = gl.reshape(gl.join(first, second), [64, 4, 4, 2, 2, 2])
    return gl.convert_layout(
        gl.reshape(gl.permute(parts, (0, 1, 4, 3, 2, 5)), [64, 128]), OPERAND, assert_trivial=True
    )


@gluon.jit
def _channel(k):
    """The channel at place ``k`` of a product: the inverse of `_left_operand`'s order."""
    second, word, high, odd, block = k & 1, (k >> 1) & 3, (k >> 3) & 1, (k >> 4) & 1, k >> 5
    return 32 * block + 8 * word + 4 * high + 2 * second + odd


@gluon.jit
def _load_queries(q, w, token, head, known, q_stride, w_stride, target, MMA: gl.constexpr):
    """Queries of all columns to shared memory; their weights in the product's layout."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    N: gl.constexpr = token.shape[0]
    place = gl.convert_layout(token * q_stride + head * 128, gl.SliceLayout(1, LAYOUT))
    channel = _channel(gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT)))
    inside = gl.convert_layout(known, gl.SliceLayout(1, LAYOUT))
    target.store(
        gl.load(
            gl.expand_dims(q + place, 1) + gl.expand_dims(channel, 0),
            mask=gl.expand_dims(inside, 1),
            other=0.0,
        )
    )
    fence_async_shared()
    weight = gl.load(w + token * w_stride + head, mask=known, other=0.0)
    none = gl.zeros([_KEYS, N], gl.int16, MMA)
    bits = gl.expand_dims(weight.to(gl.int16, bitcast=True), 0) | none
    return bits.to(gl.bfloat16, bitcast=True)


@gluon.jit
def _scores(codes, scales, queries, weight, Q: gl.constexpr, MMA: gl.constexpr):
    """float32 ``[64, Q]``."""
    keys = _left_operand(codes, scales, gl.DotOperandLayout(0, MMA, 2))
    dot = gl.zeros([_KEYS, 32 * Q], gl.float32, MMA)
    dot = warpgroup_mma(keys, queries.permute((1, 0)), dot, is_async=True)
    dot = warpgroup_mma_wait(0, deps=[dot])
    dot = gl.inline_asm_elementwise(
        _WEIGH, "=r,=r,r,r,r", [dot, weight], dtype=gl.float32, is_pure=True, pack=2
    )
    return gl.sum(gl.reshape(dot, [_KEYS, Q, 32]), 2) * _GROW


@gluon.jit
def _entries(tile):
    return tile * _KEYS + gl.arange(0, _KEYS, layout=_ROWS)


@gluon.jit
def _places(table, entry, filled, PAGE: gl.constexpr):
    """First rows of the pages that hold these entries."""
    return gl.load(table + entry // PAGE, mask=filled, other=0) * PAGE


@gluon.jit
def scan(
    q, w, raw, table, first, visible, out, best, table_stride, q_stride, w_stride, out_stride,
    best_stride, Q: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The tiles ``split``, ``split + programs``, ... of one sequence, for all its query tokens."""
    splits = gl.num_programs(0)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32 * Q, 16]
    )
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    split = gl.program_id(0)
    sequence = gl.program_id(1).to(gl.int64)
    start = gl.load(first + sequence).to(gl.int64)
    stop = gl.load(first + sequence + 1).to(gl.int64)
    table += sequence * table_stride
    column = gl.arange(0, 32 * Q, layout=COLUMNS)
    token = start + column // 32
    queries = gl.allocate_shared_memory(
        gl.bfloat16, [32 * Q, 128], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    weight = _load_queries(q, w, token, column % 32, token < stop, q_stride, w_stride, queries, MMA)
    longest = gl.load(visible + stop - 1, mask=stop > start, other=0).to(gl.int32)
    # Bytes are asked for one tile ahead, and their page another tile before: nothing waits.
    entry = _entries(split)
    filled = entry < longest
    row = _places(table, entry, filled, PAGE) + entry % PAGE
    codes, scales = _load_keys(raw, row, filled)
    entry = _entries(split + splits)
    place = _places(table, entry, entry < longest, PAGE)
    for tile in range(split, gl.cdiv(longest, _KEYS), splits):
        entry = _entries(tile + splits)
        next_codes, next_scales = _load_keys(raw, place + entry % PAGE, entry < longest)
        entry = _entries(tile + 2 * splits)
        place = _places(table, entry, entry < longest, PAGE)
        total = _scores(codes, scales, queries, weight, Q, MMA)
        LAYOUT: gl.constexpr = total.type.layout
        query = start + gl.arange(0, Q, layout=gl.SliceLayout(0, LAYOUT))
        here = tile * _KEYS + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, LAYOUT))
        asked = query < stop
        seen = gl.load(visible + query, mask=asked, other=0).to(gl.int32)
        hidden = gl.expand_dims(here, 1) >= gl.expand_dims(seen, 0)
        score = gl.where(hidden, float("-inf"), total).to(gl.bfloat16)
        target = gl.expand_dims(out + query * out_stride, 0) + gl.expand_dims(here, 1)
        inside = gl.expand_dims(here < longest, 1) & gl.expand_dims(asked, 0)
        gl.store(target, score, mask=inside)
        if BLOCK > 0:
            COUNT: gl.constexpr = _KEYS // BLOCK
            most = gl.max(gl.reshape(score.to(gl.float32), [COUNT, BLOCK, Q]), 1)
            MOST: gl.constexpr = most.type.layout
            query = start + gl.arange(0, Q, layout=gl.SliceLayout(0, MOST))
            block = tile * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(1, MOST))
            target = gl.expand_dims(best + query * best_stride, 0) + gl.expand_dims(block, 1)
            inside = gl.expand_dims(block * BLOCK < longest, 1) & gl.expand_dims(query < stop, 0)
            gl.store(target, most.to(gl.bfloat16), mask=inside)
        codes, scales = next_codes, next_scales


@gluon.jit
def _members(blocks, tile, count, BLOCK: gl.constexpr):
    """Block numbers of a tile's members."""
    member = _entries(tile)
    return gl.load(blocks + member // BLOCK, mask=member < count, other=-1).to(gl.int32)


@gluon.jit
def _member_entries(block, tile, seen, BLOCK: gl.constexpr):
    """Their entries, and which of those exist."""
    entry = block * BLOCK + _entries(tile) % BLOCK
    filled = (block >= 0) & (entry < seen)
    return gl.where(filled, entry, 0), filled


@gluon.jit
def pool(
    q, w, raw, table, sequence, visible, blocks, out, table_stride, q_stride, w_stride,
    out_stride, blocks_stride, count, PAGE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The same over the candidate blocks of one query."""
    splits = gl.num_programs(0)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]
    )
    split = gl.program_id(0)
    t = gl.program_id(1).to(gl.int64)
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, MMA))
    queries = gl.allocate_shared_memory(
        gl.bfloat16, [32, 128], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    weight = _load_queries(
        q, w, column * 0 + t, column, column < 32, q_stride, w_stride, queries, MMA
    )
    seen = gl.load(visible + t).to(gl.int32)
    table += gl.load(sequence + t).to(gl.int64) * table_stride
    blocks += t * blocks_stride
    # As in `scan`; the blocks are asked for yet another tile before.
    block = _members(blocks, split, count, BLOCK)
    entry, filled = _member_entries(block, split, seen, BLOCK)
    row = _places(table, entry, filled, PAGE) + entry % PAGE
    codes, scales = _load_keys(raw, row, filled)
    block = _members(blocks, split + splits, count, BLOCK)
    entry, next_filled = _member_entries(block, split + splits, seen, BLOCK)
    place = _places(table, entry, next_filled, PAGE)
    block = _members(blocks, split + 2 * splits, count, BLOCK)
    for tile in range(split, gl.cdiv(count, _KEYS), splits):
        next_codes, next_scales = _load_keys(raw, place + entry % PAGE, next_filled)
        entry, after_filled = _member_entries(block, tile + 2 * splits, seen, BLOCK)
        place = _places(table, entry, after_filled, PAGE)
        block = _members(blocks, tile + 3 * splits, count, BLOCK)
        total = _scores(codes, scales, queries, weight, 1, MMA)
        total = gl.convert_layout(gl.reshape(total, [_KEYS]), _ROWS)
        score = gl.where(filled, total, float("-inf")).to(gl.bfloat16)
        member = _entries(tile)
        gl.store(out + t * out_stride + member, score, mask=member < count)
        codes, scales = next_codes, next_scales
        filled, next_filled = next_filled, after_filled
