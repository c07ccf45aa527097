"""The code and the commands that README and the pages show really run.

Snippets for clients run against a server on a port of its own.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import serving

ADDRESS = "http://127.0.0.1:8000"
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


ALL_PYTHON = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(snippets(page, "python"))
]


def test_the_pages_have_snippets() -> None:
    assert len(ALL_PYTHON) >= 3


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--pool-tokens", "16384") as served:
        yield served.url


@pytest.mark.parametrize("code", ALL_PYTHON)
def test_python_snippets_run(code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if ADDRESS in code:
        code = code.replace(ADDRESS, request.getfixturevalue("url"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if "print(" in code:
        assert done.stdout.strip()


def test_every_command_in_the_readme_exists() -> None:
    listed = set(re.findall(r"`cedar ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    help_text = subprocess.run(
        [str(Path(sys.executable).with_name("cedar")), "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    offered = set(re.findall(r"^[│|] ([a-z]+)\s", help_text, re.MULTILINE))
    assert listed == offered


@pytest.mark.parametrize("verb", ["install", "check", "test", "soak", "bench", "serve", "demo"])
def test_make_has_the_verbs(verb: str) -> None:
    done = subprocess.run(["make", "-n", verb], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
