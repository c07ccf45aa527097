"""Routed experts on packed FP4 weights for Hopper, with layouts under control.

Weights stay packed until they are in the registers of the tensor-core operand: a 32-bit word holds
eight codes of one row, and all first codes of the words are one operand, all second codes another.
That permutes the inner dimension of the product, so the activations are permuted alike (`_order`)
and nothing is ever interleaved or sent through shared memory. Codes times power-of-two scales are
exact in bfloat16. Weight rows are the long side of the tile and tokens the short one, so a few
tokens waste nothing. Copies run ahead by several steps; unpacking and products of different
programs on a multiprocessor overlap.

Bytes: every visited expert's ``3 D F (1/2 + 1/32)``, and ``T A (2 D + 2 F)`` for rows.
FLOP: ``6 T A D F``.
"""

# mypy: ignore-errors

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from cedar.ops.experts.tiles import tile_visits, visits_per_tile
from cedar.ops.experts.triton import combine
from cedar.quant import FP8_ROW, BlockFormat, QuantTensor, fake_quantize

__all__ = ["experts"]

_STEP = 128  # values of a row that one step takes: 16 words
# Triton 3.6 calls it by its older name.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_LIFT = 63  # binary digits; decoded weights are so much too small, activations so much too large


def experts(
    x_TD: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: QuantTensor,
    w2: QuantTensor,
    w3: QuantTensor,
    *,
    limit: float,
    input_format: BlockFormat,
) -> Tensor:
    """As `cedar.ops.experts.Experts`, for bfloat16 and packed FP4; D and F multiples of 128."""
    tokens, dim = x_TD.shape
    num_experts, inner = w1.shape[0], w1.shape[1]
    block = visits_per_tile(experts_TA.numel(), num_experts)
    tiles = tile_visits(experts_TA, num_experts, block)
    num_tiles = len(tiles.expert_M)
    x = _order(fake_quantize(x_TD, input_format))
    hidden = x_TD.new_empty((num_tiles * block, inner))
    down = x_TD.new_empty((num_tiles * block, dim))
    rows, warps = (128, 8) if block == 128 else (64, 4)
    gate_up_kernel[(num_tiles, inner // rows)](
        x, tiles.token_R, tiles.source_R, weights_TA.contiguous(), tiles.expert_M,
        _words(w1.codes), _words(w1.scale), _words(w3.codes), _words(w3.scale), hidden,
        num_experts, limit, DIM=dim, INNER=inner, FLOOR=FP8_ROW.amax_floor,
        ROWS=rows, TOKENS=block, STAGES=3, num_warps=warps,
    )  # fmt: skip
    down_kernel[(num_tiles, dim // rows)](
        hidden, tiles.token_R, tiles.expert_M, _words(w2.codes), _words(w2.scale), down,
        num_experts, DIM=dim, INNER=inner,
        ROWS=rows, TOKENS=block, STAGES=4, num_warps=warps,
    )  # fmt: skip
    return combine(down, tiles.row_TA, tokens)


def _words(packed: Tensor) -> Tensor:
    return packed.view(torch.int32)


def _order(x: Tensor) -> Tensor:
    """``[T, n]`` as the kernels read it: of 128 values all 16 first codes, all second ones, ..."""
    steps = x.unflatten(-1, (-1, _STEP // 8, 8))
    return steps.transpose(-1, -2).flatten(-3) * 2.0**_LIFT


# Two words of a row give two values of every one of its eight codes, a pair per register: the low
# (high) halves of both words side by side, then sign to bit 15 and magnitude to bits 8-6 of each
# half, which is the value times 2^-126, then times the block's scale.
_EIGHT_CODES = gl.constexpr("""
{
.reg .b32 a, b, m, s;
prmt.b32 a, $8, $9, 0x5410;
prmt.b32 b, $8, $9, 0x7632;
shl.b32 m, a, 6; shl.b32 s, a, 12;
and.b32 m, m, 0x01C001C0; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $0, m, $10;
shl.b32 m, a, 2; shl.b32 s, a, 8;
and.b32 m, m, 0x01C001C0; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $1, m, $10;
shr.u32 m, a, 2; shl.b32 s, a, 4;
and.b32 m, m, 0x01C001C0; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $2, m, $10;
shr.u32 m, a, 6;
and.b32 m, m, 0x01C001C0; lop3.b32 m, a, 0x80008000, m, 0xEA; mul.rn.bf16x2 $3, m, $10;
shl.b32 m, b, 6; shl.b32 s, b, 12;
and.b32 m, m, 0x01C001C0; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $4, m, $10;
shl.b32 m, b, 2; shl.b32 s, b, 8;
and.b32 m, m, 0x01C001C0; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $5, m, $10;
shr.u32 m, b, 2; shl.b32 s, b, 4;
and.b32 m, m, 0x01C001C0; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 $6, m, $10;
shr.u32 m, b, 6;
and.b32 m, m, 0x01C001C0; lop3.b32 m, b, 0x80008000, m, 0xEA; mul.rn.bf16x2 $7, m, $10;
}
""")


@gluon.jit
def _decode(word, scales):
    """Eight operands ``[ROWS, 16]`` of words ``[ROWS, 16]`` and four scale bytes ``[ROWS]``."""
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, word.type.layout))
    byte = (scales[:, None] >> (8 * (k // 4))[None, :]) & 255
    # 2^(byte - 127 + 63) as a bfloat16.
    factor = ((byte + 63) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.inline_asm_elementwise(
        _EIGHT_CODES,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
        [word, factor],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _multiply(acc, w0, w1, w2, w3, w4, w5, w6, w7, x):
    """Begin eight products with the parts of x ``[TOKENS, 128]`` in shared memory."""
    acc = hopper.warpgroup_mma(w0, x.slice(0, 16, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(w1, x.slice(16, 16, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(w2, x.slice(32, 16, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(w3, x.slice(48, 16, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(w4, x.slice(64, 16, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(w5, x.slice(80, 16, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(w6, x.slice(96, 16, 1).permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma(w7, x.slice(112, 16, 1).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def gate_up_kernel(
    x, token_R, source_R, weight_V, expert_M, codes1, scales1, codes3, scales3, hidden,
    num_experts, limit,
    DIM: gl.constexpr, INNER: gl.constexpr, FLOOR: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``hidden [R, F]``: SwiGLU times the routing weight, through FP8 per 32 values, ordered."""
    warps: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, TOKENS, 16]
    )
    lhs: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    row_of: gl.constexpr = gl.SliceLayout(1, lhs)
    copy_w: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [warps, 1], [1, 0])
    copy_s: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    copy_x: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    in_w: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [1, 0])
    in_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    in_x: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = gl.program_id(0)
    expert = gl.load(expert_M + tile)
    if expert >= num_experts:
        return
    steps: gl.constexpr = DIM // 128
    first = gl.program_id(1) * ROWS
    base = expert.to(gl.int64) * INNER + first
    word1 = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 16], in_w)
    word3 = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 16], in_w)
    scale1 = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], in_s)
    scale3 = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], in_s)
    part = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 128], in_x)
    row = base + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy_w))
    at_w = row[:, None] * (steps * 16) + gl.arange(0, 16, layout=gl.SliceLayout(0, copy_w))[None, :]
    at_s = (base + gl.arange(0, ROWS, layout=copy_s)) * steps
    token = gl.load(
        token_R + tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copy_x))
    )
    at_x = (
        x + token.to(gl.int64)[:, None] * DIM
        + gl.arange(0, 128, layout=gl.SliceLayout(0, copy_x))[None, :]
    )  # fmt: skip
    filled = (token >= 0)[:, None]
    for s in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(word1.index(s), codes1 + at_w + s * 16)
        async_copy.async_copy_global_to_shared(word3.index(s), codes3 + at_w + s * 16)
        async_copy.async_copy_global_to_shared(scale1.index(s), scales1 + at_s + s)
        async_copy.async_copy_global_to_shared(scale3.index(s), scales3 + at_s + s)
        async_copy.async_copy_global_to_shared(part.index(s), at_x + s * 128, mask=filled)
        async_copy.commit_group()
    gate = gl.zeros((ROWS, TOKENS), gl.float32, layout=mma)
    up = gl.zeros((ROWS, TOKENS), gl.float32, layout=mma)
    for step in range(steps):
        slot = step % STAGES
        async_copy.wait_group(STAGES - 2)
        hopper.fence_async_shared()
        # No product is in flight while operands are decoded: nothing keeps their registers apart.
        a0, a1, a2, a3, a4, a5, a6, a7 = _decode(
            word1.index(slot).load(lhs), scale1.index(slot).load(row_of)
        )
        b0, b1, b2, b3, b4, b5, b6, b7 = _decode(
            word3.index(slot).load(lhs), scale3.index(slot).load(row_of)
        )
        gate = _multiply(gate, a0, a1, a2, a3, a4, a5, a6, a7, part.index(slot))
        up = _multiply(up, b0, b1, b2, b3, b4, b5, b6, b7, part.index(slot))
        gate, up = hopper.warpgroup_mma_wait(0, deps=[gate, up])
        # When every warp is here, the last part of x may be overwritten.
        _barrier()
        ahead = step + STAGES - 1
        into, live = ahead % STAGES, ahead < steps
        async_copy.async_copy_global_to_shared(
            word1.index(into), codes1 + at_w + ahead * 16, mask=live
        )
        async_copy.async_copy_global_to_shared(
            word3.index(into), codes3 + at_w + ahead * 16, mask=live
        )
        async_copy.async_copy_global_to_shared(
            scale1.index(into), scales1 + at_s + ahead, mask=live
        )
        async_copy.async_copy_global_to_shared(
            scale3.index(into), scales3 + at_s + ahead, mask=live
        )
        async_copy.async_copy_global_to_shared(
            part.index(into), at_x + ahead * 128, mask=filled & live
        )
        async_copy.commit_group()
    async_copy.wait_group(0)
    r = tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, mma))
    source = gl.load(source_R + r)
    weight = gl.load(weight_V + source, mask=source >= 0, other=0.0)
    gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), limit)
    up = gl.minimum(gl.maximum(up.to(gl.bfloat16).to(gl.float32), -limit), limit)
    y = weight[None, :] * (gate / (1.0 + gl.exp(-gate)) * up)
    blocks = gl.reshape(y.to(gl.bfloat16).to(gl.float32), (ROWS // 32, 32, TOKENS))
    # FP8 per 32 along F: a power of two at or above amax / 448, from the bits.
    ratio = gl.maximum(gl.max(gl.maximum(blocks, -blocks), axis=1), FLOOR) / 448.0
    exponent = (ratio.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    factor = gl.expand_dims((exponent << 23).to(gl.float32, bitcast=True), 1)
    y = (blocks / factor).to(gl.float8e4nv).to(gl.float32) * factor * 9223372036854775808.0  # 2^63
    y = gl.convert_layout(gl.reshape(y, (ROWS, TOKENS)), mma)
    f = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
    place = (f // 128) * 128 + (f % 8) * 16 + (f % 128) // 8
    where = hidden + r.to(gl.int64)[None, :] * INNER + place[:, None]
    gl.store(where, y.to(gl.bfloat16), mask=(source >= 0)[None, :])


@gluon.jit
def down_kernel(
    hidden, token_R, expert_M, codes, scales, out, num_experts,
    DIM: gl.constexpr, INNER: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``out [R, D]``: each row of ``hidden`` through its expert's ``w2``."""
    warps: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, TOKENS, 16]
    )
    lhs: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    row_of: gl.constexpr = gl.SliceLayout(1, lhs)
    copy_w: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [warps, 1], [1, 0])
    copy_s: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    copy_x: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    in_w: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [1, 0])
    in_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    in_x: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = gl.program_id(0)
    expert = gl.load(expert_M + tile)
    if expert >= num_experts:
        return
    steps: gl.constexpr = INNER // 128
    first = gl.program_id(1) * ROWS
    base = expert.to(gl.int64) * DIM + first
    word = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 16], in_w)
    scale = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], in_s)
    part = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 128], in_x)
    row = base + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy_w))
    at_w = row[:, None] * (steps * 16) + gl.arange(0, 16, layout=gl.SliceLayout(0, copy_w))[None, :]
    at_s = (base + gl.arange(0, ROWS, layout=copy_s)) * steps
    r = tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copy_x))
    at_x = (
        hidden + r.to(gl.int64)[:, None] * INNER
        + gl.arange(0, 128, layout=gl.SliceLayout(0, copy_x))[None, :]
    )  # fmt: skip
    filled = (gl.load(token_R + r) >= 0)[:, None]
    for s in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(word.index(s), codes + at_w + s * 16)
        async_copy.async_copy_global_to_shared(scale.index(s), scales + at_s + s)
        async_copy.async_copy_global_to_shared(part.index(s), at_x + s * 128, mask=filled)
        async_copy.commit_group()
    acc = gl.zeros((ROWS, TOKENS), gl.float32, layout=mma)
    for step in range(steps):
        slot = step % STAGES
        async_copy.wait_group(STAGES - 2)
        hopper.fence_async_shared()
        a0, a1, a2, a3, a4, a5, a6, a7 = _decode(
            word.index(slot).load(lhs), scale.index(slot).load(row_of)
        )
        acc = _multiply(acc, a0, a1, a2, a3, a4, a5, a6, a7, part.index(slot))
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        ahead = step + STAGES - 1
        into, live = ahead % STAGES, ahead < steps
        async_copy.async_copy_global_to_shared(
            word.index(into), codes + at_w + ahead * 16, mask=live
        )
        async_copy.async_copy_global_to_shared(scale.index(into), scales + at_s + ahead, mask=live)
        async_copy.async_copy_global_to_shared(
            part.index(into), at_x + ahead * 128, mask=filled & live
        )
        async_copy.commit_group()
    async_copy.wait_group(0)
    r = tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, mma))
    d = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
    where = out + r.to(gl.int64)[None, :] * DIM + d[:, None]
    gl.store(where, acc.to(gl.bfloat16), mask=(gl.load(token_R + r) >= 0)[None, :])
