"""Engram tables outside of the model: rows by number, from where they lie."""

from cedar.memory.mmap import MappedTable, RowReader
from cedar.memory.pinned import PinnedTable, SliceReader

__all__ = ["MappedTable", "PinnedTable", "RowReader", "SliceReader"]
