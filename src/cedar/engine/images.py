"""Images of a request: where their spans stand, and what the model needs of each."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cedar.inputs.images import ImageSettings, SpanType, expand_spans, preprocess, span_types

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ImageInput", "feature_rows", "image_types", "place_images"]


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image: its span begins at position ``start``.

    types: one a position, see `SpanType`; patches ``[P, 3, p, p]`` of ``grid`` rows and columns;
    digest: SHA-256 of the pixels, by which caches tell images apart.
    """

    start: int
    types: tuple[int, ...]
    patches: Tensor
    grid: tuple[int, int]
    digest: bytes

    @property
    def stop(self) -> int:
        """One past the last position of the span."""
        return self.start + len(self.types)


def place_images(
    tokens: Sequence[int],
    pictures: Sequence["Image.Image"],
    image_token_id: int,
    settings: ImageSettings,
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Replace every image token of a prompt by the span of the next picture.

    Raises `RequestError` if the prompt has not as many image tokens as there are pictures.
    """
    prepared = [preprocess(picture, settings) for picture in pictures]
    ids, _ = expand_spans(tokens, [plan for _, plan in prepared], image_token_id)
    images: list[ImageInput] = []
    grown = 0  # how much longer the text before is than in ``tokens``
    places = [i for i, token in enumerate(tokens) if token == image_token_id]
    for place, (patches, plan) in zip(places, prepared, strict=True):
        # Of what the tower sees: a palette's indices or an alpha channel would not say it all.
        seen = patches.contiguous().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(f"{plan.patch_grid} ".encode() + seen)
        types = tuple(int(kind) for kind in span_types(plan))
        start = place + grown
        images.append(ImageInput(start, types, patches, plan.patch_grid, digest.digest()))
        grown += len(types) - 1
    return ids, tuple(images)


def image_types(images: Sequence[ImageInput], start: int, stop: int) -> list[int]:
    """The type of every position in ``[start, stop)``, text included."""
    types = [int(SpanType.TEXT)] * (stop - start)
    for image in images:
        for position in range(max(start, image.start), min(stop, image.stop)):
            types[position - start] = image.types[position - image.start]
    return types


def feature_rows(image: ImageInput, features: Tensor, start: int, stop: int) -> Tensor:
    """Those of the image's features ``[n, D]`` that stand at positions ``[start, stop)``."""
    first = max(start - image.start, 0)
    last = max(min(stop, image.stop) - image.start, first)
    before = image.types[:first].count(SpanType.IMAGE)
    return features[before : before + image.types[first:last].count(SpanType.IMAGE)]
