"""Images of a request: taken out of the body, so that only a number stands for each.

So the image data does not travel through the conversion, and every image keeps the path under
which the client sent it.
"""

from collections.abc import Iterator
from typing import Any

from cedar.inputs.chat.shape import Notes, Path
from cedar.inputs.chat.types import Api, ImageRef

__all__ = ["image_number", "take_images"]

# A URL that the conversion takes for an image's; nobody ever opens it.
_PREFIX = "http://image.invalid/"


def take_images(api: Api, body: dict[str, Any], notes: Notes) -> list[ImageRef]:
    """Replaces the images of a checked body by numbered marks; what they were, in that order.

    Raises `ProtocolError` for sources other than data URLs and http(s) URLs.
    """
    found: list[ImageRef] = []
    field = "input" if api is Api.RESPONSES else "messages"
    for part, path in _parts(body.get(field), (field,)):
        url, detail, where = _source(part, path, notes)
        if detail == "low":  # images have the model's own size
            notes.ignore((*path, "detail"))
        mark = f"{_PREFIX}{len(found)}"
        found.append(_reference(url, detail, where, notes))
        if part["type"] == "image":
            part["source"] = {"type": "url", "url": mark}
        elif part["type"] == "input_image":
            part["image_url"] = mark
        else:
            part["image_url"] = {"url": mark}
    return found


def image_number(url: str | None) -> int:
    """Which image a mark stands for."""
    assert url is not None
    return int(url[len(_PREFIX) :])


def _parts(value: Any, path: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Image parts of messages or items, inside results too, in the order of the body."""
    if not isinstance(value, list):
        return
    for place, one in enumerate(value):
        if not isinstance(one, dict):
            continue
        here = (*path, place)
        if one.get("type") in ("image_url", "input_image", "image"):
            yield one, here
        for field in ("content", "output"):
            yield from _parts(one.get(field), (*here, field))


def _source(part: dict[str, Any], path: Path, notes: Notes) -> tuple[str, str, Path]:
    """The URL of a part, the wanted detail, and the path of the URL."""
    if part["type"] == "image":
        source, where = part["source"], (*path, "source")
        if source["type"] == "url":
            return source["url"], "auto", (*where, "url")
        return f"data:{source['media_type']};base64,{source['data']}", "auto", (*where, "data")
    where = (*path, "image_url")
    if "image_url" not in part:
        notes.fail(where, "is missing; expected a data URL.", "missing_field")
    value = part["image_url"]
    if isinstance(value, str):
        return value, part.get("detail", "auto"), where
    return value["url"], value.get("detail", "auto"), (*where, "url")


def _reference(url: str, detail: str, path: Path, notes: Notes) -> ImageRef:
    scheme = url[:8].lower()
    where = notes.spell(path)
    if scheme.startswith("data:"):
        return ImageRef(path=where, kind="data_url", data_url=url, detail=detail)
    if scheme.startswith(("http://", "https://")):
        return ImageRef(path=where, kind="url", url=url, detail=detail)
    notes.fail(
        path, "expected a data URL (data:image/png;base64,...) or an http(s) URL.", "invalid_image"
    )
