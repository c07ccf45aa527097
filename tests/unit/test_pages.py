"""The page allocator: counts, refusals that change nothing, and a check that can fail."""

import random
from collections import Counter

import pytest

from cedar.cache.pages import PageAllocator
from cedar.errors import CapacityError


def test_allocate_and_release() -> None:
    pool = PageAllocator(4)
    first = pool.allocate(3)
    assert len(set(first)) == 3
    assert (pool.free, pool.used) == (1, 3)
    assert [pool.refcount(page) for page in first] == [1, 1, 1]
    pool.release(first[:2])
    second = pool.allocate(3)
    assert first[2] not in second
    assert pool.free == 0
    pool.release([first[2], *second])
    assert pool.free == 4
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    pool = PageAllocator(2)
    (page,) = pool.allocate(1)
    pool.retain([page, page])
    assert pool.refcount(page) == 3
    pool.release([page])
    pool.release([page])
    assert pool.free == 1
    pool.release([page])
    assert (pool.free, pool.refcount(page)) == (2, 0)
    pool.check_integrity()


def test_no_page_is_taken_if_there_are_not_enough() -> None:
    pool = PageAllocator(3)
    pool.allocate(1)
    with pytest.raises(CapacityError, match="3 pages were asked for but 2 of 3 are free"):
        pool.allocate(3)
    assert pool.free == 2
    pool.check_integrity()


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(CapacityError, match="num_pages is 0; expected at least 1"):
        PageAllocator(0)


def test_faults_of_the_caller_change_nothing() -> None:
    pool = PageAllocator(4)
    held = pool.allocate(2)
    free = next(page for page in range(4) if page not in held)
    for fault in (
        lambda: pool.release([held[0], free]),
        lambda: pool.release([held[0], held[0]]),
        lambda: pool.retain([held[0], free]),
        lambda: pool.retain([4]),
        lambda: pool.release([-1]),
        lambda: pool.allocate(-1),
    ):
        with pytest.raises(ValueError, match="page"):
            fault()
        assert [pool.refcount(page) for page in held] == [1, 1]
        pool.check_integrity()


def test_ten_thousand_random_steps() -> None:
    rng = random.Random(0)
    pool = PageAllocator(50)
    held: list[int] = []
    for _ in range(10_000):
        if rng.random() < 0.4 and pool.free:
            new = pool.allocate(rng.randint(1, min(pool.free, 5)))
            assert not set(new) & set(held)
            held += new
        elif rng.random() < 0.3 and held:
            shared = rng.choice(held)
            pool.retain([shared])
            held.append(shared)
        elif held:
            pool.release([held.pop(rng.randrange(len(held)))])
        counts = Counter(held)
        assert pool.used == len(counts)
        assert all(pool.refcount(page) == count for page, count in counts.items())
    pool.check_integrity()
    pool.release(held)
    assert pool.free == 50
    pool.check_integrity()


def test_the_check_finds_every_kind_of_fault() -> None:
    def broken() -> PageAllocator:
        pool = PageAllocator(3)
        pool.allocate(2)
        pool.check_integrity()
        return pool

    leaked, twice, aliased, negative, shrunk = (broken() for _ in range(5))
    leaked._free.clear()
    twice._free *= 2
    aliased._free.append(next(p for p in range(3) if aliased.refcount(p)))
    negative._references[0] = -1
    shrunk.num_pages = 4
    for pool, text in (
        (leaked, "0 holders and is not free"),
        (twice, "free twice"),
        (aliased, "1 holders and is free"),
        (negative, "-1 holders"),
        (shrunk, "changed its size"),
    ):
        with pytest.raises(AssertionError, match=text):
            pool.check_integrity()
