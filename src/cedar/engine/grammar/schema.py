"""JSON schemas as the grammar library enforces them, completely or not at all.

The library refuses most of what it cannot do, but passes over keywords that it does not know, and
some that it knows mean less than they say. So a schema is read here first: what constrains nothing
is left out, formats and expressions are rewritten, and everything else that would not be enforced
to the letter is refused with its place in the schema.
"""

import difflib
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn

from cedar.engine.grammar.formats import FORMATS
from cedar.engine.grammar.keywords import (
    ANNOTATIONS,
    ENFORCED,
    LISTED,
    NAMED,
    NO_EFFECT,
    ONE,
    REMEDIES,
    VALUES,
)
from cedar.engine.grammar.pattern import CONTROLS, rewritten
from cedar.engine.grammar.pointers import escaped, unquoted
from cedar.errors import RequestError

__all__ = ["SchemaReader", "check_depth"]

_MOST_DEPTH = 100
_EXACT = 2**53  # larger integers are not told apart
_EXACT_POWERS = 22  # of ten, that a floating-point number holds


class SchemaReader:
    """Reads one schema; ``name`` begins every error, as in ``the schema of the answer``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._places: set[str] = set()
        self._references: list[tuple[str, str]] = []

    def read(self, schema: Any) -> dict[str, Any]:
        """The schema as the grammar library is to see it.

        Raises `RequestError` for whatever would not be enforced.
        """
        check_depth(schema, self._name)
        read = self._schema(schema, "#")
        for place, target in self._references:
            local, _, pointer = target.partition("#")
            # A name behind the # is an anchor, which the library looks up in schemas only.
            if pointer.startswith("/") and (local or "#" + unquoted(pointer) not in self._places):
                self.refuse(place, f"{target!r} is no schema within this one")
        if isinstance(read, bool):
            return {} if read else {"enum": []}
        return read

    def refuse(self, place: str, reason: str) -> NoReturn:
        """Raise the error for the keyword at the end of a JSON pointer."""
        keyword = _keyword(place)
        remedy = REMEDIES.get(keyword or "")
        subject = f"{keyword} at {place}" if keyword else place
        if place == "#":
            subject = "the whole"
        raise RequestError(
            f"{self._name}: {subject} cannot be enforced: {reason.rstrip('.')}."
            + (f" {remedy}." if remedy else "")
        )

    def _schema(self, schema: Any, at: str) -> dict[str, Any] | bool:
        self._places.add(at)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.refuse(at, f"{_short(schema)} is no schema; expected an object or a boolean")
        read: dict[str, Any] = {}
        formats: list[dict[str, Any]] = []
        for keyword, value in schema.items():
            place = f"{at}/{escaped(keyword)}"
            if keyword == "format":
                formats = self._format(value, place)
            elif self._constrains(keyword, value, place):
                read[keyword] = self._value(keyword, value, place)
        if formats:
            read["allOf"] = [*read.get("allOf", []), *formats]
        self._check_count(schema, at)
        return read

    def _constrains(self, keyword: str, value: Any, place: str) -> bool:
        """Whether a keyword is to be enforced; refuses it if it cannot be."""
        if keyword in ENFORCED:
            return True
        if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
            return False
        if keyword in NO_EFFECT and NO_EFFECT[keyword] is value:
            return False
        near = difflib.get_close_matches(keyword, ENFORCED, 1, 0.8)
        hint = f"; did you mean {near[0]}?" if near and keyword not in REMEDIES else ""
        self.refuse(place, f"there is no grammar for this keyword{hint}")

    def _value(self, keyword: str, value: Any, place: str) -> Any:
        if keyword in NAMED:
            if not isinstance(value, dict):
                self.refuse(place, f"{_short(value)}; expected an object of schemas")
            return self._named(keyword, value, place)
        if keyword in LISTED and isinstance(value, list):
            return [self._schema(each, f"{place}/{k}") for k, each in enumerate(value)]
        if keyword in ONE:
            return self._schema(value, place)
        if keyword in LISTED:
            self.refuse(place, f"{_short(value)}; expected a list of schemas")
        if keyword == "pattern":
            return self._pattern(value, place)
        if keyword in VALUES or keyword == "required":
            self._check_values(value, place)
        if keyword == "$ref" and isinstance(value, str):
            self._references.append((place, value))
        return value

    def _named(self, keyword: str, schemas: dict[str, Any], place: str) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for name, schema in schemas.items():
            at = f"{place}/{escaped(name)}"
            if keyword == "properties":
                self._check_values(name, at)
            key = self._pattern(name, at) if keyword == "patternProperties" else name
            if key in read:
                self.refuse(place, f"two expressions mean the same, {name!r} is one of them")
            read[key] = self._schema(schema, at)
        return read

    def _pattern(self, pattern: Any, place: str) -> str:
        if not isinstance(pattern, str):
            self.refuse(place, f"{_short(pattern)}; expected a string")
        try:
            return rewritten(pattern)
        except RequestError as error:
            self.refuse(place, str(error))

    def _format(self, name: Any, place: str) -> list[dict[str, Any]]:
        if not isinstance(name, str) or name not in FORMATS:
            self.refuse(place, f"{_short(name)}; expected one of {', '.join(FORMATS)}")
        return [
            {**schema, "pattern": rewritten(str(schema["pattern"]))} for schema in FORMATS[name]
        ]

    def _check_count(self, schema: dict[str, Any], at: str) -> None:
        """Keys that no property names may come twice, and then count once."""
        least, required = schema.get("minProperties"), schema.get("required")
        known = len(set(required)) if isinstance(required, list) and _is_names(required) else 0
        if isinstance(least, int) and least > known + 1:
            self.refuse(
                f"{at}/minProperties",
                f"{least} is more than one key beside the {known} required ones",
            )

    def _check_values(self, value: Any, place: str) -> None:
        for each in _inside(value):
            if isinstance(each, int) and abs(each) > _EXACT:
                self.refuse(place, f"{_short(each)} is beyond 2^53; use a string")
            if isinstance(each, float) and not _is_exact(each):
                self.refuse(place, f"{_short(each)} is not read exactly; use fewer digits")
            if isinstance(each, str) and not CONTROLS.isdisjoint(map(ord, each)):
                self.refuse(place, f"{_short(each)} holds a control character")


def check_depth(value: Any, name: str) -> None:
    """Raises `RequestError`, beginning with ``name``, for JSON that is nested too deeply."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise RequestError(f"{name} is nested more than {_MOST_DEPTH} levels deep. Use $ref.")
        level = [inner for each in level for inner in _children(each)]


def _is_exact(number: float) -> bool:
    """Whether the library reads it without rounding: as an integer times a power of ten."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    mantissa = int("".join(map(str, digits)))
    return isinstance(exponent, int) and mantissa <= _EXACT and abs(exponent) <= _EXACT_POWERS


def _keyword(place: str) -> str | None:
    """The keyword that a pointer ends in; None if it ends in a name or a number."""
    named = False
    found = None
    for step in place.split("/")[1:]:
        keyword = not named and not step.isdigit()
        found = step if keyword else None
        named = keyword and step in NAMED
    return found


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _inside(value: Any) -> Iterator[Any]:
    """A value and all within it, keys too."""
    yield value
    yield from value if isinstance(value, dict) else ()
    for each in _children(value):
        yield from _inside(each)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
