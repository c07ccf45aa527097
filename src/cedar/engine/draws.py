"""Random numbers that are a pure function of who draws and where.

A draw depends on the request's seed, on which of its ``n`` texts it is for, on the position of the
token and on its purpose, and on nothing else: not on what ran beside it, on how often it was
preempted, or on how many tokens were drafted. Every process that holds the seed draws the same.
"""

import hashlib
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Purpose", "uniforms"]


class Purpose(StrEnum):
    """What a draw is for. Draws for different purposes are independent."""

    TOKEN = "token"
    VERIFY = "verify"


def uniforms(
    seed: int, sample: int, position: int, count: int, purpose: Purpose = Purpose.TOKEN
) -> NDArray[np.float64]:
    """``count`` uniform numbers in the open interval (0, 1), float64.

    The first numbers do not depend on ``count``. sample: which of the request's texts; position:
    number of the token in its text.
    """
    key = hashlib.sha256(f"cedar/{purpose}/{seed}/{sample}/{position}".encode()).digest()
    # Raw Philox output is fixed by its definition, unlike the distributions built on it.
    generator = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    # 52 bits, not 53: with the half added the largest value would otherwise round to 1.
    bits: NDArray[np.uint64] = generator.random_raw(count) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
