"""Corpora: one JSON object with a "text" per line, `.jsonl` or `.jsonl.xz`."""

import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cedar.errors import DataError

__all__ = ["read_documents", "read_records"]


def read_documents(path: Path) -> Iterator[str]:
    """Yield the "text" of every line of a `.jsonl` or `.jsonl.xz` file, in order.

    Raises what `read_records` raises.
    """
    for record in read_records(path):
        yield record["text"]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every line's object, which has a "text" string and perhaps more, in order.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object with a "text" string;
            the message names the line.
    """
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not valid JSON ({error}).") from None
            text = document.get("text") if isinstance(document, dict) else None
            if not isinstance(text, str):
                raise DataError(
                    f'{path}, line {number}: no "text" string; every line has to be an object '
                    'such as {"text": "…"}.'
                )
            yield document


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """The corpus as text; every way of failing to read it becomes a DataError."""
    if not (path.name.endswith(".jsonl") or path.name.endswith(".jsonl.xz")):
        raise DataError(f"{path}: a corpus file has to end in .jsonl or .jsonl.xz.")
    try:
        opener: Callable[..., IO[str]] = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason}).") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"The corpus {path} cannot be read: {error}.") from None
