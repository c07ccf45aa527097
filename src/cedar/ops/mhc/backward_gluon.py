"""The large launch of `cedar.ops.mhc.backward_triton` for Hopper, with layouts under control.

A program owns 64 channels of all streams and goes through tokens, 16 at a time; a thread has 8
channels of one token. Two programs share a multiprocessor, so that one computes while the other
waits. Copies of the next tokens run ahead, whole lines of 128 bytes. Only what
tensor cores multiply changes its layout: new streams go to shared memory for dfn, and the 24-column
product comes back once. Sums over channels meet in shared memory, 24 a token. The same bytes and
FLOP as there.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from cedar.ops.mhc.hopper_finish import barrier

__all__ = ["kernel"]

_TOKENS = gl.constexpr(16)
_CHANNELS = gl.constexpr(64)
_STAGES = gl.constexpr(3)
_TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_ROW = gl.constexpr(gl.SliceLayout(1, _TILE.value))
_COL = gl.constexpr(gl.SliceLayout(0, _TILE.value))
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))  # 64 x 16 of float32
_LEARN = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8])
)
_REACH = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8])
)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
_FLOATS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
_LIST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_REACHED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_PARTIAL = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# Sums x tokens x lanes: a thread adds up the 8 parts of one token.
_ADD = gl.constexpr(gl.BlockedLayout([1, 1, 8], [2, 16, 1], [4, 1, 1], [2, 1, 0]))
_TURNED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def _narrow(x):
    """float32 to bfloat16, two values an instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _ahead(
    raw, zeta, buf, t, stop, x, y, dx_new, dh, table, channel, D: gl.constexpr,
):  # fmt: skip
    """Begin to copy the tokens from ``t`` on into buffer ``buf``; nothing at or behind ``stop``."""
    row = gl.arange(0, _TOKENS, layout=_ROW)
    inside = (row < stop - t)[:, None]
    # Offsets within a tile have 32 bits.
    place = (row * (4 * D))[:, None] + channel[None, :]
    narrow = (row * D)[:, None] + channel[None, :]
    first = t.to(gl.int64) * D
    x, y, dx_new, dh = x + 4 * first, y + first, dx_new + 4 * first, dh + first
    for n in gl.static_range(4):
        async_copy.async_copy_global_to_shared(raw[n].index(buf), x + place + n * D, inside)
        async_copy.async_copy_global_to_shared(
            raw[4 + n].index(buf), dx_new + place + n * D, inside
        )
    async_copy.async_copy_global_to_shared(raw[8].index(buf), y + narrow, inside)
    async_copy.async_copy_global_to_shared(raw[9].index(buf), dh + narrow, inside)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS))
    lane = gl.arange(0, _TOKENS, layout=gl.SliceLayout(0, _WORDS))
    tile = t // 32
    words = table + (tile.to(gl.int64) * 2048 + (t - tile * 32))
    words = words + (row[:, None] * 32 + lane[None, :])
    # What the table says of tokens behind the last one is nothing.
    async_copy.async_copy_global_to_shared(zeta.index(buf), words, (row * 0 + t < stop)[:, None])
    async_copy.commit_group()


@gluon.jit
def _told(rows, buf, number: gl.constexpr):
    """What the table says of each of the tokens."""
    return rows.index(buf * 64 + number).load(_ROW)[:, None]


@gluon.jit
def _add_channels(values):
    """Sums over the 8 channels of a thread: ``[tokens, 8]``."""
    return gl.sum(gl.reshape(values, [_TOKENS, 8, 8]), 2)


@gluon.jit
def _pairs(values, HALF: gl.constexpr):
    """The first HALF of the tensors joined with the rest."""
    out = ()
    for n in gl.static_range(HALF):
        out = out + (gl.join(values[n], values[n + HALF]),)
    return out


@gluon.jit
def _add_lanes(held, sums, COUNT: gl.constexpr):
    """COUNT sums over the 8 parts of every token, from shared memory to their place."""
    total = gl.sum(held.load(_ADD), 2)
    which = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, _ADD)))
    lane = gl.arange(0, _TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, _ADD)))
    gl.store(sums + which[:, None] * 32 + lane[None, :], total)


@gluon.jit
def kernel(
    x, y, fn, weight, table, dx_new, dh, dx, dy, sums, fn_parts, weight_parts, count, per_program,
    D: gl.constexpr,
):  # fmt: skip
    """bfloat16 streams with an update; D a multiple of 64, ``per_program`` of 32."""
    # One allocation each, so that no barrier parts accesses that have nothing to do with another.
    raw, fresh, reached = (), (), ()
    for _ in gl.static_range(10):
        raw = raw + (gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _TOKENS, _CHANNELS], _PLAIN),)
    for _ in gl.static_range(4):
        fresh = fresh + (gl.allocate_shared_memory(gl.bfloat16, [_TOKENS, _CHANNELS], _TURNED),)
        reached = reached + (gl.allocate_shared_memory(gl.float32, [_TOKENS, _CHANNELS], _REACHED),)
    zeta = gl.allocate_shared_memory(gl.float32, [_STAGES, 64, _TOKENS], _FLOATS)
    rows = zeta._reinterpret(gl.float32, [_STAGES * 64, _TOKENS], _LIST)
    added_8 = gl.allocate_shared_memory(gl.float32, [8, _TOKENS, 8], _PARTIAL)
    added_16 = gl.allocate_shared_memory(gl.float32, [16, _TOKENS, 8], _PARTIAL)
    channel = gl.program_id(0) * _CHANNELS + gl.arange(0, _CHANNELS, layout=_COL)
    start = gl.program_id(1) * per_program
    stop = gl.minimum(start + per_program, count)
    for s in gl.static_range(_STAGES - 1):
        _ahead(raw, zeta, s, start + s * _TOKENS, stop, x, y, dx_new, dh, table, channel, D)

    column = gl.arange(0, 32, layout=gl.SliceLayout(1, _TILE))
    line = fn + column[:, None] * (4 * D) + channel[None, :]
    fns = ()
    acc = ()
    for n in gl.static_range(4):
        f = gl.load(line + n * D, mask=(column < 24)[:, None], other=0.0).to(gl.bfloat16)
        fns = fns + (gl.convert_layout(f, gl.DotOperandLayout(1, _REACH, 2)),)
        acc = acc + (gl.zeros((32, _CHANNELS), gl.float32, layout=_LEARN),)
    d_weight = gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_TILE)

    buf = 0
    for t in range(start, stop, _TOKENS):
        narrow_w = gl.load(weight + channel)  # again, or it would need registers
        async_copy.wait_group(_STAGES - 2)
        barrier()
        # The buffer that the step before this one has read.
        free = (buf + _STAGES - 1) % _STAGES
        then = t + _TOKENS * (_STAGES - 1)
        _ahead(raw, zeta, free, then, stop, x, y, dx_new, dh, table, channel, D)
        xs = ()
        for n in gl.static_range(4):
            xs = xs + (raw[n].index(buf).load(_TILE).to(gl.float32),)
        new = raw[8].index(buf).load(_TILE).to(gl.float32)
        slope = raw[9].index(buf).load(_TILE).to(gl.float32)
        rate, share = _told(rows, buf, 24), _told(rows, buf, 25)
        kappa = _told(rows, buf, 26)
        ns = ()
        collapsed = gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_TILE)
        for i in gl.static_range(4):
            mixed = _told(rows, buf, 40 + i) * xs[0] + _told(rows, buf, 44 + i) * xs[1]
            mixed += _told(rows, buf, 48 + i) * xs[2] + _told(rows, buf, 52 + i) * xs[3]
            n = _told(rows, buf, 32 + i) * new + mixed
            # Tensor cores see the stored, rounded stream; what stays here need not be rounded.
            fresh[i].store(_narrow(n))
            ns = ns + (n,)
            collapsed += _told(rows, buf, 36 + i) * n
        d_weight += slope * collapsed * rate
        dc = rate * narrow_w.to(gl.float32)[None, :] * slope - share * collapsed
        turned = zeta.index(buf).slice(0, 32).permute((1, 0))
        high = _narrow(turned.load(gl.DotOperandLayout(0, _REACH, 2)))
        for i in gl.static_range(4):
            none = gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_REACH)
            reached[i].store(mma_v2(high, fns[i], none))
        partial = ()
        bases = ()
        for i in gl.static_range(4):
            partial = partial + (_add_channels(dc * ns[i]),)
            bases = bases + (_told(rows, buf, 36 + i) * dc - kappa * ns[i],)
        outs = ()
        for _ in gl.static_range(4):
            outs = outs + (gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_TILE),)
        d_new = gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_TILE)
        d_post = ()
        d_comb = ()
        for i in gl.static_range(4):
            g = bases[i] + raw[4 + i].index(buf).load(_TILE).to(gl.float32)
            g += reached[i].load(_TILE)
            d_post = d_post + (_add_channels(new * g),)
            d_new += _told(rows, buf, 32 + i) * g
            more = ()
            for j in gl.static_range(4):
                d_comb = d_comb + (_add_channels(xs[j] * g),)
                more = more + (outs[j] + _told(rows, buf, 40 + 4 * j + i) * g,)
            outs = more
        eight = _pairs(_pairs(_pairs(partial + d_post, 4), 2), 1)[0]
        sixteen = ()
        for j in gl.static_range(4):
            for i in gl.static_range(4):
                sixteen = sixteen + (d_comb[4 * i + j],)
        sixteen = _pairs(_pairs(_pairs(_pairs(sixteen, 8), 4), 2), 1)[0]
        added_8.store(gl.permute(gl.reshape(eight, [_TOKENS, 8, 8]), (2, 0, 1)))
        added_16.store(gl.permute(gl.reshape(sixteen, [_TOKENS, 8, 16]), (2, 0, 1)))
        learn = zeta.index(buf).slice(0, 32).load(gl.DotOperandLayout(0, _LEARN, 2))
        high = _narrow(learn)
        low = _narrow(learn - high.to(gl.float32))
        grown = ()
        for n in gl.static_range(4):
            operand = fresh[n].load(gl.DotOperandLayout(1, _LEARN, 2))
            grown = grown + (mma_v2(low, operand, mma_v2(high, operand, acc[n])),)
        acc = grown

        tile = gl.program_id(0).to(gl.int64) * ((count + 31) // 32) + t // 32
        _add_lanes(added_8, sums + (tile * 768 + t % 32), 8)
        _add_lanes(added_16, sums + (tile * 768 + t % 32 + 256), 16)
        row = gl.arange(0, _TOKENS, layout=_ROW)
        known = (row < stop - t)[:, None]
        first = t.to(gl.int64) * D
        place = (row * (4 * D))[:, None] + channel[None, :]
        for j in gl.static_range(4):
            gl.store(dx + (4 * first + j * D) + place, _narrow(outs[j]), mask=known)
        gl.store(dy + first + ((row * D)[:, None] + channel[None, :]), _narrow(d_new), mask=known)
        buf = (buf + 1) % _STAGES
    async_copy.wait_group(0)

    part = gl.program_id(1).to(gl.int64)
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, _LEARN))
    here = gl.program_id(0) * _CHANNELS + gl.arange(0, _CHANNELS, layout=gl.SliceLayout(0, _LEARN))
    line = fn_parts + part * (24 * 4 * D) + row[:, None] * (4 * D) + here[None, :]
    for n in gl.static_range(4):
        gl.store(line + n * D, acc[n], mask=(row < 24)[:, None])
    gl.store(weight_parts + part * D + channel, gl.sum(d_weight, 0))
