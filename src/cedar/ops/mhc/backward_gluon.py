"""The large launch of `cedar.ops.mhc.backward_triton` for Hopper, with layouts under control.

A program owns 64 channels of all streams and goes through tokens, 16 at a time; a thread has 8
channels of one token. Two programs share a multiprocessor, so that one computes while the other
waits. Copies of the next tokens run ahead, whole lines of 128 bytes. Only what
tensor cores multiply changes its layout: new streams go to shared memory for dfn, and the 24-column
product comes back once. Sums over channels meet in shared memory, 24 a token, and are added up
while the next tokens are under way. The same bytes and FLOP as there.

Whole slices of the channels do not fill the device: ``TIMES`` programs share the tokens up to
``tail`` of every slice, further programs take the rest of ``EACH`` slices, one after another.
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
_TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_ROW = gl.constexpr(gl.SliceLayout(1, _TILE.value))
_COL = gl.constexpr(gl.SliceLayout(0, _TILE.value))
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))  # two channels each
_ZETA = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # 2 x 16 tokens x 32
_LIST = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
# Four numbers of a token, in the threads that have its channels.
_FOUR = gl.constexpr(
    gl.SliceLayout(1, gl.BlockedLayout([1, 1, 4], [4, 8, 1], [4, 1, 1], [2, 1, 0]))
)
_LEARN = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
)
_REACH = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8])
)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
_PAIRS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Rows of 32 words, a tile's rows in halves: then no two threads want the same banks.
_BANKS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_HALVES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_TURNED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_CUT = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))


@gluon.jit
def _narrow(x):
    """float32 to bfloat16, two values an instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _said(instruction: gl.constexpr):
    """An instruction that has no result."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        instruction + " mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _hand_over():
    """As `cedar.ops.dependent_launch.hand_over`."""
    _said("griddepcontrol.wait;")
    _said("griddepcontrol.launch_dependents;")


@gluon.jit
def _wide(word):
    """Words of two channels as float32."""
    low = (word << 16).to(gl.float32, bitcast=True)
    high = (word & -65536).to(gl.float32, bitcast=True)
    both = gl.reshape(gl.join(low, high), [word.shape[0], _CHANNELS])
    return gl.convert_layout(both, _TILE, assert_trivial=True)


@gluon.jit
def _ahead(
    raw, told, zeta, buf, turn, t, stop, x, y, dx_new, dh, table, cut, channel, D: gl.constexpr,
):  # fmt: skip
    """Begin to copy the tokens from ``t`` on into buffer ``buf``, their ζ into ``turn``; nothing
    at or behind ``stop``."""
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
    at = gl.arange(0, 512, layout=_LIST)
    tile = table + t.to(gl.int64) * 32
    async_copy.async_copy_global_to_shared(told.index(buf), tile + at, at < (stop - t) * 512)
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, _ZETA))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, _ZETA))
    words = cut + t.to(gl.int64) * 64 + ((row * 32)[:, None] + lane[None, :])
    async_copy.async_copy_global_to_shared(
        zeta.index(turn), words, (row < (stop - t) * 32)[:, None]
    )
    async_copy.commit_group()


@gluon.jit
def _column(values):
    return gl.convert_layout(values, _ROW, assert_trivial=True)[:, None]


@gluon.jit
def _four(values):
    """Four numbers of each token, one after another."""
    even, odd = gl.split(gl.reshape(values, [_TOKENS, 2, 2]))
    n0, n2 = gl.split(even)
    n1, n3 = gl.split(odd)
    return _column(n0), _column(n1), _column(n2), _column(n3)


@gluon.jit
def _learnt(zeta, part: gl.constexpr, some: gl.constexpr):
    """A part of ζ of the tokens, the first 16 columns or the last 8."""
    held = zeta.slice(part, _TOKENS).slice(16 * some, 16 // (some + 1), dim=1)
    return held.load(gl.DotOperandLayout(1, _LEARN, 2))


@gluon.jit
def _lesson(fresh, zeta):
    """New streams, then ζ as `_learn` wants them."""
    out = ()
    for n in gl.static_range(4):
        out = out + (fresh[n].permute((1, 0)).load(gl.DotOperandLayout(0, _LEARN, 2)),)
    for part in gl.static_range(2):
        for some in gl.static_range(2):
            out = out + (_learnt(zeta, part * _TOKENS, some),)
    return out


@gluon.jit
def _learn(acc, lesson):
    """``acc + X'ᵀ ζ`` of 16 tokens."""
    grown = ()
    for n in gl.static_range(4):
        for some in gl.static_range(2):
            grew = mma_v2(lesson[n], lesson[4 + some], acc[2 * n + some])
            grown = grown + (mma_v2(lesson[n], lesson[6 + some], grew),)
    return grown


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
def _add_lanes(parts, sums, wanted, COUNT: gl.constexpr):
    """COUNT sums over the 8 parts of every token to their place."""
    total = gl.sum(gl.reshape(parts, [COUNT, _TOKENS, 8]), 2)
    LAYOUT: gl.constexpr = total.type.layout
    which = gl.arange(0, COUNT, layout=gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, _TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    known = (which * 0 + wanted > 0)[:, None]
    gl.store(sums + which[:, None] * 32 + lane[None, :], total, mask=known)


@gluon.jit
def kernel(
    x, y, fn, weight, table, cut, dx_new, dh, dx, dy, sums, fn_parts, weight_parts, count, tail,
    per_program,
    D: gl.constexpr, TIMES: gl.constexpr, EACH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """bfloat16 streams with an update; D a multiple of 64, ``tail`` and ``per_program`` of 16."""
    SLICES: gl.constexpr = D // _CHANNELS
    # One allocation each, so that no barrier parts accesses that have nothing to do with another.
    raw, words, fresh, reached = (), (), (), ()
    for _ in gl.static_range(10):
        ring = gl.allocate_shared_memory(gl.bfloat16, [2, _TOKENS, _CHANNELS], _PLAIN)
        raw = raw + (ring,)
        words = words + (ring._reinterpret(gl.int32, [2, _TOKENS, _CHANNELS // 2], _PAIRS),)
    for _ in gl.static_range(4):
        fresh = fresh + (gl.allocate_shared_memory(gl.bfloat16, [_TOKENS, _CHANNELS], _TURNED),)
        reached = reached + (gl.allocate_shared_memory(gl.float32, [2 * _TOKENS, 32], _BANKS),)
    told = gl.allocate_shared_memory(gl.float32, [2, 512], _FLAT)
    fours = told._reinterpret(gl.float32, [2 * 8, _TOKENS, 4], _PAIRS)
    said = ()
    for _ in gl.static_range(5):
        said = said + (gl.allocate_shared_memory(gl.float32, [_TOKENS, 4], _PAIRS),)
    zeta = gl.allocate_shared_memory(gl.bfloat16, [4, 32, 32], _CUT)
    weights = gl.allocate_shared_memory(gl.bfloat16, [1, _CHANNELS], _PLAIN)
    weight_words = weights._reinterpret(gl.int32, [1, _CHANNELS // 2], _PAIRS)
    added_8 = gl.allocate_shared_memory(gl.float32, [8 * _TOKENS // 4, 32], _BANKS)
    added_16 = gl.allocate_shared_memory(gl.float32, [16 * _TOKENS // 4, 32], _BANKS)
    fns = gl.allocate_shared_memory(gl.bfloat16, [4, 32, _CHANNELS], _TURNED)

    part = gl.minimum(gl.program_id(0) // SLICES, TIMES)
    first = gl.program_id(0) - part * SLICES
    last = first + 1
    start = part * per_program
    stop = gl.minimum(start + per_program, tail)
    if part == TIMES:
        first = first * EACH
        last = gl.minimum(first + EACH, SLICES)
        start = tail
        stop = count
    for own in range(first, last):
        channel = own * _CHANNELS + gl.arange(0, _CHANNELS, layout=_COL)
        barrier()  # the buffers of the slice before are read
        column = gl.arange(0, 32, layout=gl.SliceLayout(1, _TILE))
        line = fn + column[:, None] * (4 * D) + channel[None, :]
        acc = ()
        for n in gl.static_range(4):
            f = gl.load(line + n * D, mask=(column < 24)[:, None], other=0.0).to(gl.bfloat16)
            fns.index(n).store(f)
            for some in gl.static_range(2):
                acc = acc + (gl.zeros((_CHANNELS, 16 // (some + 1)), gl.float32, layout=_LEARN),)
        weights.store(gl.load(weight + channel)[None, :])
        d_weight = gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_TILE)
        if PDL:
            _hand_over()
        for n in gl.static_range(2):
            _ahead(
                raw, told, zeta, n, n, start + n * _TOKENS, stop, x, y, dx_new, dh, table, cut,
                channel, D,
            )  # fmt: skip
        sums_of = sums + own.to(gl.int64) * ((count + 31) // 32 * 768)

        for n in gl.static_range(4):
            # Before the first tokens there are none to learn from.
            fresh[n].store(gl.zeros((_TOKENS, _CHANNELS), gl.bfloat16, layout=_TILE))
        for t in range(start, stop, _TOKENS):
            turn = (t - start) // _TOKENS
            buf = turn & 1
            async_copy.wait_group(1)
            barrier()
            # What others have left in shared memory: of the tokens before these, ...
            past = gl.maximum(turn - 1, 0) & 3
            acc = _learn(acc, _lesson(fresh, zeta.index(past)))
            parts_8, parts_16 = added_8.load(_HALVES), added_16.load(_HALVES)
            # ... and of these.
            high = zeta.index(turn & 3).slice(0, _TOKENS).load(gl.DotOperandLayout(0, _REACH, 2))
            reaching = ()
            for i in gl.static_range(4):
                reaching = reaching + (fns.index(i).load(gl.DotOperandLayout(1, _REACH, 2)),)
            for i in gl.static_range(4):
                none = gl.zeros((_TOKENS, _CHANNELS), gl.float32, layout=_REACH)
                product = mma_v2(high, reaching[i], none)
                reached[i].store(gl.reshape(product, [2 * _TOKENS, 32]))
            held = ()
            for n in gl.static_range(10):
                held = held + (words[n].index(buf).load(_WORDS),)
            w = weight_words.load(_WORDS)
            rate, share, kappa, _gap = _four(fours.index(buf * 8).load(_FOUR))
            pre = _four(fours.index(buf * 8 + 1).load(_FOUR))
            into = ()
            for n in gl.static_range(5):
                values = fours.index(buf * 8 + 2 + n).load(_FOUR)
                said[n].store(values)  # for the way back, or it would need registers
                into = into + (_four(values),)
            # A barrier: everything above has been read, its place is free.
            _ahead(
                raw, told, zeta, buf, (turn + 2) & 3, t + 2 * _TOKENS, stop, x, y, dx_new, dh,
                table, cut, channel, D,
            )  # fmt: skip
            before = t - _TOKENS
            target = sums_of + (before // 32 * 768 + before % 32)
            _add_lanes(parts_8, target, t - start, 8)
            _add_lanes(parts_16, target + 256, t - start, 16)

            new = _wide(held[8])
            xs = ()
            mixed = ()
            for i in gl.static_range(4):
                mixed = mixed + (into[0][i] * new,)
            for j in gl.static_range(4):
                stream = _wide(held[j])
                xs = xs + (stream,)
                more = ()
                for i in gl.static_range(4):
                    more = more + (mixed[i] + into[1 + j][i] * stream,)
                mixed = more
            collapsed = pre[0] * mixed[0]
            for i in gl.static_range(4):
                # Tensor cores see the stored, rounded stream; what stays here need not be rounded.
                fresh[i].store(_narrow(mixed[i]))
                if i > 0:
                    collapsed += pre[i] * mixed[i]
            slope = rate * _wide(held[9])
            d_weight += slope * collapsed
            dc = _wide(w) * slope - share * collapsed

            partial = ()
            outs = ()
            d_post = ()
            d_comb = ()
            for i in gl.static_range(4):
                partial = partial + (_add_channels(dc * mixed[i]),)
            for i in gl.static_range(4):
                g = gl.reshape(reached[i].load(_HALVES), [_TOKENS, _CHANNELS])
                g = _wide(held[4 + i]) + gl.convert_layout(g, _TILE, assert_trivial=True)
                g = g + pre[i] * dc - kappa * mixed[i]
                d_post = d_post + (_add_channels(new * g),)
                for j in gl.static_range(4):
                    d_comb = d_comb + (_add_channels(xs[j] * g),)
                outs = outs + (g,)
            eight = _pairs(_pairs(_pairs(partial + d_post, 4), 2), 1)[0]
            sixteen = ()
            for j in gl.static_range(4):
                for i in gl.static_range(4):
                    sixteen = sixteen + (d_comb[4 * i + j],)
            sixteen = _pairs(_pairs(_pairs(_pairs(sixteen, 8), 4), 2), 1)[0]
            eight = gl.permute(gl.reshape(eight, [_TOKENS, 8, 8]), (2, 0, 1))
            sixteen = gl.permute(gl.reshape(sixteen, [_TOKENS, 8, 16]), (2, 0, 1))
            added_8.store(gl.reshape(eight, [8 * _TOKENS // 4, 32]))
            added_16.store(gl.reshape(sixteen, [16 * _TOKENS // 4, 32]))

            row = gl.arange(0, _TOKENS, layout=_ROW)
            known = (row < stop - t)[:, None]
            place = (row * (4 * D))[:, None] + channel[None, :]
            at = t.to(gl.int64) * D
            post = _four(said[0].load(_FOUR))
            d_new = post[0] * outs[0] + post[1] * outs[1] + post[2] * outs[2] + post[3] * outs[3]
            narrow = (row * D)[:, None] + channel[None, :]
            gl.store(dy + at + narrow, _narrow(d_new), mask=known)
            for j in gl.static_range(4):
                comb = _four(said[1 + j].load(_FOUR))
                out = comb[0] * outs[0]
                for i in gl.static_range(1, 4):
                    out += comb[i] * outs[i]
                gl.store(dx + (4 * at + j * D) + place, _narrow(out), mask=known)
        async_copy.wait_group(0)
        barrier()
        acc = _learn(acc, _lesson(fresh, zeta.index((stop - start - 1) // _TOKENS & 3)))
        before = (stop + _TOKENS - 1) // _TOKENS * _TOKENS - _TOKENS
        into = sums_of + (before // 32 * 768 + before % 32)
        _add_lanes(added_8.load(_HALVES), into, stop - start, 8)
        _add_lanes(added_16.load(_HALVES), into + 256, stop - start, 16)

        here = own * _CHANNELS + gl.arange(0, _CHANNELS, layout=gl.SliceLayout(1, _LEARN))
        line = fn_parts + part.to(gl.int64) * (24 * 4 * D) + here[:, None]
        for some in gl.static_range(2):
            row = 16 * some + gl.arange(0, 16 // (some + 1), layout=gl.SliceLayout(0, _LEARN))
            for n in gl.static_range(4):
                gl.store(line + (row * (4 * D) + n * D)[None, :], acc[2 * n + some])
        gl.store(weight_parts + part * D + channel, gl.sum(d_weight, 0))
