"""Chat Completions, Responses and Messages: three forms of one conversation."""

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cedar.errors import CedarError
from cedar.inputs.chat import Api, ChatRequest, Event, Reply, UsageDetails
from cedar.server.choices import join_responses, join_usage
from cedar.server.door import Visit
from cedar.server.errors import ApiError, ClientGone, as_api_error, error_body
from cedar.server.faults import internal_error, report
from cedar.server.metrics import Timing
from cedar.server.protocols import Output
from cedar.server.relay import Relay, raise_failure
from cedar.server.service import Service, body_of, fitting, new_id, notes_header
from cedar.server.streaming import attended, encode_events
from cedar.server.watch import watched

__all__ = ["COUNT_PATH", "PATHS", "chat", "count_tokens"]

PATHS: Mapping[Api, str] = {
    Api.CHAT: "/v1/chat/completions",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
}
COUNT_PATH = "/v1/messages/count_tokens"
_PREFIXES = {Api.CHAT: "chatcmpl-", Api.RESPONSES: "resp_", Api.MESSAGES: "msg_"}
_DONE = "[DONE]"


def chat(service: Service, api: Api) -> Callable[[Request, Visit], Awaitable[Response]]:
    """The endpoint of one API."""

    async def endpoint(request: Request, visit: Visit) -> Response:
        body = await body_of(request)
        watch = api is Api.CHAT and request.headers.get("x-cedar-watch") == "1"
        return await attended(request.receive, _answer(service, api, body, visit, watch))

    return endpoint


def count_tokens(service: Service) -> Callable[[Request, Visit], Awaitable[Response]]:
    """The endpoint that says how long the prompt of a Messages request is."""

    async def endpoint(request: Request, visit: Visit) -> Response:
        body = await body_of(request)
        read = partial(service.protocol.read, Api.MESSAGES, body, count_only=True)
        parsed = await run_in_threadpool(read)
        prompt = await service.prompt(parsed)
        content = {"input_tokens": len(prompt.tokens)}
        return JSONResponse(content, headers=notes_header(parsed.ignored))

    return endpoint


async def _answer(service: Service, api: Api, body: bytes, visit: Visit, watch: bool) -> Response:
    """Read a request, start it, and wait for its first token, or for all without streaming."""
    timing = service.metrics.timing()
    parsed = await run_in_threadpool(service.protocol.read, api, body)
    if parsed.n > service.settings.max_choices:
        raise ApiError(
            400, f"n is {parsed.n}; expected 1 to {service.settings.max_choices}.", param="n"
        )
    prompt = await service.prompt(parsed)
    answer = _Answer(service, parsed, new_id(_PREFIXES[api]), timing, visit)
    answer.transcript.prompt(parsed.prompt)
    masks = None
    if parsed.constraint is not None:
        make = partial(
            service.engine.masks,
            parsed.constraint,
            thinking=parsed.thinking,
            starts_in_tools=parsed.starts_in_tools,
        )
        masks = await run_in_threadpool(make)
    limit = fitting(service.engine, len(prompt.tokens), parsed.max_tokens)
    params = {**parsed.sampling, "max_tokens": limit}
    relay = service.relay()
    try:
        relay.take(await service.engine.submit(prompt, params, masks=masks, watch=watch))
        await relay.first()
        if not parsed.stream:
            async for batch in relay.batches():
                for _, output in batch:
                    raise_failure(output, service.engine)
                    answer.push(output)
                if answer.over:
                    break
            await relay.close()
            return JSONResponse(answer.response(), headers=notes_header(parsed.ignored))
    except BaseException:
        await relay.close()
        raise
    return service.stream(_chunks(answer, relay, watch), relay, notes_header(parsed.ignored))


async def _chunks(answer: "_Answer", relay: Relay, watch: bool) -> AsyncGenerator[bytes, None]:
    """The events of an answer, as bytes; an error that comes now is an event, too."""
    try:
        async for batch in relay.batches():
            events: list[Event] = []
            for _, output in batch:
                raise_failure(output, answer.service.engine)
                events += answer.push(output)
            if watch:
                events = watched(events, batch[-1][1], answer.service.engine.info)
            if events:
                answer.sent += len(events)
                yield encode_events(events)
            if answer.over:
                break
    except ApiError as error:
        yield encode_events(answer.broken(error))
    except CedarError as error:
        yield encode_events(answer.broken(as_api_error(error)))
    except ClientGone:
        raise
    except Exception as fault:
        report(fault, answer.visit.id)
        yield encode_events(answer.broken(internal_error(answer.visit.id)))


class _Answer:
    """The samples of one request, on their way from outputs to events or to one response."""

    def __init__(
        self, service: Service, parsed: ChatRequest, id: str, timing: Timing, visit: Visit
    ) -> None:
        self.service, self.id = service, id
        self.transcript = service.transcript(id)
        self.sent = 0
        self.visit, self._parsed, self._timing = visit, parsed, timing
        created = int(time.time())
        self._replies: list[Reply] = [
            service.protocol.reply(parsed, id, created, index) for index in range(parsed.n)
        ]
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._usages: list[dict[str, Any]] = []

    @property
    def over(self) -> bool:
        """Whether nothing that may still come matters."""
        return len(self._ended) == len(self._replies)

    def push(self, output: Output) -> list[Event]:
        """The events of what is new."""
        index, reply, usage = output.index, self._replies[output.index], output.usage
        if index in self._ended:
            return []
        self._timing.saw(0, output)
        events: list[Event] = []
        if index not in self._begun:
            self._begun.add(index)
            self.visit.used(usage.prompt_tokens if len(self._begun) == 1 else 0)
            events += reply.begin(usage.prompt_tokens, usage.cached_tokens)
        self.visit.used(len(output.tokens))
        if output.text or output.tokens:
            events += reply.push(output.text, output.tokens, output.logprobs)
        last = output.finish_reason is not None or reply.done
        self.transcript.answer(index, output.text, last=last)
        if last:
            self._ended.add(index)
            details = UsageDetails(
                completion_tokens=usage.generated_tokens,
                accepted=usage.accepted,
                drafted=usage.drafted,
                stopped_by=output.stopped_by,
            )
            events += self._last(reply.finish(output.finish_reason or "stop", details))
        return events

    def _last(self, events: list[Event]) -> list[Event]:
        """The last events of a sample; those that end the whole stream wait for all samples."""
        if len(self._replies) == 1:
            return events
        kept: list[Event] = []
        for event in events:
            if event.data == _DONE:
                kept += [event] if self.over else []
                continue
            chunk = json.loads(event.data)
            if chunk.get("choices") != []:
                kept.append(event)
                continue
            self._usages.append(chunk)
            if self.over:
                kept.append(Event(event.name, json.dumps(join_usage(self._usages))))
        return kept

    def response(self) -> dict[str, Any]:
        """The answer in one piece."""
        return join_responses([reply.response() for reply in self._replies])

    def broken(self, error: ApiError) -> list[Event]:
        """The events that end a stream in which something went wrong."""
        body = error_body(PATHS[self._parsed.api], error)
        if self._parsed.api is Api.MESSAGES:
            return [Event("error", json.dumps(body))]
        if self._parsed.api is Api.RESPONSES:
            fields = {
                "type": "error",
                "code": error.code or body["error"]["type"],
                "message": error.message,
                "param": error.param,
                "sequence_number": self.sent,
            }
            return [Event("error", json.dumps(fields))]
        return [Event(None, json.dumps(body)), Event(None, _DONE)]
