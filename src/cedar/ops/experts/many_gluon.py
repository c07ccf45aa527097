"""Experts for many tokens on Hopper: each weight is decoded once for all tokens of a tile.

128 weight rows are the long side of a product; the short one is `SOME` tokens, and `MORE` where a
tile has them, so that most experts need one tile of little padding. Decoded weights are operands
in registers, inputs in shared memory. A step's operands may be decoded while the last step's are
multiplied, as they have registers of their own; the assembler makes little use of it, and forcing
it was slower. What comes from L2, all inputs once for every 128 rows of weights, bounds this more.

Rows of gate and up alternate by eights, so a lane ends up with both values of a hidden one.

Bytes: every visited expert's ``3 D F (1/2 + 1/32)``, rows. FLOP: ``6 T A D F``.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from cedar.ops.experts.decode_gluon import blocks_layout, operands, words_layout
from cedar.ops.experts.prepare import MANY as _MANY
from cedar.ops.experts.swiglu_gluon import paired_row, store_hidden

__all__ = ["down_kernel", "gate_up_kernel"]

MANY = gl.constexpr(_MANY)
# Triton 3.6 calls it by its older name.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
ROWS = gl.constexpr(128)  # of weights in a tile


@gluon.constexpr_function
def _product_layout(tokens):
    """Of ``[128, tokens]`` in two warpgroups."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, tokens, 16]
    )


@gluon.jit
def _multiply(acc, weights, x, TOKENS: gl.constexpr):
    """Begin eight products with the parts of ``x [TOKENS, 128]`` in shared memory."""
    lhs: gl.constexpr = gl.DotOperandLayout(0, _product_layout(TOKENS), 2)
    for n in gl.static_range(8):
        part = x.slice(16 * n, 16, 1).permute((1, 0))
        acc = hopper.warpgroup_mma(gl.convert_layout(weights[n], lhs), part, acc, is_async=True)
    return acc


@gluon.jit
def _visits(source_R, first, TOKENS: gl.constexpr, layout: gl.constexpr):
    return gl.load(source_R + first + gl.arange(0, TOKENS, layout=layout))


@gluon.jit
def _copy(slots, sources, filled, step, steps, STAGES: gl.constexpr):
    """Begin to copy what a step needs: words, scales and one or two parts of inputs."""
    slot, live = step % STAGES, step < steps
    async_copy.async_copy_global_to_shared(slots[0].index(slot), sources[0] + step * 16, mask=live)
    async_copy.async_copy_global_to_shared(slots[1].index(slot), sources[1] + step, mask=live)
    for n in gl.static_range(len(filled)):
        async_copy.async_copy_global_to_shared(
            slots[2 + n].index(slot), sources[2 + n] + step * 128, mask=filled[n] & live
        )
    async_copy.commit_group()


@gluon.jit
def _decoded(slots, step, SOME: gl.constexpr, STAGES: gl.constexpr):
    """The operands of a step's weights."""
    lhs: gl.constexpr = gl.DotOperandLayout(0, _product_layout(SOME), 2)
    blocks: gl.constexpr = gl.SliceLayout(2, blocks_layout(ROWS, 8))
    shift = 8 * gl.arange(0, 4, layout=gl.SliceLayout(0, blocks))[None, :]
    slot = step % STAGES
    four = slots[1].index(slot).load(gl.SliceLayout(1, blocks))[:, None]
    word = slots[0].index(slot).load(words_layout(ROWS, 8))
    return operands(word, (four >> shift) & 255, lhs, ROWS, False)


@gluon.jit
def _step(
    sums, weights, slots, sources, filled, step, steps,
    SOME: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums with a step's products, and the operands of the next, decoded in the meantime."""
    async_copy.wait_group(STAGES - 3)
    hopper.fence_async_shared()
    # When every warp is here, what the last step multiplied may be overwritten.
    _barrier()
    _copy(slots, sources, filled, step + STAGES - 1, steps, STAGES)
    some = _multiply(sums[0], weights, slots[2].index(step % STAGES), SOME)
    if MORE > 0:
        more = _multiply(sums[1], weights, slots[3].index(step % STAGES), MORE)
        later = _decoded(slots, step + 1, SOME, STAGES)
        some, more = hopper.warpgroup_mma_wait(0, deps=[some, more])
        return (some, more), later
    else:
        later = _decoded(slots, step + 1, SOME, STAGES)
        some = hopper.warpgroup_mma_wait(0, deps=[some])
        return (some,), later


@gluon.jit
def _sums(
    words_at, scales_at, x, source_R, first,
    WIDTH: gl.constexpr, PER_ROW: gl.constexpr, SOME: gl.constexpr, MORE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """``[128, SOME]`` and, if there are any, ``[128, MORE]``: weights times the tile's inputs.

    Pointers to the first words ``[128, 16]`` and scales ``[128]`` of the rows; ``PER_ROW`` visits
    read the same row of ``x``.
    """
    steps: gl.constexpr = WIDTH // 128
    copy_x: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    in_w: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    in_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    in_x: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, copy_x))[None, :]
    visit = _visits(source_R, first, SOME, gl.SliceLayout(1, copy_x))
    slots = (
        gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 16], in_w),
        gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], in_s),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, SOME, 128], in_x),
    )
    row = (visit // PER_ROW).to(gl.int64)[:, None]
    sources = (words_at, scales_at, x + row * WIDTH + column)
    filled = ((visit >= 0)[:, None],)
    sums = (gl.zeros((ROWS, SOME), gl.float32, layout=_product_layout(SOME)),)
    if MORE > 0:
        visit = _visits(source_R, first + SOME, MORE, gl.SliceLayout(1, copy_x))
        slots = slots + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, MORE, 128], in_x),)
        row = (visit // PER_ROW).to(gl.int64)[:, None]
        sources = sources + (x + row * WIDTH + column,)
        filled = filled + ((visit >= 0)[:, None],)
        sums = sums + (gl.zeros((ROWS, MORE), gl.float32, layout=_product_layout(MORE)),)
    for s in gl.static_range(STAGES - 1):
        _copy(slots, sources, filled, s, steps, STAGES)
    async_copy.wait_group(STAGES - 2)
    _barrier()
    weights = _decoded(slots, 0, SOME, STAGES)
    # Two steps at a time: operands that are decoded and those that are multiplied have registers
    # of their own, without a move.
    for step in range(0, steps - 1, 2):
        sums, others = _step(sums, weights, slots, sources, filled, step, steps, SOME, MORE, STAGES)
        sums, weights = _step(
            sums, others, slots, sources, filled, step + 1, steps, SOME, MORE, STAGES
        )
    if steps % 2 == 1:
        sums, weights = _step(
            sums, weights, slots, sources, filled, steps - 1, steps, SOME, MORE, STAGES
        )
    async_copy.wait_group(0)
    return sums


@gluon.jit
def _hidden(
    sums, source_R, first, weight_V, hidden, limit,
    INNER: gl.constexpr, FLOOR: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    source = _visits(source_R, first, TOKENS, gl.SliceLayout(0, sums.type.layout))
    weight = gl.load(weight_V + source, mask=source >= 0, other=0.0)
    store_hidden(
        sums, source, weight, hidden, gl.program_id(0) * (ROWS // 2), limit,
        INNER, FLOOR, ROWS, TOKENS, MANY,
    )  # fmt: skip


@gluon.jit
def _gate_up_tile(
    codes1, scales1, codes3, scales3, x, source_R, first, weight_V, hidden, base, limit,
    DIM: gl.constexpr, INNER: gl.constexpr, ACTIVE: gl.constexpr, FLOOR: gl.constexpr,
    SOME: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    copy_w: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])
    copy_s: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy_w))
    row = base + paired_row(r)
    at_w = row[:, None] * (DIM // 8) + gl.arange(0, 16, layout=gl.SliceLayout(0, copy_w))[None, :]
    codes = gl.where((r & 8 == 0)[:, None], codes1, codes3)
    r = gl.arange(0, ROWS, layout=copy_s)
    at_s = (base + paired_row(r)) * (DIM // 128)
    scales = gl.where(r & 8 == 0, scales1, scales3)
    sums = _sums(codes + at_w, scales + at_s, x, source_R, first, DIM, ACTIVE, SOME, MORE, STAGES)
    _hidden(sums[0], source_R, first, weight_V, hidden, limit, INNER, FLOOR, SOME)
    if MORE > 0:
        _hidden(sums[1], source_R, first + SOME, weight_V, hidden, limit, INNER, FLOOR, MORE)


@gluon.jit
def gate_up_kernel(
    x, source_R, expert_M, weight_V, codes1, scales1, codes3, scales3, hidden, num_experts, limit,
    DIM: gl.constexpr, INNER: gl.constexpr, ACTIVE: gl.constexpr, FLOOR: gl.constexpr,
    SOME: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``hidden [V, F]``: SwiGLU times the routing weight, through FP8 per 32, ordered."""
    tile = gl.program_id(1)
    expert = gl.load(expert_M + tile)
    if expert < num_experts:
        first = tile * (SOME + MORE)
        base = expert.to(gl.int64) * INNER + gl.program_id(0) * 64
        # Visits fill a tile from its beginning.
        if gl.load(source_R + first + SOME) < 0:
            _gate_up_tile(
                codes1, scales1, codes3, scales3, x, source_R, first, weight_V, hidden, base,
                limit, DIM, INNER, ACTIVE, FLOOR, SOME, 0, STAGES,
            )  # fmt: skip
        else:
            _gate_up_tile(
                codes1, scales1, codes3, scales3, x, source_R, first, weight_V, hidden, base,
                limit, DIM, INNER, ACTIVE, FLOOR, SOME, MORE, STAGES,
            )  # fmt: skip


@gluon.jit
def _store(sums, source_R, first, out, DIM: gl.constexpr, TOKENS: gl.constexpr):
    mma: gl.constexpr = sums.type.layout
    source = _visits(source_R, first, TOKENS, gl.SliceLayout(0, mma))
    d = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
    where = out + source.to(gl.int64)[None, :] * DIM + d[:, None]
    gl.store(where, sums.to(gl.bfloat16), mask=(source >= 0)[None, :])


@gluon.jit
def _down_tile(
    codes, scales, hidden, source_R, first, out, base,
    DIM: gl.constexpr, INNER: gl.constexpr,
    SOME: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    copy_w: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])
    copy_s: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    row = base + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy_w))
    at_w = row[:, None] * (INNER // 8) + gl.arange(0, 16, layout=gl.SliceLayout(0, copy_w))[None, :]
    at_s = (base + gl.arange(0, ROWS, layout=copy_s)) * (INNER // 128)
    sums = _sums(codes + at_w, scales + at_s, hidden, source_R, first, INNER, 1, SOME, MORE, STAGES)
    _store(sums[0], source_R, first, out, DIM, SOME)
    if MORE > 0:
        _store(sums[1], source_R, first + SOME, out, DIM, MORE)


@gluon.jit
def down_kernel(
    hidden, source_R, expert_M, codes, scales, out, num_experts,
    DIM: gl.constexpr, INNER: gl.constexpr,
    SOME: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``out [V, D]``: each row of ``hidden`` through its expert's ``w2``."""
    tile = gl.program_id(1)
    expert = gl.load(expert_M + tile)
    if expert < num_experts:
        first = tile * (SOME + MORE)
        base = expert.to(gl.int64) * DIM + gl.program_id(0) * ROWS
        if gl.load(source_R + first + SOME) < 0:
            _down_tile(
                codes, scales, hidden, source_R, first, out, base, DIM, INNER, SOME, 0, STAGES
            )
        else:
            _down_tile(
                codes, scales, hidden, source_R, first, out, base, DIM, INNER, SOME, MORE, STAGES
            )
