"""What the encoder knows at one place of a text besides the pages: its windows and its history.

At a page boundary no group is unfinished, so pages, these windows and the newest n-gram classes are
all that the rest of a text depends on. They are taken while a pass stores its rows, at any places
that it goes through, however it is cut into chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RingCapture", "RingSnapshot"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingSnapshot:
    """Windows and history after the first ``position`` tokens of a text.

    rings_LRB: packed window rows of the encoder layers, oldest first: uint8 ``[L, ≤ window − 1,
    bytes]``, all that a later token can see. classes_R: the newest Engram classes, int64
    ``[≤ max_ngram − 1]``.
    """

    position: int
    rings_LRB: Tensor
    classes_R: Tensor

    @property
    def nbytes(self) -> int:
        """1.34 MB at the released size."""
        return self.rings_LRB.nbytes + self.classes_R.nbytes


class RingCapture:
    """Snapshots in the making: told of all rows of a pass before they go into the rings.

    positions: within the pass. rows, back: window rows and classes that are kept. oldest: the
    first position that the windows hold.
    """

    def __init__(self, positions: Sequence[int], *, rows: int, back: int, oldest: int) -> None:
        self._positions = sorted(positions)
        self._count, self._back, self._oldest = rows, back, oldest
        self._rows: list[Tensor] = []
        self._classes: Tensor | None = None

    def add_window(
        self, ring: Tensor, start: int, rows_TH: Tensor, pack: Callable[[Tensor], Tensor]
    ) -> None:
        """Of the next encoder layer: its ring, and new rows from position ``start`` on."""
        first = max(self._positions[0] - self._count, self._oldest)
        self._rows.append(self._span(ring, start, rows_TH, first, pack))

    def add_history(self, ring: Tensor, start: int, classes_T: Tensor) -> None:
        """The same for the classes."""
        first = max(self._positions[0] - self._back, 0)
        self._classes = self._span(ring, start, classes_T, first, lambda x: x)

    def _span(
        self,
        ring: Tensor,
        start: int,
        rows: Tensor,
        first: int,
        pack: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Positions from ``first`` to the last snapshot's, out of the ring and the new rows."""
        last = self._positions[-1]
        old = torch.arange(min(first, start), start, device=ring.device) % len(ring)
        return torch.cat((ring[old], pack(rows[max(first - start, 0) : last - start].detach())))

    def finish(self) -> dict[int, RingSnapshot]:
        """By position; called when the pass is through."""
        rings_LRB = torch.stack(self._rows)
        last = self._positions[-1]

        def part(rows: Tensor, at: int, count: int) -> Tensor:
            """Up to ``count`` rows before a position; a copy, so that the rest can go."""
            stop = rows.shape[-2] - (last - at)
            return rows[..., max(stop - count, 0) : stop, :].clone()

        classes = self._classes
        if classes is None:
            classes = torch.empty(0, dtype=torch.int64, device=rings_LRB.device)
        return {
            at: RingSnapshot(
                position=at,
                rings_LRB=part(rings_LRB, at, self._count),
                classes_R=part(classes.unsqueeze(1), at, self._back).squeeze(1),
            )
            for at in self._positions
        }
