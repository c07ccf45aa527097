"""Checkpoints in the official layout: names, strict reading, loading, writing, checking."""

from cedar.checkpoint.check import CheckReport, Mismatch, check_directory, check_files
from cedar.checkpoint.load import fill
from cedar.checkpoint.names import (
    Entry,
    Kind,
    Part,
    Storage,
    TensorSpec,
    Weight,
    expected_tensors,
    parameter_map,
    weights,
)
from cedar.checkpoint.read import Checkpoint
from cedar.checkpoint.save import convert_checkpoint, save_checkpoint

__all__ = [
    "CheckReport",
    "Checkpoint",
    "Entry",
    "Kind",
    "Mismatch",
    "Part",
    "Storage",
    "TensorSpec",
    "Weight",
    "check_directory",
    "check_files",
    "convert_checkpoint",
    "expected_tensors",
    "fill",
    "parameter_map",
    "save_checkpoint",
    "weights",
]
