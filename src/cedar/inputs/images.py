"""Images to patches, and the place that an image takes in a text.

An image is planned (which canvas, how many tokens), resized onto its canvas and cut into patches.
In the text it is a span: start, then the tokens of each row followed by a row end, then end. All
positions of a span carry the image token's id; their types tell them apart.

Decoding and resizing need Pillow (``pip install 'cedar-lm[images]'``); planning does not.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.errors import BackendUnavailable, CedarError, ConfigError, RequestError
from cedar.inputs.picture_bytes import lean, sniff

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "GridPlan",
    "ImageSettings",
    "SpanType",
    "expand_spans",
    "open_image",
    "plan_grid",
    "preprocess",
    "span_types",
]

# What a service should accept from strangers. The longest canvas of the released settings has
# 1.8 million pixels, so nothing is gained by larger sources.
MAX_FILE_BYTES = 32 * 2**20
MAX_PIXELS = 64 * 10**6
MAX_SIDE = 65_535
# Formats whose decoders are widely used; Pillow's rare ones are a larger risk than they are worth.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

_GREY = (127, 127, 127)


class SpanType(IntEnum):
    """What a position is: text, or its part in an image span."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """The image part of a model configuration, without the ``vision_`` prefix.

    patch_size: side of a patch in pixels. downsample_ratio: patches per image token, each way.
    max_n_token: longest span, delimiters included. min_pixels: smaller images are enlarged.
    max_wh_ratio: wider images are narrowed to this width-to-height ratio; None for no limit.
    """

    patch_size: int = 14
    downsample_ratio: int = 3
    max_n_token: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        low = {"patch_size": 1, "downsample_ratio": 1, "max_n_token": 4, "min_pixels": 0}
        problems = [
            f"{name} is {getattr(self, name)}, expected at least {least}"
            for name, least in low.items()
            if getattr(self, name) < least
        ]
        if self.max_wh_ratio is not None and self.max_wh_ratio <= 0:
            problems.append(f"max_wh_ratio is {self.max_wh_ratio}, expected a positive number")
        if problems:
            raise ConfigError(f"image settings: {'; '.join(problems)}.")

    @classmethod
    def from_config(cls, config: ModelConfig) -> "ImageSettings":
        """The settings of a model. Raises ConfigError for a model without a vision tower."""
        if config.vision_n_layers == 0:
            raise ConfigError(
                "vision_n_layers is 0: this model has no vision tower and takes no images."
            )
        return cls(
            patch_size=config.vision_patch_size,
            downsample_ratio=config.vision_downsample_ratio,
            max_n_token=config.vision_max_n_token,
            min_pixels=config.vision_min_pixels,
            max_wh_ratio=config.vision_max_wh_ratio,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPlan:
    """How an image is laid out.

    patch_rows x patch_cols patches on a canvas of canvas_height x canvas_width pixels become
    rows x cols image tokens. ``stretched``: the image fills the canvas instead of keeping its
    aspect (only where max_wh_ratio narrowed it).
    """

    canvas_width: int
    canvas_height: int
    patch_rows: int
    patch_cols: int
    rows: int
    cols: int
    stretched: bool = False

    @property
    def num_tokens(self) -> int:
        """Length of the span: ``rows * (cols + 1) + 2``."""
        return self.rows * (self.cols + 1) + 2

    @property
    def patch_grid(self) -> tuple[int, int]:
        """(patch rows, patch columns), as the vision tower wants them."""
        return self.patch_rows, self.patch_cols


def plan_grid(width: int, height: int, settings: ImageSettings) -> GridPlan:
    """The layout of an image of ``width`` x ``height`` pixels. Source: the released planner.

    Small images grow to min_pixels; sides round up to whole patches; if the span would exceed
    max_n_token, the image shrinks to the largest grid that keeps its aspect. Raises RequestError
    for an empty image.
    """
    if width < 1 or height < 1:
        raise RequestError(f"the image is {width} x {height} pixels; expected at least 1 x 1.")
    patch, limit = settings.patch_size, settings.max_n_token
    token = patch * settings.downsample_ratio
    stretched = False
    if settings.max_wh_ratio is not None and width > height * settings.max_wh_ratio:
        width, stretched = max(1, int(height * settings.max_wh_ratio)), True
    if width * height < settings.min_pixels:
        growth = math.sqrt(settings.min_pixels / (width * height))
        width, height = int(width * growth), int(height * growth)

    def on_canvas(canvas_width: int, canvas_height: int) -> GridPlan:
        patch_cols, patch_rows = canvas_width // patch, canvas_height // patch
        return GridPlan(
            canvas_width=canvas_width,
            canvas_height=canvas_height,
            patch_rows=patch_rows,
            patch_cols=patch_cols,
            rows=-(-patch_rows // settings.downsample_ratio),
            cols=-(-patch_cols // settings.downsample_ratio),
            stretched=stretched,
        )

    plan = on_canvas(-(-width // patch) * patch, -(-height // patch) * patch)
    if plan.num_tokens <= limit:
        return plan
    # rows * (cols + 1) + 2 = limit with rows = ratio * cols, solved for cols.
    ratio = height / width
    cols = math.sqrt((limit - 2) / ratio + 0.25) - 0.5
    rows = ratio * cols
    if cols < 1:
        return on_canvas(token, token * ((limit - 2) // 2))
    if rows < 1:
        return on_canvas(token * (limit - 3), token)
    # The order of these operations decides the last pixel; it is the released one.
    scale = min(math.floor(cols) * token / width, math.floor(rows) * token / height)
    # At least one patch: with a downsample_ratio of 1 the short side can round to none.
    return on_canvas(
        max(1, math.floor(width * scale / patch)) * patch,
        max(1, math.floor(height * scale / patch)) * patch,
    )


def span_types(grid: GridPlan) -> list[int]:
    """The types of a span's positions: ``START, (IMAGE * cols, NEWLINE) * rows, END``."""
    row = [int(SpanType.IMAGE)] * grid.cols + [int(SpanType.NEWLINE)]
    return [int(SpanType.START), *row * grid.rows, int(SpanType.END)]


def expand_spans(
    tokens: Sequence[int], grids: Sequence[GridPlan], image_token_id: int
) -> tuple[list[int], list[int]]:
    """Replace each image placeholder by its span; (token ids, types), equally long.

    Placeholders and grids correspond in order. Raises RequestError if their numbers differ.
    """
    placeholders = sum(token == image_token_id for token in tokens)
    if placeholders != len(grids):
        raise RequestError(
            f"the text has {placeholders} image placeholders (token {image_token_id}) but "
            f"{len(grids)} images came with it; expected one placeholder per image."
        )
    remaining = iter(grids)
    ids: list[int] = []
    types: list[int] = []
    for token in tokens:
        span = span_types(next(remaining)) if token == image_token_id else [int(SpanType.TEXT)]
        ids.extend([token] * len(span))
        types.extend(span)
    return ids, types


def open_image(
    source: bytes | str | Path,
    *,
    formats: Sequence[str] = FORMATS,
    max_bytes: int | None = None,
    max_pixels: int | None = None,
) -> "Image.Image":
    """Decode an image file (its bytes, or a path) to RGB, within limits.

    formats: those of `FORMATS` that may come. max_bytes, max_pixels: limits of the file and of the
    decoded picture, by default those of this module. Of an animation the first frame counts. The
    size is checked before any pixel is decoded, and the metadata of the formats in
    `picture_bytes.MEDIA_TYPES` is never parsed. Raises RequestError for a file that is missing,
    too large, damaged, cut off or of an unknown format, and BackendUnavailable without Pillow.
    """
    pillow = _pillow()
    where = "the image" if isinstance(source, bytes) else str(source)
    max_bytes = MAX_FILE_BYTES if max_bytes is None else max_bytes
    max_pixels = MAX_PIXELS if max_pixels is None else max_pixels
    if not isinstance(source, bytes):
        source = _read(Path(source), max_bytes)
    if len(source) > max_bytes:
        raise RequestError(
            f"{where} has {len(source)} bytes; expected at most {max_bytes}. Scale it down."
        )

    def check(width: int, height: int) -> None:
        if width * height > max_pixels or max(width, height) > MAX_SIDE:
            raise RequestError(
                f"{where} has {width} x {height} pixels; expected at most {max_pixels} in "
                f"all and {MAX_SIDE} per side. Scale it down."
            )

    try:
        if kind := sniff(source):
            source, *size = lean(source, kind)
            check(*size)
        with pillow.open(io.BytesIO(source), formats=tuple(formats)) as image:
            check(*image.size)
            decoded: Image.Image = image.convert("RGB")
            return decoded
    except CedarError:
        raise
    except Exception as error:  # decoders raise whatever their format's trouble is
        known = not isinstance(error, pillow.UnidentifiedImageError)
        trouble = f"{type(error).__name__}: {error}" if known else "no such format"
        raise RequestError(
            f"{where} cannot be decoded ({trouble}). Expected a complete "
            f"file of one of these formats: {', '.join(formats)}."
        ) from None


def preprocess(image: "Image.Image", settings: ImageSettings) -> tuple[Tensor, GridPlan]:
    """Patches of an image, bfloat16 [P, 3, patch, patch] in reading order, and its layout.

    The image is scaled to fit its canvas (bicubic, aspect kept), centred on grey 127, mapped to
    [-1, 1] and cut. Raises RequestError if it is too narrow for its canvas.
    """
    pillow = _pillow()
    plan = plan_grid(image.width, image.height, settings)
    image = image.convert("RGB")
    size = plan.canvas_width, plan.canvas_height
    if plan.stretched:
        canvas = image.resize(size, pillow.Resampling.BICUBIC)
    else:
        from PIL import ImageOps

        # ImageOps.pad rounds the fitted side like this; its versions differ at zero.
        if not (
            round(image.width / image.height * size[1])
            and round(image.height / image.width * size[0])
        ):
            raise RequestError(
                f"the image is {image.width} x {image.height} pixels: on its canvas of "
                f"{size[0]} x {size[1]} the short side would vanish. Crop it."
            )
        canvas = ImageOps.pad(image, size, pillow.Resampling.BICUBIC, color=_GREY)
    pixels_YXC = torch.from_numpy(np.array(canvas, dtype=np.uint8))
    values_YXC = ((pixels_YXC.to(torch.float32) / 255 - 0.5) / 0.5).to(torch.bfloat16)
    side = settings.patch_size
    grid = values_YXC.reshape(plan.patch_rows, side, plan.patch_cols, side, 3)
    return grid.permute(0, 2, 4, 1, 3).reshape(-1, 3, side, side).contiguous(), plan


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise RequestError(f"{path} cannot be read as an image: {error.strerror}.") from None


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise BackendUnavailable(
            "images need Pillow, which is not installed: pip install 'cedar-lm[images]'"
        ) from None
    return Image
