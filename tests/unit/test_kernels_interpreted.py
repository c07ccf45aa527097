"""The Triton kernels against their references on a CPU, in an interpreter process of their own.

Triton decides when it is imported whether to compile or to interpret, so the tests themselves are
files in ``tests/interpreted`` that only such a process can run. They prove indexing, masks and
formulas; what compiles is for `test_kernels_compile.py`, and numbers of a device for `tests/gpu`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
FILES = sorted((TESTS / "interpreted").glob("kernel_*.py"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path) -> None:
    done = run(str(file))
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_failure_is_seen(tmp_path: Path) -> None:
    """Negative control: a failing file fails here."""
    bad = tmp_path / "kernel_bad.py"
    bad.write_text("def test_bad() -> None:\n    assert False\n")
    assert run(str(bad)).returncode == 1
