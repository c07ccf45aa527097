import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import chat_setting
from cedar.inputs.chat import Api, ChatRequest, UsageDetails
from chat_setting import CALLS, HELLO, TOOLS, Played, play, protocol, read, spell, tokenizer

APIS = list(Api)
KINDS = ["real", "bundled"]
DETAILS = UsageDetails(completion_tokens=9, accepted=3, drafted=5)
ONE_CALL = CALLS[: CALLS.index('<｜DSML｜ invoke name="list"')] + "</｜DSML｜ calls>"


def content_of(api: Api, response: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, answer and calls of a response of any API, arguments parsed."""
    reasoning, answer, calls = chat_setting.content_of(api, response)
    parsed = [(name, json.loads(a) if isinstance(a, str) else a) for name, a in calls]
    return reasoning, answer, parsed


def check_types(api: Api, played: Played) -> None:
    """Every event and the response are what the clients' own types take, strictly."""
    if api is Api.CHAT:
        assert played.events[-1] == (None, "[DONE]")
        for chunk in played.chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
        ChatCompletion.model_validate(played.response, strict=True)
        return
    assert [event.name for event in played.events] == [chunk["type"] for chunk in played.chunks]
    event_type: Any = ResponseStreamEvent if api is Api.RESPONSES else RawMessageStreamEvent
    adapter = TypeAdapter(event_type)
    for chunk in played.chunks:
        if chunk["type"] != "ping":
            adapter.validate_python(chunk, strict=True)
    kind: Any = Response if api is Api.RESPONSES else Message
    kind.model_validate(played.response, strict=True)


def text_pieces(text: str, kind: str) -> list[list[int]]:
    return [[token] for token in spell(text, kind)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_events_and_responses_are_what_clients_take(api: Api, kind: str, reason: str) -> None:
    fields: dict[str, Any] = {"stream": True, "tools": TOOLS[api]}
    if api is Api.CHAT:
        fields["stream_options"] = {"include_usage": True}
    request = read(api, kind=kind, reasons=True, **fields)
    pieces = text_pieces("Let me see.</think>I look." + CALLS, kind)
    played = play(request, pieces, kind=kind, reason=reason, details=DETAILS)
    check_types(api, played)
    reasoning, answer, calls = content_of(api, played.response)
    assert (reasoning, answer) == ("Let me see.", "I look.")
    assert calls == [("find", {"text": 'a "b" <c>', "limits": [1, 2.5]}), ("list", {})]


@pytest.mark.parametrize("api", APIS)
def test_text_without_tokens_is_read_as_well(api: Api) -> None:
    request = read(api, reasons=True, tools=TOOLS[api])
    text = "Let me see.</think>I look." + CALLS
    from_text = play(request, list(text), details=DETAILS)
    from_tokens = play(request, text_pieces(text, "real"), details=DETAILS)
    assert content_of(api, from_text.response) == content_of(api, from_tokens.response)
    check_types(api, from_text)


# --- usage ----------------------------------------------------------------------------------


def test_usage_of_chat_completions() -> None:
    request = read(Api.CHAT, stream=True, stream_options={"include_usage": True})
    played = play(request, text_pieces("one two</think>three", "real"), details=DETAILS)
    *chunks, last = played.chunks
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"] == played.response["usage"]
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 9,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
        "prompt_cache_hit_tokens": 4,
        "prompt_cache_miss_tokens": 6,
        "completion_tokens_details": {
            "reasoning_tokens": 2,
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 2,
        },
    }


def test_without_include_usage_no_chunk_has_the_field() -> None:
    played = play(read(Api.CHAT, stream=True), text_pieces("x", "real"))
    assert all("usage" not in chunk for chunk in played.chunks)
    assert all(chunk["choices"] for chunk in played.chunks)


def test_usage_of_responses_and_messages() -> None:
    played = play(read(Api.RESPONSES), text_pieces("one two</think>x", "real"), details=DETAILS)
    usage = played.response["usage"]
    assert usage == played.chunks[-1]["response"]["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, 9, 19)
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2
    assert usage["output_tokens_details"]["accepted_prediction_tokens"] == 3
    request = read(Api.MESSAGES, reasons=True)
    played = play(request, text_pieces("one two</think>x", "real"), details=DETAILS)
    usage = played.response["usage"]
    assert usage == played.chunks[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 4)
    assert usage["output_tokens"] == 9
    assert usage["output_tokens_details"]["thinking_tokens"] == 2


@pytest.mark.parametrize("api", APIS)
def test_created_index_and_names_are_the_callers(api: Api) -> None:
    request = read(api, reasons=False, **({"n": 3} if api is Api.CHAT else {}))
    played = play(request, text_pieces("x", "real"), index=2)
    if api is Api.CHAT:
        assert {chunk["created"] for chunk in played.chunks} == {1234}
        assert {chunk["choices"][0]["index"] for chunk in played.chunks} == {2}
        assert played.response["choices"][0]["index"] == 2
    if api is Api.RESPONSES:
        assert played.response["created_at"] == 1234
        assert played.chunks[0]["response"]["created_at"] == 1234
    assert played.response["id"] == "id-1"
    assert played.response["model"] == "cedar"


# --- finish reasons and stops ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "reason", "expected"),
    [
        (Api.CHAT, "stop", "stop"),
        (Api.CHAT, "length", "length"),
        (Api.CHAT, "deadline", "length"),
        (Api.RESPONSES, "stop", "completed"),
        (Api.RESPONSES, "length", "incomplete"),
        (Api.MESSAGES, "stop", "end_turn"),
        (Api.MESSAGES, "length", "max_tokens"),
    ],
)
def test_finish_reasons(api: Api, reason: str, expected: str) -> None:
    played = play(read(api, reasons=False), text_pieces("x", "real"), reason=reason)
    check_types(api, played)
    found = {
        Api.CHAT: lambda: played.response["choices"][0]["finish_reason"],
        Api.RESPONSES: lambda: played.response["status"],
        Api.MESSAGES: lambda: played.response["stop_reason"],
    }[api]()
    assert found == expected


STOPS = {Api.CHAT: "stop", Api.RESPONSES: None, Api.MESSAGES: "stop_sequences"}


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES])
def test_stop_sequences_end_the_answer_but_not_the_reasoning(api: Api) -> None:
    request = read(api, reasons=True, **{str(STOPS[api]): ["two th", "zzz"]})
    reply = protocol().reply(request, "id", 0)
    reply.begin(1, 0)
    for token in spell("one two three</think>one two"):
        reply.push("", [token])
    assert not reply.done
    reply.push("", spell(" three"))
    assert reply.done
    assert reply.push("", spell(" four")) == []
    reply.finish("stop", UsageDetails(completion_tokens=100))
    reasoning, answer, _ = content_of(api, reply.response())
    assert (reasoning, answer) == ("one two three", "one ")
    usage = reply.response()["usage"]
    # Six tokens of reasoning with its end, three of the answer; what came later does not count.
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 7
    if api is Api.MESSAGES:
        assert reply.response()["stop_reason"] == "stop_sequence"
        assert reply.response()["stop_sequence"] == "two th"


def test_the_engine_looks_for_stops_only_where_all_text_is_the_answer() -> None:
    assert read(Api.CHAT, reasons=False, stop="x").sampling["stop"] == ("x",)
    assert "stop" not in read(Api.CHAT, reasons=True, stop="x").sampling
    assert "stop" not in read(Api.CHAT, reasons=False, stop="x", tools=TOOLS[Api.CHAT]).sampling


def test_a_stop_sequence_within_a_call_is_part_of_the_call() -> None:
    request = read(Api.CHAT, reasons=False, stop='"b"', tools=TOOLS[Api.CHAT])
    _, _, calls = content_of(Api.CHAT, play(request, text_pieces(CALLS, "real")).response)
    assert calls[0] == ("find", {"text": 'a "b" <c>', "limits": [1, 2.5]})


def test_a_stop_sequence_that_the_engine_found_is_named() -> None:
    request = read(Api.MESSAGES, stop_sequences=["END"])
    details = UsageDetails(completion_tokens=1, stopped_by="END")
    assert play(request, ["text"], details=details).response["stop_sequence"] == "END"
    # The tokens of a stop string are pushed, too; then the parser finds it.
    assert play(request, [spell("text END")]).response["stop_sequence"] == "END"


# --- calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
def test_a_call_within_unclosed_reasoning_is_a_call(api: Api) -> None:
    request = read(api, reasons=True, tools=TOOLS[api])
    played = play(request, text_pieces("I search" + CALLS, "real"))
    check_types(api, played)
    reasoning, answer, calls = content_of(api, played.response)
    assert (reasoning, answer, len(calls)) == ("I search", "", 2)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("extra", [{}, {"tool_choice": "none"}])
def test_without_tools_the_markup_is_text(api: Api, extra: dict[str, Any]) -> None:
    fields: dict[str, Any] = {}
    if extra:
        choice = {"type": "none"} if api is Api.MESSAGES else "none"
        fields = {"tools": TOOLS[api], "tool_choice": choice}
    request = read(api, reasons=False, **fields)
    played = play(request, text_pieces("x" + CALLS, "real"))
    assert content_of(api, played.response) == ("", "x" + CALLS, [])


@pytest.mark.parametrize("api", APIS)
def test_parallel_calls_can_be_ruled_out(api: Api) -> None:
    fields: dict[str, Any] = {"parallel_tool_calls": False}
    if api is Api.MESSAGES:
        fields = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    one = read(api, reasons=False, tools=TOOLS[api], stream=True, **fields)
    played = play(one, text_pieces("x" + CALLS, "real"))
    check_types(api, played)
    _, answer, calls = content_of(api, played.response)
    assert (answer, [name for name, _ in calls]) == ("x", ["find"])
    # The events say the same as one call without the second.
    alone = play(one, text_pieces("x" + ONE_CALL, "real"))
    assert shape_of(played) == shape_of(alone)
    both = read(api, reasons=False, tools=TOOLS[api])
    _, _, calls = content_of(api, play(both, text_pieces("x" + CALLS, "real")).response)
    assert [name for name, _ in calls] == ["find", "list"]


def shape_of(played: Played) -> list[Any]:
    """Events without what differs by chance or by counting."""
    found = []
    for chunk in played.chunks:
        text = json.dumps(chunk)
        if "usage" in chunk or "response" in chunk or "created" in chunk:
            text = text.split('"usage"')[0]
        found.append((chunk.get("type"), chunk.get("sequence_number"), text.count("call_00")))
    return found


def test_done_after_the_only_call() -> None:
    request = read(Api.CHAT, reasons=False, tools=TOOLS[Api.CHAT], parallel_tool_calls=False)
    reply = protocol().reply(request, "id", 0)
    reply.begin(1, 0)
    reply.push("", spell("x" + ONE_CALL.removesuffix("</｜DSML｜ calls>")))
    assert not reply.done
    reply.push("", spell('<｜DSML｜ invoke name="list">\n'))
    assert reply.done
    reply.finish("cancelled", UsageDetails(completion_tokens=3))
    assert reply.response()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_reply_that_begins_within_the_block() -> None:
    request = read(Api.CHAT, reasons=False, tools=TOOLS[Api.CHAT], tool_choice="required")
    assert request.starts_in_tools
    inside = CALLS.removeprefix("\n\n<｜DSML｜ calls>\n")
    played = play(request, text_pieces(inside, "real"))
    _, answer, calls = content_of(Api.CHAT, played.response)
    assert (answer, len(calls)) == ("", 2)
    assert played.response["choices"][0]["finish_reason"] == "tool_calls"


def test_namespaces_are_split_from_names() -> None:
    tools = [{"type": "function", "namespace": "ns", "function": {"name": "find"}}]
    request = read(Api.CHAT, reasons=False, tools=tools)
    text = CALLS.replace('"find"', '"ns::find"')
    played = play(request, text_pieces(text, "real"))
    check_types(Api.CHAT, played)
    call = played.response["choices"][0]["message"]["tool_calls"][0]
    assert (call["namespace"], call["function"]["name"]) == ("ns", "find")
    streamed = [
        call
        for chunk in played.chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        if "name" in call["function"]
    ]
    assert (streamed[0]["namespace"], streamed[0]["function"]["name"]) == ("ns", "find")
    inner = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "ns", "description": "D", "tools": [inner]}]
    request = read(Api.RESPONSES, reasons=False, tools=tools)
    played = play(request, text_pieces(text, "real"))
    check_types(Api.RESPONSES, played)
    assert played.response["output"][0]["namespace"] == "ns"
    assert played.response["output"][0]["name"] == "find"


# --- control tokens and text ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api", APIS)
def test_control_tokens_never_become_content(api: Api, kind: str) -> None:
    controls = tokenizer(kind).control_ids
    silent = [
        name
        for name in controls
        if name not in ("</think>", "｜DSML｜") and not any(m in name for m in ("ref", "box", "po"))
    ]
    assert len(silent) > 10
    request = read(api, kind=kind, reasons=False)
    noise = [controls[name] for name in silent]
    pieces = [spell("a", kind), noise, spell("b", kind), [tokenizer(kind).vocab_size + 7]]
    played = play(request, pieces, kind=kind)
    assert content_of(api, played.response)[1] == "ab"


def test_the_same_spelling_as_ordinary_text_stays() -> None:
    text = "The markers are <｜User｜> and <｜end▁of▁sentence｜>."
    pieces = [tokenizer().encode(text, control=False)]
    played = play(read(Api.CHAT, reasons=False), pieces)
    assert content_of(Api.CHAT, played.response)[1] == text


def test_grounding_marks_stay() -> None:
    text = "<｜ref｜>cat<｜/ref｜><｜box｜>[[1,2,3,4]]<｜/box｜>"
    played = play(read(Api.CHAT, reasons=False), text_pieces(text, "real"))
    assert content_of(Api.CHAT, played.response)[1] == text


@pytest.mark.parametrize("kind", KINDS)
def test_stray_markup_is_dropped_where_calls_are_looked_for(kind: str) -> None:
    markup = tokenizer(kind).control_ids["｜DSML｜"]
    request = read(Api.CHAT, kind=kind, reasons=False, tools=TOOLS[Api.CHAT])
    pieces = [spell("a ", kind), [markup], spell("b", kind), text_pieces(CALLS, kind)]
    flat = [p for piece in pieces for p in ([piece] if isinstance(piece[0], int) else piece)]
    played = play(request, flat, kind=kind)
    assert content_of(Api.CHAT, played.response)[1] == "a b"
    assert len(content_of(Api.CHAT, played.response)[2]) == 2


def test_half_a_character_at_the_end_is_left_out() -> None:
    smile = tokenizer().encode("a😀")
    assert len(smile) == 3
    played = play(read(Api.CHAT, reasons=False), [smile[:-1]], reason="length")
    assert content_of(Api.CHAT, played.response)[1] == "a"


# --- log probabilities ----------------------------------------------------------------------


class Score(NamedTuple):
    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


def scores_of(tokens: Sequence[int]) -> list[Score]:
    top = [(spell("Hello")[0], -0.25), (10**6, -1.0), (spell("a")[0], -math.inf)]
    return [Score(token, -0.5, top) for token in tokens]


def test_log_probabilities_of_chat_completions() -> None:
    request = read(Api.CHAT, reasons=True, stream=True, logprobs=True, top_logprobs=3)
    assert request.sampling["logprobs"] == 3
    played = play(request, text_pieces("hm</think>Hello wörld 😀", "real"), scores=scores_of)
    check_types(Api.CHAT, played)
    found = played.response["choices"][0]["logprobs"]
    assert [entry["token"] for entry in found["reasoning_content"]] == ["hm"]
    entries = found["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "Hello wörld 😀"
    assert [entry["token"] for entry in entries[:2]] == ["Hello", " w"]
    assert entries[0]["logprob"] == -0.5
    # Unknown ids are left out, and JSON has no infinity.
    assert entries[0]["top_logprobs"] == [
        {"token": "Hello", "logprob": -0.25, "bytes": list(b"Hello")},
        {"token": "a", "logprob": -9999.0, "bytes": list(b"a")},
    ]
    streamed = [
        entry
        for chunk in played.chunks
        for entry in (chunk["choices"][0]["logprobs"] or {}).get("content") or ()
    ]
    assert streamed == entries


def test_log_probabilities_of_responses() -> None:
    include = ["message.output_text.logprobs"]
    request = read(Api.RESPONSES, reasons=False, include=include, top_logprobs=3)
    assert request.sampling["logprobs"] == 3
    played = play(request, text_pieces("Hello you", "real"), scores=scores_of)
    check_types(Api.RESPONSES, played)
    part = played.response["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["Hello", " you"]


def test_no_log_probabilities_without_being_asked() -> None:
    played = play(read(Api.CHAT, reasons=False), text_pieces("Hello", "real"), scores=scores_of)
    assert played.response["choices"][0]["logprobs"] is None


# --- what a continued message becomes -------------------------------------------------------


@pytest.mark.parametrize("reasons", [True, False])
@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES])
def test_a_continued_message_keeps_the_newlines_at_the_seam(api: Api, reasons: bool) -> None:
    last: dict[str, Any] = {"role": "assistant", "content": "Answer:"}
    if api is Api.CHAT:
        last["prefix"] = True
    request = read(api, reasons=reasons, messages=[*HELLO, last])
    assert request.prompt.endswith("</think>Answer:")
    assert not request.thinking
    played = play(request, text_pieces("\n\n42", "real"))
    assert content_of(api, played.response)[1] == "\n\n42"
    check_types(api, played)


def test_reasoning_can_be_continued() -> None:
    last = {"role": "assistant", "content": None, "reasoning_content": "First", "prefix": True}
    request = read(Api.CHAT, reasons=True, messages=[*HELLO, last])
    assert request.prompt.endswith("<think>First")
    assert request.thinking
    played = play(request, text_pieces("\nthen</think>42", "real"))
    assert content_of(Api.CHAT, played.response)[:2] == ("\nthen", "42")


# --- misuse ---------------------------------------------------------------------------------


def test_the_response_is_there_after_the_end_only() -> None:
    reply = protocol().reply(read(Api.CHAT), "id", 0)
    reply.begin(1, 0)
    with pytest.raises(RuntimeError, match="before finish"):
        reply.response()
    assert reply.finish("stop", UsageDetails(completion_tokens=0))
    assert reply.finish("stop", UsageDetails(completion_tokens=0)) == []


def test_replies_of_one_request_are_independent() -> None:
    request: ChatRequest = read(Api.CHAT, reasons=False, n=2)
    first = protocol().reply(request, "id", 0, 0)
    second = protocol().reply(request, "id", 0, 1)
    for reply, text in ((first, "one"), (second, "two")):
        reply.begin(1, 0)
        reply.push("", spell(text))
    for reply, text in ((second, "two"), (first, "one")):
        reply.finish("stop", UsageDetails(completion_tokens=1))
        assert reply.response()["choices"][0]["message"]["content"] == text


def test_the_type_check_can_fail() -> None:
    played = play(read(Api.CHAT), text_pieces("x", "real"))
    played.response["usage"]["total_tokens"] = "19"
    with pytest.raises(ValueError, match="total_tokens"):
        check_types(Api.CHAT, played)
