"""Helpers for tests: small random models, comparisons, the check of the shape letters.

Shipped, so that whoever builds on Cedar can test with them; nothing else in Cedar imports them.
"""

from cedar.testing.compare import (
    TOLERANCES,
    Tolerance,
    assert_bitwise,
    assert_close,
    assert_unbiased,
    same_bits,
    worst,
)
from cedar.testing.shapes import ShapeReport, check_shapes
from cedar.testing.tiny import random_tokens, randomise, tiny_config, tiny_model, token_map

__all__ = [
    "TOLERANCES",
    "ShapeReport",
    "Tolerance",
    "assert_bitwise",
    "assert_close",
    "assert_unbiased",
    "check_shapes",
    "random_tokens",
    "randomise",
    "same_bits",
    "tiny_config",
    "tiny_model",
    "token_map",
    "worst",
]
