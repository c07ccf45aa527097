"""Runs the model for the engine: packs work into batches, owns the packed store.

Prefill is asymmetric. Every prompt token goes through the encoder and the decoder source's KV
projection; only the last window's worth goes on through the decoder (bounded decoder replay).
Which tokens those are follows from the length of the prompt alone, so the state at the first
decoded token depends neither on chunks nor on neighbours nor, as long as the encoder is exact, on
the prefix cache.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor

from cedar.cache.layout import KVLayout
from cedar.cache.paged import PagedKV
from cedar.cache.snapshots import RingSnapshot
from cedar.config.plan import Half
from cedar.engine.build import LoadedModel
from cedar.engine.images import ImageInput, feature_rows, image_types
from cedar.engine.runner_protocol import Work
from cedar.engine.stepping import Stepper
from cedar.errors import RequestError
from cedar.model import Batch
from cedar.model.context import Selection, Shared
from cedar.model.draft import DraftProposal
from cedar.model.drafting import greedy
from cedar.model.forward import ForwardContext
from cedar.model.model import Pass

__all__ = ["Decoding", "Replay", "RunResult", "Runner"]


class Replay(StrEnum):
    """Which shortcuts prefill takes.

    ``OFF``: every token through every layer; exact, and without prefix hits. ``DECODER``: the
    decoder sees the last window of the prompt only; the encoder is exact, after a prefix hit too
    (it runs again as much of the prefix as its windows reach back). ``ENCODER_DECODER``: after a
    prefix hit the encoder runs only the last window of the prefix again, so its windows are
    approximate there, and with them what is stored of the tokens behind. Where a snapshot of the
    windows serves, neither mode runs anything again that lies before it, and the windows are
    exact.
    """

    OFF = "off"
    DECODER = "decoder"
    ENCODER_DECODER = "encoder+decoder"


class Decoding(StrEnum):
    """Who knows where the tokens of a decoding step stand.

    ``HOST``: the host, as in prefill. ``DEVICE``: the device alone, which reads packed rows in
    place. ``GRAPHS``: likewise, and passes are recorded as CUDA graphs.
    """

    HOST = "host"
    DEVICE = "device"
    GRAPHS = "graphs"


@dataclass(frozen=True, slots=True)
class RunResult:
    """logits: float32 ``[k, V]``, the scores after each token asked for; None for "none".

    selected_KE, snapshots: see `cedar.engine.runner_protocol.Result`.
    """

    logits: Tensor | None
    selected_KE: Tensor | None = None
    snapshots: Mapping[int, RingSnapshot] = field(default_factory=dict)


@dataclass(slots=True)
class _Prefix:
    """Tokens of a prefix hit that the next pass has to run again before the new ones."""

    start: int
    tokens: tuple[int, ...]
    snapshot: RingSnapshot | None


class Runner:
    """Implements `cedar.engine.runner_protocol.RunnerProtocol` with a `PagedKV`."""

    def __init__(
        self,
        loaded: LoadedModel,
        layout: KVLayout,
        *,
        num_pages: int,
        num_slots: int,
        replay: Replay = Replay.DECODER,
        draft: bool = False,
        decoding: Decoding = Decoding.HOST,
        batch_invariant: bool = False,
    ) -> None:
        """batch_invariant: decoding passes of one size, prompts alone; for `Decoding.DEVICE` and
        ``GRAPHS``.
        """
        self.model = loaded.model
        self.replay = replay
        self.drafts = draft
        if draft:
            _ = self.model.draft  # raises where there is no draft head
        self.store = PagedKV(
            self.model.config,
            layout,
            num_pages=num_pages,
            num_slots=num_slots,
            device=loaded.device,
            dtype=self.model.compute_dtype,
            in_place=decoding is not Decoding.HOST,
        )
        sources = [plan.compress_ratio for plan in self.model.plan if plan.has_indexer]
        self.entry_tokens = sources[-1] if sources else 1
        self._device = loaded.device
        self._stepper = None
        if decoding is not Decoding.HOST:
            graphs = decoding is Decoding.GRAPHS
            self._stepper = Stepper(
                self.model, self.store, drafts=draft, graphs=graphs, one_size=batch_invariant
            )
        self._batch_invariant = batch_invariant
        self._prefixes: dict[int, _Prefix] = {}
        self._features: dict[int, dict[int, Tensor]] = {}  # per slot, by the image's position
        # Per slot, from where on its windows are those of a cold run; from the start by default.
        self._exact_from: dict[int, float] = {}

    # --- slots ----------------------------------------------------------------------------

    def open(self, slot: int) -> None:
        """Begin an empty sequence."""
        self.store.open(slot)
        self._forget(slot)

    def close(self, slot: int) -> None:
        """Forget the sequence; its pages belong to the scheduler."""
        self.store.close(slot)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._prefixes.pop(slot, None)
        self._features.pop(slot, None)
        self._exact_from.pop(slot, None)

    def restore(
        self,
        slot: int,
        pages: Sequence[int],
        tokens: int,
        tail_tokens: Sequence[int],
        snapshot: RingSnapshot | None = None,
    ) -> None:
        """Begin a sequence whose first ``tokens`` tokens lie in ``pages`` already.

        tail_tokens: all of those tokens. Where the replay begins depends on the length of the
        prompt, so it is decided by the first `execute`. snapshot: of a pass over the same tokens;
        it serves if it lies before all that the decoder has to see, and else is left alone.
        """
        if self.replay is Replay.OFF:
            raise RequestError("replay is off: every token has to be computed, none restored.")
        if len(tail_tokens) != tokens:
            raise ValueError(f"{tokens} tokens are restored, but {len(tail_tokens)} are given")
        self.open(slot)
        self.store.set_pages(slot, pages)
        self._prefixes[slot] = _Prefix(tokens, tuple(tail_tokens), snapshot)

    def copy_slot(self, source: int, target: int) -> None:
        """Give the opened slot ``target`` everything but the pages of ``source``."""
        self.store.copy_slot(source, target)
        self._exact_from[target] = self._exact_from.get(source, 0)

    def copy_page(self, source: int, target: int) -> None:
        """Copy all bytes of a page."""
        self.store.copy_page(source, target)

    def read_page(self, page: int) -> bytes:
        """A page as it is held."""
        return self.store.read_page(page)

    def write_page(self, page: int, payload: bytes) -> None:
        """The inverse of `read_page`."""
        self.store.write_page(page, payload)

    def mark(self, slot: int) -> None:
        """Nothing to do: the store's rings keep what a verified block could overwrite."""

    def rollback(self, slot: int, tokens: int) -> None:
        """Keep only what the first ``tokens`` tokens of the sequence stored."""
        self.store.truncate(slot, tokens)

    def nbytes(self) -> int:
        """Bytes of pools and slots together."""
        return self.store.global_nbytes + self.store.slot_nbytes

    # --- running --------------------------------------------------------------------------

    def execute(self, work: Sequence[Work]) -> list[RunResult]:
        """Run all of it, in one pass if it can be. What fails, wherever, leaves no trace at all."""
        store = self.store
        with torch.inference_mode():
            mark = store.mark({item.slot: len(item.tokens) for item in work})
            try:
                whole = [self._with_replay(item) for item in work]
                results: dict[int, RunResult] = {}
                for items in self._passes(whole):
                    found = self._run(items)
                    results |= {item.slot: one for item, one in zip(items, found, strict=True)}
            except BaseException:
                store.rollback(mark)
                raise
        for item in work:
            self._prefixes.pop(item.slot, None)
        return [results[item.slot] for item in work]

    def _passes(self, work: list[Work]) -> list[list[Work]]:
        """What runs together: everything; or what decodes, and each prompt alone."""
        if not self._batch_invariant or self._stepper is None:
            return [work]
        fits = [self._fits(self._stepper, [item]) for item in work]
        decoding = [item for item, fit in zip(work, fits, strict=True) if fit]
        most = self._stepper.most_sequences
        together = [decoding[n : n + most] for n in range(0, len(decoding), most)]
        return together + [[item] for item, fit in zip(work, fits, strict=True) if not fit]

    def _fits(self, stepper: Stepper, work: list[Work]) -> bool:
        """Whether the stepper can run it: it takes every token through both halves."""
        return stepper.fits(work) and all(item.start >= self.decoder_start(item) for item in work)

    def _run(self, work: list[Work]) -> list[RunResult]:
        """One pass, with the snapshots that it was asked for."""
        if self._stepper is not None and self._fits(self._stepper, work):
            results = self._step(self._stepper, work)
            taken = [self._snapshots(item) for item in work]
        else:
            for item in work:
                self._capture(item)
            results = self._execute(work)
            taken = [self.store.captured(item.slot) for item in work]
        return [
            replace(result, snapshots=found) if found else result
            for result, found in zip(results, taken, strict=True)
        ]

    def draft(
        self,
        slots: Sequence[int],
        first: Sequence[int],
        choose: Callable[[Tensor], Tensor] = greedy,
    ) -> DraftProposal:
        """Draft a block after the newest token of each sequence, which is not stored yet."""
        with torch.inference_mode():
            tokens = torch.tensor(list(first), device=self._device)
            if self._stepper is not None:
                output = self._stepper.draft(slots, first)
                return self.model.draft.finish(output, tokens, choose)
            return self.model.draft_propose(tokens, tuple(slots), self.store, choose)

    def decoder_start(self, work: Work) -> int:
        """The first position that goes through the decoder."""
        if self.replay is Replay.OFF or work.wants_logits == "all":
            return 0
        return max(work.prompt_tokens - self.model.config.window_size, 0)

    @property
    def replay_tokens(self) -> int:
        """How far before a prefix's end the encoder begins again."""
        window = self.model.config.window_size
        if self.replay is Replay.DECODER:
            return self.model.decoder_start * (window - 1)  # as far as its windows reach back
        return window

    def _with_replay(self, work: Work) -> Work:
        """Put the tokens of a prefix hit that have to run again before the new ones."""
        self.store.set_pages(work.slot, work.pages)
        prefix = self._prefixes.get(work.slot)
        if prefix is None:
            return work
        # The decoder needs what the encoder gives from its own start on.
        needed = min(prefix.start, self.decoder_start(work))
        snapshot = prefix.snapshot
        if snapshot is not None and snapshot.position <= needed:
            self.store.resume(work.slot, prefix.start, snapshot)
            self._exact_from[work.slot] = 0
            begin = snapshot.position
        else:
            begin = self._replay(work, prefix, needed)
        return replace(work, start=begin, tokens=prefix.tokens[begin:] + work.tokens)

    def _replay(self, work: Work, prefix: _Prefix, needed: int) -> int:
        """Prepare a slot whose encoder begins without windows; returns where."""
        config = self.model.config
        if work.snapshots and self.replay is Replay.DECODER:
            # A little earlier, so that the windows are exact at a place for a snapshot.
            needed -= needed % self.store.layout.page_tokens
        begin = max(needed - self.replay_tokens, 0)
        begin -= begin % math.lcm(*(p.compress_ratio for p in self.model.plan if p.has_compressor))
        exact = needed if self.replay is Replay.DECODER else math.inf
        self._exact_from[work.slot] = exact if begin else 0
        before = prefix.tokens[:begin]
        back = max(config.engram_max_ngram_size - 1, 0)
        recent = torch.tensor(before[len(before) - min(back, len(before)) :], dtype=torch.int64)
        classes = recent
        if self.model.token_map is not None:
            kinds = image_types(work.images, len(before) - len(recent), len(before))
            classes = self.model.token_map[recent.to(self._device)].cpu()
            classes = torch.where(torch.tensor(kinds, dtype=torch.int64) < 0, classes, -1)
        self.store.restore(work.slot, prefix.start, begin, classes)
        return begin

    def _places(self, work: Work) -> list[int]:
        """Where snapshots are wanted that will be exact."""
        stop, exact = work.start + len(work.tokens), self._exact_from.get(work.slot, 0)
        return [at for at in work.snapshots if work.start < at <= stop and at >= exact]

    def _capture(self, work: Work) -> None:
        """Have them taken while the pass runs."""
        places = self._places(work)
        if places:
            self.store.capture(work.slot, places)

    def _snapshots(self, work: Work) -> dict[int, RingSnapshot]:
        """Take them after a pass of few tokens, all of which the rings still hold."""
        return {at: self.store.snapshot(work.slot, at) for at in self._places(work)}

    def _step(self, stepper: Stepper, work: list[Work]) -> list[RunResult]:
        """Decode without the host."""
        output = stepper.run(work)
        results, stop = [], 0
        for item in work:
            start, stop = stop, stop + len(item.tokens)
            first = {"all": start, "last": stop - 1, "none": stop}[item.wants_logits]
            if first == stop:
                results.append(RunResult(None))
                continue
            selected = None
            if item.watch and output.selected_TK is not None:
                selected = self._first_positions(output.selected_TK[first:stop])
            results.append(RunResult(output.logits[first:stop], selected))
        return results

    def _first_positions(self, entries_KE: Tensor) -> Tensor:
        """Of selected entries the first tokens, on the host; −1 stays."""
        entries = entries_KE.cpu()
        return torch.where(entries < 0, -1, entries * self.entry_tokens)

    def _execute(self, work: list[Work]) -> list[RunResult]:
        model, store = self.model, self.store
        batch = self._batch(work)
        ctx = model.context(batch, store)
        state = model.encode(model.embed_batch(batch), ctx)
        rows: list[int] = []
        parts: list[Work] = []
        lengths: list[int] = []
        for item, (start, stop) in zip(work, batch.bounds, strict=True):
            first = max(item.start, self.decoder_start(item))
            here = range(start + first - item.start, stop)
            if len(here) == 0:
                continue
            if store.length(item.slot, Half.DECODER) != first:
                for half in (Half.DECODER, Half.DRAFT):
                    store.skip(item.slot, half, first)
            rows += here
            parts.append(item)
            lengths.append(len(here))
        if not parts:
            return [RunResult(None)] * len(work)
        index = torch.tensor(rows, device=self._device)
        inner = self._decoder_context(ctx, index, parts, lengths)
        main = store.main(model.decoder_start, inner.slots, inner.sequence_T)
        state = Pass(
            state.streams.rows(index), Shared(main), tuple(t[index] for t in state.taps), ()
        )
        state = model.decode(state, inner)
        if self.drafts:
            model.draft_store(torch.cat(state.taps, dim=1), inner)
        hidden_TD = model.norm(state.streams.collapse(model.ops))
        return self._results(work, parts, inner, hidden_TD, state.shared.selection)

    def _batch(self, work: list[Work]) -> Batch:
        """All work as packed tokens, with the parts of images that fall into it."""
        tokens, slots = [item.tokens for item in work], [item.slot for item in work]
        if not any(item.images for item in work):
            return Batch.pack(tokens, slots=slots, device=self._device)
        spans = [(item, item.start, item.start + len(item.tokens)) for item in work]
        rows = [
            feature_rows(image, self._features_of(item.slot, image), start, stop)
            for item, start, stop in spans
            for image in item.images
        ]
        return Batch.pack(
            tokens,
            slots=slots,
            device=self._device,
            image_types=[image_types(item.images, start, stop) for item, start, stop in spans],
            features=torch.cat(rows),
        )

    def _features_of(self, slot: int, image: ImageInput) -> Tensor:
        """The tower runs once for an image of a sequence, however its span is cut."""
        known = self._features.setdefault(slot, {})
        if image.start not in known:
            patches = image.patches.to(self._device)
            known[image.start] = self.model.vision_features(patches, image.grid)
        return known[image.start]

    def _decoder_context(
        self, ctx: ForwardContext, index: Tensor, parts: list[Work], lengths: list[int]
    ) -> ForwardContext:
        """The context of the tokens that go through the decoder."""
        stops = [sum(lengths[: n + 1]) for n in range(len(lengths))]
        bounds = tuple((stop - n, stop) for stop, n in zip(stops, lengths, strict=True))
        slots = tuple(item.slot for item in parts)
        starts = tuple(self.store.length(slot, Half.DECODER) for slot in slots)
        return self.model.sub_context(ctx, index, bounds, slots, starts)

    def _results(
        self,
        work: list[Work],
        parts: list[Work],
        inner: ForwardContext,
        hidden_TD: Tensor,
        selection: Selection | None,
    ) -> list[RunResult]:
        """Logits of the rows that were asked for, all in one product."""
        wanted: list[int] = []
        counts: dict[int, int] = {}
        selected: dict[int, Tensor] = {}
        for item, (start, stop) in zip(parts, inner.bounds, strict=True):
            ends = {"all": range(start, stop), "last": range(stop - 1, stop), "none": range(0)}
            chosen = ends[item.wants_logits]
            wanted += chosen
            counts[item.slot] = len(chosen)
            if item.watch and chosen and selection is not None:
                entries_KE = selection.entries_TK[chosen.start : chosen.stop]
                selected[item.slot] = self._first_positions(entries_KE)
        if not wanted:
            return [RunResult(None)] * len(work)
        logits = self.model.logits(hidden_TD[torch.tensor(wanted, device=self._device)])
        rows = iter(logits.split([counts[item.slot] for item in parts]))
        found = {item.slot: next(rows) for item in parts}
        return [
            RunResult(found[item.slot], selected.get(item.slot))
            if counts.get(item.slot)
            else RunResult(None)
            for item in work
        ]
