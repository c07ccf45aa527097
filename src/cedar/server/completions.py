"""``/v1/completions``: plain text to be continued, for base models and evaluations."""

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cedar.errors import CedarError
from cedar.inputs.chat import Event
from cedar.server.completion_request import CompletionRequest, read_completion
from cedar.server.completion_scores import Scores
from cedar.server.door import Visit
from cedar.server.errors import ApiError, ClientGone, as_api_error, error_body
from cedar.server.faults import internal_error, report
from cedar.server.metrics import Timing
from cedar.server.protocols import EngineLike, Output, Prompt
from cedar.server.relay import Relay, raise_failure
from cedar.server.service import Service, body_of, fitting, new_id, notes_header
from cedar.server.streaming import attended, encode_events

__all__ = ["PATH", "completions"]

PATH = "/v1/completions"


def completions(service: Service) -> Callable[[Request, Visit], Awaitable[Response]]:
    """The endpoint."""

    async def endpoint(request: Request, visit: Visit) -> Response:
        body = await body_of(request)
        return await attended(request.receive, _complete(service, body, visit))

    return endpoint


async def _complete(service: Service, body: bytes, visit: Visit) -> Response:
    timing = service.metrics.timing()
    asked = await run_in_threadpool(
        read_completion, body, service.engine, service.settings.models, service.settings.max_choices
    )
    answer = _Completion(service, asked, timing, visit)
    relay = service.relay()
    try:
        for tokens in asked.prompts:
            limit = fitting(service.engine, len(tokens), asked.max_tokens)
            params = {**asked.sampling, "max_tokens": limit}
            relay.take(await service.engine.submit(Prompt(tokens=tokens), params))
        await relay.first()
        if not asked.stream:
            async for batch in relay.batches():
                for place, output in batch:
                    raise_failure(output, service.engine)
                    answer.push(place, output)
            await relay.close()
            return JSONResponse(answer.response(), headers=notes_header(asked.ignored))
    except BaseException:
        await relay.close()
        raise
    return service.stream(_chunks(answer, relay), relay, notes_header(asked.ignored))


async def _chunks(answer: "_Completion", relay: Relay) -> AsyncGenerator[bytes, None]:
    """The events of an answer, as bytes; an error that comes now is an event, too."""
    try:
        async for batch in relay.batches():
            chunks = []
            for place, output in batch:
                raise_failure(output, answer.service.engine)
                chunks += answer.push(place, output)
            if chunks:
                yield encode_events(_event(chunk) for chunk in chunks)
        if answer.asked.include_usage:
            yield encode_events([_event(answer.chunk([], answer.usage()))])
    except ApiError as error:
        yield _broken(error)
    except CedarError as error:
        yield _broken(as_api_error(error))
    except ClientGone:
        raise
    except Exception as fault:
        report(fault, answer.visit.id)
        yield _broken(internal_error(answer.visit.id))
    yield encode_events([Event(None, "[DONE]")])


def _event(value: dict[str, Any]) -> Event:
    return Event(None, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _broken(error: ApiError) -> bytes:
    return encode_events([_event(error_body(PATH, error))])


class _Completion:
    """All choices of a request; choice ``place * n + index`` is a sample of the prompt at place."""

    def __init__(
        self, service: Service, asked: CompletionRequest, timing: Timing, visit: Visit
    ) -> None:
        self.service, self.asked, self.visit = service, asked, visit
        self._timing = timing
        self._id, self._created = new_id("cmpl-"), int(time.time())
        self._choices = [
            _Choice(service.engine, asked, place)
            for place in range(len(asked.prompts))
            for _ in range(asked.n)
        ]
        self._transcript = service.transcript(self._id)
        for text in asked.texts:
            self._transcript.prompt(text)

    def push(self, place: int, output: Output) -> list[dict[str, Any]]:
        """The chunk of what is new; none if nothing is."""
        self._timing.saw(place, output)
        number = place * self.asked.n + output.index
        choice = self._choices[number]
        if choice.usage is None and output.index == 0:
            self.visit.used(output.usage.prompt_tokens)
        self.visit.used(len(output.tokens))
        text, logprobs = choice.push(output)
        self._transcript.answer(number, text, last=choice.finish_reason is not None)
        if not text and choice.finish_reason is None and logprobs is None:
            return []
        entry = {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        return [self.chunk([entry])]

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One object of the stream."""
        made: dict[str, Any] = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.asked.model,
            "choices": choices,
        }
        if self.asked.include_usage or usage is not None:
            made["usage"] = usage
        return made

    def response(self) -> dict[str, Any]:
        """The answer in one piece."""
        entries = [
            {
                "index": number,
                "text": choice.text,
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish_reason,
            }
            for number, choice in enumerate(self._choices)
        ]
        return self.chunk(entries, self.usage())

    def usage(self) -> dict[str, Any]:
        """Counts of all choices; prompts count once."""
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        prompts = [
            usage
            for choice in self._choices[:: self.asked.n]
            if (usage := choice.usage) is not None
        ]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        completion = sum(choice.completion_tokens for choice in self._choices)
        accepted = sum(usage.accepted for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in prompts)},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(u.drafted for u in usages) - accepted,
            },
        }


class _Choice:
    """One continuation of one prompt."""

    def __init__(self, engine: EngineLike, asked: CompletionRequest, place: int) -> None:
        self._asked, self._place = asked, place
        self._eos = engine.info.eos
        self._scores = None
        if asked.logprobs is not None:
            self._scores = Scores(engine, asked.logprobs)
        self._begun = False
        self._parts: list[str] = []
        self.completion_tokens = 0
        self.usage: Any = None
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._parts)

    @property
    def logprobs(self) -> dict[str, Any] | None:
        """Of everything."""
        return None if self._scores is None else self._scores.all()

    def push(self, output: Output) -> tuple[str, dict[str, Any] | None]:
        """New text, and the log probabilities that came with it."""
        asked, text = self._asked, ""
        if not self._begun:
            self._begun = True
            if asked.echo:
                text = asked.texts[self._place]
        if self._scores is not None and output.prompt_logprobs is not None:
            self._scores.prompt(asked.prompts[self._place], output.prompt_logprobs, text)
        self.usage = output.usage
        reason = output.finish_reason
        if not asked.drops_text:
            ended = asked.shows_end and output.tokens[-1:] == (self._eos,)
            text += "" if ended else output.text
            reason = "stop" if ended else reason
            self.completion_tokens += len(output.tokens)
            if self._scores is not None and output.logprobs is not None:
                self._scores.add(output.logprobs)
        self.finish_reason = reason
        self._parts.append(text)
        return text, None if self._scores is None else self._scores.new()
