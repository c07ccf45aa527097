"""Picture files before decoding: sizes, and what is left of them."""

import contextlib
import io
import struct
import warnings
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from cedar.errors import RequestError
from cedar.inputs.images import open_image
from cedar.inputs.picture_bytes import MAX_PARTS, MAX_SCANS, MEDIA_TYPES, lean, sniff

SECRET = b"a secret place"


def picture(mode: str = "RGB", width: int = 23, height: int = 17) -> Image.Image:
    image = Image.new("RGB", (width, height))
    image.putdata(
        [(x * 11 % 256, y * 13 % 256, (x * y) % 256) for y in range(height) for x in range(width)]
    )
    return image.convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_metadata(kind: str, image: Image.Image) -> bytes:
    """The picture with a text in every place where its format can carry one."""
    exif = Image.Exif()
    exif[0x010E] = SECRET.decode()
    if kind == "PNG":
        info = PngImagePlugin.PngInfo()
        info.add_text("Comment", SECRET.decode())
        info.add_itxt("Title", SECRET.decode())
        return encoded(image, kind, pnginfo=info, exif=exif, icc_profile=SECRET)
    if kind == "JPEG":
        return encoded(image, kind, comment=SECRET, exif=exif, icc_profile=SECRET, quality=95)
    if kind == "GIF":
        return encoded(image, kind, comment=SECRET)
    return encoded(image, kind, lossless=True)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def pixels(file: bytes) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Image.open(io.BytesIO(file)).convert("RGB").tobytes()


@pytest.mark.parametrize("kind", list(MEDIA_TYPES))
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "CMYK"])
def test_what_is_left_has_the_same_pixels_and_no_metadata(kind: str, mode: str) -> None:
    allowed = {"JPEG": ("RGB", "L", "CMYK"), "GIF": ("L", "P", "1"), "WEBP": ("RGB", "RGBA")}
    if mode not in allowed.get(kind, ("RGB", "L", "P", "1", "RGBA")):
        mode = "RGB" if kind != "GIF" else "P"
    file = with_metadata(kind, picture(mode))
    left = lean(file, kind)
    assert sniff(file) == sniff(left.data) == kind
    assert (left.width, left.height) == (23, 17)
    assert pixels(left.data) == pixels(file)
    assert open_image(file).tobytes() == pixels(file)
    if kind != "WEBP":
        assert SECRET in file
    assert SECRET not in left.data


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 2}])
def test_every_way_to_write_a_jpeg_is_read(options: dict[str, Any]) -> None:
    file = encoded(picture(width=64, height=64), "JPEG", quality=90, **options)
    assert pixels(lean(file, "JPEG").data) == pixels(file)
    junk = file[:2] + b"\x00\x01junk\xff\x00\xff\xff" + file[2:]
    assert lean(junk, "JPEG").data == lean(file, "JPEG").data


def test_what_follows_a_jpeg_is_not_part_of_it() -> None:
    file = encoded(picture(), "JPEG")
    video = b"\xff\xda\x00\x04ab" * (2 * MAX_SCANS)
    assert lean(file + video, "JPEG") == lean(file, "JPEG")
    # Negative control: inside of the picture so many scans are too many.
    with pytest.raises(ValueError, match="scans"):
        lean(file[:-2] + video + file[-2:], "JPEG")


def test_only_the_first_frame_is_left() -> None:
    frames = [picture("P"), picture("L").convert("P").rotate(90)]
    for kind in ("GIF", "PNG"):
        file = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
        left = lean(file, kind)
        assert Image.open(io.BytesIO(file)).n_frames == 2  # type: ignore[attr-defined]
        assert getattr(Image.open(io.BytesIO(left.data)), "n_frames", 1) == 1
        assert pixels(left.data) == pixels(file) == frames[0].convert("RGB").tobytes()


def test_a_gif_frame_may_be_larger_than_the_screen() -> None:
    file = bytearray(encoded(picture("P"), "GIF"))
    file[6:10] = struct.pack("<HH", 1, 1)
    left = lean(bytes(file), "GIF")
    assert (left.width, left.height) == (23, 17)
    frame = file.index(b"\x2c\0\0\0\0")
    file[frame + 5 : frame + 9] = struct.pack("<HH", 65_000, 65_000)
    assert lean(bytes(file), "GIF")[1:] == (65_000, 65_000)
    with pytest.raises(RequestError, match="pixels"):
        open_image(bytes(file))


def claims(kind: str, width: int, height: int) -> bytes:
    """A small file whose header claims a size."""
    if kind == "PNG":
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        data = chunk(b"IDAT", zlib.compress(bytes(1000)))
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")
    if kind == "GIF":
        return (
            b"GIF89a"
            + struct.pack("<HHBBB", width, height, 0, 0, 0)
            + b",".ljust(10, b"\0")
            + b"\2\0;"
        )
    file = bytearray(encoded(picture(), kind))
    if kind == "JPEG":
        start = file.index(b"\xff\xc0")
        file[start + 5 : start + 9] = struct.pack(">HH", height, width)
        return bytes(file)
    body = b"VP8X" + struct.pack("<I", 10) + b"\x10\0\0\0"
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little") + file[12:]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


@pytest.mark.parametrize("kind", list(MEDIA_TYPES))
@pytest.mark.parametrize("size", [(9_500, 9_500), (65_000, 65_000)])
def test_bombs_are_seen_before_any_decoder_sees_them(kind: str, size: tuple[int, int]) -> None:
    file = claims(kind, *size)
    assert lean(file, kind)[1:] == size
    # Both for sizes at which Pillow warns and for those at which it raises.
    with pytest.raises(RequestError, match=f"{size[0]} x {size[1]} pixels; expected at most"):
        open_image(file)


@pytest.mark.parametrize("kind", ["VP8 ", "VP8L", "VP8X"])
def test_sizes_of_webp(kind: str) -> None:
    options: dict[str, Any] = {
        "VP8 ": {},
        "VP8L": {"lossless": True},
        "VP8X": {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"},
    }[kind]
    file = encoded(picture(), "WEBP", **options)
    assert file[12:16] == kind.encode()
    assert lean(file, "WEBP")[1:] == (23, 17)


def test_damaged_metadata_makes_no_warning() -> None:
    good = encoded(picture(), "JPEG")
    exif = (
        b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x05" + b"\x01\x1a\0\x05\xff\xff\xff\xff\xff\xff\xff\xff" * 3
    )
    file = good[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + good[2:]
    with pytest.warns(UserWarning, match=r"EXIF|Tag|Truncated|Corrupt"):
        Image.open(io.BytesIO(file)).load()
    apng = claims("PNG", 2, 2)
    apng = apng[:33] + chunk(b"acTL", bytes(8)) + apng[33:]
    with pytest.warns(UserWarning, match="APNG"):
        Image.open(io.BytesIO(apng))
    clear = picture("P")
    clear.info["transparency"] = bytes(range(200))
    palette = encoded(clear, "PNG")
    with pytest.warns(UserWarning, match="Transparency"):
        Image.open(io.BytesIO(palette)).convert("RGB")
    assert open_image(file).tobytes() == open_image(good).tobytes()
    assert open_image(apng).size == (2, 2)
    assert open_image(palette).tobytes() == clear.convert("RGBA").convert("RGB").tobytes()


@pytest.mark.parametrize("kind", list(MEDIA_TYPES))
def test_headers_that_end_early_are_value_errors(kind: str) -> None:
    file = with_metadata(kind, picture("P" if kind == "GIF" else "RGB"))
    for kept in range(len(file)):
        with contextlib.suppress(ValueError):
            left = lean(file[:kept], kind)
            assert len(left.data) <= kept + 1
    with pytest.raises(ValueError, match=r"header|no scan|no frame"):
        lean(file[:14], kind)


@settings(deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(list(MEDIA_TYPES)),
    damage=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4)), min_size=1, max_size=6),
)
def test_damage_is_a_picture_or_a_value_error(kind: str, damage: list[tuple[int, bytes]]) -> None:
    file = bytearray(FILES[kind])
    for at, content in damage:
        file[at : at + len(content)] = content
    with contextlib.suppress(ValueError):
        lean(bytes(file), kind)
    with contextlib.suppress(RequestError):  # and no warning either, which would be an error here
        assert open_image(bytes(file), max_pixels=10_000).mode == "RGB"


FILES = {
    kind: with_metadata(kind, picture("P" if kind == "GIF" else "RGB")) for kind in MEDIA_TYPES
}


@pytest.mark.parametrize(
    ("kind", "start", "part"),
    [
        ("PNG", FILES["PNG"][:33], chunk(b"teSt", b"")),
        ("JPEG", b"\xff\xd8", b"\xff\xfe\0\2"),
        ("GIF", b"GIF89a" + bytes(7), b"!\xfe\0"),
        ("GIF", b"GIF89a" + bytes(7) + b",".ljust(10, b"\0") + b"\2", b"\1a"),
    ],
)
def test_floods_of_parts_are_refused(kind: str, start: bytes, part: bytes) -> None:
    with pytest.raises(ValueError, match="parts"):
        lean(start + part * (MAX_PARTS + 5), kind)


def test_other_formats_are_not_known() -> None:
    for file in (
        b"",
        b"<svg/>",
        b"\x89PNG",
        b"RIFF1234AVI ",
        b"II*\0",
        b"BM",
        b"GIF88a",
        b"\xff\xd8",
    ):
        assert sniff(file) is None
