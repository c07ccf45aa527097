"""Gradients of experts' weights on Hopper, for experts of many rows: programs that stay.

One warp does nothing but load, steps and tiles ahead; eight multiply and store.

FLOP: ``2 R M N`` for each pair of operands. Bytes: results once, operands mostly from L2.
"""

# mypy: ignore-errors

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cedar.ops.experts.training_plan import ceil_div

__all__ = ["weight_gradients"]

STEP = gl.constexpr(64)  # rows that a step takes
_TILE, _STAGES = 128, 4
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def weight_gradients(
    left: tuple[Tensor, Tensor | None], right: Tensor, first_E1: Tensor, outs: list[Tensor],
    programs: int,
) -> None:  # fmt: skip
    """Into ``outs``, ``[splits, E, M, N]``, as `training_triton.weight_gradients` does."""
    first, second = left
    splits, num_experts, m, n = outs[0].shape
    pair = second is not None
    n_tiles = ceil_div(n, _TILE)
    tiles = ceil_div(m, _TILE if pair else 2 * _TILE) * n_tiles
    total = tiles * num_experts * splits
    _weight_gradients[(min(programs, total),)](
        _tiles(first), _tiles(second if pair else first), _tiles(right), first_E1, outs[0],
        outs[-1], m, n, n_tiles, tiles, num_experts, total,
        PAIR=pair, SPLITS=splits, M_TILE=_TILE, N_TILE=_TILE, STAGES=_STAGES, num_warps=8,
    )  # fmt: skip


def _tiles(x: Tensor) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [STEP.value, _TILE], layout=_SHARED)


@gluon.constexpr_function
def _store_layout(rows, columns, warps, wide):
    """Eight bytes of a row in one thread, so that four threads store a sector."""
    reg = [[0, 1], [8, 0]] if wide else [[0, 1], [0, 2], [8, 0]]
    lane = [[0, 2], [0, 4]] if wide else [[0, 8], [0, 4]]
    at = 8 if wide else 16
    while at < columns:
        reg.append([0, at])
        at *= 2
    warp = [[16, 0], [32, 0], [64, 0]][: warps.bit_length() - 1]
    return gl.DistributedLinearLayout(
        reg, [*lane, [1, 0], [2, 0], [4, 0]], warp, [], [rows, columns]
    )


@gluon.jit
def _part(tile, first_E1, tiles, num_experts, n_tiles, PAIR: gl.constexpr, SPLITS: gl.constexpr,
          M_TILE: gl.constexpr, N_TILE: gl.constexpr):  # fmt: skip
    """Which matrix a tile is part of, where it lies there, and the rows to sum over."""
    matrix = tile // tiles
    place = tile % tiles
    m = place // n_tiles * (M_TILE if PAIR else 2 * M_TILE)
    n = place % n_tiles * N_TILE
    expert = matrix % num_experts
    begin = gl.load(first_E1 + expert)
    end = gl.load(first_E1 + expert + 1)
    if SPLITS > 1:
        share = (end - begin + SPLITS * STEP - 1) // (SPLITS * STEP) * STEP
        begin += matrix // num_experts * share
        end = gl.minimum(begin + share, end)
    return matrix, m, n, begin, gl.maximum(end - begin, 0) // STEP


@gluon.jit
def _load(
    left0, left1, right, first_E1, n_tiles, tiles, num_experts, total,
    a_smem, b_smem, full, empty,
    PAIR: gl.constexpr, SPLITS: gl.constexpr, M_TILE: gl.constexpr, N_TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    count = gl.program_id(0) * 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        _, m, n, row, steps = _part(
            tile, first_E1, tiles, num_experts, n_tiles, PAIR, SPLITS, M_TILE, N_TILE
        )
        m1 = m if PAIR else m + M_TILE
        for _ in range(steps):
            buf = count % STAGES
            mbarrier.wait(empty.index(buf), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(buf), (2 * M_TILE + N_TILE) * STEP * 2)
            tma.async_copy_global_to_shared(left0, [row, m], full.index(buf), a_smem.index(2 * buf))
            tma.async_copy_global_to_shared(
                left1, [row, m1], full.index(buf), a_smem.index(2 * buf + 1)
            )
            tma.async_copy_global_to_shared(right, [row, n], full.index(buf), b_smem.index(buf))
            row += STEP
            count += 1


@gluon.jit
def _store(s, out, m, n, m_size, n_size):
    kind: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = _store_layout(
        s.shape[0], s.shape[1], gl.num_warps(), kind.primitive_bitwidth == 32
    )
    y = gl.convert_layout(s.to(kind), layout)
    i = m + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout))
    j = n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    ok = (i < m_size)[:, None] & (j < n_size)[None, :]
    gl.store(out + (i[:, None] * n_size + j[None, :]), y, mask=ok)


@gluon.jit
def _multiply(
    first_E1, out0, out1, m_size, n_size, n_tiles, tiles, num_experts, total,
    a_smem, b_smem, full, empty,
    PAIR: gl.constexpr, SPLITS: gl.constexpr, M_TILE: gl.constexpr, N_TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, N_TILE, 16]
    )
    count = gl.program_id(0) * 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        matrix, m, n, _, steps = _part(
            tile, first_E1, tiles, num_experts, n_tiles, PAIR, SPLITS, M_TILE, N_TILE
        )
        s0 = gl.zeros((M_TILE, N_TILE), gl.float32, layout=layout)
        s1 = gl.zeros((M_TILE, N_TILE), gl.float32, layout=layout)
        for step in range(steps):
            buf = count % STAGES
            mbarrier.wait(full.index(buf), (count // STAGES) & 1)
            b = b_smem.index(buf)
            n0 = hopper.warpgroup_mma(a_smem.index(2 * buf).permute((1, 0)), b, s0, is_async=True)
            n1 = hopper.warpgroup_mma(
                a_smem.index(2 * buf + 1).permute((1, 0)), b, s1, is_async=True
            )
            s0, s1 = hopper.warpgroup_mma_wait(2, deps=[n0, n1])
            # The step before is complete: its place is free.
            if step > 0:
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
            count += 1
        s0, s1 = hopper.warpgroup_mma_wait(0, deps=[s0, s1])
        if steps > 0:
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        at = matrix.to(gl.int64) * m_size * n_size
        _store(s0, out0 + at, m, n, m_size, n_size)
        _store(s1, out1 + at, m if PAIR else m + M_TILE, n, m_size, n_size)


@gluon.jit
def _weight_gradients(
    left0, left1, right, first_E1, out0, out1, m_size, n_size, n_tiles, tiles, num_experts, total,
    PAIR: gl.constexpr, SPLITS: gl.constexpr, M_TILE: gl.constexpr, N_TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, STEP, M_TILE], left0.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, STEP, N_TILE], right.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buf in gl.static_range(STAGES):
        mbarrier.init(full.index(buf), count=1)
        mbarrier.init(empty.index(buf), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    first_E1, out0, out1, m_size, n_size, n_tiles, tiles, num_experts, total,
                    a_smem, b_smem, full, empty, PAIR, SPLITS, M_TILE, N_TILE, STAGES,
                ),
            ),
            (
                _load,
                (
                    left0, left1, right, first_E1, n_tiles, tiles, num_experts, total,
                    a_smem, b_smem, full, empty, PAIR, SPLITS, M_TILE, N_TILE, STAGES,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
