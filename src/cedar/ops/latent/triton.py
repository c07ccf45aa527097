"""Norm, rotation and cast of rows, their packed bytes in the cache, several kinds in one launch.

A program takes about a thousand values of whole rows (heads of a query, window rows, entries, index
keys). Rotation and cast round bit for bit as the references do; a norm differs by the order of one
sum, which is the same whatever else is in the batch. Bytes: ``2 W`` values a row read and written
(a packed row instead where it is only stored, ``2 r`` values where rows are rotated in place).
Bound by the launch at decode, where it replaces three or four launches a job, by memory in prefill.
"""

# mypy: ignore-errors

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.cast.triton import KINDS, round_trip
from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write.triton import put_rows, row_places
from cedar.ops.kv_write.triton import unsupported as unsupported_write
from cedar.ops.latent import Append, InPlace
from cedar.ops.latent import reference as plain
from cedar.quant import BlockFormat

__all__ = ["latent", "latent_write", "latents", "rotate", "unsupported"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MOST = 4  # jobs of one launch
_VALUES = 1024  # of a program
_POINTERS = 8  # of a job


@triton.jit
def _job(
    x, out, weight, cos, sin, table, sequence, number, rows, part, eps, SHAPE: tl.constexpr
):  # fmt: skip
    """Some rows of one job. SHAPE: see `_shape`. They are packed if there is a ``number``."""
    W: tl.constexpr = SHAPE[0]
    PADDED: tl.constexpr = SHAPE[1]
    TURNED: tl.constexpr = SHAPE[2]
    HEADS: tl.constexpr = SHAPE[3]
    KIND: tl.constexpr = SHAPE[6]
    COLS: tl.constexpr = SHAPE[7]
    ROWS: tl.constexpr = SHAPE[12]
    PAIRS: tl.constexpr = PADDED // 2
    BLOCKS: tl.constexpr = PADDED // COLS
    row = part * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    channel = tl.arange(0, PADDED)[None, :]
    inside = (row < rows)[:, None] & (channel < W)
    place = (token.to(tl.int64) * SHAPE[4] + head * SHAPE[5] + SHAPE[13])[:, None] + channel
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(values * values, 1) / W + eps)
        # For every row, so that it comes in the layout of the values.
        w = tl.load(weight + row[:, None] * 0 + channel, mask=inside, other=0.0).to(tl.float32)
        values = (w * (values * scale[:, None])).to(x.dtype.element_ty).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (ROWS, PAIRS, 2)))
    pair = tl.arange(0, PAIRS)[None, :] - (W // 2 - TURNED)
    turned = (row < rows)[:, None] & (pair >= 0) & (pair < TURNED)
    angle = token.to(tl.int64)[:, None] * TURNED + pair
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    if SHAPE[8]:
        s = -s
    new_even = tl.where(turned, (even * c - odd * s).to(x.dtype.element_ty).to(tl.float32), even)
    new_odd = tl.where(turned, (even * s + odd * c).to(x.dtype.element_ty).to(tl.float32), odd)
    values = tl.reshape(tl.join(new_even, new_odd), (ROWS * BLOCKS, COLS))
    if number is not None:
        block_row = part * ROWS + tl.arange(0, ROWS * BLOCKS) // BLOCKS
        first, written = row_places(
            table, sequence, number, block_row, block_row < rows, SHAPE[11], SHAPE[9], SHAPE[10]
        )
        put_rows(values, out, first, written, W, BLOCKS, COLS, KIND)
    else:
        if KIND >= 0:
            values = round_trip(values, KIND)
        tl.store(out + place, tl.reshape(values, (ROWS, PADDED)), mask=inside)


@triton.jit
def _jobs(
    x0, out0, weight0, cos0, sin0, table0, sequence0, number0, rows0,
    x1, out1, weight1, cos1, sin1, table1, sequence1, number1, rows1,
    x2, out2, weight2, cos2, sin2, table2, sequence2, number2, rows2,
    x3, out3, weight3, cos3, sin3, table3, sequence3, number3, rows3,
    eps, COUNT: tl.constexpr, SHAPE0: tl.constexpr, SHAPE1: tl.constexpr, SHAPE2: tl.constexpr,
    SHAPE3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    part = tl.program_id(0)
    stop = tl.cdiv(rows0, SHAPE0[12])
    if part < stop:
        _job(
            x0, out0, weight0, cos0, sin0, table0, sequence0, number0, rows0, part, eps, SHAPE0
        )  # fmt: skip
    if COUNT > 1:
        begin1 = stop
        stop += tl.cdiv(rows1, SHAPE1[12])
        if (part >= begin1) & (part < stop):
            _job(
                x1, out1, weight1, cos1, sin1, table1, sequence1, number1, rows1, part - begin1,
                eps, SHAPE1,
            )  # fmt: skip
    if COUNT > 2:
        begin2 = stop
        stop += tl.cdiv(rows2, SHAPE2[12])
        if (part >= begin2) & (part < stop):
            _job(
                x2, out2, weight2, cos2, sin2, table2, sequence2, number2, rows2, part - begin2,
                eps, SHAPE2,
            )  # fmt: skip
    if COUNT > 3:  # noqa: SIM102 (one is decided when compiling)
        if part >= stop:
            _job(
                x3, out3, weight3, cos3, sin3, table3, sequence3, number3, rows3, part - stop,
                eps, SHAPE3,
            )  # fmt: skip


def unsupported(
    x: Tensor, weight: Tensor | None, rotary: tuple[Tensor, Tensor], fmt: BlockFormat | None
) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    width = x.shape[-1]
    if x.dtype not in _FLOATS:
        return f"values in {x.dtype}"
    if width % 2 or 2 * rotary[0].shape[-1] > width:
        return f"rows {width} wide with {rotary[0].shape[-1]} rotated pairs"
    if fmt is not None and (fmt.name not in KINDS or width % fmt.cols):
        return f"rows {width} wide in {fmt.name}"
    learned = (x,) if weight is None else (x, weight)
    if torch.is_grad_enabled() and any(v.requires_grad for v in learned):
        return "a gradient is wanted"
    return None


def latent(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    fmt: BlockFormat | None,
    inverse: bool = False,
) -> Tensor:
    """`cedar.ops.latent.Latent`; inputs it cannot take go to the reference."""
    if unsupported(x, weight, rotary, fmt) is not None:
        return plain.latent(x, weight, eps, rotary, fmt, inverse)
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _launch([_replacing(InPlace(x, weight, rotary, fmt, inverse), out)], eps)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """`cedar.ops.rope.Rotate` in one launch."""
    return latent(x, None, 0.0, (cos, sin), None, inverse)


def latent_write(
    write: RowWrite, weight: Tensor | None, eps: float, rotary: tuple[Tensor, Tensor]
) -> None:
    """`cedar.ops.latent.LatentWrite`; inputs it cannot take go to the reference."""
    latents((Append(write, weight, rotary),), eps)


def latents(jobs: tuple[InPlace | Append, ...], eps: float) -> None:
    """`cedar.ops.latent.Latents`; jobs the kernel cannot take go to the reference."""
    ours = []
    for job in jobs:
        if _obstacle(job) is not None:
            plain.latents((job,), eps)
        elif isinstance(job, Append):
            if len(job.write.values):
                ours.append(_appending(job))
        elif job.x.numel():
            ours.append(_replacing(job))
    for first in range(0, len(ours), _MOST):
        _launch(ours[first : first + _MOST], eps)


def _obstacle(job: InPlace | Append) -> str | None:
    if isinstance(job, Append):
        write = job.write
        return unsupported(write.values, job.weight, job.rotary, write.format) or unsupported_write(
            write
        )
    if _rows_of(job.x) is None:
        return "rows whose values are not contiguous"
    return unsupported(job.x, job.weight, job.rotary, job.format)


def _rows_of(x: Tensor) -> tuple[int, int, int] | None:
    """Heads of a token and the strides of tokens and heads of ``x [T, ..., W]``, if it has them."""
    if x.stride(-1) != 1:
        return None
    if x.dim() == 2:
        return 1, x.stride(0), 0
    inner = [(n, step) for n, step in zip(x.shape[1:-1], x.stride()[1:-1], strict=True) if n > 1]
    for (_, outer), (n, step) in pairwise(inner):
        if outer != n * step:
            return None
    return x[0, ..., 0].numel(), x.stride(0), inner[-1][1] if inner else 0


def _replacing(
    job: InPlace, out: Tensor | None = None
) -> tuple[list[Tensor | None], tuple[int, ...]]:
    x, width, turned = job.x, job.x.shape[-1], 2 * job.rotary[0].shape[-1]
    # In place, rows that are only rotated change in their last channels alone.
    passed = width - turned if out is None and job.weight is None and job.format is None else 0
    pointers = [x, x if out is None else out, job.weight, *_angles(job.rotary), None, None, None]
    return pointers, _shape(x, job.rotary, job.format, job.inverse, passed=passed)


def _appending(job: Append) -> tuple[list[Tensor | None], tuple[int, ...]]:
    write = job.write
    x = write.values if write.values.stride(1) == 1 else write.values.contiguous()
    pages = 0 if write.table is None else write.table.stride(0)
    pointers = [
        x, write.raw, job.weight, *_angles(job.rotary), write.table, write.sequence.contiguous(),
        write.number.contiguous(),
    ]  # fmt: skip
    place = (*write.raw.shape[1:], pages)
    return pointers, _shape(x, job.rotary, write.format, False, place)


def _angles(rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rotary[0].contiguous(), rotary[1].contiguous()


def _shape(
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    fmt: BlockFormat | None,
    inverse: bool,
    place: tuple[int, int, int] = (0, 0, 0),
    passed: int = 0,
) -> tuple[int, ...]:
    """What a kernel is compiled for.

    W, W padded, rotated pairs, heads, strides of tokens and heads, kind and width of a block,
    whether it rotates back; rows and bytes of a place, pages of a table; rows of a program;
    channels that are passed over (W counts the others).
    """
    width, cols = x.shape[-1] - passed, 16 if fmt is None else fmt.cols
    padded = max(triton.next_power_of_2(width), cols)
    return (
        width, padded, rotary[0].shape[-1], *_rows_of(x), -1 if fmt is None else KINDS[fmt.name],
        cols, int(inverse), *place, max(_VALUES // padded, 1), passed,
    )  # fmt: skip


def _launch(jobs: list[tuple[list[Tensor | None], tuple[int, ...]]], eps: float) -> None:
    arguments, shapes, programs = [], [], 0
    for pointers, shape in jobs:
        x = pointers[0]
        rows = x.shape[0] * shape[3]
        programs += -(-rows // shape[12])
        arguments += [*pointers, rows]
        shapes.append(shape)
    missing = _MOST - len(jobs)
    shapes += shapes[:1] * missing
    _jobs[(programs,)](
        *arguments, *[None] * ((_POINTERS + 1) * missing), eps, COUNT=len(jobs), SHAPE0=shapes[0],
        SHAPE1=shapes[1], SHAPE2=shapes[2], SHAPE3=shapes[3], num_warps=4, enable_fp_fusion=False,
        **dependent(x.device, programs),
    )  # fmt: skip
