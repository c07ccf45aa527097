"""The plain PyTorch cast is the definition in `cedar.quant`."""

from cedar.quant import fake_quantize as cast

__all__ = ["cast"]
