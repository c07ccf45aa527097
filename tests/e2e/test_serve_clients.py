"""`cedar serve` with the clients that people use: openai's and anthropic's."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from anthropic import Anthropic
from anthropic import BadRequestError as AnthropicBadRequest
from openai import BadRequestError, NotFoundError, OpenAI
from PIL import Image

from served import serving

MODEL = "cedar-tiny"
USER: Any = [{"role": "user", "content": "And the LORD said"}]
PLACE = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--pool-tokens", "16384", "--served-model-name", MODEL) as served:
        yield served.url


@pytest.fixture(scope="module")
def openai(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def data_url(colour: str, size: tuple[int, int] = (40, 30)) -> str:
    return f"data:image/png;base64,{encoded(colour, size)}"


def encoded(colour: str, size: tuple[int, int] = (40, 30)) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_chat_and_its_stream_agree(openai: OpenAI) -> None:
    same: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 12, "seed": 5}
    whole = openai.chat.completions.create(**same)
    again = openai.chat.completions.create(**same)
    text = whole.choices[0].message.content
    assert text
    assert again.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "length"
    parts, usage = [], None
    options: Any = {"include_usage": True}
    with openai.chat.completions.create(**same, stream=True, stream_options=options) as stream:
        for chunk in stream:
            parts += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
    assert "".join(parts) == text
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 12


def test_samples_and_scores(openai: OpenAI) -> None:
    found = openai.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=5, n=2, logprobs=True, top_logprobs=2, temperature=0
    )
    first, second = found.choices
    assert first.message.content == second.message.content
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    assert len(first.logprobs.content) == 5
    for entry in first.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert len(entry.top_logprobs) == 2
        assert entry.logprob <= 0
    assert "".join(entry.token for entry in first.logprobs.content) == first.message.content


def test_a_loop_with_tools(openai: OpenAI) -> None:
    """A forced call has the arguments that its schema demands, whatever the model would say."""
    asked = openai.chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, tool_choice="required", max_tokens=200, seed=1
    )
    (choice,) = asked.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "weather"
        jsonschema_rs.validate(PLACE, json.loads(call.function.arguments))
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        for call in choice.message.tool_calls
    ]
    messages = [*USER, choice.message.model_dump(exclude_none=True), *results]
    answer = openai.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert asked.usage is not None
    assert answer.usage.prompt_tokens > len(results)


@pytest.mark.parametrize("effort", ["none", "low"])
def test_an_answer_by_schema(openai: OpenAI, effort: Any) -> None:
    """Also after reasoning, which the schema does not concern."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": PLACE}}
    bias = {} if effort == "none" else {str(_token(openai, "</think>")): 100.0}
    found = openai.chat.completions.create(
        model=MODEL,
        messages=USER,
        response_format=form,
        reasoning_effort=effort,
        max_tokens=150,
        seed=2,
        logit_bias=bias,  # this model does not know when to end its reasoning
    )
    assert found.choices[0].finish_reason == "stop"
    jsonschema_rs.validate(PLACE, json.loads(found.choices[0].message.content or ""))


def _token(openai: OpenAI, text: str) -> int:
    body = {"prompt": text, "add_special_tokens": False, "parse_special": True}
    root = str(openai.base_url).removesuffix("/v1/")
    found = openai.post(f"{root}/tokenize", body=body, cast_to=dict[str, Any])
    (token,) = found["tokens"]
    return int(token)


def test_a_schema_that_cannot_be_enforced(openai: OpenAI) -> None:
    schema = {"type": "array", "items": {}, "uniqueItems": True}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(BadRequestError, match="uniqueItems"):
        openai.chat.completions.create(model=MODEL, messages=USER, response_format=form)


def test_responses(openai: OpenAI) -> None:
    whole = openai.responses.create(
        model=MODEL, input="And the LORD said", max_output_tokens=16, temperature=0
    )
    assert whole.output_text
    with openai.responses.create(
        model=MODEL, input="And the LORD said", max_output_tokens=16, temperature=0, stream=True
    ) as stream:
        events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[0].type == "response.created"
    with pytest.raises(BadRequestError) as refused:
        openai.responses.create(model=MODEL, input="a", previous_response_id=whole.id)
    assert refused.value.param == "previous_response_id"


def test_completions_score_their_prompt(openai: OpenAI) -> None:
    found = openai.completions.create(
        model=MODEL, prompt=["In the beginning", "x"], max_tokens=1, echo=True, logprobs=1
    )
    for choice, start in zip(found.choices, ("In the beginning", "x"), strict=True):
        assert choice.text.startswith(start)
        scores = choice.logprobs
        assert scores is not None
        assert scores.token_logprobs is not None
        assert scores.tokens is not None
        assert scores.token_logprobs[0] is None  # of the begin of text
        assert all(value <= 0 for value in scores.token_logprobs[1:])
        assert "".join(scores.tokens[1:-1]) == start


def look(openai: OpenAI, colour: str, size: tuple[int, int] = (40, 30)) -> tuple[Any, Any]:
    """The likeliest tokens after a text around a picture of one colour, and the usage."""
    content = [
        {"type": "text", "text": "In the days of old " * 20},
        {"type": "image_url", "image_url": {"url": data_url(colour, size)}},
        {"type": "text", "text": "And it came to pass " * 20},
    ]
    found = openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
        max_tokens=1,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    assert found.choices[0].logprobs is not None
    assert found.choices[0].logprobs.content is not None
    return found.choices[0].logprobs.content[0].top_logprobs, found.usage


def alike(once: Any, later: Any) -> None:
    assert [entry.token for entry in once] == [entry.token for entry in later]
    assert [entry.logprob for entry in once] == pytest.approx(
        [entry.logprob for entry in later], abs=0.05
    )


def apart(red: Any, blue: Any) -> bool:
    most = max(abs(a.logprob - b.logprob) for a, b in zip(red, blue, strict=True))
    return most > 1e-4 or [e.token for e in red] != [e.token for e in blue]


def test_pictures(openai: OpenAI) -> None:
    """Equal texts with two pictures in turn: each gets its own, also from the cache."""
    (red, used), (blue, _), (red_again, hit), (blue_again, _) = (
        look(openai, colour) for colour in ("red", "blue", "red", "blue")
    )
    assert hit.prompt_tokens_details.cached_tokens > 0
    assert used.prompt_tokens == hit.prompt_tokens
    alike(red, red_again)
    alike(blue, blue_again)
    assert apart(red, blue)


def test_pictures_after_a_restart(tmp_path: Path) -> None:
    """The same from the disk, by another process."""
    seen: dict[str, Any] = {}
    for restarted in (False, True):
        options = ("--pool-tokens", "16384", "--served-model-name", MODEL)
        with serving(*options, "--disk-cache", str(tmp_path / "prefixes")) as served:
            client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
            with client:
                for colour in ("red", "blue", "red", "blue"):
                    found, usage = look(client, colour)
                    cached = usage.prompt_tokens_details.cached_tokens
                    assert not (restarted or colour in seen) or cached > 0
                    alike(seen.setdefault(colour, found), found)
            assert served.end() == 0
    assert apart(seen["red"], seen["blue"])


def test_mistakes(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        openai.chat.completions.create(model="gpt-5", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as wrong:
        openai.chat.completions.create(model=MODEL, messages=USER, extra_body={"temprature": 1})
    assert wrong.value.param == "temprature"
    assert wrong.value.response.headers["x-request-id"]
    url: Any = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/a.png"}}
    with pytest.raises(BadRequestError, match="URL"):
        openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [url]}])


def test_models(openai: OpenAI, anthropic: Anthropic) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL]
    assert openai.models.retrieve(MODEL).owned_by == "cedar"
    assert [model.id for model in anthropic.models.list()] == [MODEL]


def test_messages_and_their_stream_agree(anthropic: Anthropic) -> None:
    same: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 12}
    same["extra_body"] = {"temperature": 0}  # which the client no longer knows
    whole = anthropic.messages.create(**same)
    (block,) = whole.content
    assert block.type == "text"
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 12
    with anthropic.messages.stream(**same) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().usage.output_tokens == 12
    counted = anthropic.messages.count_tokens(model=MODEL, messages=USER)
    read = whole.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == whole.usage.input_tokens + read


def test_messages_call_tools(anthropic: Anthropic) -> None:
    found = anthropic.messages.create(
        model=MODEL,
        messages=USER,
        max_tokens=200,
        tools=[{"name": "weather", "input_schema": PLACE}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert found.stop_reason == "tool_use"
    (call,) = [block for block in found.content if block.type == "tool_use"]
    assert call.name == "weather"
    jsonschema_rs.validate(PLACE, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    content = [block.model_dump(exclude_none=True) for block in found.content]
    messages: Any = [
        *USER,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    answer = anthropic.messages.create(
        model=MODEL,
        messages=messages,
        max_tokens=5,
        tools=[{"name": "weather", "input_schema": PLACE}],
        tool_choice={"type": "none"},
    )
    assert answer.content


def test_messages_see_pictures(anthropic: Anthropic) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": encoded("green")}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "See"}]
    without = anthropic.messages.count_tokens(model=MODEL, messages=USER)
    messages: Any = [{"role": "user", "content": content}]
    found = anthropic.messages.create(model=MODEL, messages=messages, max_tokens=3)
    read = found.usage.cache_read_input_tokens or 0
    assert found.usage.input_tokens + read > without.input_tokens
    counted = anthropic.messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens == found.usage.input_tokens + read


def test_mistakes_in_messages(anthropic: Anthropic) -> None:
    with pytest.raises(AnthropicBadRequest) as wrong:
        anthropic.messages.create(
            model=MODEL, messages=USER, max_tokens=5, extra_body={"max_token": 1}
        )
    body: Any = wrong.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert "max_token" in body["error"]["message"]
