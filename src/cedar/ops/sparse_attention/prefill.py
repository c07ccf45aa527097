"""Sparse attention for prefill and training: many queries, plain rows, gradients.

`sparse_attention` is a `cedar.ops.sparse_attention.SparseAttention` whose inputs may require
gradients: into q, into rows (which are keys and values at once) and into the sinks. Two
implementations: for Hopper at 512 channels (`prefill_gluon`), and one for every CUDA device and
shape (`prefill_triton`). What neither takes goes to the plain implementation, and `unsupported`
says why.

The forward pass keeps the output and, for every query and head, the logarithm of the softmax's
denominator; the backward pass computes the scores again. The gradient of the rows is summed in
float32, by atomic additions in no fixed order, or, where PyTorch is asked for deterministic
algorithms, in the order of the queries: the same bits every time, for twice the traffic.
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedar.ops.devices import is_hopper, multiprocessors
from cedar.ops.packed import row_width, unpack_rows
from cedar.ops.sparse_attention import Rows, Source
from cedar.ops.sparse_attention import prefill_triton as portable
from cedar.ops.sparse_attention import reference as plain

__all__ = ["Kernels", "kernels_for", "sparse_attention", "unsupported"]

_LOG2E = 1.4426950408889634
_WIDEST = 512
_MOST_SLOTS = 4096  # of a query, that the Hopper kernels' shared memory holds
_PART_BYTES = 2**29  # what deterministic gradients take at a time
_FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


class Kernels(NamedTuple):
    """Which kernels take an input, and why not the faster ones."""

    name: str
    reason: str


def unsupported(q_TNH: Tensor, sources: tuple[Source, ...]) -> str | None:
    """Why no kernel can take these inputs; None if one can."""
    width = q_TNH.shape[2]
    if q_TNH.dtype not in _FLOATS:
        return f"queries in {q_TNH.dtype}"
    if width > _WIDEST:
        return f"head width {width}: expected at most {_WIDEST}"
    if len(sources) > 2:
        return f"{len(sources)} sources of rows: expected at most 2"
    for source in sources:
        if isinstance(source, Rows):
            if source.rows_RH.dtype not in _FLOATS:
                return f"rows in {source.rows_RH.dtype}"
        elif row_width(source.raw_RB.shape[1], source.format) != width:
            return "packed rows of another width"
    if not _held(sources) or q_TNH.numel() == 0:
        return "nothing to attend to"
    return None


def kernels_for(q_TNH: Tensor, sources: tuple[Rows, ...]) -> Kernels:
    """``gluon`` for Hopper, else ``triton``; both compute the same."""
    heads, width = q_TNH.shape[1:]
    rows = [s.rows_RH for s in sources]
    if not is_hopper(q_TNH.device):
        reason = "written for compute capability 9.0"
    elif width != _WIDEST:
        reason = f"written for heads {_WIDEST} wide; these are {width}"
    elif heads <= 32:
        reason = f"works on 64 heads at a time; {heads} would waste half"
    elif any(t.dtype is not torch.bfloat16 for t in (q_TNH, *rows)):
        reason = "written for bfloat16"
    elif any(_unaligned(t) for t in (q_TNH, *rows)):
        reason = "copies 16 bytes at a time; a row does not begin at a multiple of that"
    elif sum(s.slots_TK.shape[1] + 31 for s in sources) > _MOST_SLOTS:
        reason = f"more than {_MOST_SLOTS} slots a query"
    else:
        return Kernels("gluon", "")
    return Kernels("triton", reason)


def sparse_attention(
    q_TNH: Tensor,
    sources: tuple[Source, ...],
    sink_N: Tensor,
    scale: float,
    *,
    deterministic: bool | None = None,
) -> Tensor:
    """`cedar.ops.sparse_attention.SparseAttention`, with gradients.

    deterministic: sum the gradient of the rows in a fixed order; None: as PyTorch is set
    (`torch.use_deterministic_algorithms`).
    """
    if unsupported(q_TNH, sources) is not None:
        return plain.sparse_attention(q_TNH, sources, sink_N, scale)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    near, *rest = _held(tuple(_plain(s, q_TNH.dtype) for s in sources))
    far = rest[0] if rest else None
    return _Attention.apply(
        q_TNH, near.rows_RH, far.rows_RH if far else None, sink_N,
        near.slots_TK, far.slots_TK if far else None, scale, deterministic,
    )  # fmt: skip


class _Attention(torch.autograd.Function):
    """Tensors that may require gradients first; the second source may be missing."""

    @staticmethod
    def forward(ctx, q, near, far, sink, near_slots, far_slots, scale, deterministic):
        q, sink = _contiguous(q), sink.contiguous()
        sources = _sources(near, near_slots, far, far_slots)
        save = any(ctx.needs_input_grad)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        log_sum = torch.empty(q.shape[:2], device=q.device) if save else None
        forward(q, sources, sink, scale, out, log_sum)
        if save:
            ctx.save_for_backward(q, near, far, sink, near_slots, far_slots, out, log_sum)
            ctx.scale, ctx.deterministic = scale, deterministic
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, near, far, sink, near_slots, far_slots, out, log_sum = ctx.saved_tensors
        sources = _sources(near, near_slots, far, far_slots)
        grad_q, grad_rows, delta = backward(
            q, sources, ctx.scale, out, log_sum, grad_out.contiguous(), ctx.deterministic
        )
        grad_sink = None
        if ctx.needs_input_grad[3]:
            share = torch.exp2(sink.float() * _LOG2E - log_sum)
            grad_sink = -(share * delta).sum(0).to(sink.dtype)
        grads = [g.to(s.rows_RH.dtype) for g, s in zip(grad_rows, sources, strict=True)]
        return grad_q, grads[0], grads[1] if far is not None else None, grad_sink, *[None] * 4


def forward(
    q_TNH: Tensor,
    sources: tuple[Rows, ...],
    sink_N: Tensor,
    scale: float,
    out_TNH: Tensor,
    log_sum_TN: Tensor | None,
    *,
    kernels: str | None = None,
    tile: int | None = None,
    stages: int = 3,
    warps: int | None = None,
) -> None:
    """Run the forward kernel; ``kernels``, ``tile``, ``stages``, ``warps`` are for measurements."""
    count, heads, width = q_TNH.shape
    near, far = sources[0], sources[-1]
    far_width = far.slots_TK.shape[1] if len(sources) == 2 else 0
    arguments = (
        q_TNH, out_TNH, out_TNH if log_sum_TN is None else log_sum_TN, sink_N,
        near.rows_RH, near.slots_TK, near.rows_RH.stride(0), near.slots_TK.stride(0),
        near.slots_TK.shape[1],
        far.rows_RH, far.slots_TK, far.rows_RH.stride(0), far.slots_TK.stride(0), far_width,
        q_TNH.stride(0), q_TNH.stride(1), scale * _LOG2E,
    )  # fmt: skip
    save = log_sum_TN is not None
    if (kernels or kernels_for(q_TNH, sources).name) == "gluon":
        from cedar.ops.sparse_attention import prefill_gluon_forward as hopper

        blocks = triton.cdiv(heads, 64)
        programs = min(multiprocessors(q_TNH.device), count * blocks)
        hopper.forward_kernel[(programs,)](
            *arguments, count * blocks, programs, N=heads, BLOCKS=blocks, SAVE=save, num_warps=8
        )
        return
    half, group = _half_width(width), _head_group(q_TNH)
    if tile is None:
        tile = 16 if q_TNH.dtype is torch.float32 else 32 if half * group >= 64 * 256 else 64
    portable.forward_kernel[(count, triton.cdiv(heads, group))](
        *arguments, N=heads, H=width, P=half, HEADS=group, TILE=tile, NEAR=True,
        FAR=far_width > 0, SAVE=save, DTYPE=_FLOATS[q_TNH.dtype], STAGES=stages,
        num_warps=warps or _warps(half * group),
    )  # fmt: skip


def backward(
    q_TNH: Tensor,
    sources: tuple[Rows, ...],
    scale: float,
    out_TNH: Tensor,
    log_sum_TN: Tensor,
    grad_TNH: Tensor,
    deterministic: bool,
    *,
    kernels: str | None = None,
    tile: int | None = None,
    stages: int = 1,
    warps: int | None = None,
    part_bytes: int = _PART_BYTES,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Gradients of q, of the rows in float32, and ``delta [T, N]``; ``grad`` is contiguous."""
    count, heads, width = q_TNH.shape
    grad_q = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    delta = torch.empty(q_TNH.shape[:2], device=q_TNH.device)
    wide = triton.next_power_of_2(width)
    few = min(triton.next_power_of_2(heads), max(1, 4096 // wide))
    portable.delta_kernel[(count, triton.cdiv(heads, few))](
        out_TNH, grad_TNH, delta, grad_TNH.stride(0), grad_TNH.stride(1),
        N=heads, H=width, WIDTH=wide, HEADS=few, num_warps=4,
    )  # fmt: skip
    grads = tuple(
        torch.zeros(s.rows_RH.shape, dtype=torch.float32, device=q_TNH.device) for s in sources
    )
    gluon = (kernels or kernels_for(q_TNH, sources).name) == "gluon"
    group = 64 if gluon else _head_group(q_TNH)
    blocks = triton.cdiv(heads, group)
    slots = sum(s.slots_TK.shape[1] for s in sources)
    chunk = max(1, part_bytes // (slots * blocks * width * 4)) if deterministic else count
    far_width = sources[1].slots_TK.shape[1] if len(sources) == 2 else 0
    for first in range(0, count, chunk):
        here = min(chunk, count - first)
        if deterministic:
            orders = tuple(_order(s, slice(first, first + here)) for s in sources)
            targets = tuple(
                _Target(torch.empty((o.place_TK.numel(), blocks, width), device=q_TNH.device),
                        o.place_TK)
                for o in orders
            )  # fmt: skip
        else:
            targets = tuple(_Target(g, s.slots_TK) for g, s in zip(grads, sources, strict=True))
        arguments = (
            q_TNH, grad_TNH, grad_q, log_sum_TN, delta,
            *_backward_source(sources[0], targets[0]), sources[0].slots_TK.shape[1],
            *_backward_source(sources[-1], targets[-1]), far_width,
            q_TNH.stride(0), q_TNH.stride(1), grad_TNH.stride(0), grad_TNH.stride(1), scale, first,
        )  # fmt: skip
        if gluon:
            from cedar.ops.sparse_attention import prefill_gluon_backward as hopper

            padded = sum(32 * triton.cdiv(s.slots_TK.shape[1], 32) for s in sources)
            hopper.backward_kernel[(here * blocks,)](
                *arguments, N=heads, BLOCKS=blocks, ATOMIC=not deterministic,
                SLOTS=max(256, triton.next_power_of_2(padded)), num_warps=8,
            )  # fmt: skip
        else:
            half = _half_width(width)
            portable.backward_kernel[(here, blocks)](
                *arguments, N=heads, H=width, P=half, HEADS=group,
                TILE=tile or (16 if q_TNH.dtype is torch.float32 else 32), NEAR=True,
                FAR=far_width > 0, BLOCKS=blocks, ATOMIC=not deterministic,
                DTYPE=_FLOATS[q_TNH.dtype], STAGES=stages, num_warps=warps or _warps(half * group),
            )  # fmt: skip
        if deterministic:
            for target, order, grad in zip(targets, orders, grads, strict=True):
                portable.sum_kernel[(len(grad),)](
                    target.grad, order.bounds, grad, WIDTH=wide, H=width, BLOCKS=blocks, TILE=8,
                    num_warps=4,
                )  # fmt: skip
    return grad_q, grads, delta


class _Order(NamedTuple):
    """Where each slot's part goes so that a row's parts lie together, and where they begin."""

    place_TK: Tensor
    bounds: Tensor


def _order(source: Rows, queries: slice) -> _Order:
    slots = source.slots_TK[queries]
    by_row, order = slots.reshape(-1).sort(stable=True)
    place = torch.empty(order.shape, dtype=torch.int32, device=order.device)
    place[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    rows = torch.arange(len(source.rows_RH) + 1, dtype=by_row.dtype, device=order.device)
    return _Order(place.view(slots.shape), torch.searchsorted(by_row, rows, out_int32=True))


class _Target(NamedTuple):
    """Where a source's gradient goes, and the place of each slot in it."""

    grad: Tensor
    place_TK: Tensor


def _backward_source(source: Rows, target: _Target) -> tuple:
    rows, slots = source
    return rows, slots, target.place_TK, target.grad, rows.stride(0), slots.stride(0)


def _sources(
    near: Tensor, near_slots: Tensor, far: Tensor | None, far_slots: Tensor | None
) -> tuple[Rows, ...]:
    """As the kernels take them: no strides in the last dimension."""
    held = [Rows(near, near_slots)] + ([Rows(far, far_slots)] if far is not None else [])
    return tuple(Rows(_contiguous(s.rows_RH), _contiguous(s.slots_TK)) for s in held)


def _held(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Sources that hold anything."""
    return tuple(
        s
        for s in sources
        if s.slots_TK.shape[1] and (s.rows_RH if isinstance(s, Rows) else s.raw_RB).shape[0]
    )


def _plain(source: Source, dtype: torch.dtype) -> Rows:
    """Packed rows that some query names as values, each dequantised once."""
    if isinstance(source, Rows):
        return source
    filled = source.slots_TK >= 0
    named = torch.zeros(len(source.raw_RB), dtype=torch.bool, device=filled.device)
    named[source.slots_TK[filled].long()] = True
    number = named.cumsum(0, dtype=torch.int32) - 1
    slots = torch.where(filled, number[source.slots_TK.clamp_min(0).long()], -1)
    return Rows(unpack_rows(source.raw_RB[named], source.format, dtype), slots)


def _contiguous(x: Tensor) -> Tensor:
    """``x`` with neighbours in its last dimension side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _unaligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 != 0 or any(stride % 16 for stride in x.stride()[:-1])


def _half_width(width: int) -> int:
    return max(16, triton.next_power_of_2(width) // 2)


def _head_group(q_TNH: Tensor) -> int:
    """Heads of one program; float32 has neither tensor cores nor room for many."""
    most = 16 if q_TNH.dtype is torch.float32 else 64
    return min(most, max(16, triton.next_power_of_2(q_TNH.shape[1])))


def _warps(values: int) -> int:
    """For an accumulator of twice so many values."""
    return 8 if values >= 32 * 256 else 4
