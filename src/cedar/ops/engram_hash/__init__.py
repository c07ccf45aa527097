"""engram_hash: table rows of a token's n-grams (section 7).

Letters: ``n`` the longest n-gram, ``U`` heads, ``L`` Engram layers.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["EngramHash", "EngramIds", "History"]


class EngramHash(Protocol):
    """``engram_hash(lookback [T, n], multipliers [n], ...) -> [T, (n-1)·U]``, all int64.

    ``primes [n-1, U]`` and ``offsets [(n-1)·U]`` belong to one layer with ``U`` heads.

    ``lookback[t, k]`` is the class of the token ``k`` places back (the pad class where there is
    none); for every order 2..n and head: xor of products, modulo the head's prime, plus its
    offset. Column ``(order - 2) · U + head``. Bytes: ``8 T (n + (n-1) U)``.
    """

    def __call__(
        self, lookback_TN: Tensor, multipliers_N: Tensor, primes: Tensor, offsets: Tensor
    ) -> Tensor: ...


class History(NamedTuple):
    """Engram classes of new tokens and the rings that hold those of the tokens before them.

    classes: int64 ``[T]``, -1 on image-span tokens. ring: int64 ``[slots, R]``, the class of a
    sequence's position ``p`` at place ``p % R``. slot, position: int32 or int64 ``[T]``; a negative
    slot is padding (all its classes are the pad class). Tokens of one sequence stand side by side,
    positions ascending, and there are at most ``R - n + 1`` of them, so that no place that is read
    is written.
    """

    classes: Tensor
    ring: Tensor
    slot: Tensor
    position: Tensor


class EngramIds(Protocol):
    """``engram_ids(history, multipliers [L, n], primes [L, n-1, U], offsets [L, (n-1)·U], pad)``.

    Table rows int64 ``[L, T, (n-1)·U]`` of all Engram layers at decode, as `EngramHash` gives them
    for the look-back that the rings and the new tokens make: it stops at the start of the sequence
    and at the first -1; that place and everything further back is the class ``pad``. The new
    classes are put into the rings. Bytes: ``8 T (n + L (n-1) U)``.
    """

    def __call__(
        self, history: History, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int
    ) -> Tensor: ...
