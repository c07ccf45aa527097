"""The slice programs of `cedar.ops.mhc.hopper`: 64 channels of all streams, tile after tile.

A quarter of a tile is 16 tokens of 128 bytes a stream, a thread has 8 channels of one token. Two
quarters ahead are under way in registers. New streams go to shared memory for the product with fn,
32 tokens at a time, while the next quarters are computed.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cedar.ops.mhc.hopper_finish import LIST, PLAIN, RING, ROWS, barrier, part_place
from cedar.ops.mhc.hopper_words import high_of, low_of, word_of

__all__ = ["slice_tiles"]

_LAG = gl.constexpr(2)  # tiles for which the collapsed input waits, fewer than RING
# 16 tokens x 32 words of two channels: whole lines of 128 bytes, 4 words of a token in a thread.
_TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_ROW = gl.constexpr(gl.SliceLayout(1, _TILE.value))
_COL = gl.constexpr(gl.SliceLayout(0, _TILE.value))
_Z = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
)
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
_FN = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))  # 32 x 64
_COMB = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))  # 64 x 16
_GATES = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0]))  # 64 x 4

# The two halves of a word that says how often its place was used; waits until that changes.
_WAIT = gl.constexpr(
    """
    {
    .reg .pred p;
    .reg .b32 number;
    mov.b32 $0, $1;
    mov.b32 number, $2;
    again:
    setp.ne.u32 p, number, $3;
    @p bra done;
    ld.volatile.global.v2.b32 {$0, number}, [$4];
    bra again;
    done:
    }
    """
)


@gluon.jit
def _ask(x, y, tile, part: gl.constexpr, column, count, D: gl.constexpr, UPDATE: gl.constexpr):
    """The words of a slice of a quarter of a tile's tokens: of the streams, and of y."""
    row = part * 16 + gl.arange(0, 16, layout=_ROW)
    here = gl.arange(0, 32, layout=_COL)[None, :]
    known = (row < count - tile * 64)[:, None]
    place = x + (tile.to(gl.int64) * (128 * D) + column) + ((row * (2 * D))[:, None] + here)
    out = ()
    for n in gl.static_range(4):
        out = out + (gl.load(place + n * (D // 2), mask=known, other=0),)
    if UPDATE:
        place = y + (tile.to(gl.int64) * (32 * D) + column) + ((row * (D // 2))[:, None] + here)
        out = out + (gl.load(place, mask=known, other=0),)
    return out


@gluon.jit
def _ask_weights(pre, post, comb, tile, count, UPDATE: gl.constexpr):
    """pre, post and comb of a tile's tokens."""
    token = tile.to(gl.int64) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _GATES))
    place = (token * 4)[:, None] + gl.arange(0, 4, layout=gl.SliceLayout(0, _GATES))[None, :]
    known = (token < count)[:, None]
    out = (gl.load(pre + place, mask=known, other=0.0),)
    if UPDATE:
        out = out + (gl.load(post + place, mask=known, other=0.0),)
        token = tile.to(gl.int64) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _COMB))
        place = (token * 16)[:, None] + gl.arange(0, 16, layout=gl.SliceLayout(0, _COMB))[None, :]
        out = out + (gl.load(comb + place, mask=(token < count)[:, None], other=0.0),)
    return out


@gluon.jit
def _keep_weights(held, asked, UPDATE: gl.constexpr):
    """A weight a row, tokens beside one another: 16 of comb, 4 of pre, 4 of post."""
    held.slice(16, 4).permute((1, 0)).store(asked[0])
    if UPDATE:
        held.slice(20, 4).permute((1, 0)).store(asked[1])
        held.slice(0, 16).permute((1, 0)).store(asked[2])


@gluon.jit
def _weight(told, number: gl.constexpr, part: gl.constexpr):
    """One of the weights of a quarter of the tokens."""
    return told.index(number * 4 + part).load(_ROW)[:, None]


@gluon.jit
def _keep_fn(fn, held, first, D: gl.constexpr, CH: gl.constexpr):
    """This slice of fn to shared memory, tiles (stream, 64 channels) of 64 rows: 8 times the high
    parts of 4 coefficients x 2, then their low parts; so both land in one thread."""
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, _FN))[:, None]
    here = gl.arange(0, 64, layout=gl.SliceLayout(0, _FN))[None, :]
    values = ()
    for n in gl.static_range(4):
        for a in gl.static_range(CH // 64):
            line = fn + row * (4 * D) + (n * D + first + a * 64) + here
            values = values + (gl.load(line, mask=row < 24, other=0.0),)
    for t in gl.static_range(CH // 16):
        high = values[t].to(gl.bfloat16)
        low = (values[t] - high.to(gl.float32)).to(gl.bfloat16)
        both = gl.join(gl.reshape(high, [4, 8, 64]), gl.reshape(low, [4, 8, 64]))
        held.index(t).store(gl.reshape(gl.permute(both, (0, 3, 1, 2)), [64, 64]))


@gluon.jit
def _write_normed(
    held, weight, h, tile, slot, column, early, used, ready, count, D: gl.constexpr,
):  # fmt: skip
    """Wait for the reciprocal RMS of a tile, then write its normalised input."""
    here = gl.arange(0, 32, layout=_COL)[None, :]
    w = gl.load(weight + column + here)
    for part in gl.static_range(4):
        row = part * 16 + gl.arange(0, 16, layout=_ROW)
        rate = gl.inline_asm_elementwise(
            _WAIT,
            "=&r,r,r,r,l",
            [
                early[part].to(gl.int32),
                (early[part] >> 32).to(gl.int32),
                used + row * 0,
                (ready + row).to(gl.int64),
            ],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        rate = rate.to(gl.float32, bitcast=True)[:, None]
        raw = held[part].index(slot).load(_TILE)
        low, high = low_of(w) * (low_of(raw) * rate), high_of(w) * (high_of(raw) * rate)
        place = h + (tile.to(gl.int64) * (32 * D) + column) + ((row * (D // 2))[:, None] + here)
        gl.store(place, word_of(low, high), mask=(row < count - tile * 64)[:, None])


@gluon.jit
def _words_of(ready):
    """What is in the places of a tile's tokens, a quarter each."""
    out = ()
    for part in gl.static_range(4):
        row = part * 16 + gl.arange(0, 16, layout=_ROW)
        out = out + (gl.load(ready + row, volatile=True),)
    return out


@gluon.jit
def _mixed(words, told, i: gl.constexpr, part: gl.constexpr):
    """The words of new stream i."""
    c0, c1 = _weight(told, i, part), _weight(told, 4 + i, part)
    c2, c3 = _weight(told, 8 + i, part), _weight(told, 12 + i, part)
    new = _weight(told, 20 + i, part)
    low = c0 * low_of(words[0]) + c1 * low_of(words[1])
    low = low + c2 * low_of(words[2]) + c3 * low_of(words[3])
    high = c0 * high_of(words[0]) + c1 * high_of(words[1])
    high = high + c2 * high_of(words[2]) + c3 * high_of(words[3])
    return word_of(new * low_of(words[4]) + low, new * high_of(words[4]) + high)


@gluon.jit
def _store_sums(part, z, first: gl.constexpr, OWN: gl.constexpr):
    """z of 32 tokens, the products with both parts of fn added."""
    both = gl.reshape(gl.sum(gl.reshape(z, [4, 2, 8, 32]), 1), [32, 32])
    LAYOUT: gl.constexpr = both.type.layout
    number = gl.arange(0, 32, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    token = first + gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(part + part_place(number, token, OWN), both, mask=number < 24)


@gluon.jit
def slice_tiles(
    x, y, comb, post, pre, fn, weight, x_out, h, parts, arrivals, ready, count,
    D: gl.constexpr, CH: gl.constexpr, GROUPS: gl.constexpr, FINISH: gl.constexpr,
    UPDATE: gl.constexpr,
):  # fmt: skip
    OWN: gl.constexpr = 64 // FINISH
    SLICES: gl.constexpr = D // CH
    own = gl.program_id(0) % SLICES
    group = gl.program_id(0) // SLICES
    tiles = gl.cdiv(count, 64)
    column = own * (CH // 2)
    fns = gl.allocate_shared_memory(gl.bfloat16, [CH // 16, 64, 64], _SWIZZLED)
    weights = gl.allocate_shared_memory(gl.float32, [32, 64], PLAIN)
    told = weights._reinterpret(gl.float32, [128, 16], LIST)
    # One allocation each, so that no barrier parts writes to one from writes to another.
    even, odd, held = (), (), ()
    for _ in gl.static_range(4):
        even = even + (gl.allocate_shared_memory(gl.bfloat16, [1, 32, CH], _SWIZZLED),)
        odd = odd + (gl.allocate_shared_memory(gl.bfloat16, [1, 32, CH], _SWIZZLED),)
        held = held + (gl.allocate_shared_memory(gl.int32, [_LAG + 1, 16, CH // 2], PLAIN),)

    next_0 = _ask(x, y, group, 0, column, count, D, UPDATE)
    next_1 = _ask(x, y, group, 1, column, count, D, UPDATE)
    _keep_weights(weights, _ask_weights(pre, post, comb, group, count, UPDATE), UPDATE)
    _keep_fn(fn, fns, own * CH, D, CH)
    # How often the places of the last tiles had been used before.
    past = ()
    for _ in gl.static_range(_LAG):
        past = past + (group * 0,)
    turn = 0
    for tile in range(group, tiles, GROUPS):
        place = group * RING + turn % RING
        used = (gl.load(ready + place * 64, volatile=True) >> 32).to(gl.int32)
        late = ready + (group * RING + (turn + RING - _LAG) % RING) * 64
        part_of = parts + (place * SLICES + own) * (ROWS * 64)
        z = gl.zeros([64, 32], gl.float32, _Z)
        for part in gl.static_range(4):
            fresh = even if part < 2 else odd
            words = next_0
            next_0 = next_1
            next_1 = _ask(
                x, y, tile + ((part + 2) // 4) * GROUPS, (part + 2) % 4, column, count, D, UPDATE
            )
            barrier()  # or the compiler would ask for them as late as it can
            if part == 3:
                # What is wanted soon is asked for now.
                early = _words_of(late)
                asked = _ask_weights(pre, post, comb, tile + GROUPS, count, UPDATE)
            row = part * 16 + gl.arange(0, 16, layout=_ROW)
            here = gl.arange(0, 32, layout=_COL)[None, :]
            known = (row < count - tile * 64)[:, None]
            target = x_out + (tile.to(gl.int64) * (128 * D) + column)
            target = target + ((row * (2 * D))[:, None] + here)
            low = gl.zeros([16, 32], gl.float32, _TILE)
            high = gl.zeros([16, 32], gl.float32, _TILE)
            square = gl.zeros([16, 32], gl.float32, _TILE)
            more = gl.zeros([16, 32], gl.float32, _TILE)
            for i in gl.static_range(4):
                if UPDATE:
                    stream = _mixed(words, told, i, part)
                    gl.store(target + i * (D // 2), stream, mask=known)
                else:
                    stream = words[i]
                fresh_words = fresh[i]._reinterpret(gl.int32, [1, 32, CH // 2], _WORDS)
                fresh_words.index(0).slice((part % 2) * 16, 16).store(stream)
                a, b = low_of(stream), high_of(stream)
                square += a * a
                more += b * b
                mixed = _weight(told, 16 + i, part)
                low += mixed * a
                high += mixed * b
            collapsed = word_of(low, high)
            held[part].index(turn % (_LAG + 1)).store(collapsed)
            a, b = low_of(collapsed), high_of(collapsed)
            gl.store(part_of + part_place(24, row, OWN), gl.sum(square + more, 1))
            gl.store(part_of + part_place(25, row, OWN), gl.sum(a * a + b * b, 1))
            if part % 2 == 1:
                fence_async_shared()
                if part == 3:
                    # The product of the first half has read the other operands: they are free for
                    # all behind the next barrier.
                    first_z = warpgroup_mma_wait(0, deps=[z])
                z = gl.zeros([64, 32], gl.float32, _Z)
                for i in gl.static_range(4):
                    for a in gl.static_range(CH // 64):
                        right = fresh[i].index(0).slice(a * 64, 64, dim=1).permute((1, 0))
                        z = warpgroup_mma(fns.index(i * (CH // 64) + a), right, z, is_async=True)
        z = warpgroup_mma_wait(0, deps=[z])
        _store_sums(part_of, first_z, 0, OWN)
        _store_sums(part_of, z, 32, OWN)
        barrier()
        gl.atomic_add(arrivals + place, 1, sem="release")
        _keep_weights(weights, asked, UPDATE)
        if turn >= _LAG:
            _write_normed(
                held, weight, h, tile - _LAG * GROUPS, (turn + 1) % (_LAG + 1), column, early,
                past[0], late, count, D,
            )  # fmt: skip
        shifted = ()
        for n in gl.static_range(1, _LAG):
            shifted = shifted + (past[n],)
        past = shifted + (used,)
        turn += 1
    for n in gl.static_range(_LAG):
        if turn >= _LAG - n:
            late = ready + (group * RING + (turn + RING - _LAG + n) % RING) * 64
            _write_normed(
                held, weight, h, group + (turn - _LAG + n) * GROUPS, (turn + n + 1) % (_LAG + 1),
                column, _words_of(late), past[n], late, count, D,
            )  # fmt: skip
