"""Regular expressions of JSON schemas and requests, read as ECMA-262 writes them.

The grammar library has a dialect of its own, in which some of these expressions mean something
else: its ``.`` matches a carriage return, its ``\\s`` a next-line character, ``[a&&b]`` is an
intersection and ``a++`` is no mistake. What reads alike and means another thing would be enforced
wrongly without a word, so every expression is rewritten into forms that both read alike, or
refused.

Control characters that JSON writes as ``\\u00..`` are left out of all classes, for grammars know
no such escapes. The library would pass over them where they stand alone, and take a class of all
of them for one that has quotes and backslashes as well.
"""

import re
from typing import NamedTuple, NoReturn

from cedar.errors import RequestError

__all__ = ["CONTROLS", "Branch", "full_match", "read_pattern", "rewritten"]

# JSON has no short escape for these.
CONTROLS = frozenset(range(0x20)).difference(b"\b\t\n\f\r") | {0x7F}
_CONTROLS = r"\x00-\x07\x0b\x0e-\x1f\x7f"
# ECMA-262 white space without U+FEFF, which other dialects do not count as such; and for its
# complement everything that any of them counts.
_SPACE = r"\t\n\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACES = _SPACE + r"\u0085\ufeff"
_SETS = {
    "d": "[0-9]",
    "D": f"[^0-9{_CONTROLS}]",
    "w": "[A-Za-z0-9_]",
    "W": f"[^A-Za-z0-9_{_CONTROLS}]",
    "s": f"[{_SPACE}]",
    "S": f"[^{_SPACES}{_CONTROLS}]",
}
_ANY_BUT_LINE_ENDS = rf"[^\n\r\u2028\u2029{_CONTROLS}]"
_ANYTHING = "(?s:.*)"
_UNWRITTEN = frozenset(rf"\u{{{code:x}}}" for code in CONTROLS)
_META = r"\.+*?()|[]{}^$#&-~/"
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_GROUP = re.compile(r"\((?:\?:|\?<[A-Za-z_$][\w$]*>)?(?!\?)")
_CODE = re.compile(
    r"u([0-9A-Fa-f]{4})(?:\\u([dD][c-fC-F][0-9A-Fa-f]{2}))?|x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]{1,6})\}"
)
_BRACED = re.compile(r"[pP]\{\^?[A-Za-z0-9_=]+\}")


class Branch(NamedTuple):
    """One of the alternatives of an expression, and whether it is bound to start and end."""

    starts: bool
    body: str
    ends: bool
    anchored_inside: bool


def rewritten(pattern: str) -> str:
    """The expression for the grammar library's ``pattern``, which searches as JSON schemas do.

    Raises `RequestError`, which begins with the reason.
    """
    return "|".join(
        ("^" if starts else "") + f"(?:{body})" + ("$" if ends else "")
        for starts, body, ends, _ in read_pattern(pattern)
    )


def full_match(pattern: str, *, search: bool) -> str:
    """The expression of all whole texts: those it is found in, or those it describes itself.

    search: whether text may come before and after what is not anchored. Raises as `rewritten`, and
    for anchors elsewhere than at the ends of an alternative.
    """
    branches = read_pattern(pattern)
    if any(branch.anchored_inside for branch in branches):
        raise RequestError(f"^ and $ are supported only at the ends of it: {pattern!r}")
    return "|".join(
        ("" if starts or not search else _ANYTHING)
        + f"(?:{body})"
        + ("" if ends or not search else _ANYTHING)
        for starts, body, ends, _ in branches
    )


def read_pattern(pattern: str) -> tuple[Branch, ...]:
    """The alternatives of an expression, rewritten; anchors inside of them stay where they are."""
    return _Reader(pattern).branches()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def branches(self) -> tuple[Branch, ...]:
        found = [self._branch()]
        while self._at < len(self._text):
            self._at += 1  # the bar
            found.append(self._branch())
        if self._depth:
            self._refuse("a group is not closed")
        return tuple(found)

    def _branch(self) -> Branch:
        """Up to a bar outside of all groups, or the end."""
        starts = ends = inside = False
        parts: list[str] = []
        while self._at < len(self._text):
            symbol = self._text[self._at]
            if symbol == "|" and not self._depth:
                break
            if symbol == "^" and not parts:
                starts, self._at = True, self._at + 1
            elif symbol == "$" and not self._depth and self._text[self._at + 1 :][:1] in ("", "|"):
                ends, self._at = True, self._at + 1
            else:
                parts.append(self._piece(symbol))
                inside |= symbol in "^$"
        return Branch(starts, "".join(parts), ends, inside)

    def _piece(self, symbol: str) -> str:
        """What stands here, rewritten; moves behind it."""
        if symbol == "\\":
            escape = self._escape()
            self._check_controls(escape)
            return escape
        if symbol == "[":
            return self._class()
        if symbol == "(":
            return self._group()
        quantifier = _QUANTIFIER.match(self._text, self._at)
        if quantifier is not None:
            return self._quantified(quantifier.group())
        self._at += 1
        if symbol == ")":
            self._depth -= 1
            if self._depth < 0:
                self._refuse("a group is closed that was not opened")
            return symbol
        if symbol == ".":
            return _ANY_BUT_LINE_ENDS
        literal = symbol if symbol in "|^$" else _literal(symbol)
        self._check_controls(literal)
        return literal

    def _check_controls(self, literal: str) -> None:
        if literal in _UNWRITTEN:
            self._refuse("a control character is not supported in it")

    def _group(self) -> str:
        match = _GROUP.match(self._text, self._at)
        if match is None:
            self._refuse(f"{self._text[self._at : self._at + 4]!r} is not supported in it")
        self._at = match.end()
        self._depth += 1
        return "(?:"

    def _quantified(self, quantifier: str) -> str:
        self._at += len(quantifier)
        if self._text.startswith("?", self._at):  # whether lazy or not, the same texts match
            self._at += 1
        if _QUANTIFIER.match(self._text, self._at):
            self._refuse(f"nothing is repeated at character {self._at}")
        return quantifier

    def _escape(self) -> str:
        start = self._at + 1
        symbol = self._text[start : start + 1]
        if not symbol:
            self._refuse("it ends in a backslash")
        self._at = start + 1
        if symbol in _SETS:
            return _SETS[symbol]
        if symbol in "tnrf":
            return "\\" + symbol
        if symbol == "v":
            return _literal("\v")
        code = _CODE.match(self._text, start)
        if code is not None:
            self._at = code.end()
            return self._character(code)
        braced = _BRACED.match(self._text, start)
        if braced is not None:
            self._at = braced.end()
            return f"[\\{braced.group()}&&[^{_CONTROLS}]]"
        if symbol.isalnum():
            self._refuse(f"'\\{symbol}' is not supported in it")
        return _literal(symbol)

    def _character(self, code: re.Match[str]) -> str:
        four, low, two, braced = code.groups()
        value = int(four or two or braced, 16)
        if 0xD800 <= value < 0xDC00 and low is not None:
            value = 0x10000 + ((value - 0xD800) << 10) + (int(low, 16) - 0xDC00)
        elif low is not None:
            self._at -= len(low) + 2  # two characters, not one of two halves
        if value > 0x10FFFF:
            self._refuse(f"there is no character with the code {value:x}")
        if 0xD800 <= value < 0xE000:
            self._refuse("half of a surrogate pair stands alone in it")
        return f"\\u{{{value:x}}}"

    def _class(self) -> str:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        parts: list[str] = []
        previous_is_set = True  # a hyphen at the start is one character
        while not self._text.startswith("]", self._at):
            symbol = self._text[self._at : self._at + 1]
            if not symbol:
                self._refuse("a class of characters is not closed")
            if self._text.startswith("--", self._at):
                self._refuse("'--' is not supported in a class of characters")
            if symbol == "\\":
                parts.append(self._escape())
                previous_is_set = parts[-1].startswith("[")
                continue
            self._at += 1
            if symbol != "-":
                parts.append(_literal(symbol))
                previous_is_set = False
                continue
            single = previous_is_set or self._text.startswith("]", self._at) or self._set_follows()
            parts.append("\\-" if single else "-")
            previous_is_set = single
        if not parts:
            self._refuse("a class of characters is empty")
        self._at += 1
        inside = "".join(parts)
        return f"[^{inside}{_CONTROLS}]" if negated else f"[{inside}&&[^{_CONTROLS}]]"

    def _set_follows(self) -> bool:
        return re.compile(r"\\[dDwWsSpP]").match(self._text, self._at) is not None

    def _refuse(self, reason: str) -> NoReturn:
        raise RequestError(f"{reason}: {self._text!r}")


def _literal(symbol: str) -> str:
    if symbol < " " or symbol == "\x7f":
        return f"\\u{{{ord(symbol):x}}}"
    return "\\" + symbol if symbol in _META else symbol
