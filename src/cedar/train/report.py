"""What a run says: a JSON line per log point in a file, and a progress bar for people."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from cedar.errors import TrainingError

__all__ = ["ConsoleReporter", "LogFile", "Reporter", "SilentReporter", "Stopwatch", "read_log"]

Record = dict[str, Any]


class Reporter(Protocol):
    """Who is told how a run goes."""

    def note(self, text: str) -> None:
        """Say something once."""

    def begin(self, step: int, steps: int) -> None:
        """The loop starts at `step` of `steps`."""

    def train(self, record: Mapping[str, Any]) -> None:
        """A log point of training (see `loop.Trainer` for its keys)."""

    def advance(self, step: int) -> None:
        """`step` steps are done."""

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """A held-out evaluation."""

    def end(self) -> None:
        """The loop has ended, for whatever reason."""


class SilentReporter:
    """Says nothing; keeps the notes for whoever asks."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, step: int, steps: int) -> None: ...

    def train(self, record: Mapping[str, Any]) -> None: ...

    def advance(self, step: int) -> None: ...

    def evaluated(self, record: Mapping[str, Any]) -> None: ...

    def end(self) -> None: ...


class ConsoleReporter:
    """A progress bar with speed and losses; evaluations and notes stay as lines above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[losses]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=None, speed="", losses="")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def begin(self, step: int, steps: int) -> None:
        self._progress.update(self._task, total=steps, completed=step)
        self._progress.start()

    def train(self, record: Mapping[str, Any]) -> None:
        names = ("lm", "index", "draft_ce", "draft_tv")
        losses = "  ".join(f"{name} {record[name]:.3f}" for name in names if name in record)
        speed = f"{record['tokens_per_second']:,.0f} tok/s"
        self._progress.update(self._task, speed=speed, losses=losses)
        if not self._console.is_terminal:
            self.note(f"step {record['step']}: {speed}, {losses}")

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        line = (
            f"step {record['step']}, held out: {record['loss_per_token']:.4f} nats/token, "
            f"{record['loss_per_byte']:.4f} nats/byte, accuracy {record['accuracy']:.2%}"
        )
        if "accuracy_without_engram" in record:
            line += (
                f"; without Engram {record['loss_per_byte_without_engram']:.4f} nats/byte, "
                f"accuracy {record['accuracy_without_engram']:.2%}"
            )
        self.note(line)

    def end(self) -> None:
        self._progress.stop()


class LogFile:
    """`log.jsonl`: one JSON object per line with "kind" and "step".

    Opening it for a resumed run drops what the resumed run will write again, so the file reads as
    if there had been no interruption.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        kept = [
            record
            for record in (read_log(path) if step else [])
            # An evaluation comes after its step's checkpoint and is repeated on resuming.
            if record["step"] < step
            or (record["kind"] in ("run", "train") and record["step"] == step)
        ]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        os.replace(part, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> LogFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **record}) + "\n")
        self._file.flush()


def read_log(path: Path) -> list[Record]:
    """The records of a log file; a last line cut off by a crash is left out.

    Raises:
        TrainingError: any other line is not a record.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
                raise ValueError('no object with "kind" and "step"')
        except ValueError as error:
            if number == len(lines):
                break
            raise TrainingError(
                f"{path}, line {number}: not a log record ({error}); move the file away to go on "
                "without the earlier curve."
            ) from None
        records.append(record)
    return records


class Stopwatch:
    """Seconds of training without evaluation and saving."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens inside."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before
