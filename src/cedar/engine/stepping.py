"""Decoding without the host: passes over few tokens a sequence, recorded as CUDA graphs.

A pass is recorded once for every size (how many sequences, how many tokens of each at most) and
replayed with other numbers in its input. What is missing to a size is padding, which reads and
writes nothing. Between two passes one copy goes to the device, and logits come back.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from cedar.cache.paged import PagedKV
from cedar.config.plan import Half
from cedar.engine.runner_protocol import Work
from cedar.errors import RequestError
from cedar.model import Model
from cedar.model.draft import DraftOutput
from cedar.model.model import StepOutput
from cedar.model.step import DraftInput, StepInput

__all__ = ["Stepper", "record"]

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
N = TypeVar("N")

_MOST_SEQUENCES = 256
_NO_DRAFT = (0, -1, -1, 0)  # padding
_WARM_UPS = 2  # compile kernels, and let libraries choose theirs


def record(step: Callable[[], T], device: torch.device, pool: Any = None) -> Callable[[], T]:
    """A function that replays a pass; its results lie where those of the last replay did.

    The pass runs while it is recorded: its input should be padding, or harmless. pool: memory that
    several recordings share, none of which is in use when another one runs.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = step()

    def replay() -> T:
        graph.replay()
        return output

    return replay


class _Size(NamedTuple):
    """So many sequences, of at most so many tokens each."""

    sequences: int
    queries: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


class Stepper:
    """Runs `Model.step` for a `PagedKV`, recorded if ``graphs``, else as it is.

    drafts: store what the draft head needs. one_size: every pass has the largest size, so that
    sums are taken in the same order whatever it is about.
    """

    def __init__(
        self, model: Model, store: PagedKV, *, drafts: bool, graphs: bool, one_size: bool = False
    ) -> None:
        self._model, self._store = model, store
        self._drafts, self._graphs, self._one_size = drafts, graphs, one_size
        self._device = store.arrays.history.device
        self._passes: dict[_Size, _Pass[_StepNumbers, StepOutput]] = {}
        self._drafts_of: dict[int, _Pass[_Numbers, DraftOutput]] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    @property
    def most_sequences(self) -> int:
        """Of one pass."""
        return min(self._store.num_slots, _MOST_SEQUENCES)

    def fits(self, work: Sequence[Work]) -> bool:
        """Whether all of it is decoding: few tokens of text behind what both halves have."""
        store = self._store
        return len(work) <= self.most_sequences and all(
            len(item.tokens) <= store.slack
            and item.start > 0
            and store.length(item.slot, Half.ENCODER) == item.start
            and store.length(item.slot, Half.DECODER) == item.start
            and not any(image.stop > item.start for image in item.images)
            for item in work
        )

    def run(self, work: Sequence[Work]) -> StepOutput:
        """Logits ``[tokens, V]`` of all new tokens, and what the last index source selected."""
        store = self._store
        for item in work:
            store.check_room(item.slot, item.start + len(item.tokens))
        store.write_tables([item.slot for item in work])
        size = self._size_for(work)
        if size not in self._passes:
            self._passes[size] = self._prepare(size)
        found = self._passes[size]
        found.numbers.fill(work, store)
        output = found.run()
        halves = tuple(Half) if self._drafts else (Half.ENCODER, Half.DECODER)
        for item in work:
            store.count(item.slot, len(item.tokens), halves)
        count = sum(len(item.tokens) for item in work)
        # The next pass of this size writes where this one's results are.
        selected = output.selected_TK
        return StepOutput(
            output.logits[:count].clone(), None if selected is None else selected[:count].clone()
        )

    def draft(self, slots: Sequence[int], first: Sequence[int]) -> DraftOutput:
        """What is drafted from after the newest tokens of sequences, which are not stored yet."""
        store = self._store
        for slot in slots:
            if store.window_length(slot, Half.DRAFT) == 0:
                raise RequestError(f"slot {slot} has no main state to draft from")
        count = self.most_sequences if self._one_size else 1 << (len(slots) - 1).bit_length()
        if count not in self._drafts_of:
            self._drafts_of[count] = self._prepare_draft(count)
        found = self._drafts_of[count]
        rows = [
            (token, slot, store.length(slot, Half.DRAFT) - 1, store.window_start(slot, Half.DRAFT))
            for token, slot in zip(first, slots, strict=True)
        ]
        rows += [_NO_DRAFT] * (count - len(rows))
        found.numbers.write(_columns(rows))
        output = found.run()
        n = len(slots)
        return DraftOutput(output.hidden_NBD[:n].clone(), output.logits_NBV[:n].clone(), ())

    def _size_for(self, work: Sequence[Work]) -> _Size:
        store = self._store
        if self._one_size:
            return _Size(self.most_sequences, store.slack)
        queries = 1 if all(len(item.tokens) == 1 for item in work) else store.slack
        return _Size(1 << (len(work) - 1).bit_length(), queries)

    def _prepare(self, size: _Size) -> "_Pass[_StepNumbers, StepOutput]":
        store, arrays = self._store, self._store.arrays
        numbers = _StepNumbers(size, self._device)

        def step() -> StepOutput:
            return self._model.step(
                numbers.input(),
                arrays,
                most_queries=size.queries,
                most_tokens=arrays.table.shape[1] * store.layout.page_tokens,
                drafts=self._drafts,
            )

        return _Pass(numbers, self._recorded(step))

    def _prepare_draft(self, count: int) -> "_Pass[_Numbers, DraftOutput]":
        numbers = _Numbers(count * len(_NO_DRAFT), self._device)
        numbers.write(_columns([_NO_DRAFT] * count))

        def step() -> DraftOutput:
            columns = numbers.device.view(-1, count)
            return self._model.draft_step(DraftInput(*columns), self._store.arrays)

        return _Pass(numbers, self._recorded(step))

    def _recorded(self, step: Callable[[], T]) -> Callable[[], T]:
        if not self._graphs:
            return step
        try:
            return record(step, self._device, self._pool)
        except RuntimeError as error:
            _LOG.warning(
                "decoding goes on without CUDA graphs, because a pass cannot be recorded: %s", error
            )
            self._graphs = False
            return step


class _Pass(NamedTuple, Generic[N, T]):
    """A pass of one size: its input, and what runs it."""

    numbers: N
    run: Callable[[], T]


class _Numbers:
    """Integers of a pass, on the host and on the device."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._host = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = torch.empty(count, dtype=torch.int64, device=device)

    def write(self, numbers: list[int]) -> None:
        """For another pass. The one before has to be through; its results say so."""
        self._host.copy_(torch.tensor(numbers))
        self.device.copy_(self._host, non_blocking=True)


class _StepNumbers(_Numbers):
    """Those of a `StepInput`, one part after the other."""

    def __init__(self, size: _Size, device: torch.device) -> None:
        self._size = size
        super().__init__((4 + len(Half)) * size.tokens + 2 * size.sequences + 1, device)
        self._write([], [])

    def input(self) -> StepInput:
        """On the device, as the pass reads it."""
        tokens, sequences = self._size.tokens, self._size.sequences
        sizes = [tokens] * 4 + [len(Half) * tokens, sequences + 1, sequences]
        token, position, slot, sequence, starts, first, slot_of = self.device.split(sizes)
        return StepInput(
            tokens_T=token,
            positions_T=position,
            slots_T=slot,
            sequence_T=sequence,
            first=first.int(),
            sequence_slot=slot_of,
            starts=starts.view(len(Half), -1),
        )

    def fill(self, work: Sequence[Work], store: PagedKV) -> None:
        """For another pass."""
        self._write(work, [[store.window_start(item.slot, half) for half in Half] for item in work])

    def _write(self, work: Sequence[Work], window_starts: Sequence[Sequence[int]]) -> None:
        rows = [
            (token, item.start + k, item.slot, n, *window_starts[n])
            for n, item in enumerate(work)
            for k, token in enumerate(item.tokens)
        ]
        rows += [(0, -1, -1, 0, *[0] * len(Half))] * (self._size.tokens - len(rows))
        first = list(accumulate((len(item.tokens) for item in work), initial=0))
        first += first[-1:] * (self._size.sequences + 1 - len(first))
        slots = [item.slot for item in work] + [0] * (self._size.sequences - len(work))
        self.write([*_columns(rows), *first, *slots])


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(zip(*rows, strict=True)))
