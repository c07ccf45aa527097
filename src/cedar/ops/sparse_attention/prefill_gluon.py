"""Sparse attention over bfloat16 rows on Hopper, for heads 512 wide: what both directions share.

`prefill_gluon_forward` and `prefill_gluon_backward` hold the kernels. A program works on one query
and 64 heads with eight warps, two groups of four. Rows are gathered into shared memory 16 bytes at
a time, two tiles deep, and used twice, as keys and as values.

Shapes, bytes and FLOP: as `cedar.ops.sparse_attention.prefill_triton`, with H = 512.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "HEADS", "OUT", "PLAIN", "SHARED", "WIDTH", "barrier", "heads_at", "rows_at", "store_heads",
]  # fmt: skip

HEADS = gl.constexpr(64)
WIDTH = gl.constexpr(512)

# Triton renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# The accumulator of a query: half of the columns in each warp group.
OUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16])
)
# The same with 8 bytes of a bfloat16 row in one thread: four threads store a sector.
_STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 256]],
        block_bases=[],
        shape=[64, 512],
    )
)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def heads_at(base, t, first, stride_T, stride_N, N: gl.constexpr, COPY: gl.constexpr):
    """Pointers to 64 heads of query ``t``, and which of them there are."""
    head = first + gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    place = base + t * stride_T + (head.to(gl.int64) * stride_N)[:, None] + col[None, :]
    return place, (head < N)[:, None]


@gluon.jit
def rows_at(near, near_stride, far, far_stride, slot, in_near, COPY: gl.constexpr):
    """Pointers to the rows ``slot`` of one of the sources, and which of them are filled."""
    if in_near:
        base = near
        stride = near_stride
    else:
        base = far
        stride = far_stride
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    filled = slot >= 0
    offset = gl.where(filled, slot, 0).to(gl.int64) * stride
    return base + offset[:, None] + col[None, :], filled[:, None]


@gluon.jit
def store_heads(out, acc, row, first, N: gl.constexpr):
    """64 heads to ``row`` on, those there are."""
    y = gl.convert_layout(acc.to(gl.bfloat16), _STORE)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _STORE))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, _STORE))
    place = out + (row + head)[:, None] * WIDTH + col[None, :]
    gl.store(place, y, mask=(first + head < N)[:, None])
