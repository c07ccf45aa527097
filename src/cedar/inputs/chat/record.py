"""Shapes of lists and objects; see `cedar.inputs.chat.shape`.

What a record does not know it drops and notes, so that nothing is ignored in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cedar.inputs.chat.shape import Choice, Notes, Path, Shape, json_type, listed, nearest, within

__all__ = ["Either", "Items", "Object", "Record", "Refused", "Tagged"]


@dataclass(frozen=True, slots=True)
class Object:
    """An object with any keys, whose values may have a shape of their own."""

    values: Shape | None = None
    takes: ClassVar[tuple[str, ...]] = ("object",)

    @property
    def says(self) -> str:
        return "an object"

    def check(self, value: Any, path: Path, notes: Notes) -> dict[str, Any]:
        if not isinstance(value, dict):
            notes.unfit(path, self.says, value)
        if self.values is None:
            return value
        return {key: self.values.check(one, (*path, key), notes) for key, one in value.items()}

    def schema(self) -> dict[str, Any]:
        extra = {} if self.values is None else {"additionalProperties": self.values.schema()}
        return {"type": "object"} | extra


@dataclass(frozen=True, slots=True)
class Items:
    """A list whose items have one shape."""

    item: Shape
    fewest: int = 0
    most: int | None = None
    takes: ClassVar[tuple[str, ...]] = ("list",)

    @property
    def says(self) -> str:
        if self.most is not None:
            return f"a list of {self.fewest} to {self.most} items"
        return f"a list of {self.fewest} or more items" if self.fewest else "a list"

    def check(self, value: Any, path: Path, notes: Notes) -> list[Any]:
        if not isinstance(value, list):
            notes.unfit(path, self.says, value)
        if not within(len(value), self.fewest, self.most):
            notes.fail(path, f"expected {self.says}, found {len(value)}.")
        return [self.item.check(one, (*path, place), notes) for place, one in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "array", "items": self.item.schema()}
        if self.fewest:
            found["minItems"] = self.fewest
        return found if self.most is None else found | {"maxItems": self.most}


@dataclass(frozen=True, slots=True)
class Either:
    """One of several shapes that differ in their JSON type, like a string or a list."""

    shapes: tuple[Shape, ...]
    takes: ClassVar[tuple[str, ...]] = ()

    @property
    def says(self) -> str:
        return " or ".join(shape.says for shape in self.shapes)

    def check(self, value: Any, path: Path, notes: Notes) -> Any:
        kind = json_type(value)
        for shape in self.shapes:
            if kind in shape.takes:
                return shape.check(value, path, notes)
        notes.unfit(path, self.says, value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [shape.schema() for shape in self.shapes]}


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is known and not offered; only values that ask for nothing are taken.

    reason: why, and what to use instead.
    """

    reason: str
    harmless: tuple[Any, ...] = ()
    takes: ClassVar[tuple[str, ...]] = ()

    @property
    def says(self) -> str:
        return "nothing"

    def check(self, value: Any, path: Path, notes: Notes) -> Any:
        # 1 == True in Python, so types are compared as well.
        if not any(value == one and type(value) is type(one) for one in self.harmless):
            notes.fail(path, self.reason, code="unsupported_parameter")
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.harmless)} if self.harmless else {"not": {}}


@dataclass(frozen=True, slots=True)
class Record:
    """An object with known fields. Null is the absence of an optional field.

    Other fields are noted as ignored, or refused if the record is ``closed``.
    """

    fields: Mapping[str, Shape]
    required: tuple[str, ...] = ()
    closed: bool = False
    takes: ClassVar[tuple[str, ...]] = ("object",)

    @property
    def says(self) -> str:
        return "an object"

    def check(self, value: Any, path: Path, notes: Notes) -> dict[str, Any]:
        if not isinstance(value, dict):
            notes.unfit(path, self.says, value)
        for name in self.required:
            if value.get(name) is None:
                what = self.fields[name].says
                notes.fail((*path, name), f"is missing; expected {what}.", "missing_field")
        found: dict[str, Any] = {}
        for name, one in value.items():
            if name not in self.fields:
                self._unknown(name, one, path, notes)
            elif one is not None:
                found[name] = self.fields[name].check(one, (*path, name), notes)
        return found

    def _unknown(self, name: str, value: Any, path: Path, notes: Notes) -> None:
        if self.closed:
            near = nearest(name, tuple(self.fields))
            notes.fail((*path, name[:100]), f"is not a known field.{near}", "unknown_parameter")
        if value not in (None, False, "", [], {}):  # these ask for nothing
            notes.ignore((*path, name[:100]))

    def schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        for name, shape in self.fields.items():
            one = shape.schema()
            properties[name] = one if name in self.required else {"anyOf": [one, {"type": "null"}]}
        found: dict[str, Any] = {"type": "object", "properties": properties}
        if self.required:
            found["required"] = list(self.required)
        return found | ({"additionalProperties": False} if self.closed else {})


@dataclass(frozen=True, slots=True)
class Tagged:
    """Objects that one of their fields tells apart.

    tag: that field. kinds: its values and what the object then is, the tag apart. default: the
    kind of an object without the tag. refused: other known values, and why not.
    """

    tag: str
    kinds: Mapping[str, Record]
    default: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    takes: ClassVar[tuple[str, ...]] = ("object",)

    @property
    def says(self) -> str:
        return f"an object with {self.tag} {listed(tuple(self.kinds))}"

    def check(self, value: Any, path: Path, notes: Notes) -> dict[str, Any]:
        if not isinstance(value, dict):
            notes.unfit(path, self.says, value)
        where = (*path, self.tag)
        kind = value.get(self.tag)
        if kind is None:
            kind = self.default
        if kind is None:
            names = listed(tuple(self.kinds))
            notes.fail(where, f"is missing; expected {names}.", "missing_field")
        if isinstance(kind, str) and kind in self.refused:
            notes.fail(where, f'"{kind}" {self.refused[kind]}', "unsupported_value")
        kind = Choice(tuple(self.kinds)).check(kind, where, notes)
        rest = {name: one for name, one in value.items() if name != self.tag}
        return {self.tag: kind} | self.kinds[kind].check(rest, path, notes)

    def schema(self) -> dict[str, Any]:
        found = []
        for kind, record in self.kinds.items():
            one = record.schema()
            usual = kind == self.default
            tag: dict[str, Any] = {"enum": [kind, None]} if usual else {"const": kind}
            one["properties"] = {self.tag: tag} | one["properties"]
            if not usual:
                one["required"] = [self.tag, *one.get("required", ())]
            found.append(one)
        return {"anyOf": found}
