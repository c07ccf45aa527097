"""Write the parameters of every endpoint into docs/serving.md, from the tables that read them.

`python tools/parameter_table.py` rewrites the part between the two markers; with ``--check`` it
only says whether that part is up to date.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from cedar.inputs.chat import PARAMETERS, Api
from cedar.server.completion_request import IGNORED, NOTES, completion_record
from cedar.server.tokens import (
    DETOKENIZE_NOTES,
    TOKENIZE_NOTES,
    detokenize_record,
    tokenize_record,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "serving.md"
BEGIN, END = "<!-- parameters: begin -->", "<!-- parameters: end -->"
_PATHS = {
    Api.CHAT: "/v1/chat/completions",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
}
_ANY = 1 << 30  # what a limit that depends on the model is does not matter here


def tables() -> str:
    """All tables as Markdown."""
    parts = []
    for api, path in _PATHS.items():
        rows = [
            (name, each.required, str(each.effect), each.note)
            for name, each in PARAMETERS[api].items()
        ]
        parts.append(_table(path, rows))
    for path, record, notes in (
        ("/v1/completions", completion_record(_ANY, _ANY), NOTES),
        ("/tokenize", tokenize_record(), TOKENIZE_NOTES),
        ("/detokenize", detokenize_record(_ANY), DETOKENIZE_NOTES),
    ):
        ignored = IGNORED if path == "/v1/completions" else ()
        rows = [
            (
                name,
                name in record.required,
                "ignored" if name in ignored else "supported",
                notes.get(name, ""),
            )
            for name in record.fields
        ]
        parts.append(_table(path, rows))
    return "\n".join(parts)


def page(text: str) -> str:
    """A page with the part between its markers made anew."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{PAGE} lacks the markers {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def _table(path: str, rows: Iterable[tuple[str, bool, str, str]]) -> str:
    lines = [f"### `{path}`", "", "| field | | note |", "| --- | --- | --- |"]
    for name, required, effect, note in rows:
        word = "**required**" if required else effect
        lines.append(f"| `{name}` | {word} | {note.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite the page, or check it; 1 if the check fails."""
    text = PAGE.read_text(encoding="utf-8")
    new = page(text)
    if "--check" in sys.argv[1:]:
        if new != text:
            print(f"{PAGE.name} is out of date: run python tools/parameter_table.py")
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
