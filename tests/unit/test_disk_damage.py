"""The disk store is never wrong: damage of any kind is a miss and one warning."""

import logging
import random
from pathlib import Path

import pytest
from disk_setting import (
    fill,
    key,
    payload,
    segment_files,
    tier,
)

import cedar.cache.segments as segments
from cedar.errors import DataError

Log = pytest.LogCaptureFixture


class TestDamage:
    """Whatever happens to the bytes on disk, `get` returns the page or nothing."""

    def one_warning(self, caplog: Log, text: str) -> bool:
        found = [r for r in caplog.records if r.levelno == logging.WARNING]
        return len(found) == 1 and text in found[0].getMessage()

    def test_every_bit_of_a_record(self, tmp_path: Path, caplog: Log) -> None:
        with tier(tmp_path) as store:
            store.put(b"before", b"0123456789")
            store.put(b"k", b"the payload")
        (file,) = segment_files(tmp_path)
        good = file.read_bytes()
        start = good.rindex(segments._MAGIC)
        for position in range(start, len(good)):
            for bit in range(8):
                bad = bytearray(good)
                bad[position] ^= 1 << bit
                file.write_bytes(bad)
                caplog.clear()
                with tier(tmp_path, read_only=True) as store:
                    assert store.get(b"k") is None
                    assert store.get(b"k") is None
                    assert store.get(b"before") == b"0123456789"
                    assert store.stats().rejected == 2
                assert self.one_warning(caplog, "is damaged"), position

    def test_without_the_checksum_it_would_be_wrong(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The control: the same damage goes through when nobody looks."""
        monkeypatch.setattr(segments.zlib, "crc32", lambda *_: 0)
        fill(tmp_path, [1])
        (file,) = segment_files(tmp_path)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with tier(tmp_path) as store:
            found = store.get(key(1))
            assert found is not None
            assert found != payload(1)

    def test_a_damaged_page_can_be_written_again(self, tmp_path: Path, caplog: Log) -> None:
        fill(tmp_path, [1, 2])
        (file,) = segment_files(tmp_path)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with tier(tmp_path) as store:
            assert store.get(key(2)) is None
            assert store.get(key(2)) is None
            assert self.one_warning(caplog, "its checksum is")
            store.put(key(2), payload(2))
            assert store.get(key(2)) == payload(2)
            assert store.get(key(1)) == payload(1)
        with tier(tmp_path) as store:
            assert store.get(key(2)) == payload(2)

    @pytest.mark.parametrize("read_only", [False, True])
    @pytest.mark.parametrize("lost", [1, 30_000])
    def test_a_truncated_segment(
        self, tmp_path: Path, caplog: Log, lost: int, read_only: bool
    ) -> None:
        fill(tmp_path, range(10))
        (file,) = segment_files(tmp_path)
        left = file.stat().st_size - lost
        file.write_bytes(file.read_bytes()[:left])
        with tier(tmp_path, read_only=read_only) as store:
            found = [store.get(key(number)) for number in range(10)]
            bad = [number for number in range(10) if found[number] is None]
            assert bad
            assert bad == list(range(bad[0], 10))
            assert found[: bad[0]] == [payload(number) for number in range(bad[0])]
            assert [store.get(key(number)) for number in bad] == [None] * len(bad)
            assert len(caplog.records) == len(bad)
            if not read_only:
                for number in bad:
                    store.put(key(number), payload(number))
                assert [store.get(key(n)) for n in range(10)] == [payload(n) for n in range(10)]

    def test_a_lost_segment(self, tmp_path: Path, caplog: Log) -> None:
        fill(tmp_path, range(200), max_bytes=16 << 20)
        first, *_ = segment_files(tmp_path)
        assert len(segment_files(tmp_path)) > 2
        first.unlink()
        with tier(tmp_path, max_bytes=16 << 20) as store:
            found = [store.get(key(number)) for number in range(200)]
            there = [number for number in range(200) if found[number] is not None]
            assert there == list(range(there[0], 200))
            assert there[0] > 10
            assert self.one_warning(caplog, f"{there[0]} pages are gone")

    def test_a_segment_lost_while_open(self, tmp_path: Path, caplog: Log) -> None:
        fill(tmp_path, range(100), max_bytes=16 << 20)
        with tier(tmp_path, max_bytes=16 << 20) as store:
            segment_files(tmp_path)[0].unlink()
            assert store.get(key(1)) is None
            assert self.one_warning(caplog, "No such file")
            assert store.get(key(99)) == payload(99)
            store.put(key(1), payload(1))
            assert store.get(key(1)) == payload(1)
        with tier(tmp_path, max_bytes=16 << 20) as store:
            assert store.get(key(1)) == payload(1)

    def test_swapped_segments(self, tmp_path: Path, caplog: Log) -> None:
        fill(tmp_path / "a", [1])
        fill(tmp_path / "b", [2])
        (a,), (b,) = segment_files(tmp_path / "a"), segment_files(tmp_path / "b")
        a.write_bytes(b.read_bytes() + bytes(40_000))
        with tier(tmp_path / "a") as store:
            assert store.get(key(1)) is None
        assert self.one_warning(caplog, "header is not the one")

    def test_a_foreign_tag(self, tmp_path: Path, caplog: Log) -> None:
        fill(tmp_path, range(5), layout_tag=b"another model")
        with tier(tmp_path) as store:
            assert [store.get(key(number)) for number in range(5)] == [None] * 5
            assert self.one_warning(caplog, "another model or cache format")
            store.put(key(1), b"mine")
            assert store.get(key(1)) == b"mine"
        with tier(tmp_path, layout_tag=b"another model") as store:
            assert store.get(key(0)) == payload(0)
            assert store.get(key(1)) is None

    def test_membership_is_of_the_own_tag(self, tmp_path: Path, caplog: Log) -> None:
        fill(tmp_path, range(5), layout_tag=b"another model")
        with tier(tmp_path) as store:
            assert not any(key(number) in store for number in range(5))
            assert self.one_warning(caplog, "another model or cache format")
            assert store.stats().rejected == 0
            store.put(key(1), payload(1))
            assert key(1) in store

    def test_a_foreign_record_behind_a_good_index_entry(self, tmp_path: Path, caplog: Log) -> None:
        fill(tmp_path / "a", [1])
        fill(tmp_path / "b", [1], layout_tag=b"another model")
        (a,), (b,) = segment_files(tmp_path / "a"), segment_files(tmp_path / "b")
        a.write_bytes(b.read_bytes())
        with tier(tmp_path / "a") as store:
            assert store.get(key(1)) is None
        assert self.one_warning(caplog, "header is not the one")

    @pytest.mark.parametrize("sealed", [True, False], ids=["closed", "killed"])
    @pytest.mark.parametrize("damage", ["text", "empty", "short", "zeros"])
    def test_a_damaged_index_starts_the_store_empty(
        self, tmp_path: Path, caplog: Log, damage: str, sealed: bool
    ) -> None:
        fill(tmp_path, range(300), max_bytes=64 << 20)
        file = tmp_path / "index" / "data.mdb"
        size = file.stat().st_size
        if not sealed:
            (tmp_path / "index" / "seal").unlink()
        if damage == "text":
            file.write_bytes(b"no index " * 2000)
        elif damage == "empty":
            file.write_bytes(b"")
        elif damage == "short":
            file.write_bytes(file.read_bytes()[: 2 * 4096])
        else:
            file.write_bytes(file.read_bytes()[:8192] + bytes(size - 8192))
        with tier(tmp_path, max_bytes=64 << 20) as store:
            assert [store.get(key(number)) for number in range(300)] == [None] * 300
            if sealed or damage != "empty":  # an empty file is a new index
                assert self.one_warning(caplog, "index is damaged")
            store.put(key(5), payload(5))
            store.flush()
            assert store.get(key(5)) == payload(5)
        with tier(tmp_path) as store:
            assert store.get(key(5)) == payload(5)
            assert store.stats().pages == 1

    def test_rot_anywhere_in_a_closed_index(self, tmp_path: Path, caplog: Log) -> None:
        """lmdb itself returns other entries, or crashes, for some of these."""
        fill(tmp_path, range(20))
        files = tmp_path / "index" / "data.mdb", tmp_path / "index" / "seal"
        good, seal = (file.read_bytes() for file in files)
        for position in random.Random(0).sample(range(len(good)), 40):
            bad = bytearray(good)
            bad[position] ^= 0x10
            for file, content in zip(files, (bytes(bad), seal), strict=True):
                file.write_bytes(content)
            with pytest.raises(DataError, match="its checksum is not"):
                tier(tmp_path, read_only=True)
        with tier(tmp_path) as store:
            assert store.get(key(1)) is None
            assert self.one_warning(caplog, "index is damaged (its checksum is not")
            assert segment_files(tmp_path) == []

    def test_unacknowledged_rest_is_cut_off(self, tmp_path: Path) -> None:
        fill(tmp_path, [1])
        (file,) = segment_files(tmp_path)
        size = file.stat().st_size
        with file.open("ab") as out:
            out.write(b"half a record")
        (tmp_path / "00000099.segment").write_bytes(b"nothing acknowledged")
        with tier(tmp_path) as store:
            assert segment_files(tmp_path) == [file]
            assert file.stat().st_size == size
            assert store.get(key(1)) == payload(1)
