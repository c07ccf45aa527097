"""engram_hash: table rows of a token's n-grams (section 7)."""

from typing import Protocol

from torch import Tensor

__all__ = ["EngramHash"]


class EngramHash(Protocol):
    """``engram_hash(lookback [T, n], multipliers [n], ...) -> [T, (n-1)·U]``, all int64.

    ``primes [n-1, U]`` and ``offsets [(n-1)·U]`` belong to one layer with ``U`` heads.

    ``lookback[t, k]`` is the class of the token ``k`` places back (the pad class where there is
    none); for every order 2..n and head: xor of products, modulo the head's prime, plus its
    offset. Column ``(order - 2) · U + head``.
    """

    def __call__(
        self, lookback_TN: Tensor, multipliers_N: Tensor, primes: Tensor, offsets: Tensor
    ) -> Tensor: ...
