"""An engine whose model is a pure function of the token sequence, for tests of the scheduler.

The model reads tokens back from the pages where they were stored and keeps its windows in slots,
as the real one does. So a page that is shared, stale or missing, or a slot that is not what it
should be, gives other tokens than `alone`, which knows neither pages nor slots.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import Match, PrefixIndex
from cedar.engine.request import Request, Sequence
from cedar.engine.scheduler import Scheduler
from cedar.engine.steps import Item, ItemKind, StepPlan

VOCAB = 23
END = 0
WINDOW = 3


@dataclass(frozen=True, kw_only=True)
class Params:
    max_tokens: int = 8


def request(id: str, tokens: object, max_tokens: int = 8, **more: object) -> Request:
    return Request(id=id, tokens=tuple(tokens), params=Params(max_tokens=max_tokens), **more)  # type: ignore[call-overload, arg-type]


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def choose(scores: bytes, id: str) -> int:
    """The token of one sequence: samples of one request (``name/3``) draw different ones."""
    return digest(scores, id.rpartition("/")[2] if "/" in id else "")[0] % VOCAB


def alone(
    id: str, prompt: tuple[int, ...], max_tokens: int, end: int, past: tuple[int, ...] = ()
) -> list[int]:
    """What a request gives when nothing else exists; ``past`` was generated for another id."""
    tokens = list(prompt)
    decoder = digest("replay", prompt[-WINDOW:])
    while len(tokens) - len(prompt) < max_tokens:
        new = len(tokens) - len(prompt)
        scores = digest(tokens, tokens[-WINDOW:], decoder)
        token = past[new] if new < len(past) else choose(scores, id)
        if token == end:
            break
        tokens.append(token)
        decoder = digest(decoder, token)
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Slot:
    """What is not in pages: the newest tokens (window), and the decoder's state."""

    window: tuple[int, ...] = ()
    decoder: bytes = b""


class ToyRunner:
    """Pages, slots and the model. Nothing is ever cleared but by its next holder."""

    def __init__(self, num_pages: int, page_tokens: int, num_slots: int) -> None:
        self.page_tokens = page_tokens
        self.memory: list[list[int | None]] = [[None] * page_tokens for _ in range(num_pages)]
        self.slots = [Slot() for _ in range(num_slots)]
        self.faults: set[str] = set()

    def read(self, pages: list[int], stop: int) -> list[int | None]:
        size = self.page_tokens
        return [self.memory[pages[at // size]][at % size] for at in range(stop)]

    def prepare(self, plan: StepPlan) -> None:
        if "no page copy" not in self.faults:
            for source, target in plan.copies:
                self.memory[target] = list(self.memory[source])
        if "no slot copy" not in self.faults:
            for source, target in plan.slot_copies:
                self.slots[target] = self.slots[source]
        for admission in plan.admitted:
            hit = admission.hit_tokens
            tail = self.read(admission.sequence.pages, hit)[-WINDOW:]
            self.slots[admission.slot] = Slot(tuple(t or 0 for t in tail))

    def run(self, item: Item) -> tuple[list[bytes], list[Slot]]:
        """Scores and state after every token of an item."""
        sequence, scores, states = item.sequence, [], []
        assert sequence.slot is not None
        slot = self.slots[sequence.slot]
        for at, token in enumerate(item.tokens, item.start):
            page = sequence.pages[at // self.page_tokens]
            self.memory[page][at % self.page_tokens] = token
            window = (*slot.window, token)[-WINDOW:]
            decoder = slot.decoder
            if item.kind is not ItemKind.PREFILL:
                decoder = digest(decoder, token)
            elif item.is_last_chunk and at + 1 == item.stop:
                decoder = digest("replay", window)
            slot = Slot(window, decoder)
            stored = self.read(sequence.pages, at + 1)
            scores.append(digest(stored, list(window), decoder))
            states.append(slot)
        self.slots[sequence.slot] = slot
        return scores, states


@dataclass
class ToyEngine:
    """Scheduler, runner and a loop. ``chance`` decides all that is random in a run."""

    num_pages: int = 12
    page_tokens: int = 4
    num_slots: int = 3
    token_budget: int = 8
    max_waiting: int = 10_000
    aging_seconds: float = 10.0
    prefix: bool = True
    chance: Random = field(default_factory=lambda: Random(0))
    drafts: int = 0
    end: int = END  # the token that ends a text; -1 for none
    cancel_rate: float = 0.0
    fork_rate: float = 0.0
    max_forks: int = 40  # as forks fork too, they might never end
    shorten: bool = False  # prefix hits, at random
    check: bool = True

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.num_pages)
        self.index = PrefixIndex(self.allocator, self.page_tokens, b"toy") if self.prefix else None
        self.scheduler = Scheduler(
            self.allocator,
            self.index,
            page_tokens=self.page_tokens,
            num_slots=self.num_slots,
            token_budget=self.token_budget,
            max_waiting=self.max_waiting,
            aging_seconds=self.aging_seconds,
            limit_hit=self._limit_hit if self.shorten else None,
        )
        self.runner = ToyRunner(self.num_pages, self.page_tokens, self.num_slots)
        self.expected: dict[str, list[int]] = {}
        self.ended: dict[str, Sequence] = {}
        self.now = 0.0
        self.steps = self.preemptions = self.hits = self.forks = 0
        self.rejected = self.accepted = 0
        self.fork_plan: dict[str, int] = {}  # how many forks at the first token of an id
        self.on_plan: Callable[[StepPlan], None] = lambda plan: None

    def _limit_hit(self, sequence: Sequence, match: Match) -> int:
        return self.chance.randint(0, match.tokens)

    def add(self, new: Request) -> Sequence:
        sequence = self.scheduler.add(new)
        self.expected[new.id] = alone(new.id, new.tokens, new.params.max_tokens, self.end)
        return sequence

    def verify(self) -> None:
        if self.check:
            self.scheduler.check_integrity()

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left."""
        while self.scheduler.has_work:
            assert self.steps < limit, "the schedule does not end"
            self.step()

    def step(self) -> StepPlan:
        self._draft()
        plan = self.scheduler.step(self.now)
        self.verify()
        self.steps += 1
        self.now += 1.0
        self._count(plan)
        self.on_plan(plan)
        self.runner.prepare(plan)
        done = [
            (item, *self.runner.run(item)) for item in plan.items if item.sequence.slot is not None
        ]
        for item, scores, states in done:
            for child in self._fork(item):
                self._finish_item(replace(item, sequence=child), scores, states)
            self._finish_item(item, scores, states)
            self.verify()
            self._cancel_some()
        return plan

    def _count(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.token_budget
        self.preemptions += len(plan.preempted)
        self.hits += sum(admission.hit_tokens > 0 for admission in plan.admitted)
        for sequence in plan.expired:
            self.ended[sequence.id] = sequence

    def _draft(self) -> None:
        """Continue with the right tokens, then now and then with a wrong one."""
        for sequence in self.scheduler.sequences():
            if self.drafts and sequence.state == "decode":
                done = len(sequence.generated)
                right = [*self.expected[sequence.id][done:], *[END] * self.drafts]
                size = self.chance.randint(0, self.drafts)
                sequence.drafts = tuple(
                    token if self.chance.random() < 0.8 else self.chance.randrange(VOCAB)
                    for token in right[:size]
                )

    def _fork(self, item: Item) -> list[Sequence]:
        sequence = item.sequence
        children = []
        if sequence.finish_reason is None and item.kind is not ItemKind.VERIFY:
            planned = self.fork_plan.pop(sequence.id, 0) if item.wants_logits else 0
            while planned or (
                self.forks < self.max_forks and self.chance.random() < self.fork_rate
            ):
                planned = max(0, planned - 1)
                self.forks += 1
                past, prompt = tuple(sequence.generated), sequence.request.tokens
                limit = sequence.request.params.max_tokens
                child = self.scheduler.fork(sequence, f"{sequence.id}-{self.forks}/{self.forks}")
                self.expected[child.id] = alone(child.id, prompt, limit, self.end, past)
                self.verify()
                if child.slot is not None:
                    children.append(child)
        return children

    def _finish_item(self, item: Item, scores: list[bytes], states: list[Slot]) -> None:
        """Draw tokens, compare drafts, roll back, commit."""
        sequence, new = item.sequence, []
        if not item.wants_logits:
            self.scheduler.commit(sequence, (), item.stop)
            return
        if sequence.finish_reason is not None:  # cancelled meanwhile
            self.scheduler.commit(sequence, (1,), item.stop)
            return
        known = sequence.length - item.start - 1
        kept, ended = known, False
        limit = sequence.request.params.max_tokens
        for place in range(known, item.count):
            token = choose(scores[place], sequence.id)
            kept = place
            if token == self.end:
                ended = True
                break
            new.append(token)
            ended = len(sequence.generated) + len(new) == limit
            if ended or place + 1 == item.count or token != item.tokens[place + 1]:
                break
        self.accepted += kept - known
        self.rejected += item.count - 1 - kept
        if item.count - 1 - kept and "no rollback" not in self.runner.faults:
            assert sequence.slot is not None
            self.runner.slots[sequence.slot] = states[kept]
        self.scheduler.commit(sequence, new, item.start + kept + 1)
        if ended:
            self.scheduler.finish(
                sequence, "length" if len(sequence.generated) == limit else "stop"
            )
            self.ended[sequence.id] = sequence

    def _cancel_some(self) -> None:
        if self.chance.random() < self.cancel_rate:
            everyone = self.scheduler.sequences()
            if everyone:
                self.cancel(self.chance.choice(everyone).id)

    def cancel(self, id: str) -> None:
        sequence = self.scheduler.cancel(id)
        assert sequence is not None
        self.ended[id] = sequence
        self.verify()

    def wrong(self) -> list[str]:
        """Requests whose output is not what they give alone (cut short, if they were ended)."""
        found = []
        for id, sequence in self.ended.items():
            want = self.expected[id]
            if sequence.finish_reason in ("cancelled", "deadline"):
                want = want[: len(sequence.generated)]
            if sequence.generated != want:
                found.append(id)
        return found

    def check_end(self) -> None:
        """Every request ended, all outputs are right, and all pages come back."""
        assert not self.scheduler.has_work
        assert sorted(self.ended) == sorted(self.expected)
        assert self.wrong() == []
        self.scheduler.check_integrity()
        assert self.allocator.used == (len(self.index) if self.index is not None else 0)
        if self.index is not None:
            self.index.evict(self.num_pages)
        assert self.allocator.free == self.num_pages


def toy(**settings: Any) -> ToyEngine:
    """Texts that end with max_tokens only, so that lengths are known."""
    return ToyEngine(end=-1, **settings)
