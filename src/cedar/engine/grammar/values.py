"""The values of one parameter of a tool: as text, as JSON, or either."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cedar.engine.grammar.compiler import GrammarCompiler
from cedar.engine.grammar.formats import FORMATS
from cedar.engine.grammar.pattern import full_match
from cedar.engine.grammar.pointers import resolved
from cedar.errors import RequestError

__all__ = ["ANY_TEXT", "Value", "read_value"]

ANY_TEXT = "/(?s:.*)/"
_OTHERS = ("null", "boolean", "number", "array", "object")
_KINDS = frozenset(("string", *_OTHERS))
_MOST_STEPS = 500


class Value(NamedTuple):
    """What a parameter may be.

    text: a terminal (in the grammar library's language) of the strings that fit, None if none do.
    json: a schema of all other values, None if there are none.
    """

    text: str | None
    json: dict[str, Any] | None


def read_value(
    schema: Any,
    checked: Any,
    *,
    definitions: Mapping[str, Any],
    checked_definitions: Mapping[str, Any],
    compiler: GrammarCompiler,
    name: str,
) -> Value:
    """The values that fit a schema; of some there may be none, of strings or others or both.

    checked: what `GrammarCompiler.check` made of it. definitions, checked_definitions: ``$defs``
    and ``definitions`` around the two, for ``$ref``. Raises `RequestError`, beginning with
    ``name``, for what would not be enforced.
    """
    strings = _Strings(definitions)
    try:
        strings.check_references([schema, definitions])
        kinds = strings.kinds(schema)
        text = _terminal(strings.terms(schema)) if "string" in kinds else None
    except RequestError as error:
        raise RequestError(f"{name} cannot be enforced: {error}.") from None
    others = kinds - {"string"}

    def possible(types: Iterable[str]) -> dict[str, Any] | None:
        """The schema of the values of some types; None if there are none after all."""
        part = {"allOf": [checked, {"type": sorted(types)}]} if types != kinds else checked
        found = {**checked_definitions, **part}
        return found if found.keys() == {"type"} or compiler.compiles(found) else None

    if text is not None and text != ANY_TEXT and possible({"string"}) is None:
        text = None
    return Value(text, possible(others) if others else None)


class _Strings:
    """What a schema says of strings, through ``$ref`` and combinations.

    The schemas have been checked. Raises `RequestError` with the reason for what leads too far.
    """

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._root = definitions
        self._steps = 0

    def check_references(self, value: Any) -> None:
        """Refuses what does not lead into the definitions: nothing else is around a parameter."""
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
                raise RequestError(f"$ref to {target!r}; expected #/$defs/... within a tool")
            value = list(value.values())
        for each in value if isinstance(value, list) else ():
            self.check_references(each)

    def kinds(self, schema: Any) -> frozenset[str]:
        """Types that values may have, or more."""
        self._step()
        if not isinstance(schema, dict):
            return frozenset() if schema is False else _KINDS
        found = _KINDS
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            found &= {"number" if each == "integer" else str(each) for each in types}
        if "const" in schema:
            found &= {_kind(schema["const"])}
        if "enum" in schema:
            found &= {_kind(each) for each in schema["enum"]}
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                found &= frozenset().union(*map(self.kinds, schema[keyword]))
        for part in self._parts(schema):
            found &= self.kinds(part)
        return found

    def terms(self, schema: Any) -> list[str]:
        """Terminals that all strings which fit must match."""
        self._step()
        if not isinstance(schema, dict):
            return []
        terms: list[str] = []
        if "const" in schema:
            terms.append(_literals([schema["const"]]))
        if "enum" in schema:
            terms.append(_literals(schema["enum"]))
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            terms.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
        if "pattern" in schema:
            terms.append(f"/{full_match(schema['pattern'], search=True)}/")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [each for each in schema[keyword] if "string" in self.kinds(each)]
                terms.append(f"({' | '.join(_terminal(self.terms(each)) for each in options)})")
        for part in self._parts(schema):
            terms += self.terms(part)
        return terms

    def _parts(self, schema: dict[str, Any]) -> list[Any]:
        """Schemas that hold as well."""
        parts = [*schema.get("allOf", []), *map(dict, FORMATS.get(schema.get("format", ""), ()))]
        return [*parts, resolved(self._root, schema["$ref"])] if "$ref" in schema else parts

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise RequestError("its $ref go in circles, or too many ways")


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _literals(values: list[Any]) -> str:
    texts = [json.dumps(each, ensure_ascii=False) for each in values if isinstance(each, str)]
    return f"({' | '.join(texts)})"


def _terminal(terms: list[str]) -> str:
    return f"({' & '.join(terms)})" if terms else ANY_TEXT
