"""A text while it is generated: its sampler, its stop rules, and what is new to report."""

from collections.abc import Sequence

from torch import Tensor

from cedar.engine.draft_plan import AcceptanceStats
from cedar.engine.output import Output, TokenLogprob, Usage
from cedar.engine.params import SamplingParams
from cedar.engine.request import Sequence as Scheduled
from cedar.engine.sampler import Chosen, Sampler, token_logprobs
from cedar.engine.speculate import Verification, verify_keyed
from cedar.engine.stopping import StopChecker

__all__ = ["LiveText", "PromptScores"]


class PromptScores:
    """Log probabilities of a prompt's tokens, collected over its chunks."""

    def __init__(self, tokens: Sequence[int], top: int) -> None:
        self._tokens, self._top = tokens, top
        self._found: list[TokenLogprob | None] = [None]

    def add(self, start: int, logits_TV: Tensor) -> None:
        """Scores after the prompt tokens from ``start`` on; what is known already is left out."""
        known = len(self._found) - 1 - start
        stop = min(start + len(logits_TV), len(self._tokens) - 1)
        if known < 0 or start + known >= stop:
            return
        rows = logits_TV[known : stop - start]
        targets = self._tokens[start + known + 1 : stop + 1]
        self._found += [_entry(each) for each in token_logprobs(rows, targets, self._top)]

    @property
    def complete(self) -> tuple[TokenLogprob | None, ...] | None:
        """All of them, or None while some are missing."""
        return tuple(self._found) if len(self._found) == len(self._tokens) else None


class LiveText:
    """One of the ``n`` texts of a request.

    sequence: what the scheduler keeps of it. submitted: when the request came, in the engine's
    clock; the other times are set as things happen. watch: report what the indexer selects.
    """

    def __init__(
        self,
        id: str,
        index: int,
        sequence: Scheduled,
        sampler: Sampler,
        checker: StopChecker,
        submitted: float,
        *,
        watch: bool = False,
    ) -> None:
        self.id, self.index = id, index
        self.sequence = sequence
        self.sampler = sampler
        self.checker = checker
        self.params: SamplingParams = sampler.params
        self.submitted = submitted
        self.watch = watch
        self.selected: tuple[int, ...] | None = None
        self.admitted: float | None = None
        self.first: float | None = None
        self.latest = submitted
        self.cached_tokens = 0
        self.steps = 0
        self._acceptance = AcceptanceStats()
        self.prompt_scores: PromptScores | None = None
        self._text = ""
        self._fresh: list[Chosen] = []
        self._generated = 0

    def extend(self, logits_KV: Tensor, drafts: Sequence[int], now: float) -> Verification:
        """Draw the next tokens from rows of logits; more than one row verifies drafts."""
        known = self.checker.num_tokens

        def finished(token: int) -> bool:
            text, reason = self.checker.push(token)
            self._text += text
            return reason is not None

        found = verify_keyed(self.sampler, logits_KV, drafts, finished=finished)
        added = self.checker.num_tokens - known  # without a token that ended the text
        self._fresh += found.chosen[:added]
        self._generated += added
        self.steps += 1
        self._acceptance.record(len(drafts), found.accepted)
        self.first = now if self.first is None else self.first
        self.latest = now
        return found

    def see(self, selected_KE: Tensor | None, row: int) -> None:
        """Take what the indexer selected for the newest token that stays."""
        if selected_KE is not None:
            self.selected = tuple(at for at in selected_KE[row].tolist() if at >= 0)

    def usage(self) -> Usage:
        """Figures so far."""
        admitted = self.latest if self.admitted is None else self.admitted
        first = self.latest if self.first is None else self.first
        return Usage(
            prompt_tokens=self.sequence.prompt_length,
            cached_tokens=self.cached_tokens,
            generated_tokens=self._generated,
            drafted=sum(self._acceptance.verified),
            accepted=sum(self._acceptance.accepted),
            drafted_by_place=tuple(self._acceptance.verified),
            accepted_by_place=tuple(self._acceptance.accepted),
            steps=self.steps,
            preemptions=self.sequence.preemptions,
            seed=self.sampler.seed,
            queue_seconds=max(admitted - self.submitted, 0.0),
            prefill_seconds=max(first - admitted, 0.0),
            decode_seconds=max(self.latest - first, 0.0),
        )

    def report(
        self, reason: str | None = None, error: Exception | None = None, *, entry_tokens: int = 1
    ) -> Output:
        """What is new since the last report; ``reason`` ends the text, also from outside."""
        if reason is not None and self.checker.finish_reason is None:
            self._text += self.checker.flush()
        fresh, self._fresh = self._fresh, []
        text, self._text = self._text, ""
        stopped = self.checker.stopped_by
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = tuple(_entry(each) for each in fresh)
        scores = None
        if self.prompt_scores is not None and self.prompt_scores.complete is not None:
            scores, self.prompt_scores = self.prompt_scores.complete, None
        return Output(
            id=self.id,
            index=self.index,
            text=text,
            tokens=tuple(each.token for each in fresh),
            usage=self.usage(),
            logprobs=logprobs,
            prompt_logprobs=scores,
            finish_reason=reason,
            error=error,
            stopped_by=stopped if isinstance(stopped, str) else None,
            selected=self.selected,
            entry_tokens=entry_tokens,
        )


def _entry(chosen: Chosen) -> TokenLogprob:
    logprob = float("nan") if chosen.logprob is None else chosen.logprob
    return TokenLogprob(token=chosen.token, logprob=logprob, top=chosen.top)
