"""Which part of a schema keeps it from being compiled."""

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from cedar.engine.grammar.keywords import LISTED, NAMED, ONE
from cedar.engine.grammar.pointers import Path, changed, found_at, pointer, steps

__all__ = ["culprit"]

# Whatever is wrong with a value, values of other types are left without ``type``; it comes last.
_SUSPICION: Mapping[str, int] = MappingProxyType(
    {"$defs": 1, "$schema": 1, "definitions": 1, "properties": 2, "type": 3}
)
_MOST_TRIALS = 200
_MOST_CHARACTERS = 400_000  # compiled in all, which takes seconds at worst


class _Part(NamedTuple):
    """A place in a schema. instead: what takes it out of the way, None for nothing at all."""

    path: Path
    is_schema: bool
    instead: Any


def culprit(schema: Mapping[str, Any], compiles: Callable[[Any], bool]) -> str:
    """JSON pointer of the smallest part without which a schema that does not compile does.

    ``#`` if there is none. After a number of trials, fewer for large schemas, it is the smallest
    part so far.
    """
    size = len(json.dumps(schema))
    trials = iter(range(max(3, min(_MOST_TRIALS, _MOST_CHARACTERS // size))))
    blamed = _Part([], True, True)
    while True:
        parts = _within(schema, blamed)
        helping = (
            part
            for part, _ in zip(parts, trials, strict=False)
            if compiles(changed(schema, part.path, part.instead))
        )
        smaller = next(helping, None)
        # Where more than one of a list helps, it is the list that is wrong.
        if smaller is None or (isinstance(smaller.path[-1], int) and next(helping, None)):
            return pointer(blamed.path)
        blamed = smaller


def _within(schema: Mapping[str, Any], part: _Part) -> Iterator[_Part]:
    """The next smaller parts; of a reference, what it refers to."""
    path = part.path
    value = found_at(schema, path)
    if part.is_schema:
        if isinstance(value, dict):
            for keyword in sorted(value, key=_suspicion):
                yield _Part([*path, keyword], False, None)
        return
    keyword = path[-1]
    if keyword == "$ref":
        target = steps(value)
        if target and found_at(schema, target) is not None:
            yield _Part(target, True, True)
    elif keyword in NAMED and isinstance(value, dict):
        for name in value:
            yield _Part([*path, name], True, True)
    elif keyword in LISTED and isinstance(value, list):
        # An alternative that allows everything would hide the mistakes of the others.
        instead = keyword not in ("anyOf", "oneOf")
        for index in range(len(value)):
            yield _Part([*path, index], True, instead)
    elif keyword in ONE:
        yield _Part(path, True, True)


def _suspicion(keyword: str) -> int:
    return _SUSPICION.get(keyword, 0)
