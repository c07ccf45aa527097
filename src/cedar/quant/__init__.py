"""Number formats: block-scaled FP8 and FP4, exactly as the released files hold them."""

from cedar.quant.cast import fake_quantize, quantize
from cedar.quant.format import (
    FP4_MAIN,
    FP4_ROW,
    FP8_BLOCK,
    FP8_ROW,
    BlockFormat,
    Element,
    Scale,
)
from cedar.quant.tensor import QuantTensor

__all__ = [
    "FP4_MAIN",
    "FP4_ROW",
    "FP8_BLOCK",
    "FP8_ROW",
    "BlockFormat",
    "Element",
    "QuantTensor",
    "Scale",
    "fake_quantize",
    "quantize",
]
