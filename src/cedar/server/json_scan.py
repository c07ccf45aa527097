"""A look at JSON bytes before any parser sees them: encoding, depth and number of values.

Parsers recurse, and what they make of a byte may take dozens of bytes of memory, so both are
bounded here by one linear pass that keeps no text.
"""

import codecs
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cedar.server.errors import ApiError

__all__ = ["JsonScanner"]

_BLOCK = 1 << 16
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


class JsonScanner:
    """Reads a document piece by piece; `ApiError` 400 at the first piece that breaks a limit.

    depth: of nested arrays and objects. values: of all of them with their members, counted by the
    brackets that open and by commas. Up to its first mistake a document is read as parsers read
    it; what comes after that no parser reads.
    """

    def __init__(self, *, depth: int, values: int) -> None:
        self._most_depth, self._most_values = depth, values
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._step: NDArray[np.int8] = np.zeros(256, np.int8)
        self._step[list(b"[{")], self._step[list(b"]}")] = 1, -1
        self._begins: NDArray[np.bool_] = np.zeros(256, np.bool_)
        self._begins[list(b"[{,")] = True
        self._matters: NDArray[np.bool_] = self._begins | (self._step != 0)
        self._matters[[_QUOTE, _BACKSLASH]] = True
        self._depth = self._values = self._bytes = 0
        self._inside = False  # of a string
        self._escaped = False  # the next byte, by a backslash before it

    def feed(self, piece: bytes) -> None:
        """The next bytes, of any number."""
        for start in range(0, len(piece), _BLOCK):
            block = piece[start : start + _BLOCK]
            self._decode(block, final=False)
            self._scan(np.frombuffer(block, np.uint8))
            self._bytes += len(block)

    def finish(self) -> None:
        """There are no more bytes."""
        self._decode(b"", final=True)

    def _decode(self, block: bytes, *, final: bool) -> None:
        try:
            self._decoder.decode(block, final)
        except UnicodeDecodeError:
            raise ApiError(
                400,
                f"The body is not valid UTF-8, after byte {self._bytes}. Encode it as UTF-8.",
                code="invalid_utf8",
            ) from None

    def _scan(self, bytes_: NDArray[np.uint8]) -> None:
        if not self._matters[bytes_].any():  # most of a picture
            self._escaped = False
            return
        quotes = bytes_ == _QUOTE
        slashes = bytes_ == _BACKSLASH
        if self._escaped or slashes.any():
            quotes &= ~self._escaped_places(slashes)
        inside = ((np.cumsum(quotes, dtype=np.int32) + self._inside) & 1) == 1
        self._inside = bool(inside[-1])
        outside = ~inside
        self._values += int(np.count_nonzero(self._begins[bytes_] & outside))
        depths = np.cumsum(self._step[bytes_] * outside, dtype=np.int64) + self._depth
        self._depth = int(depths[-1])
        if depths.max() > self._most_depth:
            self._refuse(f"nested more than {self._most_depth} levels deep", "too_deep")
        if self._values > self._most_values:
            self._refuse(f"made of more than {self._most_values} values", "too_many_values")

    def _escaped_places(self, slashes: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Where an odd number of backslashes comes directly before; carries over to the next."""
        places = np.arange(1, len(slashes) + 1)
        last_other = np.maximum.accumulate(np.where(slashes, 0, places))
        # Length of the run of backslashes that ends here; one that has come in counts as one.
        runs = places - last_other + np.where(last_other == 0, int(self._escaped), 0)
        odd = (runs & 1) == 1
        before = np.concatenate(([self._escaped], odd[:-1]))
        self._escaped = bool(odd[-1])
        return before

    def _refuse(self, what: str, code: str) -> NoReturn:
        raise ApiError(400, f"The JSON body is {what}.", code=code)
