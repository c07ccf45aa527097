"""`cedar serve` as a process of its own, on a free port."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Served", "command", "serving"]

_URL = re.compile(r"Cedar serves \S+ at (http://\S+)")


def command(*options: str) -> list[str]:
    """The installed command."""
    return [str(Path(sys.executable).parent / "cedar"), "serve", *options]


@dataclass
class Served:
    """A running server. lines: what it has written, of which nothing is lost."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        """Everything that it has written."""
        return "".join(self.lines)

    def end(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        """Ask it to end; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


@contextmanager
def serving(*options: str, environment: Mapping[str, str] | None = None) -> Iterator[Served]:
    """A server that answers; it is ended afterwards in any case."""
    process = subprocess.Popen(
        command("--port", "0", *options),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    served = Served(process)
    reader = threading.Thread(target=served._read, daemon=True)
    reader.start()
    try:
        served.url = _wait(served)
        yield served
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(10)
        assert process.stderr is not None
        process.stderr.close()


def _wait(served: Served) -> str:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = _URL.search(served.log)
        if found is not None:
            with urllib.request.urlopen(f"{found[1]}/health", timeout=60):
                return found[1]
        assert served.process.poll() is None, served.log
        time.sleep(0.05)
    raise AssertionError(f"the server does not answer: {served.log}")
