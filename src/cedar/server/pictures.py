"""Pictures of a request: from data URLs, base64 sources and, where enabled, the web. Never files.

Everything is measured before it is decoded: how many pictures, how long their text is, how many
pixels their headers claim. What a picture is, its first bytes say; a name that disagrees is an
error of the client.
"""

import base64
import binascii
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cedar.errors import ConfigError, RequestError
from cedar.inputs.chat import ImageRef, ProtocolError
from cedar.inputs.images import open_image
from cedar.inputs.picture_bytes import MEDIA_TYPES, sniff
from cedar.server.fetch import Fetcher

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PictureLimits", "load"]

_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)
_BLANKS = str.maketrans("", "", " \t\r\n\f")
_NAMES = {media_type: kind for kind, media_type in MEDIA_TYPES.items()} | {"image/jpg": "JPEG"}
_EXPECTED = "PNG, JPEG, WebP or GIF"


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureLimits:
    """What the pictures of one request may have; ConfigError if a limit is below 1.

    count: of them. file_bytes, pixels: of each; total_bytes, total_pixels: of all together, so that
    what they take when decoded (4 bytes a pixel) is bounded. seconds: for fetching all of them.
    """

    count: int = 16
    file_bytes: int = 20 << 20
    total_bytes: int = 64 << 20
    pixels: int = 50_000_000
    total_pixels: int = 100_000_000
    seconds: float = 30.0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}; expected 1 or more"
            for name in ("file_bytes", "total_bytes", "pixels", "total_pixels")
            if getattr(self, name) < 1
        ]
        if self.count < 0:
            problems.append(f"count is {self.count}; expected 0 or more")
        if not self.seconds > 0:
            problems.append(f"seconds is {self.seconds}; expected more than 0")
        if problems:
            raise ConfigError(f"limits of pictures: {'; '.join(problems)}.")


def load(
    refs: Sequence[ImageRef], limits: PictureLimits, fetcher: Fetcher | None = None
) -> list["Image"]:
    """The pictures of a request in order, decoded to RGB.

    fetcher: None if URLs are refused. Blocks while it decodes and fetches: call it in a thread.
    Raises ProtocolError (a RequestError) naming the place in the body of the first picture that
    cannot be had, and CapacityError if too many fetches are under way.
    """
    if len(refs) > limits.count:
        raise ProtocolError(
            f"the request has {len(refs)} images; expected at most {limits.count}.",
            param=refs[limits.count].path,
        )
    files: list[tuple[bytes, str]] = []
    bytes_left, end = limits.total_bytes, time.monotonic() + limits.seconds
    for ref in refs:
        most = min(limits.file_bytes, bytes_left)
        files.append(_file_of(ref, most, fetcher, end - time.monotonic()))
        bytes_left -= len(files[-1][0])
    pictures: list[Image] = []
    pixels_left = limits.total_pixels
    for ref, (file, kind) in zip(refs, files, strict=True):
        most = min(limits.pixels, pixels_left)
        try:
            pictures.append(open_image(file, formats=(kind,), max_bytes=len(file), max_pixels=most))
        except RequestError as error:
            raise ProtocolError(f"{ref.path}: {error}", param=ref.path) from None
        pixels_left -= pictures[-1].width * pictures[-1].height
    return pictures


def _file_of(
    ref: ImageRef, most: int, fetcher: Fetcher | None, seconds: float
) -> tuple[bytes, str]:
    """The encoded bytes of one picture, at most ``most``, and their format."""
    declared = ""
    try:
        if ref.data is not None:
            data = ref.data
        elif ref.data_url is not None:
            declared, data = _from_data_url(ref.data_url, most)
        elif ref.url is not None and ref.url[:5].lower() == "data:":
            declared, data = _from_data_url(ref.url, most)
        else:
            data = _from_web(ref.url or "", most, fetcher, seconds)
        if len(data) > most:
            raise RequestError(_too_long(len(data), most))
        return data, _kind_of(data, declared)
    except RequestError as error:
        raise ProtocolError(f"{ref.path}: the image {error}.", param=ref.path) from None


def _from_data_url(url: str, most: int) -> tuple[str, bytes]:
    """The declared media type and the bytes of ``data:image/png;base64,...``."""
    head = _DATA_URL.match(url, 0, 256)
    if head is None or not head[2].lower().endswith(";base64"):
        raise RequestError(
            "has no data URL of the form data:image/png;base64,... (of PNG, JPEG, WebP or GIF)"
        )
    text = url[head.end() :].translate(_BLANKS)
    least = len(text) * 3 // 4 - 2  # what it decodes to, padding or not
    if least > most:
        raise RequestError(_too_long(least, most))
    try:
        return head[1].strip().lower(), base64.b64decode(
            text + "=" * (-len(text) % 4), validate=True
        )
    except (binascii.Error, ValueError):
        raise RequestError("is not valid base64") from None


def _from_web(url: str, most: int, fetcher: Fetcher | None, seconds: float) -> bytes:
    scheme = url.partition(":")[0].lower()
    if scheme not in ("http", "https"):
        raise RequestError(
            "is given by neither a data URL nor an http or https URL; files of the server and "
            "other schemes are refused"
        )
    if fetcher is None:
        raise RequestError(
            "is given by a URL, and this server fetches none; send it as a data URL, or start the "
            "server with the hosts it may fetch images from"
        )
    if seconds <= 0:
        raise RequestError("could not be fetched in time")
    return fetcher.fetch(url, max_bytes=most, seconds=seconds).data


def _kind_of(data: bytes, declared: str) -> str:
    """What the bytes are by themselves; RequestError if that is nothing known or not declared."""
    kind = sniff(data)
    if declared and declared not in _NAMES:
        raise RequestError(f"is declared as another type than {_EXPECTED}")
    if kind is None:
        start = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if not data:
            raise RequestError("is empty")
        if start.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
            raise RequestError(f"is an SVG drawing; expected {_EXPECTED}")
        raise RequestError(f"is of an unknown format; expected {_EXPECTED}")
    if declared and _NAMES[declared] != kind:
        raise RequestError(
            f"is declared as {declared} but its bytes are {MEDIA_TYPES[kind]}; they should agree"
        )
    return kind


def _too_long(found: int, most: int) -> str:
    return f"has {found} bytes; expected at most {most} here. Scale it down"
