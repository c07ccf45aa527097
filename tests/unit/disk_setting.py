"""What the tests of the disk store share: pages by number, and the processes that use them.

Imported by child processes too, so it imports little.
"""

import random
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from cedar.cache.disk import DiskTier

TAG = b"model, format"
ROOMY = 256 << 20


def payload(number: int) -> bytes:
    """The content of a page: up to 40 KB, never twice the same."""
    rng = random.Random(number)
    return number.to_bytes(8, "little") + rng.randbytes(rng.randrange(0, 40_000))


def key(number: int) -> bytes:
    return b"key" + number.to_bytes(29, "little")


def tier(directory: Path, **options: Any) -> DiskTier:
    return DiskTier(directory, **{"max_bytes": ROOMY, "layout_tag": TAG} | options)


def fill(directory: Path, numbers: Any, **options: Any) -> None:
    with tier(directory, **options) as store:
        for number in numbers:
            store.put(key(number), payload(number))


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def processes() -> ForkServerContext:
    """Children that start in milliseconds, because their parent has imported the store."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["cedar.cache.disk"])
    return context


class Unsafe(DiskTier):
    """Fault: pages count as acknowledged before they are in the index."""

    def flush(self) -> None:
        if len(self._pending) > 40:
            super().flush()


def write_forever(
    directory: Path, first: int, report: Connection, max_bytes: int, unsafe: bool
) -> None:
    """Put batches of pages, and report each after it was acknowledged, until killed."""
    kind = Unsafe if unsafe else DiskTier
    store = kind(directory, max_bytes=max_bytes, layout_tag=TAG)
    rng = random.Random(first)
    while True:
        batch = list(range(first, first + rng.randint(1, 8)))
        for number in batch:
            store.put(key(number), payload(number))
        store.flush()
        report.send(batch)
        first = batch[-1] + 1


def read_until(directory: Path, last: int, report: Connection) -> None:
    """Read pages while another process writes; report how many came back before ``last``."""
    store = tier(directory, read_only=True)
    good = wrong = 0
    number = 0
    while number <= last:
        found = store.get(key(number))
        if found is not None:
            good += found == payload(number)
            wrong += found != payload(number)
            number += 1
    report.send((good, wrong, store.stats().rejected))
    store.close()


def open_writer(directory: Path, report: Connection) -> None:
    """Try to be the second writer."""
    try:
        tier(directory).close()
        report.send("opened")
    except Exception as error:
        report.send(f"{type(error).__name__}: {error}")
