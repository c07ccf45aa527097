"""Pictures of a request: where they may come from, and what is refused before decoding."""

import base64
import io
import struct
import zlib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from cedar.errors import CapacityError, ConfigError, RequestError
from cedar.inputs import images
from cedar.inputs.chat import ImageRef, ProtocolError
from cedar.server import pictures
from cedar.server.fetch import Fetched, Fetcher
from cedar.server.pictures import PictureLimits, load

LIMITS = PictureLimits()
PATH = "messages.0.content[1]"


def encoded(
    kind: str = "PNG", colour: str = "red", size: tuple[int, int] = (12, 8), **options: Any
) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind, **options)
    return file.getvalue()


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def by_data_url(data: bytes, media_type: str = "image/png", path: str = PATH) -> ImageRef:
    return ImageRef(
        path=path, kind="data_url", data_url=f"data:{media_type};base64,{text_of(data)}"
    )


def by_url(url: str) -> ImageRef:
    return ImageRef(path=PATH, kind="url", url=url)


def by_bytes(data: bytes) -> ImageRef:
    return ImageRef(path=PATH, kind="bytes", data=data)


def data_url(url: str) -> ImageRef:
    return ImageRef(path=PATH, kind="data_url", data_url=url)


class FakeFetcher(Fetcher):
    """Gives what it was made with, and notes what it was asked."""

    def __init__(self, answer: Fetched | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int | None]] = []

    def fetch(
        self, url: str, *, max_bytes: int | None = None, seconds: float | None = None
    ) -> Fetched:
        self.asked.append((url, max_bytes))
        assert seconds is not None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def refusal(ref: ImageRef, limits: PictureLimits = LIMITS, fetcher: Fetcher | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        load([ref], limits, fetcher)
    assert caught.value.param == ref.path
    assert caught.value.status == 400
    assert str(caught.value).startswith(f"{ref.path}: the image ")
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_source_gives_the_same_picture(kind: str) -> None:
    file = encoded(kind)
    media_type = f"image/{kind.lower()}"
    fetcher = FakeFetcher(Fetched(file, "application/octet-stream"))
    refs = [
        by_data_url(file, media_type),
        by_bytes(file),
        by_url(f"data:{media_type};base64,{text_of(file)}"),
        by_url("https://example.org/picture"),
    ]
    found = load(refs, LIMITS, fetcher)
    assert [picture.size for picture in found] == [(12, 8)] * 4
    assert {picture.mode for picture in found} == {"RGB"}
    assert len({picture.tobytes() for picture in found}) == 1
    assert fetcher.asked == [("https://example.org/picture", LIMITS.file_bytes)]


def test_the_order_is_kept() -> None:
    colours = ["red", "lime", "blue", "white"]
    found = load([by_bytes(encoded(colour=colour)) for colour in colours], LIMITS)
    assert [picture.getpixel((0, 0)) for picture in found] == [
        (255, 0, 0),
        (0, 255, 0),
        (0, 0, 255),
        (255, 255, 255),
    ]
    assert load([], LIMITS) == []


@pytest.mark.parametrize(
    "form",
    [
        "data:image/png;base64,{}",
        "DATA:IMAGE/PNG;BASE64,{}",
        "data:image/png;charset=utf-8;base64,{}",
        "data:;base64,{}",
    ],
)
def test_forms_of_data_urls(form: str) -> None:
    text = text_of(encoded())
    wrapped = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    for content in (text, text.rstrip("="), wrapped, wrapped.replace("\n", "\r\n\t ")):
        assert load([data_url(form.format(content))], LIMITS)[0].size == (12, 8)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,rawbytes",
        "data:image/png;base64",
        "data:image/png;base64;x=y,AAAA",
        "data:" + "x" * 300 + ";base64,AAAA",
        "image/png;base64,AAAA",
        "",
        "data:,",
    ],
)
def test_other_data_urls_are_refused(url: str) -> None:
    assert "form data:image/png;base64" in refusal(data_url(url))


@pytest.mark.parametrize("text", ["a", "!!!!", "AAA*", "AA=A", "ä", "\ud800", "%2B%2B"])
def test_what_is_not_base64_is_refused(text: str) -> None:
    assert "not valid base64" in refusal(data_url(f"data:image/png;base64,{text}"))


def test_the_declared_type_must_fit_the_bytes() -> None:
    jpeg = encoded("JPEG")
    assert load([by_data_url(jpeg, "image/jpg")], LIMITS)[0].size == (12, 8)
    said = refusal(by_data_url(jpeg, "image/png"))
    assert "declared as image/png but its bytes are image/jpeg" in said
    for other in ("text/html", "image/svg+xml", "image/tiff", "application/pdf", "image/"):
        assert "another type than PNG, JPEG, WebP or GIF" in refusal(by_data_url(jpeg, other))


@pytest.mark.parametrize(
    "start", ["<svg ", "<?xml version='1.0'?><svg>", "\ufeff\n<!DOCTYPE svg><svg>"]
)
def test_drawings_are_refused_by_name(start: str) -> None:
    drawing = start + "<image href='file:///etc/passwd'/></svg>"
    assert "is an SVG drawing" in refusal(by_bytes(drawing.encode()))


def test_unknown_formats_are_refused() -> None:
    assert "is empty" in refusal(by_bytes(b""))
    for file in (b"%PDF-1.7", b"not a picture", encoded("BMP"), encoded("TIFF"), b"\0" * 100):
        assert "unknown format" in refusal(by_bytes(file))
    # Negative control: the library itself would decode two of them.
    assert images.open_image(encoded("BMP")).size == (12, 8)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "/etc/passwd",
        "etc/passwd",
        "./picture.png",
        "C:\\picture.png",
        "\\\\host\\share\\picture.png",
        "~/picture.png",
        "ftp://example.org/a.png",
        "gopher://example.org/",
        "javascript:alert(1)",
        "blob:https://example.org/1",
        "httpx://example.org/",
        "",
    ],
)
def test_files_and_other_schemes_are_refused_whether_urls_are_or_not(url: str) -> None:
    fetcher = FakeFetcher(Fetched(encoded(), ""))
    for chosen in (None, fetcher):
        assert "files of the server and other schemes are refused" in refusal(
            by_url(url), fetcher=chosen
        )
    assert fetcher.asked == []


def test_a_file_that_exists_is_not_read(tmp_path: Any) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(encoded())
    assert images.open_image(path).size == (12, 8)  # it could be
    for spelled in (str(path), f"file://{path}", f"file:{path}"):
        refusal(by_url(spelled))
        refusal(data_url(spelled))
        refusal(by_bytes(spelled.encode()))


def test_urls_are_refused_without_a_fetcher() -> None:
    assert "fetches none; send it as a data URL" in refusal(by_url("https://example.org/a.png"))


def test_what_is_fetched_passes_the_same_checks() -> None:
    page = FakeFetcher(Fetched(b"<html>", "image/png"))
    assert "unknown format" in refusal(by_url("https://example.org/"), fetcher=page)
    failing = FakeFetcher(RequestError("leads to an address that is not public"))
    assert refusal(by_url("http://example.org"), fetcher=failing).endswith(
        "the image leads to an address that is not public."
    )
    busy = FakeFetcher(CapacityError("cannot be fetched now"))
    with pytest.raises(CapacityError):
        load([by_url("http://example.org")], LIMITS, busy)


def test_no_time_is_left_for_a_second_fetch() -> None:
    file = encoded()
    fetcher = FakeFetcher(Fetched(file, ""))
    limits = PictureLimits(seconds=1e-9)
    assert "in time" in refusal(by_url("https://example.org/"), limits, fetcher)
    assert fetcher.asked == []


def test_too_many_pictures_are_refused_before_any_is_looked_at() -> None:
    refs = [by_data_url(b"broken", path=f"messages.0.content[{i}]") for i in range(4)]
    with pytest.raises(ProtocolError, match="4 images; expected at most 3") as caught:
        load(refs, PictureLimits(count=3))
    assert caught.value.param == "messages.0.content[3]"
    with pytest.raises(ProtocolError, match="at most 0"):
        load(refs[:1], PictureLimits(count=0))


def test_limits_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encoded(size=(40, 40))
    exact = PictureLimits(file_bytes=len(file))
    for ref in (by_bytes(file), by_data_url(file)):
        assert load([ref], exact)[0].size == (40, 40)
        small = PictureLimits(file_bytes=len(file) - 1)
        assert f"expected at most {len(file) - 1}" in refusal(ref, small)
    # Text that is far too long is not even decoded.
    monkeypatch.setattr(base64, "b64decode", lambda *a, **k: pytest.fail("decoded"))
    assert "bytes; expected" in refusal(by_data_url(b"x" * 10_000), exact)


def test_the_limit_of_all_bytes_names_the_first_beyond() -> None:
    file = encoded()
    refs = [by_data_url(file, path=f"input[{i}]") for i in range(3)]
    assert len(load(refs, PictureLimits(total_bytes=3 * len(file)))) == 3
    with pytest.raises(ProtocolError, match="bytes; expected at most") as caught:
        load(refs, PictureLimits(total_bytes=3 * len(file) - 1))
    assert caught.value.param == "input[2]"
    fetcher = FakeFetcher(Fetched(file, ""))
    load(
        [by_bytes(file), by_url("http://a.org")], PictureLimits(total_bytes=2 * len(file)), fetcher
    )
    assert fetcher.asked == [("http://a.org", len(file))]  # it may have what is left


def test_limits_of_pixels() -> None:
    refs = [by_data_url(encoded(size=(10, 10)), path=f"input[{i}]") for i in range(3)]
    assert len(load(refs, PictureLimits(pixels=100, total_pixels=300))) == 3
    assert "10 x 10 pixels; expected at most 99" in refusal(refs[0], PictureLimits(pixels=99))
    with pytest.raises(ProtocolError, match="10 x 10 pixels; expected at most 99") as caught:
        load(refs, PictureLimits(pixels=100, total_pixels=299))
    assert caught.value.param == "input[2]"


def bomb(width: int, height: int) -> bytes:
    """A true picture of zeros, a thousand times smaller than its pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        check = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", check)

    packer = zlib.compressobj(9)
    row = bytes(1 + width)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_a_decompression_bomb_is_refused_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    file = bomb(8000, 8000)
    assert len(file) < 100_000
    assert load([by_bytes(bomb(800, 800))], LIMITS)[0].size == (800, 800)
    monkeypatch.setattr(Image.Image, "convert", lambda *a, **k: pytest.fail("decoded"))
    assert "8000 x 8000 pixels; expected at most 50000000" in refusal(by_bytes(file))
    for size in ((70_000, 1), (1, 70_000)):
        assert "65535 per side" in refusal(by_bytes(bomb(*size)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_cut_off_files_are_refused(kind: str) -> None:
    noise = Image.effect_noise((64, 48), 90).convert("RGB")
    file = io.BytesIO()
    noise.save(file, kind)
    content = file.getvalue()
    assert load([by_bytes(content)], LIMITS)[0].size == (64, 48)
    for kept in (16, 40, len(content) // 2):
        assert "cannot be decoded" in refusal(by_bytes(content[:kept]))


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(max_size=40), form=st.sampled_from(["data:image/png;base64,{}", "data:{}", "{}"])
)
@example(text="aGVsbG8=", form="data:image/gif;base64,{}")
def test_any_text_is_refused_with_its_place(text: str, form: str) -> None:
    for ref in (data_url(form.format(text)), by_url(form.format(text))):
        with pytest.raises(ProtocolError) as caught:
            load([ref], LIMITS)
        assert caught.value.param == PATH


def test_a_refusal_does_not_say_what_the_picture_holds() -> None:
    said = refusal(by_bytes(b"\x89PNG\r\n\x1a\nsecret text of the user"))
    assert "secret" not in said
    assert "0x" not in said  # nor an address in memory
    assert "0x" not in refusal(by_bytes(b"GIF89a" + b"\0" * 40))


def test_impossible_limits_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        PictureLimits(count=-1, file_bytes=0, pixels=0, seconds=0)
    for name in ("count", "file_bytes", "pixels", "seconds"):
        assert f"{name} is " in str(caught.value)
    assert pictures.PictureLimits(count=0).count == 0
