"""A quantised tensor that knows its format."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.quant.format import BlockFormat, Element, Scale

__all__ = ["QuantTensor", "decode_e8m0", "from_blocks", "to_blocks"]

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e8m0(scale: Tensor) -> Tensor:
    """float32 factors of E8M0 bytes: ``2^(byte - 127)``."""
    byte = scale.to(torch.int32)
    # The byte is the exponent field of the float; 2^-127, byte 0, is the one denormal.
    return torch.where(byte == 0, 1 << 22, byte << 23).view(torch.float32)


def to_blocks(x: Tensor, fmt: BlockFormat) -> Tensor:
    """``x`` with every block in dimensions of its own, padded with zeros to whole blocks.

    ``[..., n / cols, cols]``; for two-dimensional blocks
    ``[..., m / rows, rows, n / cols, cols]``.
    """
    right, below = -x.shape[-1] % fmt.cols, -x.shape[-2] % fmt.rows if fmt.rows > 1 else 0
    if right or below:
        x = torch.nn.functional.pad(x, (0, right, 0, below) if below else (0, right))
    x = x.unflatten(-1, (-1, fmt.cols))
    return x.unflatten(-3, (-1, fmt.rows)) if fmt.rows > 1 else x


def from_blocks(blocks: Tensor, fmt: BlockFormat, shape: torch.Size) -> Tensor:
    """The inverse of `to_blocks`, cut to ``shape``."""
    x = blocks.flatten(-4, -3).flatten(-2) if fmt.rows > 1 else blocks.flatten(-2)
    if x.shape == shape:
        return x
    return x[..., : shape[-2], : shape[-1]] if fmt.rows > 1 else x[..., : shape[-1]]


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Codes, scales and the format that says how to read them.

    codes: ``float8_e4m3fn [..., n]``, or for E2M1 ``uint8 [..., n / 2]``.
    scale: ``uint8`` (E8M0 bytes) or ``float8_e4m3fn``, one per block.
    """

    codes: Tensor
    scale: Tensor
    format: BlockFormat

    @property
    def shape(self) -> torch.Size:
        """The shape of the values (not of the packed codes)."""
        if self.format.element is Element.E4M3:
            return self.codes.shape
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    @property
    def nbytes(self) -> int:
        """Bytes held, codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def factors(self) -> Tensor:
        """float32 factors, one per block."""
        if self.format.scale is Scale.E8M0:
            return decode_e8m0(self.scale)
        return self.scale.to(torch.float32)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``code x scale`` in float32, rounded once to ``dtype``."""
        if self.format.element is Element.E4M3:
            values = self.codes.to(torch.float32)
        else:
            values = _unpack(self.codes)
        factor = self.factors().unsqueeze(-1)
        if self.format.rows > 1:
            factor = factor.unsqueeze(-3)
        scaled = to_blocks(values, self.format) * factor
        return from_blocks(scaled, self.format, values.shape).to(dtype)


def _unpack(codes: Tensor) -> Tensor:
    """float32 values ``[..., n]`` of packed E2M1 codes ``[..., n / 2]``."""
    # Bytes may arrive as int8: shifting a signed byte would drag its sign along.
    raw = codes.view(torch.uint8)
    # Code 8 reads as 0, not as -0: nothing downstream can tell, and it is what the release does.
    values = (*_E2M1_VALUES, *(0.0 - v for v in _E2M1_VALUES))
    one = torch.tensor(values, dtype=torch.float32, device=codes.device)
    # Both values of a byte in one look-up: scans read millions of codes.
    pairs = torch.stack((one.repeat(16), one.repeat_interleave(16)), dim=-1)
    return torch.nn.functional.embedding(raw.to(torch.int32), pairs).flatten(-2)
