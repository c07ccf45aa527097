"""The prefix index: names, matches, eviction, and a state machine that knows each page's text."""

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import PrefixIndex, _Node

CAT, DOG = b"c" * 32, b"d" * 32


def filled(num_pages: int = 8, **options: Any) -> tuple[PageAllocator, PrefixIndex]:
    pool = PageAllocator(num_pages)
    return pool, PrefixIndex(pool, 4, b"model", **options)


def learn(index: PrefixIndex, tokens: list[int], images: Any = ()) -> list[int]:
    """Run a text cold and leave its pages to the index."""
    pages = index.allocator.allocate(-(-len(tokens) // index.page_tokens))
    index.insert(tokens, images, pages)
    index.allocator.release(pages)
    return pages


class TestMatch:
    def test_the_longest_chain_of_full_pages(self) -> None:
        pool, index = filled()
        pages = learn(index, [1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert pool.used == len(index) == 2  # the third page was not full
        for tokens, found in (
            ([1, 2, 3, 4, 5, 6, 7, 8, 0], 2),
            ([1, 2, 3, 4, 5, 6, 7, 0, 0], 1),
            ([1, 2, 3, 0, 5, 6, 7, 8, 9], 0),
            ([5, 6, 7, 8, 9], 0),
        ):
            match = index.match(tokens)
            assert match.pages == tuple(pages[:found])
            assert match.tokens == 4 * found
            assert match.keys == index.keys(tokens)[:found]
            pool.release(match.pages)
        index.check_integrity()

    def test_one_token_is_always_left_to_run(self) -> None:
        pool, index = filled()
        learn(index, [1, 2, 3, 4, 5, 6, 7, 8])
        assert index.match([1, 2, 3, 4, 5, 6, 7, 8]).tokens == 4
        assert index.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).tokens == 8
        assert index.match([1, 2, 3, 4]).tokens == 0
        assert index.match([1]).tokens == index.match([]).tokens == 0
        assert pool.refcount(index.match([1, 2, 3, 4, 5]).pages[0]) == 4

    def test_statistics(self) -> None:
        _, index = filled()
        learn(index, [1, 2, 3, 4, 5, 6, 7, 8])
        index.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 9])
        index.match([1, 2, 3, 4, 9])
        index.match([9, 9])
        stats = index.stats()
        assert (stats.hits, stats.misses, stats.tokens, stats.asked) == (2, 1, 12, 17)


class TestNames:
    def test_every_part_counts(self) -> None:
        """Model, page size, each token, each image's pixels and place: all make other names."""
        pool = PageAllocator(1)
        text = [7] * 8
        names = [
            PrefixIndex(pool, 4, b"model").keys(text),
            PrefixIndex(pool, 4, b"other").keys(text),
            PrefixIndex(pool, 2, b"model").keys(text)[1::2],
            PrefixIndex(pool, 4, b"model").keys([6] + [7] * 7),
            PrefixIndex(pool, 4, b"model").keys([7 + (1 << 32)] + [7] * 7),
            PrefixIndex(pool, 4, b"model").keys(text, [(0, CAT)]),
            PrefixIndex(pool, 4, b"model").keys(text, [(0, DOG)]),
            PrefixIndex(pool, 4, b"model").keys(text, [(1, CAT)]),
            PrefixIndex(pool, 4, b"model").keys(text, [(0, CAT), (1, CAT)]),
        ]
        flat = [key for keys in names for key in keys]
        assert len(flat) == len(set(flat)) == 18

    def test_a_change_reaches_all_later_pages_and_no_earlier_one(self) -> None:
        _, index = filled()
        base = index.keys([7] * 16)
        assert len(set(base)) == 4
        for other in (index.keys([7] * 9 + [8] + [7] * 6), index.keys([7] * 16, [(9, CAT)])):
            assert [a == b for a, b in zip(base, other, strict=True)] == [True, True, False, False]

    def test_names_do_not_change_between_processes(self) -> None:
        """The disk store depends on it."""
        (key,) = PrefixIndex(PageAllocator(1), 4, b"model").keys([1, 2, 3, 4], [(2, CAT)])
        assert key.hex() == "ac39ddf1a43fbd836f5b0b26294ecbab2378498ad0c79a2ff88d852f11228fa8"

    def test_two_images_with_equal_placeholders(self) -> None:
        pool, index = filled()
        text = [1, 100, 100, 100, 100, 100, 2, 3, 4]
        learn(index, text, [(1, CAT)])
        assert index.match(text, [(1, CAT)]).tokens == 8
        assert index.match(text, [(1, DOG)]).tokens == 0
        assert index.match(text).tokens == 0
        assert pool.used == 2

    @pytest.mark.parametrize(
        "images",
        [[(4, CAT)], [(-1, CAT)], [(1, CAT), (1, DOG)], [(2, CAT), (1, DOG)], [(0, b"short")]],
    )
    def test_image_lists_are_checked(self, images: list[tuple[int, bytes]]) -> None:
        _, index = filled()
        with pytest.raises(ValueError, match="image at token"):
            index.keys([1, 2, 3, 4], images)


class TestInsert:
    def test_a_duplicate_stays_with_its_owner(self) -> None:
        pool, index = filled()
        first = learn(index, [1, 2, 3, 4])
        mine = pool.allocate(2)
        index.insert([1, 2, 3, 4, 5, 6, 7, 8], (), mine)
        assert pool.refcount(mine[0]) == 1
        assert pool.refcount(mine[1]) == 2
        assert index.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).pages == (first[0], mine[1])
        index.check_integrity()

    def test_too_few_pages_change_nothing(self) -> None:
        pool, index = filled()
        (page,) = pool.allocate(1)
        with pytest.raises(ValueError, match="8 tokens fill 2 pages, but only 1"):
            index.insert([1] * 8, (), [page])
        assert len(index) == 0
        assert pool.refcount(page) == 1


class TestEvict:
    def test_least_recently_used_and_ends_first(self) -> None:
        pool, index = filled()
        old = learn(index, [1, 2, 3, 4, 5, 6, 7, 8])
        new = learn(index, [1, 2, 3, 4, 9, 9, 9, 9])
        order: list[int] = []
        index.on_evict = lambda key, page: order.append(page)
        assert index.evictable() == 3
        assert index.evict(1) == 1
        assert order == [old[1]]
        assert index.evict(9) == 2
        assert order == [old[1], new[1], old[0]]
        assert (len(index), pool.free, index.stats().evicted) == (0, 8, 3)

    def test_asking_for_a_page_is_no_use(self) -> None:
        """It neither counts, nor protects, nor retains."""
        pool, index = filled()
        first, second = learn(index, [1] * 4), learn(index, [2] * 4)
        before = index.stats()
        (key,) = index.keys([1] * 4)
        assert index.page(key) == first[0]
        assert index.page(b"unknown") is None
        assert index.stats() == before
        assert pool.refcount(first[0]) == 1
        index.evict(1)
        assert index.page(key) is None
        assert pool.refcount(second[0]) == 1

    def test_use_protects(self) -> None:
        pool, index = filled()
        first, second = learn(index, [1] * 4), learn(index, [2] * 4)
        pool.release(index.match([1] * 5).pages)
        index.evict(1)
        assert pool.refcount(second[0]) == 0
        assert pool.refcount(first[0]) == 1

    def test_pages_that_others_hold_stay(self) -> None:
        pool, index = filled()
        learn(index, [1] * 8)
        match = index.match([1] * 9)
        assert index.evictable() == index.evict(9) == 0
        pool.release(match.pages[1:])
        assert index.evictable() == index.evict(9) == 1
        pool.release(match.pages[:1])
        assert index.evictable() == index.evict(9) == 1
        assert pool.free == 8

    def test_a_held_end_keeps_its_beginning(self) -> None:
        pool, index = filled()
        learn(index, [1] * 4)
        mine = pool.allocate(2)
        index.insert([1] * 8, (), mine)
        assert index.evictable() == index.evict(9) == 0
        index.check_integrity()

    def test_the_hook_sees_the_page_while_it_is_whole(self) -> None:
        pool, index = filled()
        learn(index, [1] * 4)
        counts = []
        index.on_evict = lambda key, page: counts.append((key in index, pool.refcount(page)))
        index.evict(1)
        assert counts == [(True, 1)]

    def test_a_failing_hook_leaves_the_page(self) -> None:
        pool, index = filled()
        learn(index, [1] * 8)

        def full(key: bytes, page: int) -> None:
            raise OSError("disk full")

        index.on_evict = full
        with pytest.raises(OSError, match="disk full"):
            index.evict(1)
        assert len(index) == pool.used == 2
        index.check_integrity()

    def test_clear(self) -> None:
        pool, index = filled()
        learn(index, [1] * 8)
        match = index.match([1] * 5)
        index.clear()
        assert len(index) == 0
        assert pool.used == 1
        pool.release(match.pages)
        assert pool.free == 8
        assert index.match([1] * 5).tokens == 0


class TestSnapshots:
    def test_kept_with_the_page(self) -> None:
        _, index = filled(max_snapshots=2)
        learn(index, [1] * 12)
        one, two, three = index.keys([1] * 12)
        assert index.attach(one, "a")
        assert index.attach(two, "b")
        assert index.snapshot(one) == "a"
        assert index.attach(three, "c")
        assert (index.snapshot(one), index.snapshot(two), index.snapshot(three)) == ("a", None, "c")
        index.evict(1)
        assert index.snapshot(three) is None
        assert not index.attach(three, "d")
        index.check_integrity()
        index.clear()
        assert index.snapshot(one) is None

    def test_may_be_off(self) -> None:
        _, index = filled(max_snapshots=0)
        learn(index, [1] * 4)
        assert not index.attach(index.keys([1] * 4)[0], "a")


class TestCheckIntegrity:
    @pytest.mark.parametrize(
        ("fault", "text"),
        [
            ("freed", "known but free"),
            ("aliased", "two names"),
            ("orphan", "is missing"),
            ("order", "outlives the page before it"),
            ("count", "successors"),
            ("snapshot", "snapshot outlives"),
            ("many", "more snapshots"),
        ],
    )
    def test_finds(self, fault: str, text: str) -> None:
        pool, index = filled(max_snapshots=1)
        pages = learn(index, [1] * 8)
        first, last = index.keys([1] * 8)
        index.check_integrity()
        if fault == "freed":
            pool.release(pages[:1])
        elif fault == "aliased":
            index._nodes[last].page = pages[0]
        elif fault == "orphan":
            del index._nodes[first]
        elif fault == "order":
            index._nodes.move_to_end(last)
        elif fault == "count":
            index._nodes[last].children = 1
        elif fault == "snapshot":
            index._snapshots[b"gone"] = 0
        else:
            index._snapshots.update({first: 0, last: 0})
        with pytest.raises(AssertionError, match=text):
            index.check_integrity()


PAGE = 2
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
IMAGES = st.sampled_from(((), ((0, CAT),), ((0, DOG),)))


class CacheMachine(RuleBasedStateMachine):
    """Requests over a small pool. The model knows which text every page was written for, so an
    aliased, freed or misnamed page shows as another text."""

    index_class: type[PrefixIndex] = PrefixIndex
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PageAllocator(10)
        self.index = self.index_class(self.pool, PAGE, b"m", on_evict=self.evicted, max_snapshots=2)
        self.content: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self.held: list[int] = []
        self.saved: dict[bytes, tuple[Any, tuple[int, ...]]] = {}

    def evicted(self, key: bytes, page: int) -> None:
        content = self.content[page]
        assert self.saved.setdefault(key, content) == content

    def read(self, tokens: list[int], images: Any, pages: Any) -> None:
        for i, page in enumerate(pages):
            assert self.content[page] == (images, tuple(tokens[: (i + 1) * PAGE]))

    @rule(target=running, tokens=TEXTS, images=IMAGES)
    def start(self, tokens: list[int], images: Any) -> Any:
        match = self.index.match(tokens, images)
        assert match.tokens < len(tokens)
        self.read(tokens, images, match.pages)
        missing = -(-len(tokens) // PAGE) - len(match.pages)
        if missing > self.pool.free:
            possible = self.index.evictable()
            wanted = missing - self.pool.free
            assert self.index.evict(wanted) == min(possible, wanted)
        if missing > self.pool.free:
            self.pool.release(match.pages)
            return None
        new = self.pool.allocate(missing)
        pages = [*match.pages, *new]
        for i in range(len(match.pages), len(pages)):
            self.content[pages[i]] = (images, tuple(tokens[: (i + 1) * PAGE]))
        self.held += pages
        return tokens, images, pages

    @rule(request=running)
    def remember(self, request: Any) -> None:
        if request is not None and set(request[2]) <= set(self.held):
            keys = self.index.insert(*request)
            if keys:
                self.index.attach(keys[-1], request[:2])

    @rule(request=consumes(running), learned=st.booleans())
    def finish(self, request: Any, learned: bool) -> None:
        if request is None:
            return
        if learned:
            self.index.insert(*request)
        self.pool.release(request[2])
        for page in request[2]:
            self.held.remove(page)

    @rule(target=running, request=running)
    def fork(self, request: Any) -> Any:
        if request is None:
            return None
        self.pool.retain(request[2])
        self.held += request[2]
        return request

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        free, possible = self.pool.free, self.index.evictable()
        assert self.index.evict(count) == min(count, possible)
        assert self.pool.free == free + min(count, possible)

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @rule(request=running)
    def snapshot(self, request: Any) -> None:
        if request is not None:
            for i, key in enumerate(self.index.keys(*request[:2])):
                kept = self.index.snapshot(key)
                if kept is not None:
                    tokens, images = kept
                    assert (images, tokens[: (i + 1) * PAGE]) == (
                        request[1],
                        request[0][: (i + 1) * PAGE],
                    )

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()
        self.index.check_integrity()
        references = sum(self.pool.refcount(page) for page in range(10))
        assert references == len(self.held) + len(self.index)

    def teardown(self) -> None:
        self.pool.release(self.held)
        self.index.evict(10)
        assert self.pool.free == 10


class TwinIndex(PrefixIndex):
    """Fault: the pixels of an image are not part of the name."""

    def _chain(self, tokens: Any, image_hashes: Any, count: int) -> Any:
        return super()._chain(tokens, (), count)


class ForgetfulIndex(PrefixIndex):
    """Fault: a page's name does not depend on the pages before it."""

    def _chain(self, tokens: Any, image_hashes: Any, count: int) -> Any:
        for start in range(0, count * PAGE, PAGE):
            yield from super()._chain(tokens[start : start + PAGE], (), 1)


class GreedyIndex(PrefixIndex):
    """Fault: eviction frees the page itself, whoever else holds it."""

    def _remove(self, key: bytes) -> None:
        node: _Node = self._nodes[key]
        super()._remove(key)
        self.allocator.release([node.page] * self.allocator.refcount(node.page))

    def evict(self, count: int) -> int:
        for key in [k for k, node in self._nodes.items() if not node.children][:count]:
            self._remove(key)
        return count


class LeakyIndex(PrefixIndex):
    """Fault: the caller's reference of a match is forgotten."""

    def match(self, tokens: Any, image_hashes: Any = ()) -> Any:
        match = super().match(tokens, image_hashes)
        self.allocator.release(match.pages)
        return match


TestRandomRequests = CacheMachine.TestCase
TestRandomRequests.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("broken", [TwinIndex, ForgetfulIndex, GreedyIndex, LeakyIndex])
def test_the_machine_finds_a_broken_index(broken: type[PrefixIndex]) -> None:
    class Machine(CacheMachine):
        index_class = broken

        def teardown(self) -> None:
            pass

    with pytest.raises((AssertionError, ValueError, ExceptionGroup)):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=1000,
                stateful_step_count=30,
                deadline=None,
                database=None,
                phases=[Phase.generate],  # finding it is enough; no smallest example
                print_blob=False,
            ),
        )
