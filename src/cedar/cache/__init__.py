"""Caches: what a sequence leaves behind for its next token."""

from cedar.cache.dense import DenseKV, Mark

__all__ = ["DenseKV", "Mark"]
