"""Decoding without the host: passes over few tokens a sequence, recorded as CUDA graphs.

A pass is recorded once for every size (how many sequences, how many tokens of each at most) and
replayed with other numbers in its input. What is missing to a size is padding, which reads and
writes nothing. Between two passes one copy goes to the device, and logits come back.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cedar.cache.paged import PagedKV
from cedar.config.plan import Half
from cedar.engine.runner_protocol import Work
from cedar.model import Model
from cedar.model.model import StepOutput
from cedar.model.step import StepInput

__all__ = ["Stepper"]

_LOG = logging.getLogger(__name__)

_MOST_SEQUENCES = 256
_WARM_UPS = 2  # compile kernels, and let libraries choose theirs


class _Size(NamedTuple):
    """So many sequences, of at most so many tokens each."""

    sequences: int
    queries: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


class Stepper:
    """Runs `Model.step` for a `PagedKV`, recorded if ``graphs``, else as it is.

    drafts: store what the draft head needs.
    """

    def __init__(self, model: Model, store: PagedKV, *, drafts: bool, graphs: bool) -> None:
        self._model, self._store = model, store
        self._drafts, self._graphs = drafts, graphs
        self._device = store.arrays.history.device
        self._passes: dict[_Size, _Pass] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def fits(self, work: Sequence[Work]) -> bool:
        """Whether all of it is decoding: few tokens of text behind what both halves have."""
        store = self._store
        return len(work) <= min(store.num_slots, _MOST_SEQUENCES) and all(
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
        queries = 1 if all(len(item.tokens) == 1 for item in work) else store.slack
        size = _Size(1 << (len(work) - 1).bit_length(), queries)
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

    def _prepare(self, size: _Size) -> "_Pass":
        store, arrays = self._store, self._store.arrays
        numbers = _Numbers(size, self._device)

        def step() -> StepOutput:
            return self._model.step(
                numbers.input(),
                arrays,
                most_queries=size.queries,
                most_tokens=arrays.table.shape[1] * store.layout.page_tokens,
                drafts=self._drafts,
            )

        if not self._graphs:
            return _Pass(numbers, step)
        try:
            return _Pass(numbers, self._record(step))
        except RuntimeError as error:
            _LOG.warning(
                "decoding goes on without CUDA graphs, because a pass cannot be recorded: %s", error
            )
            self._graphs = False
            return _Pass(numbers, step)

    def _record(self, step: Callable[[], StepOutput]) -> Callable[[], StepOutput]:
        # Nothing but padding is run here, so the cache stays as it is.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()

        def replay() -> StepOutput:
            graph.replay()
            return output

        return replay


class _Pass(NamedTuple):
    """A pass of one size: its input, and what runs it."""

    numbers: "_Numbers"
    run: Callable[[], StepOutput]


class _Numbers:
    """The numbers of a `StepInput`, on the host and on the device, one after the other."""

    def __init__(self, size: _Size, device: torch.device) -> None:
        self._size = size
        count = (4 + len(Half)) * size.tokens + 2 * size.sequences + 1
        self._host = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.empty(count, dtype=torch.int64, device=device)
        self._write([], [])

    def _parts(self, numbers: Tensor) -> tuple[Tensor, ...]:
        tokens, sequences = self._size.tokens, self._size.sequences
        return numbers.split([tokens] * 4 + [len(Half) * tokens, sequences + 1, sequences])

    def input(self) -> StepInput:
        """On the device, as the pass reads it."""
        tokens, positions, slots, sequence, starts, first, slot = self._parts(self._device)
        return StepInput(
            tokens_T=tokens,
            positions_T=positions,
            slots_T=slots,
            sequence_T=sequence,
            first=first.int(),
            sequence_slot=slot,
            starts=starts.view(len(Half), -1),
        )

    def fill(self, work: Sequence[Work], store: PagedKV) -> None:
        """For another pass. The one before has to be through; its results say so."""
        self._write(work, [[store.window_start(item.slot, half) for half in Half] for item in work])

    def _write(self, work: Sequence[Work], window_starts: Sequence[Sequence[int]]) -> None:
        tokens, positions, slots, sequence, starts, first, slot = self._parts(self._host)
        starts = starts.view(len(Half), -1)
        stop = 0
        for n, (item, own) in enumerate(zip(work, window_starts, strict=True)):
            start, stop = stop, stop + len(item.tokens)
            tokens[start:stop] = torch.tensor(item.tokens)
            positions[start:stop] = torch.arange(item.start, item.start + len(item.tokens))
            slots[start:stop], sequence[start:stop] = item.slot, n
            starts[:, start:stop] = torch.tensor(own).unsqueeze(1)
            first[n], slot[n] = start, item.slot
        tokens[stop:], positions[stop:], slots[stop:], sequence[stop:] = 0, -1, -1, 0
        starts[:, stop:] = 0
        first[len(work) :], slot[len(work) :] = stop, 0
        self._device.copy_(self._host, non_blocking=True)
