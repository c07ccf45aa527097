"""The public face: `__all__`, lazy imports, and how light a plain import is."""

import subprocess
import sys

import cedar


def test_every_public_name_can_be_imported() -> None:
    for name in cedar.__all__:
        assert getattr(cedar, name) is not None


def test_all_and_the_lazy_table_agree() -> None:
    assert set(cedar.__all__) == {*cedar._HOME, "__version__"}


def test_importing_cedar_does_not_import_torch() -> None:
    code = "import cedar, cedar.cli.__main__, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_check_notices_torch() -> None:
    code = "import cedar, sys; cedar.Model; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
