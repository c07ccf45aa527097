"""Engram tables outside of the model: rows by number, from where they lie."""

from cedar.memory.mmap import MappedTable, RowReader

__all__ = ["MappedTable", "RowReader"]
