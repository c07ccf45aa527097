"""The engine's loop: schedule, run, sample, commit. Synchronous, for one thread."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cedar.cache.pages import PageAllocator
from cedar.engine.drafting import Drafter
from cedar.engine.images import ImageInput
from cedar.engine.limits import EngineLimits, check_times, check_tokens, fitting, sampling_of
from cedar.engine.live import LiveText, PromptScores
from cedar.engine.output import Output, Usage
from cedar.engine.params import SamplingParams
from cedar.engine.request import Request, RequestState
from cedar.engine.request import Sequence as Scheduled
from cedar.engine.runner_protocol import RunnerProtocol, Work
from cedar.engine.sampler import Sampler, TokenMask
from cedar.engine.scheduler import Scheduler
from cedar.engine.stats import EngineStats, Meter
from cedar.engine.steps import Item, ItemKind, StepPlan
from cedar.engine.stopping import StopChecker
from cedar.engine.tiers import PrefixTier
from cedar.errors import CedarError, RequestError
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["EngineCore"]

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """A request and the samples of it that run; the others begin when its prompt is stored."""

    request: Request
    params: SamplingParams
    masks: Callable[[], TokenMask] | None
    begun: bool
    texts: dict[str, LiveText]


class EngineCore:
    """Serves requests step by step.

    `request` builds and checks a request, `submit` queues it, `step` does one pass of the model
    and returns what is new. Whatever goes wrong with one request ends that request with the reason
    "error"; the others go on. tier: a store below the prefix cache. check: verify the scheduler's
    books after every step (for tests).
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
        tier: PrefixTier | None = None,
        clock: Callable[[], float] = time.monotonic,
        check: bool = False,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self._runner, self._scheduler, self._allocator = runner, scheduler, allocator
        self._drafter, self._tier = drafter, tier
        self._clock, self._check = clock, check
        self._numbers = itertools.count()
        self._groups: dict[str, _Group] = {}
        self._texts: dict[str, LiveText] = {}  # by the id of the scheduler's sequence
        self._outputs: list[Output] = []
        self._meter = Meter()
        self._generated = 0  # in this step

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
            images=tuple(images),
            image_hashes=tuple((image.start, image.digest) for image in images),
            # Scores of all prompt tokens need all of them to run.
            reuse_prefix=params.prompt_logprobs is None,
        )

    def submit(self, request: Request, *, masks: Callable[[], TokenMask] | None = None) -> str:
        """Queue a request of `request`; returns its id.

        masks: makes a new grammar for each sample. Raises `RequestError` for an id in use and
        `CapacityError` if too many requests wait.
        """
        params = sampling_of(request)
        wanted = _names(request.id, params.n)
        for group in self._groups.values():
            for id in wanted & _names(group.request.id, group.params.n):
                raise RequestError(f"request id {id!r} is in use; choose another.")
        sampler = Sampler(
            params, self.limits.vocab_size, request.tokens, None if masks is None else masks()
        )
        # The samples share the seed and draw with their own numbers.
        params = replace(params, seed=sampler.seed)
        if self._tier is not None and request.reuse_prefix:
            self._tier.load(request)
        sequence = self._scheduler.add(request)
        text = LiveText(request.id, 0, sequence, sampler, self._checker(params), self._clock())
        if params.prompt_logprobs is not None:
            text.prompt_scores = PromptScores(request.tokens, params.prompt_logprobs)
        self._texts[sequence.id] = text
        self._groups[request.id] = _Group(
            request, params, masks, params.n == 1, {sequence.id: text}
        )
        return request.id

    def cancel(self, id: str) -> bool:
        """End a request with the reason "cancelled"; False if it is not here (any more)."""
        group = self._groups.get(id)
        if group is None:
            return False
        for text in list(group.texts.values()):
            self._scheduler.cancel(text.sequence.id)
            self._end(text, "cancelled")
        return True

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or return anything."""
        return bool(self._groups or self._outputs)

    @property
    def accepts(self) -> bool:
        """Whether the queue has room for a request."""
        return self._scheduler.waiting < self.limits.max_waiting

    def close(self, fault: BaseException | None = None) -> list[Output]:
        """End everything that runs; returns the last outputs. fault: why, if something broke."""
        error = None
        if fault is not None:
            error = CedarError(f"the engine stopped after a fault: {fault!r}")
        for group in list(self._groups.values()):
            for text in list(group.texts.values()):
                if fault is None:
                    self._scheduler.cancel(text.sequence.id)
                self._end(text, "cancelled" if fault is None else "error", error)
        if self._tier is not None:
            self._tier.close()
            self._tier = None
        return self._taken()

    # --- one step -------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Run what the scheduler chose; returns what is new of each text."""
        if not self._groups:
            return self._taken()
        start = self._clock()
        self._generated = 0
        plan = self._scheduler.step(start)
        for sequence in plan.expired:
            self._end(self._texts[sequence.id], "deadline")
        self._meter.preemptions += len(plan.preempted)
        items = self._prepare(plan, start)
        taken = [self._take(item, rows) for item, rows in self._run(items)]
        going = [sequence for sequence in taken if sequence is not None]
        if self._drafter is not None and going:
            self._propose(going)
        for sequence in going:
            text = self._texts.get(sequence.id)
            if text is not None:
                self._outputs.append(text.report())
        seconds = self._clock() - start
        kinds = {item.kind for item in items}
        if self._drafter is not None and kinds and kinds <= {ItemKind.DECODE, ItemKind.VERIFY}:
            self._drafter.observe(plan.num_tokens, seconds)
        self._meter.step(seconds, self._generated)
        if self._check:
            self._scheduler.check_integrity()
        return self._taken()

    def _taken(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _prepare(self, plan: StepPlan, now: float) -> list[Item]:
        """Move pages and slots as planned; returns the items that can run."""
        for source, target in plan.copies:
            self._runner.copy_page(source, target)
        for source, target in plan.slot_copies:
            self._runner.open(target)
            self._runner.copy_slot(source, target)
        for admission in plan.admitted:
            sequence, hit = admission.sequence, admission.hit_tokens
            text = self._texts[sequence.id]
            if text.admitted is None:
                text.admitted, text.cached_tokens = now, hit
                self._meter.prompt_tokens += sequence.prompt_length
                self._meter.cached_tokens += hit
            try:
                self._begin(sequence)
            except Exception as error:
                self._fail(sequence, error)
        return [item for item in plan.items if item.sequence.id in self._texts]

    def _begin(self, sequence: Scheduled) -> None:
        """Give the runner a sequence that has just got its slot."""
        assert sequence.slot is not None
        self._runner.open(sequence.slot)
        hit = sequence.hit_tokens
        if hit:
            known = sequence.slice(0, hit)
            self._runner.restore(sequence.slot, sequence.pages, hit, known)

    def _run(self, items: list[Item]) -> list[tuple[Item, Tensor | None]]:
        """Each item with its logits; those that cannot run are ended and left out."""
        if not items:
            return []
        work = [self._work(item) for item in items]
        for item, each in zip(items, work, strict=True):
            if item.kind is ItemKind.VERIFY:
                self._runner.mark(each.slot)
        try:
            results = self._runner.execute(work)
        except CedarError as error:
            if len(items) == 1:
                self._fail(items[0].sequence, error)
                return []
            return self._run_alone(items)
        except Exception as error:
            _LOG.exception("a step of %d sequences failed", len(items))
            for item in items:
                self._fail(item.sequence, error)
            return []
        self._meter.computed_tokens += sum(item.count for item in items)
        return [(item, result.logits) for item, result in zip(items, results, strict=True)]

    def _run_alone(self, items: list[Item]) -> list[tuple[Item, Tensor | None]]:
        """One after the other: a refused batch has left no trace, so only the guilty will end."""
        found: list[tuple[Item, Tensor | None]] = []
        for item in items:
            # A prefix hit is restored by the first pass after it; that pass was refused.
            if item.kind is ItemKind.PREFILL and item.start == item.sequence.hit_tokens:
                self._begin(item.sequence)
            found += self._run([item])
        return found

    def _work(self, item: Item) -> Work:
        sequence = item.sequence
        assert sequence.slot is not None
        # Whoever asked for scores of the prompt gets it through all layers, again if need be.
        scored = self._texts[sequence.id].params.prompt_logprobs is not None
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
        )

    def _take(self, item: Item, logits: Tensor | None) -> Scheduled | None:
        """Sample from an item's logits and commit it; the sequence if its text goes on."""
        sequence = item.sequence
        try:
            scores = self._texts[sequence.id].prompt_scores
            if scores is not None and logits is not None and item.kind is ItemKind.PREFILL:
                scores.add(item.start, logits)
            if not item.wants_logits:
                self._scheduler.commit(sequence, [], item.stop)
                return None
            assert logits is not None
            rows = logits if item.kind is ItemKind.VERIFY else logits[-1:]
            self._branch(sequence, rows, item.stop)
            return self._sample(sequence, rows, item)
        except Exception as error:
            if not isinstance(error, CedarError):
                _LOG.exception("request %r failed", sequence.id)
            self._fail(sequence, error)
            return None

    def _sample(self, sequence: Scheduled, rows: Tensor, item: Item) -> Scheduled | None:
        text = self._texts[sequence.id]
        drafts = item.tokens[1:] if item.kind is ItemKind.VERIFY else ()
        known = text.checker.num_tokens
        found = text.extend(rows, drafts, self._clock())
        self._generated += text.checker.num_tokens - known
        if drafts:
            self._meter.acceptance.record(len(drafts), found.accepted)
        # Stored and kept: everything but the drafts behind the last token that was drawn.
        computed = item.stop - len(rows) + len(found.chosen)
        if computed < item.stop:
            assert sequence.slot is not None
            self._runner.rollback(sequence.slot, computed)
        self._scheduler.commit(sequence, found.tokens, computed)
        if text.checker.finish_reason is None:
            return sequence
        self._finish(text, str(text.checker.finish_reason))
        return None

    def _branch(self, sequence: Scheduled, rows: Tensor, computed: int) -> None:
        """When a prompt is stored: begin its other samples, which share its pages."""
        text = self._texts[sequence.id]
        group = self._groups[text.id]
        if group.begun:
            return
        group.begun = True
        for index in range(1, group.params.n):
            try:
                mask = None if group.masks is None else group.masks()
            except Exception as error:
                self._never(group, index, "error", error)
                continue
            sampler = Sampler(
                group.params, self.limits.vocab_size, group.request.tokens, mask, sample=index
            )
            child = self._scheduler.fork(sequence, _child(text.id, index))
            other = LiveText(
                text.id, index, child, sampler, self._checker(group.params), text.submitted
            )
            self._texts[child.id] = group.texts[child.id] = other
            if child.slot is None:  # no room beside the others: it gets logits of its own later
                continue
            other.admitted, other.cached_tokens = text.admitted, text.cached_tokens
            try:
                found = other.extend(rows, (), self._clock())
            except Exception as error:
                self._fail(child, error)
                continue
            self._generated += other.checker.num_tokens
            self._scheduler.commit(child, found.tokens, computed)
            if other.checker.finish_reason is None:
                self._outputs.append(other.report())
            else:
                self._finish(other, str(other.checker.finish_reason))

    def _propose(self, going: list[Scheduled]) -> None:
        assert self._drafter is not None
        ready = [s for s in going if s.state is RequestState.DECODE and s.slot is not None]
        samplers = [self._texts[s.id].sampler for s in ready]
        slots = [s.slot for s in ready if s.slot is not None]
        drafts = self._drafter.propose(slots, [s.generated[-1] for s in ready], samplers)
        for sequence, own in zip(ready, drafts, strict=True):
            sequence.drafts = own

    # --- endings --------------------------------------------------------------------------

    def _checker(self, params: SamplingParams) -> StopChecker:
        return StopChecker(params, self.limits.eos, self.tokenizer.stream())

    def _finish(self, text: LiveText, reason: str) -> None:
        stored = text.sequence.computed
        self._scheduler.finish(text.sequence, reason)
        if self._tier is not None:
            self._tier.save(text.sequence, stored)
        self._end(text, reason)

    def _fail(self, sequence: Scheduled, error: Exception) -> None:
        self._scheduler.finish(sequence, "error")
        self._end(self._texts[sequence.id], "error", error)

    def _end(self, text: LiveText, reason: str, error: Exception | None = None) -> None:
        """Report the end of a text that the scheduler has let go."""
        group = self._groups[text.id]
        self._outputs.append(text.report(reason, error))
        self._meter.finish(reason)
        del self._texts[text.sequence.id], group.texts[text.sequence.id]
        if not group.begun:  # its other samples never began and end like the first
            group.begun = True
            for index in range(1, group.params.n):
                self._never(group, index, reason, error)
        if not group.texts:
            del self._groups[text.id]

    def _never(
        self, group: _Group, index: int, reason: str, error: Exception | None = None
    ) -> None:
        """Report the end of a sample that never began."""
        usage = Usage(prompt_tokens=len(group.request.tokens), seed=group.params.seed or 0)
        self._meter.finish(reason)
        self._outputs.append(
            Output(
                id=group.request.id,
                index=index,
                text="",
                tokens=(),
                usage=usage,
                finish_reason=reason,
                error=error,
            )
        )

    def stats(self) -> EngineStats:
        """Figures as of now."""
        meter, limits = self._meter, self.limits
        used = self._allocator.used
        acceptance = meter.acceptance
        return EngineStats(
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            finished=dict(meter.finished),
            steps=meter.steps,
            prompt_tokens=meter.prompt_tokens,
            cached_tokens=meter.cached_tokens,
            computed_tokens=meter.computed_tokens,
            generated_tokens=meter.generated_tokens,
            preemptions=meter.preemptions,
            drafted=tuple(acceptance.verified),
            accepted=tuple(acceptance.accepted),
            accepted_length=acceptance.accepted_length,
            busy_seconds=meter.busy_seconds,
            tokens_per_second=meter.tokens_per_second,
            pages_used=used,
            pages_total=limits.num_pages,
            bytes_held=used * limits.page_bytes + self._scheduler.running * limits.slot_bytes,
            bytes_reserved=self._runner.nbytes(),
        )


def _child(id: str, index: int) -> str:
    return f"{id}/{index}"


def _names(id: str, samples: int) -> set[str]:
    """What the scheduler knows a request and its other samples by."""
    return {id, *(_child(id, index) for index in range(1, samples))}
