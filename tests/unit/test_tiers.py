"""The disk below the prefix cache: what goes down, what comes up, and what it must not disturb."""

import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_setting import make_core

from cedar.cache.disk import DiskTier
from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import PrefixIndex
from cedar.engine.params import SamplingParams
from cedar.engine.request import Request
from cedar.engine.request import Sequence as Scheduled
from cedar.engine.scheduler import Scheduler
from cedar.engine.tiers import PrefixTier
from cedar.errors import CapacityError

PAGE = 4
Log = pytest.LogCaptureFixture


def content(tokens: Sequence[int], size: int) -> bytes:
    """What a page holds follows from all tokens up to its end."""
    digest = hashlib.sha256(repr(list(tokens)).encode()).digest()
    return digest * (size // len(digest))


class World:
    """A pool, its index and a disk. Sequences are computed at once and end at once."""

    def __init__(
        self,
        directory: Path,
        *,
        num_pages: int = 64,
        page_bytes: int = 320,
        max_bytes: int = 1 << 20,
        read_only: bool = False,
        kind: type[PrefixTier] = PrefixTier,
    ) -> None:
        self.page_bytes = page_bytes
        self.memory: dict[int, bytes] = {}
        self.reads = 0
        self.broken = False
        self.allocator = PageAllocator(num_pages)
        self.index = PrefixIndex(self.allocator, PAGE, b"model")
        self.disk = DiskTier(
            directory, max_bytes=max_bytes, layout_tag=b"model", read_only=read_only
        )
        self.tier = kind(self.index, self.allocator, self, self.disk)

    def read_page(self, page: int) -> bytes:
        self.reads += 1
        return self.memory[page]

    def write_page(self, page: int, payload: bytes) -> None:
        if self.broken:
            raise RuntimeError("the device is gone")
        self.memory[page] = payload

    def compute(self, tokens: Sequence[int], images: Any = ()) -> Scheduled:
        """Run a prompt to its end, evicting for room as the scheduler does."""
        count = len(tokens) // PAGE
        self.index.evict(max(count - self.allocator.free, 0))
        pages = self.allocator.allocate(count)
        for n, page in enumerate(pages):
            self.memory[page] = content(tokens[: (n + 1) * PAGE], self.page_bytes)
        self.index.insert(tokens, images, pages)
        self.allocator.release(pages)
        return ended(tokens, images)

    def on_disk(self, tokens: Sequence[int]) -> list[bool]:
        return [key in self.disk for key in self.index.keys(tokens)]

    def check(self, tokens: Sequence[int], count: int) -> None:
        """The first ``count`` pages are known, with the right content; nothing has leaked."""
        known = [self.index.page(key) for key in self.index.keys(tokens)[:count]]
        for n, page in enumerate(known):
            assert page is not None, n
            assert self.memory[page] == content(tokens[: (n + 1) * PAGE], self.page_bytes)
        self.index.check_integrity()
        self.allocator.check_integrity()
        assert self.allocator.used == len(self.index)


def request(tokens: Sequence[int], images: Any = (), id: str = "r") -> Request:
    return Request(
        id=id, tokens=tuple(tokens), params=SamplingParams(max_tokens=4), image_hashes=images
    )


def ended(tokens: Sequence[int], images: Any = ()) -> Scheduled:
    """Its last three tokens were generated."""
    prompt = max(len(tokens) - 3, 1)
    return Scheduled(request(tokens[:prompt], images), (0.0, 0), list(tokens[prompt:]))


def text(number: int, pages: int = 2) -> list[int]:
    """Whole pages and one token that is left to run; no two texts begin alike."""
    return [1000 * number + k for k in range(pages * PAGE + 1)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "disk")
    yield made
    made.tier.close()


class TestSaving:
    def test_pages_come_back_in_another_process(self, tmp_path: Path) -> None:
        first = World(tmp_path)
        first.tier.save(first.compute(text(1, 5)))
        first.tier.close()
        second = World(tmp_path)
        assert second.tier.load(request(text(1, 5))) == 5
        second.check(text(1, 5), 5)
        assert second.tier.load(request(text(1, 5))) == 0  # they are known now
        assert second.tier.load(request([*text(1, 5)[:9], 7, 7, 7, 7])) == 0
        second.tier.close()

    def test_only_what_was_computed(self, world: World) -> None:
        """A sequence may end in the middle of its prompt; it is saved as far as it is known."""
        world.compute(text(1, 5)[: 3 * PAGE + 1])
        world.tier.save(ended(text(1, 5)))
        assert world.on_disk(text(1, 5)) == [True] * 3 + [False] * 2

    def test_is_not_a_look_up(self, world: World) -> None:
        """Neither hits nor recency change: the prefix used least is still evicted first."""
        old, new = world.compute(text(1)), world.compute(text(2))
        before = world.index.stats()
        world.tier.save(old)
        assert world.index.stats() == before
        world.index.evict(2)
        assert world.index.page(world.index.keys(text(1))[0]) is None
        world.check(new.tokens, 2)

    def test_a_look_up_would_be_seen(self, world: World) -> None:
        """Control of the test above."""
        world.compute(text(1))
        world.compute(text(2))
        before = world.index.stats()
        world.allocator.release(world.index.match(text(1)).pages)
        assert world.index.stats() != before
        world.index.evict(2)
        assert world.index.page(world.index.keys(text(1))[0]) is not None

    def test_what_is_on_disk_is_neither_read_nor_written_again(self, world: World) -> None:
        sequence = world.compute(text(1, 6))
        world.tier.save(sequence)
        assert (world.reads, world.disk.stats().written) == (6, 6)
        world.tier.save(sequence)
        world.tier.save(world.compute([*text(1, 6)[:-1], 5, 6, 7, 8]))
        assert (world.reads, world.disk.stats().written) == (7, 7)

    def test_images_are_told_apart(self, world: World) -> None:
        one, two = [(2, b"1" * 32)], [(2, b"2" * 32)]
        world.tier.save(world.compute(text(1), one))
        world.index.evict(9)
        assert world.tier.load(request(text(1), two)) == 0
        assert world.tier.load(request(text(1))) == 0
        assert world.tier.load(request(text(1), one)) == 2

    def test_however_the_sequence_ended(self, world: World) -> None:
        """Cancelled or too late, it leaves its full pages in the index, and so on the disk."""
        scheduler = Scheduler(
            world.allocator,
            world.index,
            page_tokens=PAGE,
            num_slots=4,
            token_budget=64,
            max_waiting=4,
        )
        late = replace(request(text(2), id="late"), deadline=5.0)
        sequences = [scheduler.add(each) for each in (request(text(1), id="cancelled"), late)]
        for item in scheduler.step(0.0).items:
            for page in item.sequence.pages:
                world.memory[page] = bytes(world.page_bytes)
            scheduler.commit(item.sequence, [7], item.stop)
        scheduler.cancel("cancelled")
        assert scheduler.step(6.0).expired == (sequences[1],)
        for sequence, tokens in zip(sequences, (text(1), text(2)), strict=True):
            assert sequence.computed == 0  # the scheduler has let go of it
            assert world.on_disk(tokens) == [False, False]
            world.tier.save(sequence)
            assert world.on_disk(tokens) == [True, True]
        waiting = scheduler.add(request(text(3), id="waiting"))
        scheduler.cancel("waiting")
        world.tier.save(waiting)  # nothing of it was computed
        assert world.on_disk(text(3)) == [False, False]


class Remembering(PrefixTier):
    """Fault: believes that what was written once is there for ever."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.saved: set[bytes] = set()

    def _keep(self, key: bytes, page: int) -> None:
        if key not in self.saved:
            super()._keep(key, page)
        self.saved.add(key)


def dropped_and_saved_again(directory: Path, kind: type[PrefixTier]) -> tuple[World, list[bool]]:
    """A prefix that everybody has, on a disk that drops it for others; then saved once more."""
    world = World(directory, num_pages=200, page_bytes=32_000, kind=kind)
    shared = world.compute(text(0))
    world.tier.save(shared)
    assert world.on_disk(text(0)) == [True, True]
    for number in range(1, 30):
        world.tier.save(world.compute(text(number)))
    assert world.disk.stats().dropped > 0
    assert world.on_disk(text(0)) == [False, False]
    world.tier.save(shared)
    return world, world.on_disk(text(0))


class TestSizeCap:
    def test_what_the_disk_dropped_is_written_again(self, tmp_path: Path) -> None:
        world, found = dropped_and_saved_again(tmp_path, PrefixTier)
        assert found == [True, True]
        world.tier.close()
        again = World(tmp_path, page_bytes=32_000)
        assert again.tier.load(request(text(0))) == 2
        again.check(text(0), 2)
        again.tier.close()

    def test_a_memory_of_its_own_would_be_wrong(self, tmp_path: Path) -> None:
        world, found = dropped_and_saved_again(tmp_path, Remembering)
        assert found == [False, False]
        assert containers(world.tier) == ["saved"]
        world.tier.close()

    def test_nothing_is_kept_per_page(self, tmp_path: Path) -> None:
        """A server runs for months: only the disk, which has a cap, knows what it has."""
        world, _ = dropped_and_saved_again(tmp_path, PrefixTier)
        assert containers(world.tier) == []
        world.tier.close()


def containers(tier: PrefixTier) -> list[str]:
    return [name for name, value in vars(tier).items() if isinstance(value, (set, dict, list))]


class TestEviction:
    def test_what_leaves_the_index_goes_to_disk(self, tmp_path: Path) -> None:
        """Pages of a sequence that nobody saved, as after a preemption."""
        world = World(tmp_path, num_pages=8)
        world.compute(text(1, 4))
        assert world.on_disk(text(1, 4)) == [False] * 4
        world.compute(text(2, 6))
        assert world.on_disk(text(1, 4)) == [False, False, True, True]  # the end goes first
        world.compute(text(3, 8))
        assert world.on_disk(text(1, 4)) == [True] * 4
        world.tier.close()
        again = World(tmp_path, num_pages=8)
        assert again.tier.load(request(text(1, 4))) == 4
        again.check(text(1, 4), 4)
        again.tier.close()

    def test_a_page_that_is_on_disk_is_not_read_again(self, world: World) -> None:
        world.tier.save(world.compute(text(1)))
        reads = world.reads
        assert world.index.evict(2) == 2
        assert world.reads == reads

    def test_the_next_save_acknowledges_it(self, world: World, tmp_path: Path) -> None:
        world.tier.save(world.compute(text(1)))
        world.compute(text(2))
        world.index.evict(4)
        for copy, expected in (("before", 0), ("after", 2)):
            # As after a kill: a copy of what is on disk now.
            shutil.copytree(world.disk.directory, tmp_path / copy)
            killed = World(tmp_path / copy)
            assert killed.tier.load(request(text(2))) == expected
            killed.check(text(2), expected)
            killed.tier.close()
            world.tier.save(ended(text(1)))  # it has nothing to save itself

    def test_a_store_that_cannot_be_written_stops_nobody(self, tmp_path: Path, caplog: Log) -> None:
        """One warning, and pages are free as without a disk."""
        world = World(tmp_path, num_pages=8, page_bytes=2 << 20)  # larger than the store
        with caplog.at_level(logging.WARNING):
            world.compute(text(1, 4))
            world.compute(text(2, 8))
            world.tier.save(world.compute(text(3, 8)))
        (record,) = caplog.records
        assert "not kept on disk from here on" in record.getMessage()
        world.check(text(3, 8), 8)
        world.tier.close()

    def test_a_flush_that_fails(
        self, world: World, caplog: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full() -> None:
            raise CapacityError("no space")

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(world.disk, "flush", full)
            world.tier.save(world.compute(text(1)))
            world.tier.save(world.compute(text(2)))
        assert len(caplog.records) == 1
        assert world.on_disk(text(2)) == [False, False]

    def test_of_a_reader_and_after_the_end(self, world: World) -> None:
        world.tier.save(world.compute(text(1)))
        world.tier.close()
        world.compute(text(3))
        assert world.index.evict(9) == 4
        world.tier.save(ended(text(3)))
        reader = World(world.disk.directory, read_only=True)
        reader.tier.save(reader.compute(text(2)))
        assert reader.index.evict(9) == 2
        assert reader.tier.load(request(text(1))) == 2
        reader.tier.close()


class TestLoading:
    @pytest.fixture
    def stored(self, tmp_path: Path) -> Path:
        world = World(tmp_path / "stored")
        world.tier.save(world.compute(text(1, 6)))
        world.tier.close()
        return tmp_path / "stored"

    def test_one_token_is_left_to_run(self, stored: Path) -> None:
        world = World(stored)
        assert world.tier.load(request(text(1, 6)[:-1])) == 5
        assert world.tier.load(request(text(1, 6)[:3])) == 0
        world.check(text(1, 6), 5)
        world.tier.close()

    def test_a_full_pool_gives_nothing_unless_it_may_evict(self, stored: Path) -> None:
        world = World(stored, num_pages=8)
        world.compute(text(2, 8))
        assert world.tier.load(request(text(1, 6))) == 0
        world.check(text(2, 8), 8)
        assert world.tier.load(request(text(1, 6)), evict=True) == 6
        world.check(text(1, 6), 6)
        world.check(text(2, 8), 2)
        assert world.on_disk(text(2, 8)) == [False] * 2 + [True] * 6
        world.tier.close()

    def test_only_as_much_is_evicted_as_is_brought_up(self, stored: Path) -> None:
        world = World(stored, num_pages=8)
        world.compute(text(2, 7))
        assert world.tier.load(request(text(3, 6)), evict=True) == 0
        world.check(text(2, 7), 7)
        assert world.tier.load(request([*text(1, 6)[:9], *text(3, 6)]), evict=True) == 2
        world.check(text(2, 7), 6)
        world.tier.close()

    def test_the_beginning_of_the_prompt_is_not_evicted_for_its_end(self, stored: Path) -> None:
        """It is the least recently used of all, and the pool is just large enough."""
        for protected in (True, False):
            world = World(stored, num_pages=6)
            world.compute(text(1, 1))
            world.compute(text(2, 5))
            if not protected:  # what eviction takes otherwise
                world.index.evict(5)
                assert world.index.page(world.index.keys(text(1, 1))[0]) is None
            else:
                assert world.tier.load(request(text(1, 6)), evict=True) == 5
                world.check(text(1, 6), 6)
            world.tier.close()

    def test_pages_that_others_hold_stay(self, stored: Path) -> None:
        world = World(stored, num_pages=6)
        world.compute(text(2, 4))
        held = world.index.match(text(2, 4)).pages
        assert world.tier.load(request(text(1, 6)), evict=True) == 2  # what was free
        world.allocator.release(held)
        world.check(text(2, 4), 4)
        world.check(text(1, 6), 2)
        world.tier.close()

    def test_gaps_are_filled_in_one_go(self, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(stored)
        world.compute(text(1, 6)[: 2 * PAGE])
        calls = []
        real = world.index.insert
        monkeypatch.setattr(world.index, "insert", lambda *a: calls.append(len(a[0])) or real(*a))
        assert world.tier.load(request(text(1, 6))) == 4
        assert calls == [6 * PAGE]
        world.check(text(1, 6), 6)
        world.tier.close()

    def test_a_damaged_page_ends_it_and_is_written_again(self, stored: Path, caplog: Log) -> None:
        (file,) = stored.glob("*.segment")
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2 + 200] ^= 1
        file.write_bytes(raw)
        world = World(stored)
        with caplog.at_level(logging.WARNING):
            found = world.tier.load(request(text(1, 6)))
        assert found == 3
        assert "is damaged" in caplog.text
        world.check(text(1, 6), 3)
        world.tier.save(world.compute(text(1, 6)))
        assert world.on_disk(text(1, 6)) == [True] * 6
        world.tier.close()

    def test_a_device_that_fails_loses_no_page(self, stored: Path) -> None:
        world = World(stored)
        world.compute(text(1, 6)[: 2 * PAGE])
        world.broken = True
        with pytest.raises(RuntimeError, match="the device is gone"):
            world.tier.load(request(text(1, 6)))
        world.check(text(1, 6), 2)
        world.tier.close()


def found_again(directory: Path, ending: str) -> int:
    """Prompt tokens that the next process finds on disk after a request that ended so."""
    prompt = list(range(10, 40))
    params = SamplingParams(temperature=0.0, max_tokens=2 if ending == "length" else 50)
    core = make_core(disk=directory)
    timeout = 0.1 if ending == "deadline" else None
    core.submit(core.request(prompt, params, id="r", timeout=timeout))
    for step in range(1000):
        if not core.has_work or (step == 4 and ending == "closed"):
            break
        core.step()
        if step == 3 and ending == "cancelled":
            core.cancel("r")
    core.close()
    again = make_core(disk=directory)
    again.submit(again.request(prompt, params, id="r"))
    again.step()
    again.close()
    return again.stats().cached_tokens


@pytest.mark.parametrize("ending", ["cancelled", "deadline", "length", "closed"])
def test_the_engine_saves_however_a_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    assert found_again(tmp_path / "right", ending) == 28  # whole pages of 30 tokens
    monkeypatch.setattr(PrefixTier, "save", lambda self, sequence: None)  # the control
    assert found_again(tmp_path / "wrong", ending) == 0
