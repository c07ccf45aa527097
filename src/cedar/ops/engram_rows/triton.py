"""Look-up and dequantisation in one launch, bit for bit the reference.

A program takes some rows at a time: 264 bytes each at the released width of 256, 512 bytes out in
bfloat16. Bytes: ``n (264 + 512)``; 24 rows a token and layer. Rows lie anywhere in a table of
gigabytes: bound by latency at decode, by memory (sectors of 32 bytes) beyond.

The table may lie in page-locked host memory, which the device reads over the bus. Then few programs
take turns with many rows in flight: enough to fill the bus, and most of the device stays free for
what runs beside them.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.engram_rows import reference as plain

__all__ = ["engram_rows", "unsupported"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_ROWS = 4  # of a program at a time
_HOST_ROWS = 8
_HOST_PROGRAMS = 64


@triton.jit
def _look_up(
    codes, scale, ids, out, count, turns, programs,
    CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    for turn in range(turns):
        row = (turn * programs + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        live = row < count
        found = tl.load(ids + row, mask=live, other=0).to(tl.int64)
        channel = tl.arange(0, PADDED)[None, :]
        inside = live[:, None] & (channel < W)
        code = tl.load(codes + found[:, None] * CODE_STRIDE + channel, mask=inside, other=0)
        place = scale + found[:, None] * SCALE_STRIDE + channel // 32
        byte = tl.load(place, mask=inside, other=0).to(tl.int32)
        # Byte 0 stands for 2^-127, the one scale that is no normal float32.
        factor = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
        values = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor
        tl.store(out + row.to(tl.int64)[:, None] * W + channel, values, mask=inside)


def unsupported(codes: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if dtype not in _FLOATS:
        return f"rows in {dtype}"
    if codes.shape[1] % 32 or codes.stride(1) != 1 or scale.stride(1) != 1:
        return f"rows {codes.shape[1]} wide, or not contiguous"
    if codes.device != ids.device and not codes.is_pinned():
        return "a table that the device of the ids cannot read"
    return None


def engram_rows(codes: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """`cedar.ops.engram_rows.EngramRows`; inputs it cannot take go to the reference."""
    if unsupported(codes, scale, ids, dtype) is not None:
        return plain.engram_rows(codes, scale, ids, dtype)
    width, count = codes.shape[1], ids.numel()
    out = torch.empty((*ids.shape, width), dtype=dtype, device=ids.device)
    if count:
        away = codes.device != ids.device
        rows = _HOST_ROWS if away else _ROWS
        parts = triton.cdiv(count, rows)
        programs = min(parts, _HOST_PROGRAMS) if away else parts
        _look_up[(programs,)](
            codes.view(torch.uint8), scale, ids.contiguous(), out, count,
            triton.cdiv(parts, programs), programs, CODE_STRIDE=codes.stride(0),
            SCALE_STRIDE=scale.stride(0), W=width, PADDED=triton.next_power_of_2(width), ROWS=rows,
            num_warps=4, **dependent(ids.device, programs),
        )  # fmt: skip
    return out
