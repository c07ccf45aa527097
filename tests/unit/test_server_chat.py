"""The three chat APIs over HTTP: forms, streams, tools, pictures, constraints, several samples."""

import asyncio
import base64
import io
import json
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from PIL import Image
from pydantic import TypeAdapter

from serving import Answer, FakeEngine, Stream, ask, events_of, make_app, post, tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "Hello"}]
CALL = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="place" string="true">Rome</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def usual(path: str) -> dict[str, Any]:
    """The smallest request."""
    given: dict[str, Any] = {"model": "cedar-tiny"}
    if path == RESPONSES:
        return given | {"input": "Hello"}
    return given | {"messages": USER} | ({"max_tokens": 100} if path == MESSAGES else {})


def send(path: str, engine: FakeEngine | None = None, headers: Any = None, **more: Any) -> Answer:
    app = make_app(engine or FakeEngine())
    return asyncio.run(post(app, path, headers, **usual(path) | more))


def picture(colour: str = "red") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_chat() -> None:
    engine = FakeEngine(text="Good day!")
    answer = send(CHAT, engine)
    assert answer.status == 200
    found = ChatCompletion.model_validate(answer.json(), strict=True)
    assert found.id.startswith("chatcmpl-")
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason) == ("Good day!", "stop")
    count = len(tokenizer().encode("Good day!"))
    assert found.usage is not None
    assert found.usage.completion_tokens == count
    prompt = engine.asked[0].prompt.tokens
    assert found.usage.prompt_tokens == len(prompt)
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == len(prompt) // 2
    assert found.usage.completion_tokens_details is not None
    assert found.usage.completion_tokens_details.accepted_prediction_tokens == (count - 1) // 2
    # The rest of the context, as no limit was set.
    assert engine.asked[0].params["max_tokens"] == engine.info.room - len(prompt)


def test_responses() -> None:
    answer = send(RESPONSES, FakeEngine(text="Good day!"))
    found = Response.model_validate(answer.json())
    assert found.output_text == "Good day!"
    assert found.status == "completed"


def test_messages() -> None:
    answer = send(MESSAGES, FakeEngine(text="Good day!"))
    found = Message.model_validate(answer.json())
    assert [block.text for block in found.content if block.type == "text"] == ["Good day!"]
    assert found.stop_reason == "end_turn"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_stream_says_the_same(path: str) -> None:
    kinds: dict[str, Any] = {
        CHAT: ChatCompletionChunk,
        RESPONSES: ResponseStreamEvent,
        MESSAGES: RawMessageStreamEvent,
    }
    answer = send(path, FakeEngine(text="Good day, 你好!"), stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    events = events_of(answer)
    text = ""
    if path == CHAT:
        assert events.pop() == (None, "[DONE]")
    for name, data in events:
        if name == "ping":  # the API has it, its client's types do not
            continue
        event = TypeAdapter(kinds[path]).validate_python(data)
        if path == CHAT:
            text += event.choices[0].delta.content or ""
            continue
        assert name == event.type
        if event.type in ("response.output_text.delta", "content_block_delta"):
            text += event.delta if path == RESPONSES else event.delta.text
    assert text == "Good day, 你好!"
    last = {RESPONSES: "response.completed", MESSAGES: "message_stop", CHAT: None}
    assert events[-1][0] == last[path]


def test_usage_comes_last_if_asked_for() -> None:
    answer = send(CHAT, stream=True, stream_options={"include_usage": True})
    *_, (_, last), (_, done) = events_of(answer)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == send(CHAT).json()["usage"]


def test_several_samples_are_one_answer() -> None:
    whole = send(CHAT, FakeEngine(text="two words"), n=3).json()
    one = send(CHAT, FakeEngine(text="two words")).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in whole["choices"]} == {"two words"}
    assert whole["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    ChatCompletion.model_validate(whole, strict=True)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(send(CHAT, FakeEngine(text="two words"), n=3, **options))
    assert [data for _, data in events].count("[DONE]") == 1
    *chunks, (_, last), _ = events
    assert last["usage"] == whole["usage"]
    assert all(len(data["choices"]) == 1 for _, data in chunks)
    for index in range(3):
        own = [d["choices"][0] for _, d in chunks if d["choices"][0]["index"] == index]
        assert "".join(each["delta"].get("content") or "" for each in own) == "two words"
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["stop"]


def test_reasoning_is_apart() -> None:
    engine = FakeEngine(text="hmm</think>Good day!")
    message = send(CHAT, engine, reasoning_effort="high").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "Good day!")


def test_a_tool_is_called() -> None:
    found = send(CHAT, FakeEngine(text="Let me see." + CALL), tools=TOOLS).json()
    (choice,) = ChatCompletion.model_validate(found, strict=True).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"place": "Rome"},
    )
    assert choice.message.content == "Let me see."


def test_after_the_only_call_the_engine_stops() -> None:
    """With parallel_tool_calls off nothing that follows one call can count."""
    second = CALL.removeprefix("\n\n<｜DSML｜ calls>\n") + " and on" * 99

    async def test() -> None:
        text = CALL.removesuffix("</｜DSML｜ calls>") + second
        engine = FakeEngine(text=text, pace=0.001)
        body = usual(CHAT) | {"tools": TOOLS, "parallel_tool_calls": False, "stream": True}
        answer = await post(make_app(engine), CHAT, **body)
        *_, (_, last), _ = events_of(answer)
        assert last["choices"][0]["finish_reason"] == "tool_calls"
        assert engine.cancelled == ["request-0"]
        assert not engine.open

    asyncio.run(test())


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": PARAMETERS},
                }
            },
            "json_schema",
        ),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ],
)
def test_a_constraint_becomes_masks(more: dict[str, Any], kind: str) -> None:
    engine = FakeEngine(text="{}")
    assert send(CHAT, engine, **more).status == 200
    ((constraint, thinking, _),) = engine.constraints
    assert (constraint.kind, thinking) == (kind, False)
    assert engine.asked[0].masks is not None
    send(CHAT, engine)
    assert engine.asked[1].masks is None
    send(CHAT, engine, **more, reasoning_effort="high")
    assert engine.constraints[1][1]


def test_what_cannot_be_enforced_is_400() -> None:
    class Refusing(FakeEngine):
        def masks(self, *_: Any, **__: Any) -> Any:
            from cedar.errors import RequestError

            raise RequestError('response_format: the keyword "uniqueItems" cannot be enforced.')

    engine = Refusing()
    answer = send(CHAT, engine, response_format={"type": "json_object"}, stream=True)
    assert answer.status == 400
    assert "uniqueItems" in answer.error["message"]
    assert not engine.asked


def test_pictures_reach_the_engine() -> None:
    engine = FakeEngine()
    url = f"data:image/png;base64,{picture()}"
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    answer = send(CHAT, engine, messages=[{"role": "user", "content": content}])
    assert answer.status == 200
    assert [image.size for image in engine.pictures] == [(20, 10)]
    assert len(engine.asked[0].prompt.images) == 1
    # The spans of the pictures count.
    assert answer.json()["usage"]["prompt_tokens"] == len(engine.asked[0].prompt.tokens)
    source = {"type": "base64", "media_type": "image/png", "data": picture("blue")}
    content = [{"type": "image", "source": source}]
    assert send(MESSAGES, engine, messages=[{"role": "user", "content": content}]).status == 200
    assert engine.pictures[1].getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "http://127.0.0.1:1/a.png",
        "data:image/png;base64,AAAA",
        "data:image/svg+xml;base64,PHN2Zy8+",
    ],
)
def test_pictures_from_elsewhere_are_400(url: str) -> None:
    engine = FakeEngine()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    answer = send(CHAT, engine, messages=[{"role": "user", "content": content}])
    assert answer.status == 400, answer.body
    assert answer.error["param"].startswith("messages[0].content[0]")
    assert not engine.asked


def test_too_many_pictures() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}
    app = make_app(FakeEngine(), max_images=2)
    body = usual(CHAT) | {"messages": [{"role": "user", "content": [part] * 3}]}
    assert asyncio.run(post(app, CHAT, **body)).status == 400
    body["messages"][0]["content"] = [part] * 2
    assert asyncio.run(post(app, CHAT, **body)).status == 200


def test_a_watched_stream_shows_what_the_model_sees() -> None:
    plain = send(CHAT, stream=True)
    assert b'"cedar"' not in plain.body
    engine = FakeEngine(text="one two three")
    answer = send(CHAT, engine, {"X-Cedar-Watch": "1"}, stream=True)
    chunks = [data for _, data in events_of(answer) if data != "[DONE]"]
    seen = [chunk["cedar"] for chunk in chunks if "cedar" in chunk]
    last = seen[-1]
    prompt, count = len(engine.asked[0].prompt.tokens), len(tokenizer().encode("one two three"))
    assert last["context_tokens"] == prompt + count
    assert last["cache_bytes"] == 1000 + 106 * (prompt + count)
    assert last["full_cache_bytes"] == 10240 * (prompt + count)
    assert last["cached_tokens"] == prompt // 2
    steps = count - 1
    assert last["drafted"] == [steps - steps // 3, steps // 3]
    assert last["accepted"] == [steps // 2, 0]
    # Entries of 8 tokens at 0, 8 and 32, cut off at the end of the context.
    end = prompt + count
    assert last["selected"][0] == [0, min(16, end)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


def test_tokens_of_a_messages_request_are_counted() -> None:
    engine = FakeEngine()
    counted = send(f"{MESSAGES}/count_tokens", engine, messages=USER)
    assert counted.status == 200
    MessageTokensCount.model_validate(counted.json())
    assert not engine.asked
    send(MESSAGES, engine)
    assert counted.json()["input_tokens"] == len(engine.asked[0].prompt.tokens)


def test_a_conversation_can_be_tokenized() -> None:
    engine = FakeEngine()
    send(CHAT, engine)
    found = send("/tokenize", engine, messages=USER).json()
    assert tuple(found["tokens"]) == engine.asked[0].prompt.tokens


def test_a_conversation_with_a_picture_can_be_tokenized() -> None:
    engine = FakeEngine()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}
    messages = [{"role": "user", "content": [part]}]
    found = send("/tokenize", engine, messages=messages).json()
    send(CHAT, engine, messages=messages)
    assert tuple(found["tokens"]) == engine.asked[0].prompt.tokens
    assert len(engine.pictures) == 2


def test_ignored_fields_are_named() -> None:
    answer = send(CHAT, user="me")
    assert "user" in answer.headers["x-cedar-ignored"].split(", ")
    answer = send(CHAT, user="me", stream=True)
    assert "user" in answer.headers["x-cedar-ignored"].split(", ")


def test_names_of_clients_stay_within_bounds() -> None:
    """Fields inside of a message may have any names, as many as there are."""
    strange = {f"ä\r\nX-Evil: {number} " + "x" * 300: 1 for number in range(100)}
    message = {"role": "user", "content": "Hello", "naïve": 1, **strange}
    answer = send(CHAT, messages=[message])
    assert answer.status == 200
    names = answer.headers["x-cedar-ignored"].split(", ")
    assert names[0] == "messages[].na?ve"
    assert names[-1] == "..."
    assert len(names) == 41
    assert max(map(len, names)) == 100
    assert "x-evil" not in answer.headers


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"temprature": 1}, "temprature"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": 5}, "input"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "user"}]}, "messages.0.content"),
    ],
)
def test_wrong_fields_are_named(path: str, more: dict[str, Any], param: str) -> None:
    answer = send(path, **more)
    assert answer.status == 400
    if path == MESSAGES:
        assert answer.json()["type"] == "error"
        assert param in answer.error["message"]
    else:
        assert answer.error["param"] == param


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_an_unknown_model_is_404(path: str) -> None:
    answer = send(path, model="gpt-5")
    assert answer.status == 404
    assert answer.error["type"] == "not_found_error" or path != MESSAGES


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_an_error_within_a_stream_has_the_form_of_its_api(path: str) -> None:
    engine = FakeEngine(text="one two three", fail=ZeroDivisionError("x"), fail_after=2, pace=0.01)
    answer = send(path, engine, stream=True)
    assert answer.status == 200
    events = events_of(answer)
    if path == CHAT:
        assert events.pop() == (None, "[DONE]")
        assert events[-1][1]["error"]["type"] == "server_error"
    elif path == RESPONSES:
        name, data = events[-1]
        assert (name, data["type"], data["code"]) == ("error", "error", "internal_error")
        assert data["sequence_number"] == events[-2][1]["sequence_number"] + 1
        TypeAdapter(ResponseStreamEvent).validate_python(data)
    else:
        assert events[-1] == ("error", {"type": "error", "error": events[-1][1]["error"]})
        assert events[-1][1]["error"]["type"] == "api_error"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_leaving_ends_the_request(path: str) -> None:
    async def test() -> None:
        engine = FakeEngine(text="word " * 300, pace=0.001)
        body = json.dumps(usual(path) | {"stream": True}).encode()
        client = Stream(make_app(engine), "POST", path, body)
        assert (await client.chunk())["status"] == 200
        assert (await client.chunk())["more_body"]
        client.leave()
        await client.task
        assert engine.cancelled == ["request-0"]

    asyncio.run(test())


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b'{"model": 1}', b"[" * 99])
def test_bad_bodies_are_400(path: str, body: bytes) -> None:
    answer = asyncio.run(ask(make_app(FakeEngine()), "POST", path, body))
    assert answer.status == 400
    assert answer.error["message"]
