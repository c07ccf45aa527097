"""Dotted changes to a frozen configuration, checked by type: `steps=100`, `data.seq_len=256`.

Also the flat form of a configuration, in which two runs are compared field by field.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from cedar.errors import TrainingError

__all__ = ["apply_overrides", "flatten"]

Json = None | bool | int | float | str | list["Json"]
Config = TypeVar("Config")

_Changes = dict[str, Any]  # field name to new value, or to the changes inside a group


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return `config` with every `name=value` of `overrides` applied, in order.

    Values: integers (`32_768`), numbers (`3e-4`), `true`/`false`, text as it stands, one of an
    enum's values, lists `[1,3]`, and `none` where a field may be absent.

    Raises:
        TrainingError: all overrides that are malformed, name no field or have the wrong type.
    """
    problems: list[str] = []
    changes: _Changes = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        try:
            if not equals or not name:
                raise _Rejected("is not of the form name=value")
            _collect(config, name.strip().split("."), text.strip(), changes)
        except _Rejected as error:
            problems.append(f"{override!r} {error}.")
    if problems:
        raise TrainingError("These overrides cannot be applied:\n  " + "\n  ".join(problems))
    # All at once: fields that have to agree with each other can be changed together.
    rebuilt: Config = _rebuild(config, changes)
    return rebuilt


def flatten(config: Any, prefix: str = "") -> dict[str, Json]:
    """Every leaf field of a (nested) configuration by its dotted name, as plain JSON values."""
    flat: dict[str, Json] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{prefix}{field.name}."))
        else:
            flat[prefix + field.name] = _plain(value)
    return flat


class _Rejected(Exception):
    """Why one override cannot be applied; collected into one TrainingError."""


def _collect(config: Any, path: list[str], text: str, changes: _Changes) -> None:
    """Check one override against `config` and add its value to the tree of changes."""
    node = config
    for depth, name in enumerate(path):
        names = [field.name for field in dataclasses.fields(node)]
        here = ".".join(path[: depth + 1])
        if name not in names:
            where = ".".join(path[:depth]) or "the configuration"
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}"
            raise _Rejected(f"names no field: {where} has no {name!r}; {hint}")
        value = getattr(node, name)
        last = depth == len(path) - 1
        if dataclasses.is_dataclass(value) == last:
            if last:
                inner = ", ".join(field.name for field in dataclasses.fields(value))
                raise _Rejected(f"sets a group: {here} consists of {inner}; set one of those")
            raise _Rejected(f"goes too deep: {here} has no fields")
        if last:
            changes[name] = _parse(text, get_type_hints(type(node))[name])
        else:
            inner_changes = changes.setdefault(name, {})
            assert isinstance(inner_changes, dict)  # groups hold dicts, leaves never do
            node, changes = value, inner_changes


def _rebuild(node: Any, changes: _Changes) -> Any:
    values = {
        name: _rebuild(getattr(node, name), change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return dataclasses.replace(node, **values)


def _parse(text: str, kind: Any) -> Any:
    """Read `text` as a value of the annotated type `kind`."""
    if get_origin(kind) in (types.UnionType, Union):
        options = [option for option in get_args(kind) if option is not type(None)]
        if len(options) < len(get_args(kind)) and text.lower() in ("none", "null"):
            return None
        return _first(text, options)
    if get_origin(kind) is tuple:
        return _parse_tuple(text, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        allowed = [str(member.value) for member in kind]
        if text not in allowed:
            raise _Rejected(f"has value {text!r}; expected one of {', '.join(allowed)}")
        return kind(text)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise _Rejected(f"has value {text!r}; expected true or false")
        return text.lower() == "true"
    if kind is str:
        return text
    try:
        if kind is int:
            return int(text)
        if kind is float and math.isfinite(number := float(text)):
            return number
    except ValueError:
        pass
    wanted = "a whole number" if kind is int else "a finite number"
    raise _Rejected(f"has value {text!r}; expected {wanted}")


def _first(text: str, options: list[Any]) -> Any:
    """The first of several allowed types that accepts `text`."""
    reasons: list[str] = []
    for option in options:
        try:
            return _parse(text, option)
        except _Rejected as error:
            reasons.append(str(error))
    raise _Rejected(" or ".join(reasons))


def _parse_tuple(text: str, kind: Any) -> tuple[Any, ...]:
    try:
        items = json.loads(text if text.startswith("[") else f"[{text}]")
    except json.JSONDecodeError:
        # Words without quotes, as a shell leaves them: freeze=vision,aligner
        items = [item.strip() for item in text.strip("[]").split(",") if item.strip()]
    (item_kind, *_) = get_args(kind) or (str,)
    return tuple(
        _parse(item if isinstance(item, str) else json.dumps(item), item_kind) for item in items
    )


def _plain(value: Any) -> Json:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a configuration field holds a {type(value).__name__}")
