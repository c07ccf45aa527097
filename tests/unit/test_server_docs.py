"""docs/serving.md says what the code does."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("table", ROOT / "tools" / "parameter_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(tool: ModuleType) -> None:
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(text) == text, "run python tools/parameter_table.py"
    changed = text.replace("| `echo` |", "| `ecco` |")
    assert tool.page(changed) == text  # so a table that is out of date is found


def test_every_option_is_known() -> None:
    """Options that the page names are options of the command."""
    import re

    from cedar.cli.serve import command

    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`?cedar serve[^`\n]*|`--[a-z-]+[^`]*`", text))
    words = {word for each in named for word in re.findall(r"--([a-z-]+)", each)}
    assert {"max-waiting", "api-key-file", "allow-host"} <= words
    known = {name.replace("_", "-") for name in command.__annotations__}
    assert words <= known
