"""All texts that are generated, by request: how samples begin, what is reported, how they end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from cedar.engine.limits import EngineLimits, sampling_of
from cedar.engine.live import LiveText, PromptScores
from cedar.engine.output import Output, Usage
from cedar.engine.params import SamplingParams
from cedar.engine.request import Request, RequestState
from cedar.engine.request import Sequence as Scheduled
from cedar.engine.sampler import Sampler, TokenMask
from cedar.engine.scheduler import Scheduler
from cedar.engine.stats import Meter
from cedar.engine.stopping import StopChecker
from cedar.errors import CedarError, RequestError
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["Texts"]

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """A request and the samples of it that run; the others begin when its prompt is stored."""

    request: Request
    params: SamplingParams
    masks: Callable[[], TokenMask] | None
    watch: bool
    begun: bool
    texts: dict[str, LiveText]


class Texts:
    """Texts by the id of the scheduler's sequence, and what is new of them.

    ended: called for every sequence that the scheduler has let go.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        limits: EngineLimits,
        tokenizer: Tokenizer,
        meter: Meter,
        clock: Callable[[], float],
        ended: Callable[[Scheduled], None],
    ) -> None:
        self._scheduler, self._limits, self._tokenizer = scheduler, limits, tokenizer
        self._meter, self._clock, self._ended = meter, clock, ended
        self._groups: dict[str, _Group] = {}
        self._texts: dict[str, LiveText] = {}
        self._outputs: list[Output] = []

    def __bool__(self) -> bool:
        """Whether any text has not ended."""
        return bool(self._groups)

    def __contains__(self, sequence: Scheduled) -> bool:
        return sequence.id in self._texts

    def __getitem__(self, sequence: Scheduled) -> LiveText:
        return self._texts[sequence.id]

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def take_outputs(self) -> list[Output]:
        """Everything reported since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # --- beginnings -----------------------------------------------------------------------

    def check_new(self, request: Request) -> None:
        """Raises `RequestError` if its id, or that of one of its samples, is in use."""
        wanted = _names(request.id, sampling_of(request).n)
        for group in self._groups.values():
            for id in wanted & _names(group.request.id, group.params.n):
                raise RequestError(f"request id {id!r} is in use; choose another.")

    def add(
        self,
        request: Request,
        masks: Callable[[], TokenMask] | None,
        watch: bool,
    ) -> None:
        """Queue a request; its first sample stands for all until the prompt is stored."""
        params = sampling_of(request)
        mask = None if masks is None else masks()
        sampler = Sampler(params, self._limits.vocab_size, request.tokens, mask)
        # The samples share the seed and draw with their own numbers.
        params = replace(params, seed=sampler.seed)
        sequence = self._scheduler.add(request)
        text = LiveText(
            request.id, 0, sequence, sampler, self._checker(params), self._clock(), watch=watch
        )
        if params.prompt_logprobs is not None:
            text.prompt_scores = PromptScores(request.tokens, params.prompt_logprobs)
        self._texts[sequence.id] = text
        self._groups[request.id] = _Group(
            request, params, masks, watch, params.n == 1, {sequence.id: text}
        )

    def branch(
        self, sequence: Scheduled, rows: Tensor, selected_KE: Tensor | None, computed: int
    ) -> None:
        """When a prompt is stored: begin its other samples, which share its pages.

        rows: logits ``[1, V]`` after its last token; ``computed`` tokens are stored.
        """
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
            self._begin_sample(group, text, index, mask, rows, selected_KE, computed)

    def _begin_sample(
        self,
        group: _Group,
        first: LiveText,
        index: int,
        mask: TokenMask | None,
        rows: Tensor,
        selected_KE: Tensor | None,
        computed: int,
    ) -> None:
        sampler = Sampler(
            group.params, self._limits.vocab_size, group.request.tokens, mask, sample=index
        )
        child = self._scheduler.fork(first.sequence, _child(first.id, index))
        text = LiveText(
            first.id,
            index,
            child,
            sampler,
            self._checker(group.params),
            first.submitted,
            watch=group.watch,
        )
        self._texts[child.id] = group.texts[child.id] = text
        if child.slot is None:  # no room beside the others: it gets logits of its own later
            return
        text.admitted, text.cached_tokens = first.admitted, first.cached_tokens
        try:
            found = text.extend(rows, (), self._clock())
        except Exception as error:
            self.fail(child, error)
            return
        text.see(selected_KE, 0)
        self._meter.drawn += text.checker.num_tokens
        self._scheduler.commit(child, found.tokens, computed)
        if text.checker.finish_reason is None:
            self.report(child)
        else:
            self.finish(child, str(text.checker.finish_reason))

    def _checker(self, params: SamplingParams) -> StopChecker:
        return StopChecker(params, self._limits.eos, self._tokenizer.stream())

    # --- what is new, and endings ---------------------------------------------------------

    def report(self, sequence: Scheduled) -> None:
        """Say what is new of a text that goes on."""
        self._report(self._texts[sequence.id])

    def finish(self, sequence: Scheduled, reason: str, error: Exception | None = None) -> None:
        """End a text, whatever state it is in."""
        self._scheduler.finish(sequence, reason)
        self.end(sequence, reason, error)

    def fail(self, sequence: Scheduled, error: Exception) -> None:
        """End a text by an error, which is logged if nobody is to blame but the program."""
        if not isinstance(error, CedarError):
            _LOG.error("request %r failed", sequence.id, exc_info=error)
        self.finish(sequence, "error", error)

    def end(self, sequence: Scheduled, reason: str, error: Exception | None = None) -> None:
        """Report the end of a text that the scheduler has let go."""
        text = self._texts.pop(sequence.id)
        group = self._groups[text.id]
        del group.texts[sequence.id]
        self._report(text, reason, error)
        self._meter.finish(reason)
        if not group.begun:  # its other samples never began and end like the first
            group.begun = True
            for index in range(1, group.params.n):
                self._never(group, index, reason, error)
        if not group.texts:
            del self._groups[text.id]
        if sequence.state is RequestState.FINISHED:  # not after a fault of the scheduler itself
            self._ended(sequence)

    def cancel(self, id: str) -> bool:
        """End all samples of a request; False if it is not here (any more)."""
        group = self._groups.get(id)
        if group is None:
            return False
        for text in list(group.texts.values()):
            self.finish(text.sequence, "cancelled")
        return True

    def end_all(self, fault: BaseException | None) -> None:
        """End everything; fault: why, and then the scheduler is not to be asked any more."""
        for id in list(self._groups):
            if fault is None:
                self.cancel(id)
                continue
            error = CedarError(f"the engine stopped after a fault: {fault!r}")
            for text in list(self._groups[id].texts.values()):
                self.end(text.sequence, "error", error)

    def _report(
        self, text: LiveText, reason: str | None = None, error: Exception | None = None
    ) -> None:
        self._outputs.append(text.report(reason, error, entry_tokens=self._limits.entry_tokens))

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


def _child(id: str, index: int) -> str:
    return f"{id}/{index}"


def _names(id: str, samples: int) -> set[str]:
    """What the scheduler knows a request and its other samples by."""
    return {id, *(_child(id, index) for index in range(1, samples))}
