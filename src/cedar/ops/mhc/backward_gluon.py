"""The large launch of `cedar.ops.mhc.backward_triton` for Hopper, with layouts under control.

A program owns 64 channels of all streams and goes through tokens, 32 at a time; a thread has 8
channels of one token, so that sums over channels stay within 8 lanes. Copies of the next tokens
run ahead. Only what tensor cores multiply changes its layout: new streams go to shared memory for
dfn, and the 24-column product comes back once. The same bytes and FLOP as there.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

__all__ = ["kernel"]

_TOKENS = gl.constexpr(32)
_CHANNELS = gl.constexpr(64)
_STAGES = gl.constexpr(3)
_TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_ROW = gl.constexpr(gl.SliceLayout(1, _TILE.value))
_COL = gl.constexpr(gl.SliceLayout(0, _TILE.value))
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0]))  # 32 x 32 of float32
_LEARN = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 8], instr_shape=[16, 8])
)
_REACH = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 4], instr_shape=[16, 8])
)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
_FLOATS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
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
    token = t + gl.arange(0, _TOKENS, layout=_ROW).to(gl.int64)
    inside = (token < stop)[:, None]
    place = token[:, None] * (4 * D) + channel[None, :]
    narrow = token[:, None] * D + channel[None, :]
    for n in gl.static_range(4):
        async_copy.async_copy_global_to_shared(raw.index(buf * 10 + n), x + place + n * D, inside)
        async_copy.async_copy_global_to_shared(
            raw.index(buf * 10 + 4 + n), dx_new + place + n * D, inside
        )
    async_copy.async_copy_global_to_shared(raw.index(buf * 10 + 8), y + narrow, inside)
    async_copy.async_copy_global_to_shared(raw.index(buf * 10 + 9), dh + narrow, inside)
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, _WORDS))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, _WORDS))
    words = table + (t // 32).to(gl.int64) * 2048 + row[:, None] * 32 + lane[None, :]
    async_copy.async_copy_global_to_shared(zeta.index(buf), words, (t + lane < stop)[None, :])
    async_copy.commit_group()


@gluon.jit
def _told(table, t, stop):
    """What the table says of each of 32 tokens from number 24 on, without the gap."""
    lane = gl.arange(0, _TOKENS, layout=_ROW)
    line = table + (t // 32).to(gl.int64) * 2048 + lane
    out = ()
    for k in gl.static_range(27):
        place = line + (24 + k if k < 3 else 29 + k) * 32
        out = out + (gl.load(place, mask=t + lane < stop, other=0.0),)
    return out


@gluon.jit
def kernel(
    x, y, fn, weight, table, dx_new, dh, dx, dy, sums, fn_parts, weight_parts, count, per_program,
    D: gl.constexpr,
):  # fmt: skip
    """bfloat16 streams with an update; D a multiple of 64, ``per_program`` of 32."""
    raw = gl.allocate_shared_memory(gl.bfloat16, [_STAGES * 10, _TOKENS, _CHANNELS], _PLAIN)
    zeta = gl.allocate_shared_memory(gl.float32, [_STAGES, 32, _TOKENS], _FLOATS)
    fresh = gl.allocate_shared_memory(gl.bfloat16, [4, _TOKENS, _CHANNELS], _TURNED)
    channel = gl.program_id(0) * _CHANNELS + gl.arange(0, _CHANNELS, layout=_COL)
    start = gl.program_id(1) * per_program
    stop = gl.minimum(start + per_program, count)
    for s in gl.static_range(_STAGES - 1):
        _ahead(raw, zeta, s, start + s * 32, stop, x, y, dx_new, dh, table, channel, D)
    told = _told(table, start, stop)
    w = gl.load(weight + channel).to(gl.float32)[None, :]

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
    for t in range(start, stop, 32):
        async_copy.wait_group(_STAGES - 2)
        token = t + gl.arange(0, _TOKENS, layout=_ROW).to(gl.int64)
        known = token < stop
        xs = ()
        for n in gl.static_range(4):
            xs = xs + (raw.index(buf * 10 + n).load(_TILE).to(gl.float32),)
        new = raw.index(buf * 10 + 8).load(_TILE).to(gl.float32)
        slope = raw.index(buf * 10 + 9).load(_TILE).to(gl.float32)
        rate, share, kappa = told[0][:, None], told[1][:, None], told[2][:, None]
        ns = ()
        collapsed = gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_TILE)
        for i in gl.static_range(4):
            mixed = told[11 + i][:, None] * xs[0] + told[15 + i][:, None] * xs[1]
            mixed += told[19 + i][:, None] * xs[2] + told[23 + i][:, None] * xs[3]
            n = told[3 + i][:, None] * new + mixed
            # Tensor cores see the stored, rounded stream; what stays here need not be rounded.
            fresh.index(i).store(_narrow(n))
            ns = ns + (n,)
            collapsed += told[7 + i][:, None] * n
        d_weight += slope * collapsed * rate
        dc = rate * w * slope - share * collapsed
        tile = gl.program_id(0).to(gl.int64) * ((count + 31) // 32) + t // 32
        into = sums + tile * 768 + gl.arange(0, _TOKENS, layout=_ROW)
        bases = ()
        for i in gl.static_range(4):
            gl.store(into + i * 32, gl.sum(dc * ns[i], 1), mask=known)
            bases = bases + (told[7 + i][:, None] * dc - kappa * ns[i],)

        turned = zeta.index(buf).permute((1, 0)).load(gl.DotOperandLayout(0, _REACH, 2))
        high = _narrow(turned)
        outs = ()
        for _ in gl.static_range(4):
            outs = outs + (gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_TILE),)
        d_new = gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_TILE)
        for i in gl.static_range(4):
            reach = mma_v2(high, fns[i], gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_REACH))
            g = bases[i] + raw.index(buf * 10 + 4 + i).load(_TILE).to(gl.float32)
            g += gl.convert_layout(reach, _TILE)
            gl.store(into + (4 + i) * 32, gl.sum(new * g, 1), mask=known)
            d_new += told[3 + i][:, None] * g
            more = ()
            for j in gl.static_range(4):
                gl.store(into + (8 + 4 * j + i) * 32, gl.sum(xs[j] * g, 1), mask=known)
                more = more + (outs[j] + told[11 + 4 * j + i][:, None] * g,)
            outs = more
        learn = zeta.index(buf).load(gl.DotOperandLayout(0, _LEARN, 2))
        high = _narrow(learn)
        low = _narrow(learn - high.to(gl.float32))
        grown = ()
        for n in gl.static_range(4):
            operand = fresh.index(n).load(gl.DotOperandLayout(1, _LEARN, 2))
            grown = grown + (mma_v2(low, operand, mma_v2(high, operand, acc[n])),)
        acc = grown

        told = _told(table, t + 32, stop)
        place = token[:, None] * (4 * D) + channel[None, :]
        for j in gl.static_range(4):
            gl.store(dx + place + j * D, _narrow(outs[j]), mask=known[:, None])
        gl.store(dy + token[:, None] * D + channel[None, :], _narrow(d_new), mask=known[:, None])
        # The buffer that the step before this one has read.
        free = (buf + _STAGES - 1) % _STAGES
        _ahead(raw, zeta, free, t + 32 * (_STAGES - 1), stop, x, y, dx_new, dh, table, channel, D)
        buf = (buf + 1) % _STAGES
    async_copy.wait_group(0)

    part = gl.program_id(1).to(gl.int64)
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, _LEARN))
    here = gl.program_id(0) * _CHANNELS + gl.arange(0, _CHANNELS, layout=gl.SliceLayout(0, _LEARN))
    line = fn_parts + part * (24 * 4 * D) + row[:, None] * (4 * D) + here[None, :]
    for n in gl.static_range(4):
        gl.store(line + n * D, acc[n], mask=(row < 24)[:, None])
    gl.store(weight_parts + part * D + channel, gl.sum(d_weight, 0))
