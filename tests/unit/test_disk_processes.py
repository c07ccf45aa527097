"""The disk store between processes: readers beside a writer, and writers that are killed."""

import random
import time
from pathlib import Path

import pytest
from disk_setting import (
    ROOMY,
    TAG,
    disk_bytes,
    fill,
    key,
    payload,
    processes,
    read_until,
    tier,
    write_forever,
)

from cedar.cache.disk import DiskTier

Log = pytest.LogCaptureFixture


class TestProcesses:
    def test_readers_while_a_process_writes(self, tmp_path: Path) -> None:
        context = processes()
        with tier(tmp_path) as store:
            readers = []
            for _ in range(3):
                here, there = context.Pipe()
                child = context.Process(target=read_until, args=(tmp_path, 119, there))
                child.start()
                readers.append((child, here))
            for number in range(120):
                store.put(key(number), payload(number))
                if number % 5 == 4:
                    store.flush()
                    time.sleep(0.005)
            for child, here in readers:
                assert here.recv() == (120, 0, 0)
                child.join()

    def test_nothing_is_visible_before_flush(self, tmp_path: Path) -> None:
        fill(tmp_path, [0])
        context = processes()
        here, there = context.Pipe()
        with tier(tmp_path) as store:
            store.put(key(1), payload(1))
            child = context.Process(target=read_until, args=(tmp_path, 1, there))
            child.start()
            assert not here.poll(0.5)
            store.flush()
            assert here.recv() == (2, 0, 0)
            child.join()


def kill_writers(directory: Path, times: int, *, unsafe: bool, max_bytes: int) -> list[int]:
    """Kill ``times`` writers at random moments; returns all page numbers they acknowledged."""
    context, rng = processes(), random.Random(times)
    acknowledged: list[int] = []
    for turn in range(times):
        here, there = context.Pipe(duplex=False)
        arguments = (directory, turn * 1_000_000, there, max_bytes, unsafe)
        child = context.Process(target=write_forever, args=arguments)
        child.start()
        there.close()
        if turn % 5:  # the others die early: while they start, recover or write for the first time
            acknowledged += here.recv()
        time.sleep(rng.random() * 0.08)
        child.kill()
        child.join()
        try:
            while True:
                acknowledged += here.recv()
        except EOFError:
            here.close()
    return acknowledged


def check_kills(directory: Path, times: int, caplog: Log) -> None:
    acknowledged = kill_writers(directory, times, unsafe=False, max_bytes=4 << 30)
    assert len(acknowledged) > 5 * times
    with tier(directory, max_bytes=4 << 30) as store:
        lost = [n for n in acknowledged if store.get(key(n)) != payload(n)]
        assert lost == []
        assert store.stats().pages >= len(acknowledged)
    assert not caplog.records
    print(f"{times} kills, {len(acknowledged)} acknowledged pages, none lost")


def test_five_kills(tmp_path: Path, caplog: Log) -> None:
    check_kills(tmp_path, 5, caplog)


@pytest.mark.soak
def test_fifty_kills(tmp_path: Path, caplog: Log) -> None:
    check_kills(tmp_path, 50, caplog)


def test_kills_would_show_a_store_that_acknowledges_too_soon(tmp_path: Path) -> None:
    acknowledged = kill_writers(tmp_path, 5, unsafe=True, max_bytes=ROOMY)
    with tier(tmp_path) as store:
        assert any(store.get(key(number)) is None for number in acknowledged)


@pytest.mark.soak
def test_kills_while_old_segments_are_dropped(tmp_path: Path, caplog: Log) -> None:
    """Pages may be dropped for room here, but what is there is right."""
    cap = 4 << 20
    acknowledged = kill_writers(tmp_path, 50, unsafe=False, max_bytes=cap)
    with DiskTier(tmp_path, max_bytes=cap, layout_tag=TAG) as store:
        found = [(number, store.get(key(number))) for number in acknowledged]
        assert all(page in (None, payload(number)) for number, page in found)
        kept = sum(page is not None for _, page in found)
        assert 0 < kept < len(acknowledged)
        assert store.stats().pages >= kept
    assert disk_bytes(tmp_path) <= cap
    assert not caplog.records
