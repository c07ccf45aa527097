"""One launch from a sublayer's output to the next one's input, for a few tokens on Hopper (Gluon).

Same mathematics as `cedar.ops.mhc.triton`, for 4 bfloat16 streams. A tile is 8 tokens. Of its
programs most own a *slice* of 128 channels of all streams:

* X and y are read and X' is written; the slice's part of z and both sums of squares go to the
  other programs, through L2;
* with the squares of all slices, the collapsed input, which waited in registers, is normalised and
  written.

The others, one a token, add up z over the slices and turn it into the next coefficients.

A sum and the number of launches so far are one word of 64 bits. So a sum is seen with its number or
not at all, and neither fences nor counters stand between the streams and the coefficients. Whoever
wants a sum asks for it until it has the number that is due. Sums over slices are added up in a
fixed order.

A warp has 32 channels, a thread 8 channels of one token. That is how ``mma.m16n8k16`` wants its
right operand (channels may come in any order, if those of fn come in the same), so new streams go
from the registers that wrote them into the product with fn, which is cut into two bfloat16 parts.

Bytes: ``T x 10 D x 2``, and fn once a tile; a token has 200 bytes a slice for z, written and read
once, and 8 for the collapsed input, read by every slice; they stay in L2. FLOP: ``T x 4 D x 24 x 2
x 2``. Bound by latency. Programs wait for one another, so all of them have to run at the same time:
two fit on a multiprocessor, and one launch at a time.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cedar.ops.devices import is_hopper
from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc.hopper_words import high_of, low_of, tensors, word_of
from cedar.ops.mhc.sinkhorn_triton import sinkhorn

__all__ = ["Few", "few"]

_MOST = 16  # tokens up to which it is faster than programs that come and go
_WIDEST = 8192  # channels: 144 programs, which all run at once
_CHANNELS = 128  # of a slice
_COLUMNS = gl.constexpr(32)  # of a token's sums: z, the squares of X', nothing
# [warp, token, word of two channels]; of a token: [token]; of a slice's words: [warp, word].
_TILE = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
_ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(0, _TILE.value)))
_HERE = gl.constexpr(gl.SliceLayout(1, _TILE.value))
_FN = gl.constexpr(gl.BlockedLayout([1, 1, 1, 8], [1, 1, 8, 4], [1, 4, 1, 1], [3, 2, 1, 0]))
_SUMS = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0]))  # slices x columns
_TOKEN = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
_LIST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_sinkhorn = gluon.jit(sinkhorn.fn)

# 4 accumulators of a thread, its 4 words of a token, and 4 words of fn for each 16 channels.
_MMA = gl.constexpr(
    """
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
      {$0, $1, $2, $3}, {$12, $13, $14, $15}, {$8, $9}, {$4, $5, $6, $7};
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
      {$0, $1, $2, $3}, {$16, $17, $18, $19}, {$10, $11}, {$0, $1, $2, $3};
    """
)
# The two halves of a word; asks again until its number is the one that is due.
_WAIT = gl.constexpr(
    """
    {
    .reg .pred p;
    .reg .b32 number;
    mov.b32 $0, $1;
    mov.b32 number, $2;
    again:
    setp.eq.u32 p, number, $3;
    @p bra done;
    ld.volatile.global.v2.b32 {$0, number}, [$4];
    bra again;
    done:
    }
    """
)


@gluon.constexpr_function
def _slots(slices):
    """The power of two that holds them."""
    return 1 << max(slices - 1, 1).bit_length()


@gluon.constexpr_function
def _near(slices):
    """Sums of slices that a warp adds up."""
    return max(_slots(slices) // 4, 1)


@gluon.constexpr_function
def _rates_layout(near):
    return gl.BlockedLayout([1, 1, max(near // 4, 1)], [1, 8, 4], [4, 1, 1], [2, 1, 0])


@gluon.jit
def _product(z, stream, near, far):
    """``z`` plus 16 rows of fn times 32 channels x 8 tokens, in every warp."""
    return gl.inline_asm_elementwise(
        _MMA, "=&f,=&f,=&f,=&f,f,f,f,f,r,r,r,r,r,r,r,r,r,r,r,r", [z, stream, near, far],
        gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _tagged(value, tag):
    """A float32 with the number of its launch."""
    low = value.to(gl.uint32, bitcast=True).to(gl.int64)
    return (tag.to(gl.int64) << 32) | low


@gluon.jit
def _awaited(line, known, tag):
    """The values at ``line`` of this launch, 0 where nothing is ``known``."""
    due = tag.to(gl.int64) << 32
    early = gl.load(line, mask=known, other=due, volatile=True)
    value = gl.inline_asm_elementwise(
        _WAIT,
        "=&r,r,r,r,l",
        [early.to(gl.int32), (early >> 32).to(gl.int32), tag, line.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return value.to(gl.float32, bitcast=True)


@gluon.jit
def _place(base, pitch):
    """Pointers to a slice's words of a tile."""
    row = gl.arange(0, 8, layout=_ROWS)
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, _HERE))[:, None]
    here = warp * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, _HERE))[None, :]
    return base + ((row * pitch)[:, None][None, :, :] + here[:, None, :])


@gluon.jit
def _ask(x, y, tile, column, known, D: gl.constexpr, UPDATE: gl.constexpr):
    """A slice's words of the streams, and of y."""
    first = tile.to(gl.int64) * 8
    place = _place(x + (first * (2 * D) + column), 2 * D)
    out = ()
    for n in gl.static_range(4):
        out = out + (gl.load(place + n * (D // 2), mask=known),)
    if UPDATE:
        place = _place(y + (first * (D // 2) + column), D // 2)
        out = out + (gl.load(place, mask=known),)
    return out


@gluon.jit
def _ask_weights(pre, post, comb, tile, known, UPDATE: gl.constexpr):
    """Of a tile's tokens: pre, and post and comb."""
    row = gl.arange(0, 8, layout=_ROWS)
    first = tile.to(gl.int64) * 8
    out = ()
    for n in gl.static_range(4):
        out = out + (gl.load(pre + first * 4 + (row * 4 + n), mask=known),)
    if UPDATE:
        for n in gl.static_range(4):
            out = out + (gl.load(post + first * 4 + (row * 4 + n), mask=known),)
        for n in gl.static_range(16):
            out = out + (gl.load(comb + first * 16 + (row * 16 + n), mask=known),)
    return out


@gluon.jit
def _lines(fn, first, ROWS: gl.constexpr, D: gl.constexpr):
    """Pointers to a slice's part of rows of fn: [stream, warp of 32 channels, row, channel]."""
    front: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, _FN))
    back: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, _FN))
    stream = gl.arange(0, 4, layout=gl.SliceLayout(1, front))[:, None]
    warp = gl.arange(0, 4, layout=gl.SliceLayout(0, front))[None, :]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, back))[:, None]
    near = gl.arange(0, 32, layout=gl.SliceLayout(0, back))[None, :]
    place = (stream * D + warp * 32)[:, :, None][:, :, :, None]
    return fn + first + (place + (row * (4 * D) + near)[None, :, :][None, :, :, :])


@gluon.jit
def _parts(values, ROWS: gl.constexpr):
    """The words of both bfloat16 parts."""
    even, odd = gl.split(gl.reshape(values, [4, 4, ROWS, 16, 2]))
    high = word_of(even, odd)
    return high, word_of(even - low_of(high), odd - high_of(high))


@gluon.jit
def _keep(held, at: gl.constexpr, words):
    """16 rows of fn as a thread wants them: first the words of a product of 16 channels."""
    words = gl.permute(gl.reshape(words, [4, 4, 2, 8, 4, 2, 2]), (0, 1, 3, 4, 6, 2, 5))
    near, far = gl.split(gl.reshape(words, [16, 8, 16, 2]))
    held.index(at).store(near)
    held.index(at + 1).store(far)


@gluon.jit
def _keep_fn(fn, held, first, D: gl.constexpr):
    """A slice of fn to shared memory: the high parts of 16 rows, their low parts, both of the last
    8 rows; 4 times 4 warps of every stream."""
    most = gl.load(_lines(fn, first, 16, D))
    last = gl.load(_lines(fn + 64 * D, first, 8, D))
    high, low = _parts(most, 16)
    _keep(held, 0, high)
    _keep(held, 2, low)
    high, low = _parts(last, 8)
    both = gl.permute(gl.join(high, low), (0, 1, 4, 2, 3))
    _keep(held, 4, gl.reshape(both, [4, 4, 16, 16]))


@gluon.jit
def _mixed(words, w, i: gl.constexpr):
    """The words of new stream i."""
    c0, c1 = w[8 + i][:, None][None, :, :], w[12 + i][:, None][None, :, :]
    c2, c3 = w[16 + i][:, None][None, :, :], w[20 + i][:, None][None, :, :]
    new = w[4 + i][:, None][None, :, :]
    low = c0 * low_of(words[0]) + c1 * low_of(words[1])
    low = low + c2 * low_of(words[2]) + c3 * low_of(words[3])
    high = c0 * high_of(words[0]) + c1 * high_of(words[1])
    high = high + c2 * high_of(words[2]) + c3 * high_of(words[3])
    return word_of(new * low_of(words[4]) + low, new * high_of(words[4]) + high)


@gluon.jit
def _store_sums(parts, squares, square, inner, most, last, tag, left, SLICES: gl.constexpr):
    """A tile's sums over the slice, where the others look for them."""
    both = gl.reshape(gl.permute(gl.join(square, inner), (1, 3, 0, 2)), [8, 2, 64])
    total = gl.sum(both, 2)
    L: gl.constexpr = total.type.layout
    token = gl.arange(0, 8, layout=gl.SliceLayout(1, L))[:, None]
    kind = gl.arange(0, 2, layout=gl.SliceLayout(0, L))[None, :]
    line = gl.where(kind == 1, squares + token * SLICES, parts + token * (SLICES * _COLUMNS) + 24)
    gl.store(line, _tagged(total, tag), mask=token < left)

    # A thread has of two tokens rows g and g + 8 of fn: high and low parts of one in the last 8.
    z = gl.sum(most, 0)
    M: gl.constexpr = z.type.layout
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, M))[:, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, M))[None, :]
    token = word // 4 * 2 + word % 2
    column = row + word % 4 // 2 * 8
    line = parts + token * (SLICES * _COLUMNS) + column
    gl.store(line, _tagged(z, tag), mask=token < left)
    both = gl.reshape(gl.permute(last, (1, 2, 0)), [8, 4, 2, 2, 4])
    z = gl.sum(gl.reshape(gl.permute(both, (0, 1, 3, 2, 4)), [8, 8, 8]), 2)
    R: gl.constexpr = z.type.layout
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, R))[:, None]
    token = gl.arange(0, 8, layout=gl.SliceLayout(0, R))[None, :]
    line = parts + token * (SLICES * _COLUMNS) + (16 + row)
    gl.store(line, _tagged(z, tag), mask=token < left)


@gluon.jit
def _rates(squares, tag, left, norm_eps, D: gl.constexpr, SLICES: gl.constexpr):
    """The reciprocal RMS of the collapsed tokens."""
    NEAR: gl.constexpr = _near(SLICES)
    L: gl.constexpr = _rates_layout(NEAR)
    token = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(0, L)))
    token = token[:, None][None, :, :]
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, L)))[:, None]
    near = gl.arange(0, NEAR, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :]
    number = (warp * NEAR + near)[:, None, :]
    known = (number < SLICES) & (token < left)
    total = gl.sum(gl.sum(_awaited(squares + token * SLICES + number, known, tag), 2), 0)
    return gl.convert_layout(gl.rsqrt(total / D + norm_eps), _ROWS)


@gluon.jit
def _coefficients(
    parts, held, base, scale, pre_out, post_out, comb_out, place, tag, live, norm_eps, hc_eps,
    D: gl.constexpr, SLICES: gl.constexpr, ITERATIONS: gl.constexpr,
):  # fmt: skip
    """Of one token, whose sums begin at ``parts``; waits and writes only if it is ``live``."""
    slot = gl.arange(0, _slots(SLICES), layout=gl.SliceLayout(1, _SUMS))[:, None]
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, _SUMS))[None, :]
    known = (slot < SLICES) & (column < 25) & live
    z = gl.sum(_awaited(parts + (slot * _COLUMNS + column), known, tag), 0)
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, _SUMS))
    total = gl.sum(gl.where(column == 24, z, 0.0), 0)
    held.store(z * gl.rsqrt(total / (4 * D) + norm_eps))
    rows = held._reinterpret(gl.float32, [_COLUMNS, 1], _LIST)
    token = place + gl.arange(0, 1, layout=_TOKEN)
    known = (token >= 0) & live
    factor = gl.load(scale)
    for n in gl.static_range(4):
        a = rows.index(n).load(_TOKEN) * factor + gl.load(base + n)
        gl.store(pre_out + token * 4 + n, 1.0 / (1.0 + gl.exp(-a)) + hc_eps, mask=known)
    factor = gl.load(scale + 1)
    for n in gl.static_range(4):
        a = rows.index(4 + n).load(_TOKEN) * factor + gl.load(base + 4 + n)
        gl.store(post_out + token * 4 + n, 2.0 / (1.0 + gl.exp(-a)), mask=known)
    factor = gl.load(scale + 2)
    logits = ()
    for n in gl.static_range(16):
        logits = logits + (rows.index(8 + n).load(_TOKEN) * factor + gl.load(base + 8 + n),)
    comb = _sinkhorn(logits, hc_eps, ITERATIONS, True)
    for n in gl.static_range(16):
        gl.store(comb_out + token * 16 + n, comb[n], mask=known)


@gluon.jit(do_not_specialize=["count"])
def few(
    x, y, comb, post, pre, fn, base, scale, weight, x_out, pre_out, post_out, comb_out, h,
    parts, squares, launches, count, norm_eps, hc_eps,
    D: gl.constexpr, UPDATE: gl.constexpr, ITERATIONS: gl.constexpr,
):  # fmt: skip
    """Programs of a tile: the slices of D; then one for each of its tokens. X, y, h and the norm
    weight as words of two channels."""
    SLICES: gl.constexpr = D // 128
    PROGRAMS: gl.constexpr = SLICES + 8
    own = gl.program_id(0) % PROGRAMS
    tile = gl.program_id(0) // PROGRAMS
    left = count - tile * 8
    place = tile * (8 * SLICES)
    tag = gl.load(launches + gl.program_id(0)) + 1
    if own < SLICES:
        column = own * 64
        row = gl.arange(0, 8, layout=_ROWS)
        known = row < left
        inside = known[:, None][None, :, :]
        words = _ask(x, y, tile, column, inside, D, UPDATE)
        w = _ask_weights(pre, post, comb, tile, known, UPDATE)
        fns = gl.allocate_shared_memory(gl.int32, [6, 16, 8, 16], _SHARED)
        _keep_fn(fn, fns, own * 128, D)
        none = gl.zeros([4, 8, 16], gl.float32, _TILE)
        square, most, last = none, none, none
        target = _place(x_out + (tile.to(gl.int64) * (16 * D) + column), 2 * D)
        streams = ()
        for i in gl.static_range(4):
            if UPDATE:
                stream = _mixed(words, w, i)
                gl.store(target + i * (D // 2), stream, mask=inside)
            else:
                stream = words[i]
            streams = streams + (stream,)
            a, b = low_of(stream), high_of(stream)
            square = square + a * a
            square = square + b * b
            gate = w[i][:, None][None, :, :]
            if i == 0:
                low, high = gate * a, gate * b
            else:
                low, high = low + gate * a, high + gate * b
        collapsed = word_of(low, high)
        a, b = low_of(collapsed), high_of(collapsed)
        inner = none + a * a + b * b
        for i in gl.static_range(4):
            lefts = ()
            for n in gl.static_range(6):
                lefts = lefts + (fns.index(n).slice(i * 4, 4, 0).load(_TILE),)
            most = _product(most, streams[i], lefts[0], lefts[1])
            most = _product(most, streams[i], lefts[2], lefts[3])
            last = _product(last, streams[i], lefts[4], lefts[5])
        _store_sums(
            parts + (place + own) * _COLUMNS, squares + place + own, square, inner, most, last,
            tag, left, SLICES,
        )  # fmt: skip
        rate = _rates(squares + place, tag, left, norm_eps, D, SLICES)[:, None][None, :, :]
        warp = gl.arange(0, 4, layout=gl.SliceLayout(1, _HERE))[:, None]
        here = warp * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, _HERE))[None, :]
        scaled = gl.load(weight + column + here)[:, None, :]
        low = low_of(scaled) * (low_of(collapsed) * rate)
        high = high_of(scaled) * (high_of(collapsed) * rate)
        target = _place(h + (tile.to(gl.int64) * (4 * D) + column), D // 2)
        gl.store(target, word_of(low, high), mask=inside)
    elif own - SLICES < left:
        held = gl.allocate_shared_memory(gl.float32, [_COLUMNS], _LIST)
        token = own - SLICES
        # Once without a token, for the instructions to be there when the sums are.
        for attempt in range(2):
            _coefficients(
                parts + (place + token * SLICES) * _COLUMNS, held, base, scale, pre_out, post_out,
                comb_out, tile * 8 + token, tag, attempt == 1, norm_eps, hc_eps, D, SLICES,
                ITERATIONS,
            )  # fmt: skip
    gl.store(launches + gl.program_id(0), tag)


class Few:
    """Launches `few`. Holds places for sums and the numbers of launches: launches that may overlap
    need instances of their own.

    The first call with a width allocates, so it must not be captured in a graph.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, int], tuple[Tensor, Tensor, Tensor]] = {}

    def takes(
        self, x_TCD: Tensor, update: tuple[Tensor, MhcMix] | None, norm_weight: Tensor
    ) -> bool:
        """Whether it should run here: few tokens in bfloat16, whole slices, a Hopper GPU."""
        count, _, width = x_TCD.shape
        return (
            count <= _MOST
            and x_TCD.dtype is torch.bfloat16
            and (update is None or update[0].dtype is torch.bfloat16)
            and norm_weight.dtype is torch.bfloat16
            and norm_weight.is_contiguous()
            and width % _CHANNELS == 0
            and width <= _WIDEST
            and is_hopper(x_TCD.device)
        )

    def launch(
        self,
        x_TCD: Tensor,
        update: tuple[Tensor, MhcMix] | None,
        pre_TC: Tensor,
        parameters: MhcParameters,
        norm_weight: Tensor,
        x_out: Tensor,
        mix: MhcMix,
        h_TD: Tensor,
        *,
        norm_eps: float,
        hc_eps: float,
        sinkhorn_iters: int,
    ) -> None:
        """Run the kernel."""
        count, _, width = x_TCD.shape
        few[(-(-count // 8) * (width // _CHANNELS + 8),)](
            *tensors(x_TCD, update, pre_TC, parameters, norm_weight, x_out, mix, h_TD),
            *self._buffers(x_TCD.device, width // _CHANNELS), count, norm_eps, hc_eps,
            D=width, UPDATE=update is not None, ITERATIONS=sinkhorn_iters, num_warps=4,
        )  # fmt: skip

    def _buffers(self, device: torch.device, slices: int) -> tuple[Tensor, Tensor, Tensor]:
        """Words of z, words of the collapsed input's squares, launches of every program so far."""
        held = self._held.get((device, slices))
        if held is None:
            words = _MOST * slices
            programs = _MOST // 8 * (slices + 8)
            held = (
                torch.zeros(words * _COLUMNS.value, dtype=torch.int64, device=device),
                torch.zeros(words, dtype=torch.int64, device=device),
                torch.zeros(programs, dtype=torch.int32, device=device),
            )
            self._held[device, slices] = held
        return held
