"""The recipe's chunks of each API, completed: what the engine counted, names, what is cut.

The recipe writes chunks as JSON; these classes change decoded ones in place.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from cedar.inputs.chat.types import Api, Event, UsageDetails

__all__ = ["Chunk", "Ending", "Facts", "Writer", "writer_for"]

Chunk = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a reply knows besides its text.

    created: seconds since 1970; index: of the sample; shows_usage: a last chunk with the usage;
    spaced: tools have namespaces. echo: fields of a Responses object that repeat the request.
    """

    created: int
    index: int
    shows_usage: bool
    spaced: bool
    echo: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a reply ended.

    details: what the engine counted; calls: so many calls are kept, None for all; reasoning: tokens
    of the reasoning.
    """

    details: UsageDetails
    calls: int | None
    reasoning: int


class Writer(Protocol):
    """Completes the chunks of one reply."""

    def is_last(self, chunk: Chunk) -> bool:
        """Whether the chunk belongs to the end of the reply, where the usage is."""

    def call_of(self, chunk: Chunk) -> int | None:
        """Which call of the reply the chunk is about, or follows, from 0; None before any."""

    def write(self, chunk: Chunk) -> Event:
        """The event of a chunk within the reply."""

    def end(self, chunks: list[Chunk], ending: Ending) -> Iterator[Event]:
        """The last events."""

    def complete(self, response: Chunk, ending: Ending) -> Chunk:
        """The whole response."""


def writer_for(api: Api, facts: Facts) -> Writer:
    """A new writer for one reply."""
    kinds: dict[Api, type[_Chat] | type[_Responses] | type[_Messages]] = {
        Api.CHAT: _Chat,
        Api.RESPONSES: _Responses,
        Api.MESSAGES: _Messages,
    }
    return kinds[api](facts)


class _Chat:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def is_last(self, chunk: Chunk) -> bool:
        return chunk["choices"][0]["finish_reason"] is not None

    def call_of(self, chunk: Chunk) -> int | None:
        calls = chunk["choices"][0]["delta"].get("tool_calls")
        return calls[0]["index"] if calls else None

    def write(self, chunk: Chunk) -> Event:
        return _event(None, self._completed(chunk))

    def end(self, chunks: list[Chunk], ending: Ending) -> Iterator[Event]:
        for chunk in chunks:
            usage = chunk["usage"]
            yield self.write(chunk)
            if self._facts.shows_usage:
                last = {**chunk, "choices": [], "usage": _chat_usage(usage, ending)}
                yield _event(None, last)
        yield Event(None, "[DONE]")

    def complete(self, response: Chunk, ending: Ending) -> Chunk:
        response["created"] = self._facts.created
        choice = response["choices"][0]
        choice["index"] = self._facts.index
        choice["message"].setdefault("refusal", None)
        self._split_names(choice["message"])
        response["usage"] = _chat_usage(response["usage"], ending)
        return response

    def _completed(self, chunk: Chunk) -> Chunk:
        chunk["created"] = self._facts.created
        choice = chunk["choices"][0]
        choice["index"] = self._facts.index
        self._split_names(choice["delta"])
        # The usage is null in every chunk but the last, or absent altogether.
        del chunk["usage"]
        if self._facts.shows_usage:
            chunk["usage"] = None
        return chunk

    def _split_names(self, message: Chunk) -> None:
        """``namespace::name`` in two fields, for the tools of namespaces."""
        if not self._facts.spaced:
            return
        for call in message.get("tool_calls") or ():
            space, separator, name = call["function"].get("name", "").partition("::")
            if separator:
                call["namespace"] = space
                call["function"]["name"] = name


class _Responses:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._sent = 0
        self._first_call: int | None = None

    def is_last(self, chunk: Chunk) -> bool:
        return chunk["type"] in ("response.completed", "response.incomplete", "response.failed")

    def call_of(self, chunk: Chunk) -> int | None:
        place = chunk.get("output_index")
        if place is None:
            return None
        if chunk["type"] == "response.output_item.added" and _is_call(chunk["item"]):
            self._first_call = place if self._first_call is None else self._first_call
        return None if self._first_call is None else place - self._first_call

    def write(self, chunk: Chunk) -> Event:
        if "response" in chunk:
            self._echo(chunk["response"])
        chunk["sequence_number"] = self._sent  # counted again, as some may have been cut
        self._sent += 1
        return _event(chunk["type"], chunk)

    def end(self, chunks: list[Chunk], ending: Ending) -> Iterator[Event]:
        for chunk in chunks:
            self._cut(chunk["response"], ending)
            yield self.write(chunk)

    def complete(self, response: Chunk, ending: Ending) -> Chunk:
        self._echo(response)
        self._cut(response, ending)
        return response

    def _echo(self, response: Chunk) -> None:
        response["created_at"] = self._facts.created
        response.update(self._facts.echo)

    def _cut(self, response: Chunk, ending: Ending) -> None:
        places = [n for n, item in enumerate(response["output"]) if _is_call(item)]
        if ending.calls is not None and len(places) > ending.calls:
            del response["output"][places[ending.calls] :]
        usage = response["usage"]
        usage["output_tokens"] = ending.details.completion_tokens
        usage["total_tokens"] = usage["input_tokens"] + usage["output_tokens"]
        usage["input_tokens_details"].setdefault("cache_write_tokens", 0)
        usage["output_tokens_details"] = _token_details(ending)


class _Messages:
    def __init__(self, facts: Facts) -> None:
        self._first_call: int | None = None

    def is_last(self, chunk: Chunk) -> bool:
        return chunk["type"] in ("message_delta", "message_stop")

    def call_of(self, chunk: Chunk) -> int | None:
        place = chunk.get("index")
        if place is None:
            return None
        if chunk["type"] == "content_block_start" and chunk["content_block"]["type"] == "tool_use":
            self._first_call = place if self._first_call is None else self._first_call
        return None if self._first_call is None else place - self._first_call

    def write(self, chunk: Chunk) -> Event:
        return _event(chunk["type"], chunk)

    def end(self, chunks: list[Chunk], ending: Ending) -> Iterator[Event]:
        for chunk in chunks:
            if chunk["type"] == "message_delta":
                self._count(chunk["usage"], chunk["delta"], ending)
            yield self.write(chunk)

    def complete(self, response: Chunk, ending: Ending) -> Chunk:
        self._count(response["usage"], response, ending)
        return response

    def _count(self, usage: Chunk, delta: Chunk, ending: Ending) -> None:
        usage["output_tokens"] = ending.details.completion_tokens
        counts = _token_details(ending)
        counts["thinking_tokens"] = counts.pop("reasoning_tokens")
        usage["output_tokens_details"] = counts
        stopped_by = ending.details.stopped_by
        if stopped_by is not None and delta["stop_reason"] == "end_turn":
            delta["stop_reason"], delta["stop_sequence"] = "stop_sequence", stopped_by


def _is_call(item: Chunk) -> bool:
    return item["type"] in ("function_call", "custom_tool_call")


def _chat_usage(usage: Chunk, ending: Ending) -> Chunk:
    return {
        **usage,
        "completion_tokens": ending.details.completion_tokens,
        "total_tokens": usage["prompt_tokens"] + ending.details.completion_tokens,
        "completion_tokens_details": _token_details(ending),
    }


def _token_details(ending: Ending) -> Chunk:
    return {
        "reasoning_tokens": min(ending.reasoning, ending.details.completion_tokens),
        "accepted_prediction_tokens": ending.details.accepted,
        "rejected_prediction_tokens": ending.details.drafted - ending.details.accepted,
    }


def _event(name: str | None, chunk: Chunk) -> Event:
    return Event(name, json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
