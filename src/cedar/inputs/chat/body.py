"""JSON bodies, read strictly: what two readers could understand differently is refused."""

import json
import math
from typing import Any, NoReturn

from cedar.inputs.chat.types import ProtocolError

__all__ = ["MAX_DEPTH", "parse_arguments", "read_body"]

MAX_DEPTH = 100
"""Deepest nesting of lists and objects in a body."""

_LARGEST = 2**64 - 1
_SMALLEST = -(2**63)


class _Refused(ValueError):
    """A value that JSON readers disagree about; the message says which."""


def read_body(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises `ProtocolError` for anything but UTF-8, a repeated key, NaN and infinity, numbers that
    overflow (integers beyond 64 bits, floats beyond double precision), lone surrogates and more
    than `MAX_DEPTH` levels.
    """
    try:
        text = bytes(body).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError(
            f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}. Send JSON in "
            "UTF-8.",
            code="invalid_json",
        ) from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except _Refused as error:
        raise ProtocolError(f"the body cannot be used: {error}.", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ProtocolError(f"the body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ProtocolError(
            f"the body is a JSON {_kind(value)}; expected an object with the request's fields.",
            code="invalid_json",
        )
    _check_tree(value)
    return value


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object that a call's arguments spell, also if they were encoded twice; None if none.

    No arguments at all count as the empty object, as clients write a call without parameters so.
    """
    if not text.strip():
        return {}
    for _ in range(2):
        try:
            value = json.loads(
                text, parse_constant=_constant, parse_int=_integer, parse_float=_float
            )
            _check_tree(value)
        except (ValueError, RecursionError, ProtocolError):
            return None
        if isinstance(value, dict):
            return value
        if not isinstance(value, str):
            return None
        text = value
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {key[:80]!r} occurs twice in one object")
            seen.add(key)
    return found


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a JSON number")


def _integer(digits: str) -> int:
    # The length first: Python refuses to convert thousands of digits with another error.
    if len(digits) > 20 or not _SMALLEST <= int(digits) <= _LARGEST:
        raise _Refused(f"the number {digits[:24]}{'…' * (len(digits) > 24)} has over 64 bits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _Refused(f"the number {digits[:24]} is too large")
    return value


def _check_tree(root: Any) -> None:
    """Depth and Unicode of every key and string; without recursion of its own."""
    level = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, dict):
                for key in value:
                    _check_text(key)
                below += value.values()
            elif isinstance(value, list):
                below += value
        if not below:
            return
        level = below
    if any(isinstance(value, dict | list) for value in level):
        raise _too_deep()
    for value in level:
        if isinstance(value, str):
            _check_text(value)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ProtocolError(
            f"the body holds the lone surrogate \\u{ord(text[error.start]):04x}, which is half a "
            "character. Escape characters beyond U+FFFF as a pair, or send them as UTF-8.",
            code="invalid_json",
        ) from None


def _too_deep() -> ProtocolError:
    return ProtocolError(
        f"the body nests lists and objects more than {MAX_DEPTH} levels deep. Flatten it.",
        code="invalid_json",
    )


def _kind(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
