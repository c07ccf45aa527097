"""Whatever arrives as a body, the answer is a request or a `ProtocolError`."""

import copy
import json
import random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cedar.engine.params import SamplingParams
from cedar.inputs.chat import PARAMETERS, Api, ChatRequest, ProtocolError
from chat_setting import CHAT_TOOLS, HELLO, TOOLS, body_of, play, protocol, spell, tokenizer

APIS = list(Api)
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
RICH: dict[Api, dict[str, Any]] = {
    Api.CHAT: body_of(
        Api.CHAT,
        messages=[
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "text", "text": "t"}, PICTURE]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "result"},
            {"role": "latest_reminder", "content": "now"},
            *HELLO,
        ],
        tools=CHAT_TOOLS,
        tool_choice="auto",
        response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        reasoning_effort=12,
        chat_template_kwargs={"thinking": True},
        stop=["a"],
        n=2,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"3": 1},
        seed=3,
    ),
    Api.RESPONSES: body_of(
        Api.RESPONSES,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        ],
        instructions="I",
        tools=TOOLS[Api.RESPONSES],
        tool_choice={"type": "function", "name": "find"},
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "schema": {}}},
        include=["message.output_text.logprobs"],
        metadata={"a": "b"},
    ),
    Api.MESSAGES: body_of(
        Api.MESSAGES,
        system=[{"type": "text", "text": "S"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "h", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "find", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [
                            {"type": "text", "text": "t"},
                            {"type": "image", "source": {"type": "url", "url": "https://x/"}},
                        ],
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        tools=TOOLS[Api.MESSAGES],
        tool_choice={"type": "any"},
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        stop_sequences=["x"],
    ),
}
SPECIAL = [
    *(None, True, False, 0, -1, 1.5, 1e300, 2**63, -(2**63), "", " ", "\u0000", "\ufffe", "😀"),
    *("auto", "none", "required", "user", "assistant", "system", "tool", "function", "type"),
    *("<｜User｜>", "</think>", "::", "a::b::c", "{", '{"a":', "http://image.invalid/0"),
    *("data:", "data:image/png;base64,", "image_url", "json_schema", "custom", [], {}, [[]]),
    *([{}], {"type": None}, {"type": "text"}, {"": ""}, {"role": "user"}, [None], "1" * 5000),
]
CONTROLS = sorted(tokenizer("bundled").control_ids)
MARKS = [f"<｜{end}{kind}｜>" for kind in ("ref", "box", "point", "polygon") for end in ("", "/")]
SCALARS = st.sampled_from(SPECIAL) | st.text(max_size=5) | st.floats(allow_nan=False)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def attempt(api: Api, body: bytes) -> ChatRequest | None:
    error: ProtocolError | None = None
    try:
        request = protocol("bundled").read(api, body)
    except ProtocolError as refusal:
        error = refusal
    if error is not None:
        assert 400 <= error.status < 500
        assert 0 < len(str(error)) < 20_000
        return None
    # What is accepted must go through the rest, too.
    SamplingParams.from_mapping(request.sampling)
    for name in request.ignored:
        assert name.isascii()
        assert name.isprintable()
    played = play(request, [spell("a</think>b", "bundled")], kind="bundled")
    assert played.response
    return request


@settings(max_examples=200, deadline=None)
@given(api=st.sampled_from(APIS), body=st.binary(max_size=200))
def test_any_bytes(api: Api, body: bytes) -> None:
    attempt(api, body)


@settings(max_examples=200, deadline=None)
@given(api=st.sampled_from(APIS), value=VALUES)
def test_any_json(api: Api, value: Any) -> None:
    attempt(api, json.dumps(value).encode())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(api=st.sampled_from(APIS), data=st.data())
def test_any_value_of_a_known_field(api: Api, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(PARAMETERS[api])))
    attempt(api, json.dumps(body_of(api) | {name: data.draw(VALUES)}).encode())


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside."""
    found = [path] if path else []
    items = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        items = value.items()  # type: ignore[assignment]
    for key, one in items:
        found += places(one, (*path, key))
    return found


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at a path; ... removes it."""
    result = copy.deepcopy(body)
    inner: Any = result
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


@pytest.mark.parametrize("api", APIS)
def test_rich_bodies_are_taken(api: Api) -> None:
    assert attempt(api, json.dumps(RICH[api]).encode()) is not None


@pytest.mark.parametrize("api", APIS)
def test_every_place_with_special_values(api: Api) -> None:
    """Each place of a rich body without its value, and with a few others."""
    validator = jsonschema_rs.validator_for(protocol("bundled").schema(api))
    draw = random.Random(1)
    taken = total = 0
    for path in places(RICH[api]):
        for value in (..., *draw.sample(SPECIAL, 6)):
            body = changed(RICH[api], path, value)
            request = attempt(api, json.dumps(body).encode())
            total += 1
            taken += request is not None
            # The schema never promises less than what is taken.
            assert request is None or validator.is_valid(body), (path, value)
    assert 0 < taken < total


@settings(max_examples=200, deadline=None)
@given(
    api=st.sampled_from(APIS),
    data=st.data(),
)
def test_several_changes_at_once(api: Api, data: st.DataObject) -> None:
    body = RICH[api]
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(places(body)))
        body = changed(body, path, data.draw(VALUES))
        if not body:
            break
    attempt(api, json.dumps(body).encode())


@settings(max_examples=100, deadline=None)
@given(api=st.sampled_from(APIS), data=st.data())
def test_damaged_bytes(api: Api, data: st.DataObject) -> None:
    body = bytearray(json.dumps(RICH[api], ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    attempt(api, bytes(body))


def tokens_of(role: str, text: str) -> list[int]:
    messages = [{"role": role, "content": text}, *HELLO]
    body = body_of(Api.CHAT, messages=messages, thinking={"type": "disabled"})
    request = attempt(Api.CHAT, json.dumps(body).encode())
    assert request is not None
    return list(request.tokens)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(min_size=1) | st.lists(st.sampled_from(CONTROLS), min_size=1).map("".join),
    role=st.sampled_from(["user", "system", "assistant", "latest_reminder"]),
)
def test_no_text_makes_control_tokens(text: str, role: str) -> None:
    """Whatever it says, a message has the control tokens of its role.

    Only answers of the model may have marks of places in images, which it wrote itself.
    """
    controls = set(tokenizer("bundled").control_ids.values())
    if role == "assistant":
        controls -= {tokenizer("bundled").control_ids[name] for name in MARKS}
    plain = [token for token in tokens_of(role, "x") if token in controls]
    assert [token for token in tokens_of(role, text) if token in controls] == plain
