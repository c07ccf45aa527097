"""JSON pointers as references between schemas use them: ``#/properties/a``."""

from typing import Any
from urllib.parse import unquote

__all__ = ["changed", "escaped", "found_at", "pointer", "resolved", "steps", "unquoted"]

Path = list[str | int]


def escaped(name: str) -> str:
    """A name as one step of a pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unquoted(target: str) -> str:
    """A pointer out of a URI reference, where ``%20`` is a blank."""
    return unquote(target)


def pointer(path: Path) -> str:
    """The pointer that takes these steps."""
    return "/".join(["#", *(escaped(str(step)) for step in path)])


def steps(target: Any) -> Path | None:
    """The steps of ``#`` or ``#/...``; None for anything else."""
    if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
        return None
    return [step.replace("~1", "/").replace("~0", "~") for step in unquoted(target).split("/")[1:]]


def found_at(value: Any, path: Path) -> Any:
    """What lies at the end of a path, None if it leads nowhere."""
    for step in path:
        if isinstance(value, list):
            index = int(step) if str(step).isdigit() else len(value)
            value = value[index] if index < len(value) else None
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value


def resolved(value: Any, target: str) -> Any:
    """What a pointer means; None if it leads nowhere."""
    path = steps(target)
    return None if path is None else found_at(value, path)


def changed(value: Any, path: Path, instead: Any) -> Any:
    """A copy with another value at the end of a path, which exists; None leaves the key out."""
    if not path:
        return instead
    step = int(path[0]) if isinstance(value, list) else path[0]
    copy = value.copy()
    if len(path) == 1 and instead is None:
        del copy[step]
    else:
        copy[step] = changed(value[step], path[1:], instead)
    return copy
