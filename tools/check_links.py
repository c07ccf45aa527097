"""Check that every relative link in the tracked Markdown files leads somewhere.

Files and folders must exist; a fragment must be a heading of the file it points into. Links to
other hosts are not followed: a check must not depend on the network.
"""

import re
import subprocess
import sys
from pathlib import Path

_LINK = re.compile(r"(?<!\\)!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")


def main() -> int:
    """Print every broken link; the number of them decides the exit status."""
    root = Path(__file__).resolve().parent.parent
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    pages = [root / name for name in listed.stdout.split("\0") if name]
    broken = [problem for page in pages for problem in _problems(page, root)]
    for problem in broken:
        print(problem)
    print(f"{len(pages)} pages, {len(broken)} broken links")
    return 1 if broken else 0


def _problems(page: Path, root: Path) -> list[str]:
    text = _CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    problems = []
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        where = f"{page.relative_to(root)}: {target}"
        if not file.exists():
            problems.append(f"{where}: no such file")
        elif fragment and file.suffix == ".md" and fragment not in _anchors(file):
            problems.append(f"{where}: no such heading")
    return problems


def _anchors(page: Path) -> set[str]:
    headings = re.findall(
        r"^#+\s+(.*?)\s*$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


if __name__ == "__main__":
    sys.exit(main())
