"""What a picture file says about itself, read before any decoder sees it. No Pillow, no torch.

Formats are told by their first bytes, sizes are read from the headers, and what is handed on to a
decoder holds one still picture and no metadata: colour profiles, EXIF, comments, previews and the
frames of animations are never parsed. All functions take the whole file and are linear in it.
"""

import re
from typing import NamedTuple

__all__ = ["MEDIA_TYPES", "Lean", "lean", "sniff"]

# The formats that services accept, by Pillow's names.
MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
}
# A progressive JPEG may pass over all its pixels in every scan; encoders write about ten.
MAX_SCANS = 32
# Chunks, segments or blocks of a file. A GIF of the largest size that is accepted has half of it.
MAX_PARTS = 2**18

_TOO_MANY = f"the file has more than {MAX_PARTS} parts"
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")  # those with a length, and the end
_JPEG_KEPT_APPS = (0xE0, 0xEE)  # JFIF and Adobe decide how colours are coded
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_GIF_BLOCK = re.compile(rb"[!,;]")


class Lean(NamedTuple):
    """A picture without its metadata, and the size (in pixels) that its headers give."""

    data: bytes
    width: int
    height: int


def sniff(data: bytes) -> str | None:
    """The format by its first bytes: a name of `MEDIA_TYPES`, or None."""
    if data.startswith(_PNG_SIGNATURE):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return None


def lean(data: bytes, kind: str) -> Lean:
    """The first still picture of a file of format ``kind``, without metadata.

    Raises ValueError if the headers are damaged or cut off.
    """
    return {"PNG": _lean_png, "JPEG": _lean_jpeg, "WEBP": _lean_webp, "GIF": _lean_gif}[kind](data)


def _need(data: bytes, stop: int) -> None:
    if stop > len(data):
        raise ValueError(f"the file ends at byte {len(data)}, inside of a header")


def _lean_png(data: bytes) -> Lean:
    """Chunks are: length, name, content, checksum; the first is IHDR. Source: the PNG standard."""
    _need(data, 33)
    if data[12:16] != b"IHDR":
        raise ValueError("the first PNG chunk is not IHDR")
    kept = [_PNG_SIGNATURE]
    at = len(_PNG_SIGNATURE)
    for _ in range(MAX_PARTS):
        name = data[at + 4 : at + 8]
        stop = at + 12 + int.from_bytes(data[at : at + 4])
        if name in _PNG_KEPT:
            kept.append(data[at:stop])  # one that is cut off is for the decoder to refuse
        if name == b"IEND" or stop >= len(data):
            width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
            return Lean(b"".join(kept), width, height)
        at = stop
    raise ValueError(_TOO_MANY)


def _lean_jpeg(data: bytes) -> Lean:
    """Segments and, after the header of each scan, coded data. Source: ITU-T T.81, annex B."""
    kept = [b"\xff\xd8"]
    width = height = scans = 0
    at = 2
    for _ in range(MAX_PARTS):
        found = _JPEG_MARKER.search(data, at)
        start = found.start() if found else len(data)
        if scans:
            kept.append(data[at:start])  # before the first scan this is junk that decoders skip
        marker = data[start + 1] if found else 0xD9
        if marker == 0xD9:
            kept.append(data[start : start + 2])  # whatever follows is not part of the picture
            break
        stop = start + 2 + int.from_bytes(data[start + 2 : start + 4])
        if marker == 0xD8 or stop < start + 4:
            raise ValueError("a JPEG segment has an impossible length")
        if marker in _JPEG_FRAMES:
            _need(data, start + 9)
            height = max(height, int.from_bytes(data[start + 5 : start + 7]))
            width = max(width, int.from_bytes(data[start + 7 : start + 9]))
        scans += marker == 0xDA
        if scans > MAX_SCANS:
            raise ValueError(f"the JPEG has more than {MAX_SCANS} scans")
        if marker in _JPEG_KEPT_APPS or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            kept.append(data[start:stop])
        at = stop
    else:
        raise ValueError(_TOO_MANY)
    if not scans:
        raise ValueError("the JPEG has no scan")
    return Lean(b"".join(kept), width, height)


def _lean_webp(data: bytes) -> Lean:
    """The canvas of the first chunk; libwebp reads no metadata that it is not asked for.

    Source: the WebP container, VP8 (RFC 6386, 9.1) and VP8L specifications.
    """
    _need(data, 30)
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
    elif kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width = int.from_bytes(data[26:28], "little") & 0x3FFF
        height = int.from_bytes(data[28:30], "little") & 0x3FFF
    else:
        raise ValueError("the first WebP chunk is none of VP8X, VP8L and VP8")
    return Lean(data, width, height)


def _lean_gif(data: bytes) -> Lean:
    """Screen, colours and the first frame. Source: the GIF89a specification."""
    _need(data, 13)
    at = 13 + _gif_colours(data[10])
    kept = [data[:at]]
    control = b""
    for _ in range(MAX_PARTS):
        found = _GIF_BLOCK.search(data, at)  # what is skipped is junk
        if found is None or found[0] == b";":
            raise ValueError("the GIF has no frame")
        at = found.start()
        if found[0] == b",":
            break
        stop = _gif_blocks(data, at + 2)
        if data[at + 1 : at + 2] == b"\xf9":
            control = data[at:stop]  # names the transparent colour; no other extension matters
        at = stop
    else:
        raise ValueError(_TOO_MANY)
    _need(data, at + 10)
    left, top, across, down = (
        int.from_bytes(data[i : i + 2], "little") for i in range(at + 1, at + 9, 2)
    )
    begin = at + 10 + _gif_colours(data[at + 9]) + 1
    kept += [control, data[at : _gif_blocks(data, begin)], b";"]
    screen = (int.from_bytes(data[i : i + 2], "little") for i in (6, 8))
    width, height = (max(pair) for pair in zip(screen, (left + across, top + down), strict=True))
    return Lean(b"".join(kept), width, height)


def _gif_colours(flags: int) -> int:
    """Bytes of the colour table that follows, by the flags of a screen or a frame."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _gif_blocks(data: bytes, at: int) -> int:
    """One past the sub-blocks (length, content; a zero ends them) that begin at ``at``."""
    for _ in range(MAX_PARTS):
        if at >= len(data):
            return len(data)  # cut off: for the decoder to refuse
        if not data[at]:
            return at + 1
        at += 1 + data[at]
    raise ValueError(_TOO_MANY)
