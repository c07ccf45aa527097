"""What values a field may have: checks with a field's path, and the same as a JSON schema.

A shape checks a decoded JSON value and returns it as the rest of the package wants it. Here are
the shapes of single values; `cedar.inputs.chat.record` has those of lists and objects.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

from cedar.inputs.chat.types import Api, ProtocolError

__all__ = [
    "Anything",
    "Choice",
    "Flag",
    "Integer",
    "Notes",
    "Number",
    "Path",
    "Shape",
    "Text",
    "found",
    "json_type",
    "listed",
    "nearest",
    "within",
]

Path = tuple[str | int, ...]

# So many names of ignored fields are remembered: a client can make up any number.
_MOST_IGNORED = 50


@dataclass(slots=True)
class Notes:
    """How an API spells paths, and the paths of what was ignored."""

    api: Api | None = None
    ignored: list[str] = field(default_factory=list)

    def spell(self, path: Path) -> str:
        """``messages[0].content``, or ``messages.0.content`` as the Messages API has it."""
        text = ""
        for step in path:
            if isinstance(step, int) and self.api is not Api.MESSAGES:
                text += f"[{step}]"
            else:
                text += f".{step}" if text else str(step)
        return text

    def ignore(self, path: Path) -> None:
        """Remember that a field has no effect; in lists the item's number does not matter."""
        name = self.spell(tuple(step if isinstance(step, str) else "*" for step in path))
        name = name.replace(".*", "[]")
        # Names come from the client and may go into a header.
        name = "".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in name)
        if name not in self.ignored and len(self.ignored) < _MOST_IGNORED:
            self.ignored.append(name)

    def fail(self, path: Path, problem: str, code: str | None = None) -> NoReturn:
        """Raises `ProtocolError` about the field at ``path``."""
        name = self.spell(path)
        raise ProtocolError(
            f"{name}: {problem}" if name else problem, param=name or None, code=code
        )

    def unfit(self, path: Path, expected: str, value: object, hint: str = "") -> NoReturn:
        """Raises `ProtocolError` about a value that is not as expected."""
        self.fail(path, f"expected {expected}, found {found(value)}.{hint}")


class Shape(Protocol):
    """Checks values of a field. ``takes``: the JSON types that its values can have."""

    takes: ClassVar[tuple[str, ...]]

    def check(self, value: Any, path: Path, notes: Notes) -> Any:
        """The value, cleaned; raises `ProtocolError` if it has another shape."""

    def schema(self) -> dict[str, Any]:
        """The values that `check` takes, as a JSON schema."""

    @property
    def says(self) -> str:
        """What is expected, for errors."""


@dataclass(frozen=True, slots=True)
class Text:
    """A string of at least so many characters."""

    shortest: int = 0
    takes: ClassVar[tuple[str, ...]] = ("string",)

    @property
    def says(self) -> str:
        return "a string that is not empty" if self.shortest else "a string"

    def check(self, value: Any, path: Path, notes: Notes) -> str:
        if not isinstance(value, str) or len(value) < self.shortest:
            notes.unfit(path, self.says, value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string"} | ({"minLength": self.shortest} if self.shortest else {})


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few strings."""

    names: tuple[str, ...]
    takes: ClassVar[tuple[str, ...]] = ("string",)

    @property
    def says(self) -> str:
        return listed(self.names)

    def check(self, value: Any, path: Path, notes: Notes) -> str:
        if not isinstance(value, str) or value not in self.names:
            near = nearest(value, self.names) if isinstance(value, str) else ""
            notes.unfit(path, self.says, value, near)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.names)}


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    takes: ClassVar[tuple[str, ...]] = ("boolean",)

    @property
    def says(self) -> str:
        return "true or false"

    def check(self, value: Any, path: Path, notes: Notes) -> bool:
        if not isinstance(value, bool):
            notes.unfit(path, self.says, value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within limits; 3.0 is one."""

    low: int | None = None
    high: int | None = None
    takes: ClassVar[tuple[str, ...]] = ("number",)

    @property
    def says(self) -> str:
        return "an integer" + _limits(self.low, self.high)

    def check(self, value: Any, path: Path, notes: Notes) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not within(value, self.low, self.high):
            notes.unfit(path, self.says, value)
        return int(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer"} | _bounds(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Number:
    """A number within limits; the lower one may be excluded."""

    low: float
    high: float
    above: bool = False
    takes: ClassVar[tuple[str, ...]] = ("number",)

    @property
    def says(self) -> str:
        if self.above:
            return f"a number above {self.low:g} and at most {self.high:g}"
        return "a number" + _limits(self.low, self.high)

    def check(self, value: Any, path: Path, notes: Notes) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not within(value, self.low, self.high):
            notes.unfit(path, self.says, value)
        if self.above and value == self.low:
            notes.unfit(path, self.says, value)
        return float(value)

    def schema(self) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON value."""

    takes: ClassVar[tuple[str, ...]] = ("null", "boolean", "number", "string", "list", "object")

    @property
    def says(self) -> str:
        return "a value"

    def check(self, value: Any, path: Path, notes: Notes) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}


def nearest(name: str, known: Sequence[str]) -> str:
    """`` Did you mean "temperature"?``, or nothing."""
    near = difflib.get_close_matches(name[:100], known, 1)
    return f' Did you mean "{near[0]}"?' if near else ""


def json_type(value: object) -> str:
    """The name of a decoded value's JSON type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number"
    return "list" if isinstance(value, list) else "object"


def found(value: object) -> str:
    """A value as it may stand in an error: never much of a user's text."""
    if isinstance(value, str):
        return f"the string {value[:40]!r}{'…' * (len(value) > 40)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    return "a list" if isinstance(value, list) else "an object"


def listed(names: Sequence[str]) -> str:
    """``"a", "b" or "c"``."""
    quoted = [f'"{name}"' for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def within(value: float, low: float | None, high: float | None) -> bool:
    """Whether a number lies within limits; None is no limit."""
    return (low is None or low <= value) and (high is None or value <= high)


def _limits(low: float | None, high: float | None) -> str:
    if high is not None:
        return f" from {low} to {high}" if low is not None else f" of at most {high}"
    return "" if low is None else f" of {low} or more"


def _bounds(low: float | None, high: float | None) -> dict[str, Any]:
    return ({} if low is None else {"minimum": low}) | ({} if high is None else {"maximum": high})
