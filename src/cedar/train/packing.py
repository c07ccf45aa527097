"""Cutting documents into sequences and packing sequences into forward passes.

Both are pure functions of lengths; the tokens themselves are not touched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_best_fit", "split_documents"]

MAX_OPEN = 64


def split_documents(
    offsets: NDArray[np.int64], documents: NDArray[np.int64], seq_len: int
) -> NDArray[np.int64]:
    """Cut documents into pieces of at most `seq_len` tokens.

    Neighbouring pieces overlap by one token, so that every token of a document but its first is
    the target of exactly one position: losses per byte need that.

    Args:
        offsets: [all documents + 1] token offsets.
        documents: which documents to cut.
        seq_len: at least 2.

    Returns:
        [pieces, 2] start offset and length (2 or more) of each piece.
    """
    pieces: list[tuple[int, int]] = []
    for document in documents.tolist():
        start, end = int(offsets[document]), int(offsets[document + 1])
        for piece in range(start, end - 1, seq_len - 1):
            pieces.append((piece, min(seq_len, end - piece)))
    return np.array(pieces, dtype=np.int64).reshape(-1, 2)


def pack_best_fit(
    lengths: Sequence[int], capacity: int, max_open: int = MAX_OPEN
) -> list[list[int]]:
    """Put pieces, in the order given, into bins of `capacity`; each into the fullest that fits.

    At most `max_open` bins stay open, so a bin holds pieces that were near each other in the
    (shuffled) order and not, as in a global packing, only long or only short ones.

    Returns:
        The indices of the pieces of each bin; a last bin that is less than half full is dropped
        unless it is the only one.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), ascending, the open bins
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"piece {index} has {length} tokens, more than {capacity}")
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, number = room.pop(place)
        else:
            if len(room) == max_open:
                room.pop(0)
            left, number = capacity, len(bins)
            bins.append([])
        bins[number].append(index)
        if left > length:
            insort(room, (left - length, number))
    if len(bins) > 1:
        half_empty = {number for left, number in room if left * 2 > capacity}
        return [b for number, b in enumerate(bins) if number not in half_empty] or bins
    return bins
