"""The input of a forward pass: packed tokens of several sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Tokens of several sequences, one after the other, without padding.

    tokens_T: int64 ``[T]``.
    lengths: new tokens of each sequence; they sum to ``T``.
    slots: where each sequence lives in the store (its row; any number without a store).
    image_types_T: None, or int64 ``[T]``: −1 text, 0 span start, 1 image, 2 row end, 3 span end.
    images: patches ``[P, 3, p, p]`` of each image, in the order of their spans.
    image_grids: patch rows and columns of each image.
    features_ID: None, or ready image tokens in the order of the batch, instead of ``images``
        (a batch that begins or ends inside a span needs it).
    """

    tokens_T: Tensor
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    image_types_T: Tensor | None = None
    images: tuple[Tensor, ...] = ()
    image_grids: tuple[tuple[int, int], ...] = ()
    features_ID: Tensor | None = None

    def __post_init__(self) -> None:
        if sum(self.lengths) != self.tokens_T.shape[0] or min(self.lengths, default=1) < 1:
            raise ValueError(
                f"a batch of {self.tokens_T.shape[0]} tokens cannot have lengths {self.lengths}"
            )
        if len(self.slots) != len(self.lengths) or len(set(self.slots)) != len(self.slots):
            raise ValueError(f"{len(self.lengths)} sequences need as many slots: {self.slots}")
        if len(self.images) != len(self.image_grids):
            raise ValueError(f"{len(self.images)} images with {len(self.image_grids)} grids")

    @classmethod
    def pack(
        cls,
        sequences: Sequence[Sequence[int]],
        *,
        device: torch.device | str | None = None,
        slots: Sequence[int] | None = None,
        image_types: Sequence[Sequence[int]] | None = None,
        images: Sequence[Tensor] = (),
        image_grids: Sequence[tuple[int, int]] = (),
        features: Tensor | None = None,
    ) -> "Batch":
        """Pack token lists; ``image_types`` has the same shape."""

        def packed(lists: Sequence[Sequence[int]]) -> Tensor:
            flat = [value for one in lists for value in one]
            return torch.tensor(flat, dtype=torch.int64, device=device)

        return cls(
            tokens_T=packed(sequences),
            lengths=tuple(len(one) for one in sequences),
            slots=tuple(range(len(sequences))) if slots is None else tuple(slots),
            image_types_T=None if image_types is None else packed(image_types),
            images=tuple(images),
            image_grids=tuple(image_grids),
            features_ID=features,
        )

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First and one-past-last packed row of every sequence."""
        stops = [0]
        for length in self.lengths:
            stops.append(stops[-1] + length)
        return tuple(pairwise(stops))
