"""Text cleaning and duplicate detection for the corpus; no file or network access."""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Document", "Shingles", "clean", "clean_rst", "content_key", "digest"]

# Typographic variants that differ between sources; folding them saves vocabulary.
_FOLDED = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2011": "-",
        "\u2013": "-",
        "\u00a0": " ",
        "\ufeff": None,
        "\ufffd": None,
        "\t": "    ",
        "\r": None,
        "\f": "\n",
    }
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_INNER_SPACES = re.compile(r"(?<=\S) {2,}")
_BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One indivisible piece of text: it is in one split as a whole."""

    source: str
    title: str
    text: str
    heldout: bool = False

    def record(self) -> dict[str, str]:
        return {"text": self.text, "source": self.source, "title": self.title}


def clean(text: str, *, max_indent: int = 2) -> str:
    """NFC, folded quotes and spaces, at most one blank line in a row, bounded indentation."""
    text = unicodedata.normalize("NFC", text.translate(_FOLDED))
    text = _CONTROL.sub("", text)
    lines = []
    for line in text.split("\n"):
        body = line.strip()
        indent = min(len(line) - len(line.lstrip()), max_indent) if body else 0
        spaced = body if max_indent > 2 else _INNER_SPACES.sub(" ", body)
        lines.append(" " * indent + spaced)
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n")


def digest(parts: Iterable[str]) -> str:
    """SHA-256 of the UTF-8 text of all parts, each ended by a zero byte."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() + b"\0")
    return state.hexdigest()


def content_key(text: str) -> bytes:
    """Equal for texts that differ only in case, spacing and punctuation."""
    letters = "".join(_words(text))
    return hashlib.blake2b(letters.encode(), digest_size=16).digest()


# --- reStructuredText ------------------------------------------------------------------------

_ROLE = re.compile(r":[a-zA-Z][\w:+-]*:`!?(~?)([^`<]+?)(?:\s*<[^`>]*>)?`", re.S)
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`__?", re.S)
_NAMED_LINK = re.compile(r"`([^`]+)`_+")
_DROPPED = frozenset(
    (
        *("audit-event", "availability", "currentmodule", "deprecated", "deprecated-removed"),
        *("highlight", "image", "include", "index", "literalinclude", "module", "moduleauthor"),
        *("only", "raw", "sectionauthor", "tabularcolumns", "testcleanup", "testsetup"),
        *("toctree", "versionadded", "versionchanged"),
    )
)
_DIRECTIVE = re.compile(r"^(\s*)\.\. ([\w:+-]+)::\s*(.*)$")
_HEADLINE_ONLY = frozenset({"code-block", "sourcecode", "doctest", "testcode", "testoutput"})
_ADMONITIONS = {"note": "Note:", "warning": "Warning:", "seealso": "See also:"}


def clean_rst(text: str) -> str:
    """Readable text of a reStructuredText page: prose, signatures and examples stay."""
    kept: list[str] = []
    skip_deeper_than = -1
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if skip_deeper_than >= 0:
            if not line.strip() or indent > skip_deeper_than:
                continue
            skip_deeper_than = -1
        directive = _DIRECTIVE.match(line)
        if directive:
            name, argument = directive[2], directive[3]
            if name in _DROPPED:
                skip_deeper_than = indent
            elif name in _HEADLINE_ONLY:
                continue
            else:
                kept.append(directive[1] + (_ADMONITIONS.get(name, "") + " " + argument).strip())
        elif line.lstrip().startswith(".. "):
            skip_deeper_than = indent  # a comment, a label or a substitution
        elif not re.match(r"^\s*:[\w-]+:(\s|$)", line):  # field lists are options of directives
            kept.append(line)
    plain = _ROLE.sub(_role_text, "\n".join(kept))
    plain = _NAMED_LINK.sub(r"\1", _LINK.sub(r"\1", plain))
    return clean(plain.replace("``", "`").replace("::\n", ":\n"), max_indent=16)


def _role_text(match: re.Match[str]) -> str:
    target = match[2].strip()
    return target.rsplit(".", 1)[-1] if match[1] else target


# --- overlap ---------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


class Shingles:
    """A set of hashed word n-grams, to measure how much of a text was already seen.

    ``keep_one_in`` samples by hash value, so that two sets of the same setting are comparable.
    """

    def __init__(self, *, size: int, keep_one_in: int = 1) -> None:
        self.size = size
        self._keep: Callable[[int], bool] = lambda value: value % keep_one_in == 0
        self._seen: set[int] = set()

    def add(self, text: str) -> None:
        self._seen.update(self._hashes(text))

    def shared(self, text: str) -> tuple[int, int]:
        """(n-grams of the text that were seen before, all n-grams of the text)."""
        hashes = list(self._hashes(text))
        return sum(value in self._seen for value in hashes), len(hashes)

    def share(self, text: str) -> float:
        """Fraction of the text's n-grams that were seen before (0.0 for a very short text)."""
        seen, total = self.shared(text)
        return seen / total if total else 0.0

    def _hashes(self, text: str) -> Iterator[int]:
        words = _words(text)
        for start in range(len(words) - self.size + 1):
            value = _hash(words[start : start + self.size])
            if self._keep(value):
                yield value


def _hash(words: Sequence[str]) -> int:
    # Python's own hash() of strings changes from run to run; the corpus must not.
    return int.from_bytes(hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest())
