"""Images of a request: where their spans stand, and what the model needs of each."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cedar.errors import RequestError
from cedar.inputs.images import (
    GridPlan,
    ImageSettings,
    SpanType,
    expand_spans,
    preprocess,
    span_types,
)

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ImageInput", "check_images", "feature_rows", "image_types", "place_images"]

_REMEDY = "Make spans and patches with cedar.engine.images.place_images."


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


def check_images(
    tokens: Sequence[int],
    images: Sequence[ImageInput],
    image_token_id: int | None,
    settings: ImageSettings | None,
) -> tuple[ImageInput, ...]:
    """The images of a prompt, if the model can run them where they stand.

    tokens: the prompt, spans included. image_token_id, settings: of the model; None without a
    vision tower, and then an image is refused. With a tower the id stands in spans and nowhere
    else. Raises `RequestError` that names image, found and expected, so that no pass has to be
    refused later, when others are in it.
    """
    foreign = next((each for each in images if not isinstance(each, ImageInput)), None)
    if foreign is not None:
        raise RequestError(
            f"images holds a {type(foreign).__name__}; expected ImageInput. {_REMEDY}"
        )
    if image_token_id is None or settings is None:
        if images:
            raise RequestError(
                f"{len(images)} images came with the prompt, but this model has no vision tower "
                "(vision_n_layers is 0). Send text only."
            )
        return ()
    end = 0
    for number, image in enumerate(images):
        name = f"images[{number}]"
        _check_types(name, image, settings)
        _check_patches(name, image, settings.patch_size)
        _check_place(name, image, end, tokens, image_token_id)
        end = image.stop
    if tokens.count(image_token_id) != sum(len(image.types) for image in images):
        types = image_types(images, 0, len(tokens))
        stray = next(
            place
            for place, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if token == image_token_id and kind == SpanType.TEXT
        )
        raise RequestError(
            f"prompt token {stray} is {image_token_id}, the image token, but stands in none of "
            f"the {len(images)} images' spans; expected one image for each. {_REMEDY}"
        )
    return tuple(images)


def _check_types(name: str, image: ImageInput, settings: ImageSettings) -> None:
    """The span's types are those of the grid, and not too many."""
    if len(image.grid) != 2 or min(image.grid) < 1:
        raise RequestError(
            f"{name}: grid is {image.grid!r}; expected rows and columns of patches, 1 or more each."
        )
    patch_rows, patch_cols = image.grid
    plan = GridPlan(
        canvas_width=patch_cols * settings.patch_size,
        canvas_height=patch_rows * settings.patch_size,
        patch_rows=patch_rows,
        patch_cols=patch_cols,
        rows=-(-patch_rows // settings.downsample_ratio),
        cols=-(-patch_cols // settings.downsample_ratio),
    )
    if plan.num_tokens > settings.max_n_token:
        raise RequestError(
            f"{name}: a grid of {patch_rows} x {patch_cols} patches takes {plan.num_tokens} "
            f"positions; allowed are {settings.max_n_token} (vision_max_n_token). Scale it down."
        )
    if list(image.types) != span_types(plan):
        raise RequestError(
            f"{name}: types has {len(image.types)} positions, {image.types.count(SpanType.IMAGE)} "
            f"of them IMAGE; expected START, then {plan.rows} rows of {plan.cols} IMAGE and a "
            f"NEWLINE, then END, for a grid of {patch_rows} x {patch_cols} patches. {_REMEDY}"
        )


def _check_patches(name: str, image: ImageInput, side: int) -> None:
    """Finite pixels of the shape that the grid says."""
    shape = [image.grid[0] * image.grid[1], 3, side, side]
    found = list(image.patches.shape)
    if found != shape or not image.patches.is_floating_point():
        raise RequestError(
            f"{name}: patches are {image.patches.dtype} of shape {found}; expected floating point "
            f"of shape {shape} for a grid of {image.grid[0]} x {image.grid[1]}. {_REMEDY}"
        )
    # In float32: what overflows there would be infinite in the model, too.
    if not bool(image.patches.to(torch.float32).isfinite().all()):
        raise RequestError(f"{name}: patches hold NaN or infinity; expected finite pixels.")


def _check_place(
    name: str, image: ImageInput, end: int, tokens: Sequence[int], image_token_id: int
) -> None:
    """The span lies in the prompt behind the one before, and its tokens are image tokens."""
    where = f"{name}: its span is positions {image.start} to {image.stop - 1}"
    if image.start < 0 or image.stop > len(tokens):
        raise RequestError(
            f"{where}; expected a part of the prompt, which is 0 to {len(tokens) - 1}. {_REMEDY}"
        )
    if image.start < end:
        raise RequestError(
            f"{where}, but the image before ends at {end - 1}; expected images in the order of the "
            "prompt, without overlap."
        )
    for place in range(image.start, image.stop):
        if tokens[place] != image_token_id:
            raise RequestError(
                f"{where}, but prompt token {place} is {tokens[place]}; expected {image_token_id}, "
                f"the image token, in all of them. {_REMEDY}"
            )
