"""From generated tokens to the events and the response of an API."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from cedar.inputs.chat.chunks import Chunk, Ending, Facts, writer_for
from cedar.inputs.chat.convert import Generator
from cedar.inputs.chat.output_filter import OutputFilter
from cedar.inputs.chat.types import Api, ChatRequest, Event, TokenScore, UsageDetails

__all__ = ["Format", "Reply"]

# What OpenAI writes for a probability of nothing; JSON has no infinity.
_LOWEST = -9999.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How the replies of one request are read and written.

    generator: the recipe's, from an id and a model name. stage: where in the reasoning parsing
    begins, None without any. stops: strings that end the answer. parse_tools: calls are looked
    for. max_calls: further calls are cut. scored: log probabilities are wanted. spaced: tools have
    namespaces. echo: fields of a Responses object.
    """

    generator: Callable[[str, str], Generator]
    special: recipe.SpecialTokens
    stage: recipe.ThinkingInitialStage | None
    starts_in_tools: bool
    parse_tools: bool
    stops: tuple[str, ...]
    max_calls: int | None
    scored: bool
    spaced: bool
    echo: dict[str, Any]

    def options(self) -> recipe.ParsingOptions:
        """The recipe's settings for parsing."""
        return recipe.ParsingOptions(
            parse_tool_calls=self.parse_tools,
            starts_in_tool_calls=self.starts_in_tools,
            thinking_initial_stage=self.stage,
            stop_sequences=self.stops,
            special_tokens=self.special,
        )


class Reply:
    """One sample of one request; made by `ChatProtocol.reply`.

    Call `begin` once, `push` for what the engine generates, `finish` at the end. The events are
    for a stream, `response` is the same as one body.

    ``done`` becomes true when nothing that follows counts any more: a stop sequence was completed
    in the answer, or the only call that was allowed is complete. Then the sample can be cancelled
    and finished with the reason "stop"; what is pushed nevertheless has no effect.
    """

    def __init__(
        self,
        decoder: recipe.Tokenizer,
        output: OutputFilter,
        request: ChatRequest,
        id: str,
        created: int,
        index: int,
    ) -> None:
        form: Format = request.state
        self.done = False
        self._api = request.api
        self._form = form
        self._filter = output
        self._names = (id, request.model, created)
        self._processor = recipe.StreamProcessor(
            form.generator(id, request.model), form.options(), decoder
        )
        facts = Facts(
            created=created,
            index=index,
            shows_usage=request.stream and request.include_usage,
            spaced=form.spaced,
            echo=form.echo,
        )
        self._writer = writer_for(request.api, facts)
        self._response: Any = None
        self._last: list[Chunk] = []
        self._whole: Chunk | None = None
        self._pushed = 0

    def begin(self, prompt_tokens: int, cached_tokens: int) -> list[Event]:
        """The events before any text. prompt_tokens: images at their full length."""
        kinds = {
            Api.CHAT: recipe.ChatCompletionResponse,
            Api.RESPONSES: recipe.ResponsesResponse,
            Api.MESSAGES: recipe.MessagesResponse,
        }
        self._response = kinds[self._api](*self._names, prompt_tokens, cached_tokens)
        usage = recipe.PromptUsage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens
        )
        return self._take(self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    def push(
        self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenScore] | None = None
    ) -> list[Event]:
        """More of the reply: the new tokens, and one score for each if they were asked for.

        The tokens are what counts: so a control token and text that is spelled like one stay
        apart. ``text`` is only read if no tokens come with it, from a source that has none.
        """
        if not tokens and text and not self._pushed and not self.done:
            return self._push(recipe.InferenceChunk.text(text))
        events: list[Event] = []
        # One by one: of a chunk that ends within a character, nothing would be shown.
        for place, token in enumerate(tokens):
            if self.done:
                break
            self._pushed += 1
            if self._filter.keep(token):
                scores = None
                if logprobs is not None and self._form.scored:
                    scores = [self._score(logprobs[place])]
                events += self._push(recipe.InferenceChunk.tokens([token], scores))
        return events

    def finish(self, reason: str, details: UsageDetails) -> list[Event]:
        """The last events. reason: the engine's; any but "stop" says that the text was cut off."""
        if self._whole is not None:
            return []
        events: list[Event] = []
        if not self._processor.finished:
            last = recipe.InferenceFinishReason.Length
            if reason == "stop" or self.done:
                last = recipe.InferenceFinishReason.Stop
            events = self._take(self._processor.push(recipe.InferenceChunk.finish(last)))
        elif self._pushed:  # ended by a stop sequence; what came later was not counted
            details = _at_most(details, self._pushed)
        events += self._take(self._processor.finish())
        self.done = True
        ending = Ending(
            details=details,
            calls=self._form.max_calls,
            reasoning=self._filter.reasoning_tokens,
        )
        whole = json.loads(self._response.to_json())
        self._whole = self._writer.complete(whole, ending)
        events += self._writer.end(self._last, ending)
        self._processor.close()
        return events

    def response(self) -> dict[str, Any]:
        """The body of a reply that is not streamed; after `finish`."""
        if self._whole is None:
            raise RuntimeError("response() was called before finish()")
        return self._whole

    def _take(self, chunks: Iterable[Any]) -> list[Event]:
        """Chunks as events; the last ones wait for `finish`, calls too many are dropped."""
        events = []
        for chunk in chunks:
            fields: Chunk = json.loads(chunk.to_json())
            call, most = self._writer.call_of(fields), self._form.max_calls
            if call is not None and most is not None and call >= most:
                self.done = True
                continue
            self._response.accumulate(chunk)
            if self._writer.is_last(fields):
                self._last.append(fields)
            else:
                events.append(self._writer.write(fields))
        return events

    def _push(self, chunk: recipe.InferenceChunk) -> list[Event]:
        events = self._take(self._processor.push(chunk))
        self.done |= self._processor.finished
        return events

    def _score(self, score: TokenScore) -> tuple[float, list[tuple[int, float]]]:
        """As the recipe takes it."""
        top = [(token, _finite(value)) for token, value in score.top if self._filter.known(token)]
        return _finite(score.logprob), top


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


def _at_most(details: UsageDetails, tokens: int) -> UsageDetails:
    return UsageDetails(
        completion_tokens=min(details.completion_tokens, tokens),
        accepted=details.accepted,
        drafted=details.drafted,
        stopped_by=details.stopped_by,
    )
