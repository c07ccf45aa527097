"""A quantised tensor that knows its format."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.quant.format import BlockFormat, Element, Scale

__all__ = ["QuantTensor", "block_scales", "decode_e8m0", "expand_scales"]

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e8m0(scale: Tensor) -> Tensor:
    """float32 factors of E8M0 bytes: ``2^(byte - 127)``."""
    return torch.ldexp(
        torch.ones(scale.shape, dtype=torch.float32, device=scale.device),
        scale.to(torch.int32) - 127,
    )


def block_scales(x: Tensor, fmt: BlockFormat) -> Tensor:
    """The maximum of every block of ``x``: ``[..., ceil(m / rows), ceil(n / cols)]``.

    Blocks at the right and lower edge may be incomplete. For one-row formats the last dimension
    alone is reduced.
    """
    n = x.shape[-1]
    if n % fmt.cols:
        x = torch.nn.functional.pad(x, (0, -n % fmt.cols))
    x = x.unflatten(-1, (-1, fmt.cols)).amax(-1)
    if fmt.rows == 1:
        return x
    m = x.shape[-2]
    if m % fmt.rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, -m % fmt.rows))
    return x.unflatten(-2, (-1, fmt.rows)).amax(-2)


def expand_scales(scale: Tensor, fmt: BlockFormat, shape: torch.Size) -> Tensor:
    """Repeat block factors so that they cover a tensor of ``shape``."""
    full = scale.repeat_interleave(fmt.cols, dim=-1)[..., : shape[-1]]
    if fmt.rows > 1:
        full = full.repeat_interleave(fmt.rows, dim=-2)[..., : shape[-2], :]
    return full


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
        return (values * expand_scales(self.factors(), self.format, values.shape)).to(dtype)


def _unpack(codes: Tensor) -> Tensor:
    """float32 values ``[..., n]`` of packed E2M1 codes ``[..., n / 2]``."""
    # Bytes may arrive as int8: shifting a signed byte would drag its sign along.
    raw = codes.view(torch.uint8)
    nibbles = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    # Code 8 reads as 0, not as -0: nothing downstream can tell, and it is what the release does.
    values = (*_E2M1_VALUES, *(0.0 - v for v in _E2M1_VALUES))
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[nibbles.to(torch.int64)]
