import contextlib
import dataclasses
import io
import json
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from cedar.errors import BackendUnavailable, ConfigError, RequestError
from cedar.inputs import images
from cedar.inputs.images import (
    GridPlan,
    ImageSettings,
    SpanType,
    expand_spans,
    open_image,
    plan_grid,
    preprocess,
    span_types,
)

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASED = ImageSettings()
MINI = ImageSettings(max_n_token=64, min_pixels=7056)
ROWS = json.loads((GOLDEN / "image_grids.json").read_text())["rows"]


@pytest.fixture(scope="module")
def vision() -> dict[str, Tensor]:
    return load_file(GOLDEN / "mini_vision.safetensors")


def numbers(plan: GridPlan) -> tuple[int, ...]:
    return plan.rows, plan.cols, plan.canvas_height, plan.canvas_width, plan.num_tokens


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


# --- the planner -----------------------------------------------------------------------------


def test_settings_of_the_golden_file_are_the_released_ones() -> None:
    found = json.loads((GOLDEN / "image_grids.json").read_text())["settings"]
    assert {f"vision_{k}": v for k, v in dataclasses.asdict(RELEASED).items()} == found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['width']}x{row['height']}")
def test_planned_grids(row: dict[str, int]) -> None:
    names = ("n_llm_h", "n_llm_w", "best_height", "best_width", "n_tokens")
    plan = plan_grid(row["width"], row["height"], RELEASED)
    assert numbers(plan) == tuple(row[name] for name in names)


@pytest.mark.parametrize(
    ("wrong", "least"),
    [
        ({"min_pixels": 295935}, 0),
        ({"min_pixels": 200000}, 5),
        ({"max_n_token": 1000}, 3),
        ({"downsample_ratio": 2}, 20),
    ],
)
def test_planned_grids_notice_other_settings(wrong: dict[str, int], least: int) -> None:
    other = dataclasses.replace(RELEASED, **wrong)
    changed = sum(
        numbers(plan_grid(row["width"], row["height"], other))
        != numbers(plan_grid(row["width"], row["height"], RELEASED))
        for row in ROWS
    )
    assert changed >= least


@settings(deadline=None, max_examples=300)
@given(
    width=st.integers(1, 70_000),
    height=st.integers(1, 70_000),
    patch=st.sampled_from([4, 14, 16]),
    ratio=st.integers(1, 4),
    limit=st.integers(4, 2000),
    least=st.integers(0, 400_000),
    narrow=st.none() | st.floats(0.1, 8),
)
def test_a_plan_keeps_its_promises(
    width: int,
    height: int,
    patch: int,
    ratio: int,
    limit: int,
    least: int,
    narrow: float | None,
) -> None:
    chosen = ImageSettings(
        patch_size=patch,
        downsample_ratio=ratio,
        max_n_token=limit,
        min_pixels=least,
        max_wh_ratio=narrow,
    )
    plan = plan_grid(width, height, chosen)
    assert plan.num_tokens <= limit
    assert plan.rows >= 1
    assert plan.cols >= 1
    assert (plan.canvas_height, plan.canvas_width) == (
        plan.patch_rows * patch,
        plan.patch_cols * patch,
    )
    assert (plan.rows - 1) * ratio < plan.patch_rows <= plan.rows * ratio
    assert (plan.cols - 1) * ratio < plan.patch_cols <= plan.cols * ratio
    assert len(span_types(plan)) == plan.num_tokens


def test_a_shrunk_side_keeps_one_patch() -> None:
    plan = plan_grid(4814, 63970, ImageSettings(downsample_ratio=1, max_n_token=71, min_pixels=0))
    assert (plan.patch_rows, plan.patch_cols) == (13, 1)


def test_a_width_limit_narrows_wide_images_only() -> None:
    limited = dataclasses.replace(RELEASED, max_wh_ratio=2.0)
    wide, narrowed = plan_grid(3000, 600, limited), plan_grid(1200, 600, RELEASED)
    assert dataclasses.replace(wide, stretched=False) == narrowed
    assert wide.stretched
    assert plan_grid(600, 3000, limited) == plan_grid(600, 3000, RELEASED)
    assert not plan_grid(1200, 600, limited).stretched


def test_an_empty_image_is_refused() -> None:
    for width, height in ((0, 5), (5, 0), (-1, 5)):
        with pytest.raises(RequestError, match="at least 1 x 1"):
            plan_grid(width, height, RELEASED)


def test_impossible_settings_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        ImageSettings(patch_size=0, max_n_token=3, max_wh_ratio=-1.0)
    for name in ("patch_size", "max_n_token", "max_wh_ratio"):
        assert name in str(caught.value)


# --- spans -----------------------------------------------------------------------------------


def test_spans_of_the_golden_prompt(vision: dict[str, Tensor]) -> None:
    sizes = [[(200, 112)], [(60, 140), (40, 50)]]
    image_id = 509
    for row, row_sizes in enumerate(sizes):
        ids, types = vision["input_ids"][row].tolist(), vision["token_types"][row].tolist()
        prompt = [t for t, kind in zip(ids, types, strict=True) if kind in (-1, SpanType.START)]
        plans = [plan_grid(width, height, MINI) for width, height in row_sizes]
        assert expand_spans(prompt, plans, image_id) == (ids, types)


def test_placeholders_and_images_must_agree_in_number() -> None:
    plan = plan_grid(40, 50, MINI)
    assert expand_spans([1, 2], [], 509) == ([1, 2], [-1, -1])
    for tokens, plans in (([1, 509], []), ([1], [plan]), ([509], [plan, plan])):
        with pytest.raises(RequestError, match="one placeholder per image"):
            expand_spans(tokens, plans, 509)


# --- pixels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_patches_of_the_golden_images(vision: dict[str, Tensor], number: int) -> None:
    content = vision[f"image{number}.png_bytes"].numpy().tobytes()
    expected = vision[f"image{number}.patches"]
    patches, plan = preprocess(open_image(content), MINI)
    assert patches.dtype == torch.bfloat16
    assert patches.shape == (plan.patch_rows * plan.patch_cols, 3, 14, 14)
    assert torch.equal(patches, expected)
    # Negative control: another resampling of the same picture is noticed.
    picture = open_image(content)
    size = (plan.canvas_width, plan.canvas_height)
    if picture.size != size:
        wrong = picture.resize(size, Image.Resampling.BILINEAR)
        assert not torch.equal(preprocess(wrong, MINI)[0], expected)


def test_padding_is_grey_and_a_narrowed_image_has_none() -> None:
    red = Image.new("RGB", (300, 100), (255, 0, 0))
    padded, plan = preprocess(red, dataclasses.replace(MINI, min_pixels=0))
    grey = torch.tensor((127 / 255 - 0.5) / 0.5).to(torch.bfloat16)
    assert (plan.canvas_width, plan.canvas_height) == (308, 112)
    rows = padded.reshape(plan.patch_rows, plan.patch_cols, 3, 14, 14)
    assert (rows[0, :, :, 0] == grey).all()
    assert (rows[-1, :, :, -1] == grey).all()
    assert (rows[0, :, 0, -1] == 1).all()
    stretched, plan = preprocess(red, dataclasses.replace(MINI, min_pixels=0, max_wh_ratio=1.0))
    assert (plan.canvas_width, plan.canvas_height, plan.stretched) == (112, 112, True)
    assert (stretched[:, 0] == 1).all()
    assert (stretched[:, 1:] == -1).all()


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "CMYK", "I;16", "LA"])
def test_every_colour_mode_becomes_rgb(mode: str) -> None:
    picture = Image.new(mode, (30, 20))
    patches, plan = preprocess(open_image(encoded(picture, "TIFF")), MINI)
    assert patches.shape == (plan.patch_rows * plan.patch_cols, 3, 14, 14)


def test_a_file_can_be_named_and_the_first_frame_counts(tmp_path: Path) -> None:
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 255)]
    path = tmp_path / "two.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert open_image(path).getpixel((0, 0)) == (0, 0, 0)
    assert open_image(str(path)).size == (8, 8)


def test_an_image_that_would_vanish_is_refused() -> None:
    with pytest.raises(RequestError, match="short side would vanish"):
        preprocess(Image.new("RGB", (1, 65_535)), RELEASED)
    patches, _ = preprocess(Image.new("RGB", (2, 65_535)), RELEASED)  # one pixel is left
    assert (patches == -1).any()


# --- hostile and damaged files ---------------------------------------------------------------


def noise(width: int, height: int) -> Image.Image:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_cut_off_file_is_a_request_error(kind: str) -> None:
    content = encoded(noise(64, 48), kind)
    assert open_image(content).size == (64, 48)
    for kept in (0, 1, 10, 60, len(content) // 2):
        with pytest.raises(RequestError, match="cannot be decoded"):
            open_image(content[:kept])


@settings(deadline=None)
@given(position=st.integers(8, 2000), byte=st.integers(0, 255))
def test_a_damaged_file_decodes_or_is_a_request_error(position: int, byte: int) -> None:
    content = bytearray(PNG)
    content[position % len(content)] = byte
    with contextlib.suppress(RequestError):  # and nothing else
        assert open_image(bytes(content)).mode == "RGB"


PNG = encoded(noise(20, 16))


def png_of(width: int, height: int) -> bytes:
    """A small file that claims a large picture."""

    def chunk(name: bytes, body: bytes) -> bytes:
        check = zlib.crc32(name + body)
        return len(body).to_bytes(4) + name + body + check.to_bytes(4)

    header = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    data = zlib.compress(b"\0" * 1000)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize(
    "size", [(8001, 8000), (1, 65_536), (65_536, 1), (30_000, 30_000), (2**31 - 1, 2**31 - 1)]
)
def test_a_decompression_bomb_is_refused_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match=r"pixels|Decompression"):
        open_image(png_of(*size))


def test_a_file_at_the_limit_is_decoded() -> None:
    # Negative control of the limit: this one is only cut off, not too large.
    with pytest.raises(RequestError, match="cannot be decoded"):
        open_image(png_of(8000, 8000))


def test_too_many_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_FILE_BYTES", len(PNG))
    assert open_image(PNG).size == (20, 16)
    path = tmp_path / "big.png"
    path.write_bytes(PNG + b"x")
    for source in (PNG + b"x", path):
        with pytest.raises(RequestError, match="Scale it down"):
            open_image(source)


def test_other_formats_and_missing_files_are_request_errors(tmp_path: Path) -> None:
    for content in (b"", b"GIF89a", b"<svg/>", b"%!PS-Adobe-3.0 EPSF-3.0\n"):
        with pytest.raises(RequestError, match="PNG, JPEG"):
            open_image(content)
    for path in (tmp_path, tmp_path / "none.png"):
        with pytest.raises(RequestError, match="cannot be read as an image"):
            open_image(path)


def test_without_pillow_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for call in (lambda: open_image(PNG), lambda: preprocess(noise(8, 8), MINI)):
        with pytest.raises(BackendUnavailable, match=r"pip install 'cedar-lm\[images\]'"):
            call()
    assert plan_grid(640, 480, RELEASED).num_tokens == 206
