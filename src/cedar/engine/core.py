"""The engine's loop: schedule, run, sample, commit. Synchronous, for one thread."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cedar.cache.pages import PageAllocator
from cedar.engine.drafting import Drafter
from cedar.engine.images import ImageInput, check_images
from cedar.engine.limits import EngineLimits, check_times, check_tokens, fitting
from cedar.engine.output import Output
from cedar.engine.params import SamplingParams
from cedar.engine.request import Request, RequestState
from cedar.engine.request import Sequence as Scheduled
from cedar.engine.runner_protocol import Result, RunnerProtocol, Work
from cedar.engine.sampler import Sampler, TokenMask
from cedar.engine.scheduler import Scheduler
from cedar.engine.snapshots import Snapshots
from cedar.engine.stats import EngineStats, Meter
from cedar.engine.steps import Item, ItemKind, StepPlan
from cedar.engine.texts import Texts
from cedar.engine.tiers import PrefixTier
from cedar.errors import CedarError
from cedar.inputs.images import ImageSettings
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["EngineCore"]

_LOG = logging.getLogger(__name__)


class EngineCore:
    """Serves requests step by step.

    `request` builds and checks a request, `submit` queues it, `step` does one pass of the model
    and returns what is new. Whatever goes wrong with one request ends that request with the reason
    "error"; the others go on. snapshots: of the encoder's windows, kept with the prefix cache.
    tier: a store below the prefix cache. image_settings: how pictures are cut for the model; None
    if it takes none. check: verify the scheduler's books after every step (for tests).
    """

    def __init__(
        self,
        *,
        runner: RunnerProtocol,
        scheduler: Scheduler,
        allocator: PageAllocator,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        drafter: Drafter | None = None,
        snapshots: Snapshots | None = None,
        tier: PrefixTier | None = None,
        image_settings: ImageSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        check: bool = False,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.image_settings = image_settings
        self._runner, self._scheduler, self._allocator = runner, scheduler, allocator
        self._drafter, self._snapshots, self._tier = drafter, snapshots, tier
        self._clock, self._check = clock, check
        self._numbers = itertools.count()
        self._meter = Meter()
        self._texts = Texts(
            scheduler=scheduler,
            limits=limits,
            tokenizer=tokenizer,
            meter=self._meter,
            clock=clock,
            ended=self._ended,
        )
        self._open: set[int] = set()  # slots that the runner holds something for

    # --- requests -------------------------------------------------------------------------

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        images: Sequence[ImageInput] = (),
    ) -> Request:
        """A checked request.

        prompt: text, which gets the begin-of-text token and whose control tokens are not
        recognised, or tokens as they are. params: also as a mapping, as decoded from JSON.
        images: those whose spans the tokens hold (`place_images`). priority: more is sooner.
        timeout: seconds from now, after which it ends with the reason "deadline".
        Raises `RequestError` that names field, found and allowed.
        """
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            params = SamplingParams.from_mapping(params)
        if isinstance(prompt, str):
            prompt = [self.limits.bos, *self.tokenizer.encode(prompt, control=False)]
        tokens = check_tokens(prompt, self.limits)
        images = check_images(tokens, images, self.limits.image_token_id, self.image_settings)
        check_times(priority, timeout)
        Sampler(params, self.limits.vocab_size)  # raises for biased or stopping tokens it lacks
        now = self._clock()
        return Request(
            id=id if id is not None else f"request-{next(self._numbers)}",
            tokens=tokens,
            params=fitting(tokens, params, self.limits),
            priority=priority,
            deadline=None if timeout is None else now + timeout,
            arrival=now,
            images=images,
            image_hashes=tuple((image.start, image.digest) for image in images),
            # Scores of all prompt tokens need all of them to run.
            reuse_prefix=params.prompt_logprobs is None,
        )

    def submit(
        self,
        request: Request,
        *,
        masks: Callable[[], TokenMask] | None = None,
        watch: bool = False,
    ) -> str:
        """Queue a request of `request`; returns its id.

        masks: makes a new grammar for each sample. watch: outputs say what the indexer selected.
        Raises `RequestError` for an id in use and `CapacityError` if too many requests wait.
        """
        self._texts.check_new(request)
        if self._tier is not None and request.reuse_prefix:
            # What is brought up for a request that waits long would be evicted for the next one.
            self._tier.load(request, evict=not self._scheduler.waiting)
        self._texts.add(request, masks, watch)
        return request.id

    def cancel(self, id: str) -> bool:
        """End a request with the reason "cancelled"; False if it is not here (any more)."""
        found = self._texts.cancel(id)
        self._close_idle()
        return found

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or return anything."""
        return bool(self._texts) or self._texts.has_outputs

    @property
    def accepts(self) -> bool:
        """Whether the queue has room for a request."""
        return self._scheduler.waiting < self.limits.max_waiting

    def close(self, fault: BaseException | None = None) -> list[Output]:
        """End everything that runs; returns the last outputs. fault: why, if something broke."""
        self._texts.end_all(fault)
        if fault is None:
            self._close_idle()
        if self._tier is not None:
            self._tier.close()
            self._tier = None
        return self._texts.take_outputs()

    # --- one step -------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Run what the scheduler chose; returns what is new of each text."""
        if not self._texts:
            return self._texts.take_outputs()
        start = self._clock()
        plan = self._scheduler.step(start)
        for sequence in plan.expired:
            self._texts.end(sequence, "deadline")
        self._meter.preemptions += len(plan.preempted)
        items = self._prepare(plan, start)
        taken = [self._take(item, result) for item, result in self._run(items)]
        going = [sequence for sequence in taken if sequence is not None]
        if self._drafter is not None and going:
            self._propose(going)
        for sequence in going:
            if sequence in self._texts:
                self._texts.report(sequence)
        self._close_idle()
        seconds = self._clock() - start
        kinds = {item.kind for item in items}
        if self._drafter is not None and kinds and kinds <= {ItemKind.DECODE, ItemKind.VERIFY}:
            self._drafter.observe(plan.num_tokens, seconds)
        self._meter.step(seconds)
        if self._check:
            self._scheduler.check_integrity()
        return self._texts.take_outputs()

    def _prepare(self, plan: StepPlan, now: float) -> list[Item]:
        """Move pages and slots as planned; returns the items that can run."""
        for source, target in plan.copies:
            self._runner.copy_page(source, target)
        for source, target in plan.slot_copies:
            self._open_slot(target)
            self._runner.copy_slot(source, target)
        for admission in plan.admitted:
            sequence, hit = admission.sequence, admission.hit_tokens
            text = self._texts[sequence]
            if text.admitted is None:
                text.admitted, text.cached_tokens = now, hit
                self._meter.prompt_tokens += sequence.prompt_length
                self._meter.cached_tokens += hit
            try:
                self._begin(sequence, admission.slot)
            except Exception as error:
                self._texts.fail(sequence, error)
        return [item for item in plan.items if item.sequence in self._texts]

    def _begin(self, sequence: Scheduled, slot: int) -> None:
        """Give the runner a sequence that has just got its slot."""
        self._open_slot(slot)
        hit = sequence.hit_tokens
        if not hit:
            return
        snapshot = None if self._snapshots is None else self._snapshots.serving(sequence)
        self._meter.snapshot_hits += snapshot is not None
        self._runner.restore(slot, sequence.pages, hit, sequence.slice(0, hit), snapshot)

    def _open_slot(self, slot: int) -> None:
        self._open.add(slot)
        self._runner.open(slot)

    def _close_idle(self) -> None:
        """Let the runner forget sequences that have ended and that no fork is copied from."""
        for slot in self._open - self._scheduler.used_slots:
            self._open.remove(slot)
            self._runner.close(slot)

    def _run(self, items: list[Item]) -> list[tuple[Item, Result]]:
        """Each item with its result; those that cannot run are ended and left out.

        A pass that failed has left no trace, so its items run again one after the other, and only
        the guilty end.
        """
        if not items:
            return []
        work = [self._work(item) for item in items]
        for item, each in zip(items, work, strict=True):
            if item.kind is ItemKind.VERIFY:
                self._runner.mark(each.slot)
        try:
            results = self._runner.execute(work)
        except Exception as error:
            if len(items) == 1:
                self._texts.fail(items[0].sequence, error)
                return []
            if not isinstance(error, CedarError):
                _LOG.warning("a pass of %d sequences failed", len(items), exc_info=error)
            return [found for item in items for found in self._run([item])]
        self._meter.computed_tokens += sum(item.count for item in items)
        return list(zip(items, results, strict=True))

    def _work(self, item: Item) -> Work:
        sequence = item.sequence
        assert sequence.slot is not None
        text = self._texts[sequence]
        # Whoever asked for scores of the prompt gets it through all layers, again if need be.
        scored = text.params.prompt_logprobs is not None
        every = item.kind is ItemKind.VERIFY or (scored and item.kind is ItemKind.PREFILL)
        return Work(
            slot=sequence.slot,
            tokens=item.tokens,
            start=item.start,
            pages=tuple(sequence.pages),
            wants_logits="all" if every else "last" if item.wants_logits else "none",
            is_last_chunk=item.is_last_chunk,
            prompt_tokens=sequence.prompt_length,
            images=sequence.request.images,
            watch=text.watch,
            snapshots=() if self._snapshots is None else self._snapshots.wanted(item),
        )

    def _take(self, item: Item, result: Result) -> Scheduled | None:
        """Sample from an item's logits and commit it; the sequence if its text goes on."""
        sequence, logits = item.sequence, result.logits
        try:
            text = self._texts[sequence]
            scores = text.prompt_scores
            if scores is not None and logits is not None and item.kind is ItemKind.PREFILL:
                scores.add(item.start, logits)
            if not item.wants_logits:
                self._commit(item, result, [], item.stop)
                return None
            assert logits is not None
            rows = logits if item.kind is ItemKind.VERIFY else logits[-1:]
            selected = result.selected_KE if text.watch else None
            if selected is not None:
                selected = selected[-len(rows) :]
            self._texts.branch(sequence, rows, selected, item.stop)
            return self._sample(item, result, rows, selected)
        except Exception as error:
            self._texts.fail(sequence, error)
            return None

    def _sample(
        self, item: Item, result: Result, rows: Tensor, selected: Tensor | None
    ) -> Scheduled | None:
        sequence = item.sequence
        text = self._texts[sequence]
        drafts = item.tokens[1:] if item.kind is ItemKind.VERIFY else ()
        known = text.checker.num_tokens
        found = text.extend(rows, drafts, self._clock())
        text.see(selected, len(found.chosen) - 1)
        self._meter.drawn += text.checker.num_tokens - known
        if drafts:
            self._meter.acceptance.record(len(drafts), found.accepted)
        # Stored and kept: everything but the drafts behind the last token that was drawn.
        computed = item.stop - len(rows) + len(found.chosen)
        if computed < item.stop:
            assert sequence.slot is not None
            self._runner.rollback(sequence.slot, computed)
        self._commit(item, result, found.tokens, computed)
        if text.checker.finish_reason is None:
            return sequence
        self._texts.finish(sequence, str(text.checker.finish_reason))
        return None

    def _commit(self, item: Item, result: Result, tokens: list[int], computed: int) -> None:
        if self._snapshots is not None and result.snapshots:
            self._snapshots.keep(item.sequence, result.snapshots, computed)
        self._scheduler.commit(item.sequence, tokens, computed)

    def _propose(self, going: list[Scheduled]) -> None:
        assert self._drafter is not None
        ready = [s for s in going if s.state is RequestState.DECODE and s.slot is not None]
        samplers = [self._texts[s].sampler for s in ready]
        slots = [s.slot for s in ready if s.slot is not None]
        drafts = self._drafter.propose(slots, [s.generated[-1] for s in ready], samplers)
        for sequence, own in zip(ready, drafts, strict=True):
            sequence.drafts = own

    def _ended(self, sequence: Scheduled) -> None:
        if self._tier is not None:
            self._tier.save(sequence)

    def stats(self) -> EngineStats:
        """Figures as of now."""
        return self._meter.stats(
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            snapshots=0 if self._snapshots is None else self._snapshots.held,
            pages_used=self._allocator.used,
            bytes_reserved=self._runner.nbytes(),
            limits=self.limits,
        )
