"""window: where the rows of a query's sliding window lie in the rings of a cache (section 3)."""

from typing import Protocol

from torch import Tensor

__all__ = ["WindowPlaces"]


class WindowPlaces(Protocol):
    """``window_places(slot [T], position [T], start [T], window W, ring R) -> int32 [T, W]``.

    Column ``k`` is the row of the token ``k`` places back, ``slot R + (position - k) % R`` of all
    rings one after the other, or -1 where that token is before ``start``, the first position whose
    row the sequence has. A negative slot is padding and sees nothing. int32 or int64 inputs.
    Bytes: ``4 T W``.
    """

    def __call__(
        self, slot_T: Tensor, position_T: Tensor, start_T: Tensor, window: int, ring: int
    ) -> Tensor: ...
