"""Grammars handed to the library, and what it says about them."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher

from cedar.engine.grammar.culprit import culprit
from cedar.engine.grammar.schema import SchemaReader
from cedar.engine.grammar.vocabulary import MARKER, GrammarVocabulary
from cedar.errors import RequestError

__all__ = ["GrammarCompiler", "inline"]

_PLACE = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")

# One space, or one line end and an indent: a weak model likes to write blanks for ever. Without
# \u escapes a string has one spelling: the library tells keys apart by how they are written.
_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"whitespace_pattern": r"\x20|\n[\x20\t]{0,16}", "json_allowed_escapes": 'nrbtf\\"'}
)


def inline(schema: Mapping[str, Any]) -> str:
    """JSON of a schema that `GrammarCompiler.check` returned, as a rule of a grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": dict(_OPTIONS)}, ensure_ascii=False)


class GrammarCompiler:
    """Compiles grammars (in the library's variant of Lark's language) for one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary

    def compiled(self, grammar: str, name: str) -> LLMatcher:
        """A matcher at the beginning of a grammar. Raises `RequestError`, beginning with ``name``.

        Nothing of the matcher may be changed but copies of it.
        """
        matcher, problem = self._compile(grammar)
        if problem is not None:
            raise RequestError(f"{name} cannot be enforced: {problem}.")
        return matcher

    def check(self, schema: Any, name: str) -> dict[str, Any]:
        """A JSON schema as it will be enforced, to the letter.

        Raises `RequestError` naming keyword and place if it would not be, or if no value fits it.
        """
        reader = SchemaReader(name)
        read = reader.read(schema)
        _, problem = self._compile(f"start: {inline(read)}")
        if problem is not None:
            reader.refuse(culprit(read, self.compiles), problem)
        return read

    def fits(self, schema: Any) -> dict[str, Any] | None:
        """As `check`; None instead of an error."""
        try:
            read = SchemaReader("").read(schema)
        except RequestError:
            return None
        return read if self.compiles(read) else None

    def compiles(self, read: Any) -> bool:
        """Whether any value fits a schema that has been read (`SchemaReader`)."""
        if isinstance(read, bool):
            return read
        return self._compile(f"start: {inline(read)}")[1] is None

    def _compile(self, grammar: str) -> tuple[LLMatcher, str | None]:
        matcher = LLMatcher(
            self.vocabulary.library, LLMatcher.grammar_from_lark(grammar), log_level=0
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # some grammars turn out to be too large, or empty, here
        if matcher.is_error():
            return matcher, _reason(matcher.get_error())
        if self.vocabulary.marker is not None and MARKER in grammar:
            return matcher, f"{MARKER!r} is reserved for tool calls and cannot be part of a text"
        warnings = matcher.get_grammar_warnings()
        return matcher, warnings[0][:200] if warnings else None


def _reason(error: str) -> str:
    """The library's first line, without its own places and options."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    reason = _PLACE.sub("", (lines or ["unknown"])[0])
    if reason.startswith("NoExtension"):
        return "no text fits it"
    return reason.split(". Enable ")[0][:200].rstrip(".")
