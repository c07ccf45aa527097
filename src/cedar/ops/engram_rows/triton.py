"""Look-up and dequantisation in one launch, bit for bit the reference.

A program takes one row: 264 bytes at the released width of 256, 512 bytes out in bfloat16. Bytes:
``n (264 + 512)``; 48 rows a token. Rows lie anywhere in a table of gigabytes: bound by latency at
decode, by memory (sectors of 32 bytes) beyond.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.engram_rows import reference as plain

__all__ = ["engram_rows", "unsupported"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _look_up(
    codes, scale, ids, out, code_stride, scale_stride, W: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    found = tl.load(ids + row).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    place = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = place < W
    code = tl.load(codes + found * code_stride + place, mask=inside, other=0)
    byte = tl.load(scale + found * scale_stride + block, mask=block < W // 32, other=0)
    byte = byte.to(tl.int32)
    # Byte 0 stands for 2^-127, the one scale that is no normal float32.
    factor = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    values = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, None]
    tl.store(out + row * W + place, values, mask=inside)


def unsupported(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if dtype not in _FLOATS:
        return f"rows in {dtype}"
    if codes.shape[1] % 32 or codes.stride(1) != 1 or scale.stride(1) != 1:
        return f"rows {codes.shape[1]} wide, or not contiguous"
    return None


def engram_rows(codes: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """`cedar.ops.engram_rows.EngramRows`; inputs it cannot take go to the reference."""
    if unsupported(codes, scale, dtype) is not None:
        return plain.engram_rows(codes, scale, ids, dtype)
    width = codes.shape[1]
    out = torch.empty((*ids.shape, width), dtype=dtype, device=codes.device)
    if ids.numel():
        _look_up[(ids.numel(),)](
            codes.view(torch.uint8), scale, ids.contiguous(), out, codes.stride(0),
            scale.stride(0), W=width, BLOCKS=triton.next_power_of_2(width // 32), num_warps=1,
        )  # fmt: skip
    return out
