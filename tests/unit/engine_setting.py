"""An engine whose model is a pure function of the token sequence, and what it gives alone.

The toy runner keeps tokens where a real one keeps entries: in pages and in slots. It predicts from
what it reads back, so that a page that is shared wrongly, not copied or lost changes the text, and
it notices slots and pages that contradict each other.
"""

import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cedar.cache.disk import DiskTier
from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import PrefixIndex
from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine.core import EngineCore
from cedar.engine.drafting import Drafter
from cedar.engine.limits import EngineLimits
from cedar.engine.params import SamplingParams
from cedar.engine.runner_protocol import Work
from cedar.engine.sampler import Sampler
from cedar.engine.scheduler import Scheduler
from cedar.engine.snapshots import Snapshots
from cedar.engine.stopping import StopChecker
from cedar.engine.tiers import PrefixTier
from cedar.errors import CapacityError
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["EOS", "VOCAB", "ToyRunner", "alone", "drain", "make_core", "tokenizer", "toy_logits"]

VOCAB = 300
EOS = 1
PAGE = 4
TAIL = 3


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(locate_checkpoint("cedar-tiny"))


def toy_logits(tokens: Sequence[int]) -> Tensor:
    """float32 ``[V]``; a few tokens are likely, the end of text is not."""
    digest = hashlib.sha256(repr(list(tokens)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
    logits = 2.0 * torch.randn(VOCAB, generator=generator)
    logits[: EOS + 1] = -1e4
    return logits


class ToyResult(NamedTuple):
    logits: Tensor | None
    selected_KE: Tensor | None = None
    snapshots: dict[int, Any] = {}  # noqa: RUF012


class ToyProposal(NamedTuple):
    tokens_NB: Tensor
    confidence_NB: Tensor


@dataclass
class ToyRunner:
    """poison: a token that makes a batch be refused; crash: one that breaks the runner.

    wrong_draft: every so many drafts are wrong. copies: False forgets to copy pages.
    """

    num_pages: int
    poison: int | None = None
    crash: int | None = None
    block: int = 4
    wrong_draft: int = 3
    copies: bool = True
    pages: dict[int, list[int]] = field(default_factory=dict)
    slots: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, tuple[int, ...]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    """Sequences of each pass."""
    resumed: list[int] = field(default_factory=list)
    """Where the snapshots were taken that were used."""

    def execute(self, work: Sequence[Work]) -> list[ToyResult]:
        before = deepcopy((self.pages, self.slots, self.tables))
        try:
            results = [self._run(each) for each in work]
        except Exception:
            self.pages, self.slots, self.tables = before
            raise
        self.lengths.append(len(work))
        return results

    def _run(self, work: Work) -> ToyResult:
        slot = self.slots[work.slot]
        if self.poison is not None and self.poison in work.tokens:
            raise CapacityError(f"token {self.poison} is too much")
        if self.crash is not None and self.crash in work.tokens:
            raise ZeroDivisionError("the runner broke")
        assert len(slot) == work.start, (len(slot), work.start)
        assert len(work.pages) * PAGE >= work.start + len(work.tokens)
        self.tables[work.slot] = work.pages
        for position, token in enumerate(work.tokens, work.start):
            page = self.pages.setdefault(work.pages[position // PAGE], [-1] * PAGE)
            page[position % PAGE] = token
        slot.extend(work.tokens)
        stored = self._stored(work.pages, len(slot))
        assert stored[-TAIL:] == slot[-TAIL:], "the slot and the pages contradict each other"
        # The tail is what a window would be.
        taken = {at: (at, stored[max(at - TAIL, 0) : at]) for at in work.snapshots}
        count = {"none": 0, "last": 1, "all": len(work.tokens)}[work.wants_logits]
        if count == 0:
            return ToyResult(None, snapshots=taken)
        ends = range(len(stored) - count + 1, len(stored) + 1)
        return ToyResult(torch.stack([toy_logits(stored[:end]) for end in ends]), snapshots=taken)

    def _stored(self, pages: Sequence[int], count: int) -> list[int]:
        return [self.pages[pages[i // PAGE]][i % PAGE] for i in range(count)]

    def open(self, slot: int) -> None:
        self.slots[slot] = []

    def close(self, slot: int) -> None:
        del self.slots[slot]

    def restore(
        self,
        slot: int,
        pages: Sequence[int],
        tokens: int,
        tail_tokens: Sequence[int],
        snapshot: Any = None,
    ) -> None:
        assert len(tail_tokens) == tokens
        assert self._stored(pages, tokens) == list(tail_tokens), "the hit is of another text"
        if snapshot is not None:
            at, tail = snapshot
            assert 0 < at <= tokens
            assert tail == list(tail_tokens[max(at - TAIL, 0) : at]), "windows of another text"
            self.resumed.append(at)
        self.slots[slot] = list(tail_tokens)

    def copy_slot(self, source: int, target: int) -> None:
        self.slots[target] = list(self.slots[source])

    def copy_page(self, source: int, target: int) -> None:
        if self.copies:
            self.pages[target] = list(self.pages[source])
        else:
            self.pages.setdefault(target, [-1] * PAGE)

    def read_page(self, page: int) -> bytes:
        return b"".join(token.to_bytes(4, "little") for token in self.pages[page])

    def write_page(self, page: int, payload: bytes) -> None:
        self.pages[page] = [
            int.from_bytes(payload[i : i + 4], "little") for i in range(0, len(payload), 4)
        ]

    def mark(self, slot: int) -> None:
        pass

    def rollback(self, slot: int, tokens: int) -> None:
        del self.slots[slot][tokens:]

    def draft(
        self, slots: Sequence[int], first: Sequence[int], choose: Callable[[Tensor], Tensor]
    ) -> ToyProposal:
        texts = [
            [*self._stored(self.tables[slot], len(self.slots[slot])), token]
            for slot, token in zip(slots, first, strict=True)
        ]
        drafted = []
        for k in range(self.block):
            chosen = choose(torch.stack([toy_logits(text) for text in texts]))
            if (len(texts[0]) + k) % self.wrong_draft == 0:
                chosen = (chosen + 7) % VOCAB
            for text, token in zip(texts, chosen.tolist(), strict=True):
                text.append(token)
            drafted.append(chosen)
        return ToyProposal(torch.stack(drafted, 1), torch.full((len(slots), self.block), 2.0))

    def nbytes(self) -> int:
        return self.num_pages * PAGE


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def make_core(
    runner: ToyRunner | None = None,
    *,
    num_pages: int = 64,
    num_slots: int = 8,
    token_budget: int = 24,
    max_waiting: int = 100,
    draft: bool = False,
    prefix: bool = True,
    snapshots: int = 0,
    exact_hits: bool = False,
    disk: Path | None = None,
    clock: Any = None,
) -> EngineCore:
    runner = runner or ToyRunner(num_pages)
    allocator = PageAllocator(num_pages)
    index = tier = windows = None
    if prefix:
        index = PrefixIndex(allocator, PAGE, b"toy", max_snapshots=snapshots)
        windows = Snapshots(index, window=TAIL, reach=TAIL) if snapshots else None
    if disk is not None and index is not None:
        store = DiskTier(disk, max_bytes=1 << 22, layout_tag=b"toy")
        tier = PrefixTier(index, allocator, runner, store)
    return EngineCore(
        runner=runner,
        scheduler=Scheduler(
            allocator,
            index,
            page_tokens=PAGE,
            num_slots=num_slots,
            token_budget=token_budget,
            max_waiting=max_waiting,
            limit_hit=windows.exact_hit if windows and exact_hits else None,
        ),
        allocator=allocator,
        tokenizer=tokenizer(),
        limits=EngineLimits(
            vocab_size=VOCAB,
            bos=0,
            eos=EOS,
            max_positions=1000,
            page_tokens=PAGE,
            num_pages=num_pages,
            page_bytes=PAGE,
            slot_bytes=10,
            max_waiting=max_waiting,
        ),
        drafter=Drafter(runner, 4) if draft else None,
        snapshots=windows,
        tier=tier,
        clock=clock or FakeClock(),
        check=True,
    )


class Result(NamedTuple):
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None


def alone(prompt: Sequence[int], params: SamplingParams, sample: int = 0) -> Result:
    """What a request gives without an engine, one token after the other."""
    sampler = Sampler(params, VOCAB, prompt, sample=sample)
    checker = StopChecker(params, EOS, tokenizer().stream())
    text = ""
    while checker.finish_reason is None:
        token = sampler.step(toy_logits([*prompt, *sampler.history])).token
        text += checker.push(token).text
    return Result(tuple(sampler.history[: checker.num_tokens]), text, str(checker.finish_reason))


def drain(core: EngineCore, steps: int = 10_000) -> dict[tuple[str, int], Result]:
    """Step until nothing is left; what became of each sample."""
    found: dict[tuple[str, int], Result] = {}
    for _ in range(steps):
        if not core.has_work:
            return found
        for output in core.step():
            key = (output.id, output.index)
            before = found.get(key, Result((), "", None))
            assert before.finish_reason is None, "an output after the end"
            found[key] = Result(
                before.tokens + output.tokens, before.text + output.text, output.finish_reason
            )
    raise AssertionError("the engine does not come to an end")
