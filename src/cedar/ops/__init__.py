"""Operations: each a folder with a signature, its shapes and a plain PyTorch reference."""

from cedar.ops.backend import OpChoice, Ops, select_ops, with_operations
from cedar.ops.precision import widen

__all__ = ["OpChoice", "Ops", "select_ops", "widen", "with_operations"]
