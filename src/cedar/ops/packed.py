"""Rows as the packed cache holds them: codes, then scales, one row after the other.

A row of ``n`` values has ``n`` bytes (E4M3) or ``n / 2`` (E2M1, the even element in the low
nibble), then one scale byte per ``format.cols`` values. At the released sizes: a global entry
256 + 32 = 288 bytes, a window row 512 + 16 = 528, an index key 64 + 4 = 68.
"""

import torch
from torch import Tensor

from cedar.quant import BlockFormat, Element, QuantTensor, Scale, quantize

__all__ = ["pack_rows", "page_rows", "row_width", "unpack_rows"]


def row_width(row_bytes: int, fmt: BlockFormat) -> int:
    """Values in a row of ``row_bytes`` bytes. ValueError if no row of ``fmt`` is that long."""
    per_scale = fmt.cols if fmt.element is Element.E4M3 else fmt.cols // 2
    blocks, rest = divmod(row_bytes, per_scale + 1)
    if rest or blocks == 0:
        raise ValueError(
            f"{row_bytes} bytes are no row of {fmt.name}; expected a multiple of {per_scale + 1}"
        )
    return blocks * fmt.cols


def page_rows(table: Tensor, sequence: Tensor | int, number: Tensor, per_page: int) -> Tensor:
    """Rows of a storage, its pages one after the other, that hold these numbers of a sequence.

    table: pages of each sequence, in order, ``[sequences, pages]``; sequence broadcasts against
    number, which is not negative. int64, whatever the table holds.
    """
    return table[sequence, number // per_page].long() * per_page + number % per_page


def pack_rows(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Rows ``uint8 [..., bytes]`` of values ``[..., n]``."""
    q = quantize(x, fmt)
    return torch.cat((q.codes.view(torch.uint8), q.scale.view(torch.uint8)), dim=-1)


def unpack_rows(raw: Tensor, fmt: BlockFormat, dtype: torch.dtype) -> Tensor:
    """Values ``[..., n]`` of rows ``uint8 [..., bytes]``; exact in bfloat16 and wider."""
    width = row_width(raw.shape[-1], fmt)
    stop = width if fmt.element is Element.E4M3 else width // 2
    codes, scale = raw[..., :stop].contiguous(), raw[..., stop:].contiguous()
    if fmt.element is Element.E4M3:
        codes = codes.view(torch.float8_e4m3fn)
    if fmt.scale is Scale.E4M3:
        scale = scale.view(torch.float8_e4m3fn)
    return QuantTensor(codes, scale, fmt).dequantize(dtype)
