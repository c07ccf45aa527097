"""The disk store: what is put comes back, errors name their remedy, the cap holds."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from disk_setting import (
    disk_bytes,
    fill,
    key,
    open_writer,
    payload,
    processes,
    segment_files,
    tier,
)

import cedar.cache.segments as segments
from cedar.errors import BackendUnavailable, CapacityError, DataError


class TestPutAndGet:
    def test_a_page_comes_back_before_and_after_flush_and_restart(self, tmp_path: Path) -> None:
        with tier(tmp_path / "new" / "store") as store:
            store.put(key(1), payload(1))
            store.put(key(2), memoryview(bytearray(b"abc")))
            store.put(key(3), b"")
            assert store.get(key(1)) == payload(1)
            store.flush()
            assert store.get(key(2)) == b"abc"
            assert store.get(key(9)) is None
            stats = store.stats()
            assert (stats.pages, stats.hits, stats.misses, stats.written) == (3, 2, 1, 3)
            assert stats.rejected == stats.dropped == 0
        with tier(tmp_path / "new" / "store") as store:
            assert [store.get(key(n)) for n in (1, 2, 3)] == [payload(1), b"abc", b""]

    def test_membership_looks_at_the_index_alone(self, tmp_path: Path) -> None:
        with tier(tmp_path) as store:
            store.put(key(1), payload(1))
            assert key(1) in store  # before and after it is acknowledged
            store.flush()
            before = store.stats()
            assert key(1) in store
            assert key(2) not in store
            assert store.stats() == before
        with pytest.raises(ValueError, match="closed"):
            assert key(1) in store
        with tier(tmp_path, read_only=True) as reader:
            assert key(1) in reader
            assert key(2) not in reader

    def test_any_buffer_of_any_item_size(self, tmp_path: Path) -> None:
        with tier(tmp_path) as store:
            store.put(b"k", memoryview(b"12345678").cast("Q"))
            assert store.get(b"k") == b"12345678"

    def test_the_same_page_again_costs_nothing(self, tmp_path: Path) -> None:
        fill(tmp_path, [1, 1])
        size = segment_files(tmp_path)[0].stat().st_size
        fill(tmp_path, [1])
        assert segment_files(tmp_path)[0].stat().st_size == size

    def test_another_content_replaces(self, tmp_path: Path) -> None:
        fill(tmp_path, [1])
        with tier(tmp_path) as store:
            store.put(key(1), b"new")
            assert store.get(key(1)) == b"new"
        with tier(tmp_path) as store:
            assert store.get(key(1)) == b"new"
            assert store.stats().pages == 1

    def test_faults_of_the_caller(self, tmp_path: Path) -> None:
        store = tier(tmp_path)
        for wrong in (b"", b"k" * 501):
            with pytest.raises(ValueError, match="expected 1 to 500"):
                store.put(wrong, b"x")
        store.close()
        store.close()
        for call in (lambda: store.get(b"k"), lambda: store.put(b"k", b"x")):
            with pytest.raises(ValueError, match="closed"):
                call()
        with (
            tier(tmp_path, read_only=True) as reader,
            pytest.raises(ValueError, match="read-only"),
        ):
            reader.put(b"k", b"x")

    def test_overhead_at_the_released_page_size(self, tmp_path: Path) -> None:
        """890 B/token on disk: record headers and index take less than 1 %."""
        page = 890 * 64
        with tier(tmp_path) as store:
            for number in range(500):
                store.put(key(number), random.Random(number).randbytes(page))
        assert 500 * page < disk_bytes(tmp_path) < 500 * page * 1.01


class TestErrors:
    def test_without_lmdb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "lmdb", None)
        with pytest.raises(BackendUnavailable, match=r"pip install 'cedar-lm\[store\]'"):
            tier(tmp_path / "store")
        assert not (tmp_path / "store").exists()

    def test_too_small(self, tmp_path: Path) -> None:
        with pytest.raises(CapacityError, match="max_bytes of the disk store is 1,000"):
            tier(tmp_path, max_bytes=1000)

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="not a readable disk store"):
            tier(tmp_path, read_only=True)

    def test_not_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(CapacityError, match="cannot be made"):
            tier(tmp_path / "file")

    def test_a_second_writer_is_refused(self, tmp_path: Path) -> None:
        context = processes()
        here, there = context.Pipe()
        with tier(tmp_path):
            child = context.Process(target=open_writer, args=(tmp_path, there))
            child.start()
            assert "CapacityError: another writer has opened" in here.recv()
            child.join()
        child = context.Process(target=open_writer, args=(tmp_path, there))
        child.start()
        assert here.recv() == "opened"
        child.join()

    def test_a_full_disk_loses_nothing_acknowledged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        with tier(tmp_path) as store:
            store.put(key(1), payload(1))
            store.flush()
            with monkeypatch.context() as patch:
                patch.setattr("os.pwritev", full)
                with pytest.raises(CapacityError, match="No space left on device"):
                    store.put(key(2), payload(2))
            store.put(key(3), payload(3))
            with monkeypatch.context() as patch:
                patch.setattr("os.fdatasync", full)
                with pytest.raises(CapacityError, match="since the last flush may be lost"):
                    store.flush()
            assert store.get(key(3)) is None
            store.put(key(4), payload(4))
        with tier(tmp_path) as store:
            found = [store.get(key(n)) for n in (1, 2, 3, 4)]
            assert found == [payload(1), None, None, payload(4)]

    def test_short_writes_are_continued(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = segments.os.pwritev

        def seven(file: int, parts: list[memoryview], offset: int) -> int:
            return whole(file, [memoryview(b"".join(parts)[:7])], offset)

        monkeypatch.setattr("os.pwritev", seven)
        fill(tmp_path, [3])
        monkeypatch.undo()
        with tier(tmp_path) as store:
            assert store.get(key(3)) == payload(3)


class TestSizeCap:
    def test_the_oldest_pages_make_room(self, tmp_path: Path) -> None:
        cap = 2 << 20
        with tier(tmp_path, max_bytes=cap) as store:
            for number in range(400):  # about 8 MB
                store.put(key(number), payload(number))
                if number % 7 == 0:
                    store.flush()
                    assert disk_bytes(tmp_path) <= cap
            kept = [number for number in range(400) if store.get(key(number)) is not None]
            assert kept == list(range(kept[0], 400))
            assert sum(len(payload(number)) for number in kept) > 0.85 * cap
            assert [number for number in range(400) if key(number) in store] == kept
            assert store.stats().dropped == kept[0]
            assert store.stats().pages == len(kept)
            assert store.stats().bytes <= cap
        with tier(tmp_path, max_bytes=cap) as store:
            assert all(store.get(key(number)) == payload(number) for number in kept)

    def test_a_smaller_cap_after_a_restart(self, tmp_path: Path) -> None:
        fill(tmp_path, range(200), max_bytes=8 << 20)
        with tier(tmp_path, max_bytes=1 << 20) as store:
            store.put(key(200), payload(200))
            store.flush()
            assert disk_bytes(tmp_path) <= 1 << 20
            assert store.get(key(200)) == payload(200)

    def test_a_page_larger_than_a_segment_and_one_larger_than_the_store(
        self, tmp_path: Path
    ) -> None:
        with tier(tmp_path, max_bytes=1 << 20) as store:
            store.put(b"small", b"x")
            store.put(b"half", bytes(500_000))
            with pytest.raises(CapacityError, match="does not fit into the disk store"):
                store.put(b"large", bytes(1 << 20))
            assert store.get(b"half") == bytes(500_000)
            assert store.get(b"small") == b"x"

    def test_many_tiny_pages(self, tmp_path: Path) -> None:
        """Here the index is larger than the pages; the cap holds all the same."""
        with tier(tmp_path, max_bytes=1 << 20) as store:
            for number in range(20_000):
                store.put(key(number), b"tiny")
                if number % 500 == 0:
                    store.flush()
            store.flush()
            assert store.get(key(19_999)) == b"tiny"
            assert store.get(key(0)) is None
        assert disk_bytes(tmp_path) <= 1 << 20

    def test_the_index_grows_beyond_its_first_map(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cedar.cache.disk_index._FIRST_MAP_BYTES", 1 << 16)
        with tier(tmp_path) as store:
            for number in range(3000):
                store.put(key(number), b"tiny")
            store.flush()
            assert store.stats().pages == 3000
            assert store.get(key(2999)) == b"tiny"
