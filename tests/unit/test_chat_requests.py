import functools
import json
from typing import Any

import pytest

import chat_setting
from cedar.engine.params import SamplingParams
from cedar.errors import DataError
from cedar.inputs.chat import (
    PARAMETERS,
    Api,
    ChatProtocol,
    ChatRequest,
    Constraint,
    Effect,
    ProtocolError,
)
from cedar.inputs.chat.shape import Notes, Shape
from cedar.inputs.tokenizer import Tokenizer
from chat_setting import CHAT_TOOLS, HELLO, SCHEMA, TOOLS, body_of

APIS = list(Api)
# These tests are about requests, so the small tokenizer does.
read = functools.partial(chat_setting.read, kind="bundled")
protocol = functools.partial(chat_setting.protocol, "bundled")
tokenizer = functools.partial(chat_setting.tokenizer, "bundled")
TEXT = {"type": "text", "text": "t"}


def refused(api: Api, **fields: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        read(api, **fields)
    return caught.value


# --- fields ---------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
def test_unknown_fields_are_refused_with_the_nearest_known_one(api: Api) -> None:
    error = refused(api, temprature=1)
    assert (error.status, error.param, error.code) == (400, "temprature", "unknown_parameter")
    assert 'Did you mean "temperature"?' in str(error)


@pytest.mark.parametrize("api", APIS)
def test_needed_fields(api: Api) -> None:
    body = body_of(api)
    for name, parameter in PARAMETERS[api].items():
        if not parameter.required:
            continue
        for value in (None, ...):
            given = {key: one for key, one in body.items() if key != name}
            given |= {} if value is ... else {name: value}
            with pytest.raises(ProtocolError, match=f"{name}: is missing") as caught:
                protocol().read(api, json.dumps(given).encode())
            assert caught.value.param == name
    with pytest.raises(ProtocolError, match="Either input or instructions"):
        protocol().read(Api.RESPONSES, b'{"model": "cedar"}')


def test_an_unknown_model_is_not_found() -> None:
    error = refused(Api.CHAT, model="gpt")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "there is cedar" in str(error)


@pytest.mark.parametrize("api", APIS)
def test_null_is_absence(api: Api) -> None:
    fields = {name: None for name in PARAMETERS[api] if name not in body_of(api)}
    request = read(api, **fields)
    assert request == read(api)
    assert request.ignored == ()


def takes(shape: Shape, value: Any) -> bool:
    try:
        shape.check(value, (), Notes())
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("api", APIS)
def test_fields_without_effect_are_named(api: Api) -> None:
    for name, parameter in PARAMETERS[api].items():
        if parameter.effect is not Effect.IGNORED:
            continue
        values: list[Any] = ["text", {"a": 1}, True, 3]
        taken = [value for value in values if takes(parameter.shape, value)]
        assert taken
        for value in taken:
            assert read(api, **{name: value}).ignored == (name,)
        for value in parameter.quiet:
            assert read(api, **{name: value}).ignored == ()


@pytest.mark.parametrize("api", APIS)
def test_fields_that_are_not_offered(api: Api) -> None:
    for name, parameter in PARAMETERS[api].items():
        if parameter.effect is Effect.REFUSED:
            error = refused(api, **{name: {"some": "value"}})
            assert (error.status, error.param) == (400, name)
            assert error.code == "unsupported_parameter"
            for value in parameter.shape.harmless:  # type: ignore[attr-defined]
                assert read(api, **{name: value}).ignored == ()


def test_unknown_fields_inside_are_named() -> None:
    message = {"role": "user", "content": [TEXT | {"colour": "red"}], "weight": 2}
    assert read(Api.CHAT, messages=[message]).ignored == (
        "messages[].content[].colour",
        "messages[].weight",
    )


@pytest.mark.parametrize(
    ("api", "fields", "param", "problem"),
    [
        (Api.CHAT, {"messages": []}, "messages", "a list of 1 or more items, found 0"),
        (Api.CHAT, {"messages": [5]}, "messages[0]", "expected an object with role"),
        (Api.CHAT, {"messages": [{}]}, "messages[0].role", "is missing"),
        (Api.CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        (
            Api.CHAT,
            {"messages": [{"role": "usr", "content": ""}]},
            "messages[0].role",
            'Did you mean "user"',
        ),
        (
            Api.CHAT,
            {"messages": [{"role": "user", "content": [TEXT, {"type": "text"}]}]},
            "messages[0].content[1].text",
            "is missing",
        ),
        (
            Api.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "is not offered",
        ),
        (
            Api.CHAT,
            {"messages": [{"role": "function", "content": "", "name": "f"}]},
            "messages[0].role",
            "old form",
        ),
        (Api.CHAT, {"temperature": "1"}, "temperature", "expected a number from 0 to 100"),
        (Api.CHAT, {"n": 0}, "n", "expected an integer from 1 to 128"),
        (Api.CHAT, {"stop": ["a", ""]}, "stop[1]", "not empty"),
        (Api.CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "no token id; expected 0 to 2559"),
        (Api.CHAT, {"logit_bias": {"1": 101}}, "logit_bias.1", "from -100 to 100"),
        (Api.CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (Api.CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        (Api.CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "Send one"),
        (Api.CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (Api.CHAT, {"reasoning_effort": 0}, "reasoning_effort", "from 1 to 100"),
        (Api.CHAT, {"reasoning_effort": 101}, "reasoning_effort", "from 1 to 100"),
        (Api.CHAT, {"reasoning_effort": True}, "reasoning_effort", "found true"),
        (Api.CHAT, {"reasoning_effort": "silly"}, "reasoning_effort", '"none", "minimal"'),
        (Api.CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "found the"),
        (
            Api.CHAT,
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is missing",
        ),
        (
            Api.CHAT,
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}, *HELLO]},
            "messages[0].prefix",
            "only the last message",
        ),
        (Api.RESPONSES, {"input": []}, "input", "a list of 1 or more items"),
        (Api.RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].type", "no responses"),
        (Api.RESPONSES, {"background": True}, "background", "is not offered"),
        (Api.RESPONSES, {"previous_response_id": "r"}, "previous_response_id", "whole input"),
        (
            Api.RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
            "is not offered",
        ),
        (
            Api.MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
            "messages.0.content.0.type",
            "is not offered",
        ),
        (Api.MESSAGES, {"max_tokens": 0}, "max_tokens", "from 1"),
        (Api.MESSAGES, {"max_tokens": None}, "max_tokens", "is missing"),
        (Api.MESSAGES, {"mcp_servers": [{}]}, "mcp_servers", "is not offered"),
        (Api.MESSAGES, {"thinking": {"type": "on"}}, "thinking.type", "found the string"),
    ],
)
def test_mistakes_are_told_with_their_path(
    api: Api, fields: dict[str, Any], param: str, problem: str
) -> None:
    error = refused(api, **fields)
    assert (error.status, error.param) == (400, param)
    assert problem in str(error)


@pytest.mark.parametrize(
    ("api", "fields", "param", "problem"),
    [
        (
            Api.CHAT,
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
            None,
            "must be a response to a preceding message",
        ),
        (
            Api.MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "x", "content": "y"}],
                    }
                ]
            },
            "messages.0.content.0",
            "must have a corresponding",
        ),
    ],
)
def test_what_the_recipe_refuses(
    api: Api, fields: dict[str, Any], param: str | None, problem: str
) -> None:
    error = refused(api, **fields)
    assert error.status == 400
    assert problem in str(error)
    assert (error.param or "").startswith(param or "")


def test_count_only_needs_no_limit() -> None:
    body = {key: value for key, value in body_of(Api.MESSAGES).items() if key != "max_tokens"}
    data = json.dumps(body).encode()
    assert protocol().read(Api.MESSAGES, data, count_only=True).tokens == read(Api.MESSAGES).tokens
    with pytest.raises(ProtocolError, match="max_tokens"):
        protocol().read(Api.MESSAGES, data)


# --- reasoning ------------------------------------------------------------------------------

ON = {"type": "enabled"}
OFF = {"type": "disabled"}


@pytest.mark.parametrize(
    ("api", "fields", "expected"),
    [
        (Api.CHAT, {}, None),
        (Api.CHAT, {"thinking": ON}, True),
        (Api.CHAT, {"thinking": OFF}, False),
        (Api.CHAT, {"thinking": {"type": "adaptive"}}, True),
        (Api.CHAT, {"reasoning_effort": "none"}, False),
        (Api.CHAT, {"reasoning_effort": "low"}, True),
        (Api.CHAT, {"reasoning_effort": 1}, True),
        (Api.CHAT, {"thinking": OFF, "reasoning_effort": "high"}, False),
        (Api.CHAT, {"chat_template_kwargs": {"thinking": False}}, False),
        (Api.CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, True),
        (Api.CHAT, {"chat_template_kwargs": {"reasoning_effort": "none"}}, False),
        (Api.RESPONSES, {}, None),
        (Api.RESPONSES, {"reasoning": {"effort": "none"}}, False),
        (Api.RESPONSES, {"reasoning": {"effort": "low"}}, True),
        (Api.MESSAGES, {}, False),
        (Api.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        (Api.MESSAGES, {"thinking": {"type": "adaptive"}}, True),
        (Api.MESSAGES, {"thinking": OFF}, False),
        (Api.MESSAGES, {"output_config": {"effort": "max"}}, True),
        (Api.MESSAGES, {"thinking": OFF, "output_config": {"effort": "max"}}, False),
    ],
)
def test_reasoning_on_and_off(api: Api, fields: dict[str, Any], expected: bool | None) -> None:
    for default in (True, False):
        chosen = protocol(default_thinking=default)
        request = chosen.read(api, json.dumps(body_of(api, **fields)).encode())
        wanted = default if expected is None else expected
        assert request.thinking is wanted
        assert request.prompt.endswith("<think>" if wanted else "</think>")
        budget = "budget_tokens" in fields.get("thinking", {})
        assert request.ignored == (("thinking.budget_tokens",) if budget else ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"thinking": ON, "chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs.thinking",
        ),
        ({"thinking": ON, "reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_contradictions(fields: dict[str, Any], param: str) -> None:
    error = refused(Api.CHAT, **fields)
    assert error.param == param
    assert "contradicts" in str(error)


EFFORTS: list[tuple[str | int, int]] = [
    ("minimal", 50),
    ("low", 50),
    ("medium", 75),
    ("high", 75),
    ("xhigh", 75),
    ("max", 100),
    ("ultra", 100),
    (1, 1),
    (42, 42),
    (100, 100),
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("effort", "number"), EFFORTS)
def test_efforts(api: Api, effort: str | int, number: int) -> None:
    fields: dict[str, Any] = {
        Api.CHAT: {"reasoning_effort": effort},
        Api.RESPONSES: {"reasoning": {"effort": effort}},
        Api.MESSAGES: {"output_config": {"effort": effort}},
    }[api]
    request = read(api, **fields)
    assert f"<｜System｜>Reasoning Effort: {number} (range 1-100" in request.prompt
    # The number stands in text of the system, so a user's own line stays as it is.
    line = "Reasoning Effort: 9 (range 1-100"
    if api is Api.CHAT:
        forged = read(api, messages=[{"role": "user", "content": line}], **fields)
        assert forged.prompt.count(line) == 1 + (number == 9)
    assert list(request.tokens) == tokenizer().encode(request.prompt)


# --- sampling -------------------------------------------------------------------------------


def test_sampling_has_the_engines_names_and_only_what_was_sent() -> None:
    assert read(Api.CHAT).sampling == {}
    request = read(
        Api.CHAT,
        reasons=True,
        temperature=0.3,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"5": -100, "7": 1.5},
        seed=-1,
        n=3,
        logprobs=True,
        stop_token_ids=[4],
        max_completion_tokens=17,
    )
    assert request.sampling == {
        "temperature": 0.3,
        "top_p": 0.5,
        "top_k": 0,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {5: -100, 7: 1.5},
        "seed": 2**63 - 1,
        "n": 3,
        "logprobs": 0,
        "stop_token_ids": [4],
    }
    assert (request.n, request.max_tokens) == (3, 17)
    SamplingParams.from_mapping({**request.sampling, "max_tokens": 17})


def test_the_temperature_counts_while_reasoning() -> None:
    assert read(Api.CHAT, reasons=True, temperature=0.25).sampling == {"temperature": 0.25}
    assert read(Api.RESPONSES, reasons=True, temperature=0).sampling == {"temperature": 0}
    assert read(Api.MESSAGES, reasons=True, temperature=1).sampling == {"temperature": 1}


def test_the_least_top_p_takes_the_likeliest_token() -> None:
    sampling = read(Api.CHAT, top_p=0).sampling
    assert 0 < sampling["top_p"] < 1e-6
    SamplingParams.from_mapping(sampling)


@pytest.mark.parametrize(
    ("api", "name"),
    [
        (Api.CHAT, "max_tokens"),
        (Api.CHAT, "max_completion_tokens"),
        (Api.RESPONSES, "max_output_tokens"),
        (Api.MESSAGES, "max_tokens"),
    ],
)
def test_limits(api: Api, name: str) -> None:
    assert read(api, **{name: 10**9}).max_tokens == 10**9


def test_usage_chunks_are_asked_for() -> None:
    request = read(Api.CHAT, stream=True, stream_options={"include_usage": True})
    assert (request.stream, request.include_usage) == (True, True)
    assert not read(Api.CHAT, stream=True).include_usage


# --- tools ----------------------------------------------------------------------------------


def tool_fields(api: Api, choice: str) -> dict[str, Any]:
    """Two tools, and "auto", "none", "required" or the name of one as the API spells it."""
    fields: dict[str, Any] = {"tools": TOOLS[api]}
    if choice in ("auto", "none", "required"):
        kinds = {"required": "any"}
        fields["tool_choice"] = (
            {"type": kinds.get(choice, choice)} if api is Api.MESSAGES else choice
        )
    else:
        fields["tool_choice"] = {
            Api.CHAT: {"type": "function", "function": {"name": choice}},
            Api.RESPONSES: {"type": "function", "name": choice},
            Api.MESSAGES: {"type": "tool", "name": choice},
        }[api]
    return fields


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("reasons", [True, False])
def test_tool_choices(api: Api, reasons: bool) -> None:
    auto = read(api, reasons=reasons, **tool_fields(api, "auto"))
    assert '"name": "list"' in auto.prompt
    assert auto.constraint is None

    none = read(api, reasons=reasons, **tool_fields(api, "none"))
    assert "## Tools" not in none.prompt
    assert none.constraint is None

    required = read(api, reasons=reasons, **tool_fields(api, "required"))
    opened = required.prompt.endswith("</think>\n\n<｜DSML｜ calls>\n")
    assert opened is required.starts_in_tools is not reasons
    assert required.constraint is not None
    assert required.constraint.kind == "tools"
    assert required.constraint.required
    assert required.constraint.max_calls is None
    assert [tool["name"] for tool in required.constraint.value] == ["find", "list"]
    assert required.constraint.value[0]["parameters"] == SCHEMA

    named = read(api, reasons=reasons, **tool_fields(api, "find"))
    assert named.starts_in_tools is not reasons
    assert named.constraint is not None
    assert named.constraint.required
    assert named.constraint.max_calls == 1
    assert [tool["name"] for tool in named.constraint.value] == ["find"]

    error = refused(api, **tool_fields(api, "fnd"))
    assert 'Did you mean "find"?' in str(error)


@pytest.mark.parametrize("api", [Api.CHAT, Api.RESPONSES])
def test_allowed_tools(api: Api) -> None:
    name: dict[str, Any] = {"name": "find"}
    one = {"type": "function", **({"function": name} if api is Api.CHAT else name)}
    inner = {"mode": "required", "tools": [one]}
    choice = {"type": "allowed_tools"} | ({"allowed_tools": inner} if api is Api.CHAT else inner)
    request = read(api, reasons=False, tools=TOOLS[api], tool_choice=choice)
    assert request.starts_in_tools
    assert '"name": "list"' not in request.prompt
    assert request.constraint is not None
    assert [tool["name"] for tool in request.constraint.value] == ["find"]


@pytest.mark.parametrize("api", APIS)
def test_a_required_call_needs_tools(api: Api) -> None:
    choice = {"type": "any"} if api is Api.MESSAGES else "required"
    assert refused(api, tool_choice=choice).param == "tool_choice"
    assert read(api, tool_choice={"type": "auto"} if api is Api.MESSAGES else "auto")


@pytest.mark.parametrize("api", APIS)
def test_strict_tools_constrain_an_optional_call(api: Api) -> None:
    tools = json.loads(json.dumps(TOOLS[api]))
    (tools[0]["function"] if api is Api.CHAT else tools[0])["strict"] = True
    request = read(api, tools=tools)
    assert request.constraint is not None
    assert not request.constraint.required
    assert [tool["strict"] for tool in request.constraint.value] == [True, False]


@pytest.mark.parametrize(
    ("api", "field"), [(Api.CHAT, "parallel_tool_calls"), (Api.RESPONSES, "parallel_tool_calls")]
)
def test_at_most_one_call(api: Api, field: str) -> None:
    fields = tool_fields(api, "required")
    constraint = read(api, **fields, **{field: False}).constraint
    assert constraint is not None
    assert constraint.max_calls == 1
    constraint = read(api, **fields, **{field: True}).constraint
    assert constraint is not None
    assert constraint.max_calls is None


def test_at_most_one_tool_use() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    constraint = read(Api.MESSAGES, tools=TOOLS[Api.MESSAGES], tool_choice=choice).constraint
    assert constraint is not None
    assert constraint.max_calls == 1


@pytest.mark.parametrize(
    ("tools", "param", "problem"),
    [
        ([{"type": "function"}], "tools[0].function", "is missing"),
        ([{"type": "custom", "custom": {}}], "tools[0].type", "is not offered"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name", "letters"),
        (CHAT_TOOLS + CHAT_TOOLS[:1], "tools[2].function.name", "declared twice"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            "tools[0].function.parameters.type",
            'expected "object"',
        ),
        (
            [{"type": "function", "namespace": "a", "function": {"name": "b::f"}}],
            "tools[0].function.name",
            "another namespace",
        ),
        (
            [{"type": "function", "function": {"name": "a::b::f"}}],
            "tools[0].function.name",
            ":: twice",
        ),
    ],
)
def test_mistakes_in_tools(tools: list[Any], param: str, problem: str) -> None:
    error = refused(Api.CHAT, tools=tools)
    assert error.param == param
    assert problem in str(error)


def test_empty_parameters_are_an_object() -> None:
    for parameters in ({}, {"properties": {"a": {"type": "string"}}}):
        function = {"name": "f", "parameters": parameters, "strict": True}
        request = read(Api.CHAT, tools=[{"type": "function", "function": function}])
        assert request.constraint is not None
        assert request.constraint.value[0]["parameters"]["type"] == "object"


def test_web_search_is_dropped_and_named() -> None:
    request = read(Api.RESPONSES, tools=[*TOOLS[Api.RESPONSES], {"type": "web_search"}])
    assert request.ignored == ("tools[].web_search",)
    assert refused(Api.RESPONSES, tools=[{"type": "mcp"}]).param == "tools[0].type"
    blocks = [{"type": "web_search_20250305", "name": "web_search"}]
    assert refused(Api.MESSAGES, tools=blocks).param == "tools.0.type"


def test_namespaces_are_one_name_in_the_markup() -> None:
    tools = [
        {"type": "function", "namespace": space, "function": {"name": "f"}} for space in ("a", "b")
    ]
    named = {"type": "function", "function": {"name": "f", "namespace": "b"}}
    request = read(Api.CHAT, reasons=False, tools=tools, tool_choice=named)
    assert request.constraint is not None
    assert [tool["name"] for tool in request.constraint.value] == ["b::f"]
    assert '{"name": "b::f"' in request.prompt
    call = {"id": "1", "type": "function", "namespace": "a", "function": {"name": "f"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    assert '<｜DSML｜ invoke name="a::f">' in read(Api.CHAT, messages=messages, tools=tools).prompt


def test_apply_patch() -> None:
    tools = [{"type": "custom", "name": "apply_patch"}]
    request = read(
        Api.RESPONSES,
        reasons=False,
        tools=tools,
        tool_choice={"type": "custom", "name": "apply_patch"},
    )
    assert request.starts_in_tools
    assert request.constraint is not None
    assert request.constraint.value[0]["parameters"]["required"] == ["input"]


# --- formats --------------------------------------------------------------------------------


def format_fields(api: Api, kind: str) -> dict[str, Any]:
    schema = {"type": "array"}
    if api is Api.MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    inner: dict[str, Any] = {"name": "n", "schema": schema, "strict": True}
    if api is Api.RESPONSES:
        return {"text": {"format": {"type": kind, **(inner if kind == "json_schema" else {})}}}
    extra = {"json_schema": inner} if kind == "json_schema" else {}
    return {"response_format": {"type": kind, **extra}}


@pytest.mark.parametrize("api", APIS)
def test_formats(api: Api) -> None:
    request = read(api, **format_fields(api, "json_schema"))
    assert request.constraint == Constraint(kind="json_schema", value={"type": "array"})
    assert 'schema to reply:\n{"type": "array"}<｜User｜>' in request.prompt
    if api is not Api.MESSAGES:
        request = read(api, **format_fields(api, "json_object"))
        assert request.constraint == Constraint(kind="json_object")
        assert read(api, **format_fields(api, "text")).constraint is None
    request = read(api, **format_fields(api, "json_schema"), **tool_fields(api, "auto"))
    assert request.constraint is not None
    assert request.constraint.kind == "tools"
    assert not request.constraint.required
    assert request.constraint.fallback == Constraint(kind="json_schema", value={"type": "array"})
    request = read(api, **format_fields(api, "json_schema"), **tool_fields(api, "required"))
    assert request.constraint is not None
    assert request.constraint.fallback is None


def test_regular_expressions() -> None:
    request = read(Api.CHAT, response_format={"type": "regex", "regex": "a+"})
    assert request.constraint == Constraint(kind="regex", value="a+")


def test_a_continued_message_has_no_format() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "{"}]
    error = refused(Api.MESSAGES, messages=messages, **format_fields(Api.MESSAGES, "json_schema"))
    assert error.param == "messages.1"


# --- images ---------------------------------------------------------------------------------

DATA = "data:image/png;base64,AAAA"


def picture(api: Api, url: str) -> dict[str, Any]:
    if api is Api.CHAT:
        return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    if api is Api.RESPONSES:
        return {"type": "input_image", "image_url": url, "detail": "low"}
    if url == DATA:
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        return {"type": "image", "source": source}
    return {"type": "image", "source": {"type": "url", "url": url}}


def pictures(api: Api, *urls: str) -> dict[str, Any]:
    field = "input" if api is Api.RESPONSES else "messages"
    content = [picture(api, url) for url in urls]
    return {field: [{"role": "user", "content": content}]}


@pytest.mark.parametrize("kind", ["real", "bundled"])
@pytest.mark.parametrize("api", APIS)
def test_images(api: Api, kind: str) -> None:
    request = read(api, kind=kind, **pictures(api, DATA, "https://example.com/a.png"))
    first, second = request.images
    assert (first.kind, first.data_url, first.url) == ("data_url", DATA, None)
    assert (second.kind, second.url) == ("url", "https://example.com/a.png")
    number = chat_setting.tokenizer(kind).control_ids["<｜deepseek_image｜>"]
    assert request.tokens.count(number) == 2
    assert "image.invalid" not in request.prompt
    assert {
        Api.CHAT: "messages[0].content[0].image_url.url",
        Api.RESPONSES: "input[0].content[0].image_url",
        Api.MESSAGES: "messages.0.content.0.source.data",
    }[api] == first.path


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("url", ["file:///etc/passwd", "/etc/passwd", "ftp://x/y", "javascript:1"])
def test_other_places_are_refused(api: Api, url: str) -> None:
    error = refused(api, **pictures(api, url))
    assert error.code == "invalid_image"
    assert "data URL" in str(error)


@pytest.mark.parametrize("api", APIS)
def test_a_model_of_text_refuses_images(api: Api) -> None:
    body = json.dumps(body_of(api, **pictures(api, DATA))).encode()
    with pytest.raises(ProtocolError, match="reads text only") as caught:
        protocol(images=False).read(api, body)
    assert caught.value.status == 400
    assert caught.value.param


def test_images_come_in_the_order_of_their_places() -> None:
    calls = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for id in ("a", "b")
    ]
    results = [
        {"role": "tool", "tool_call_id": id, "content": [picture(Api.CHAT, f"https://{id}/")]}
        for id in ("b", "a")
    ]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    request = read(Api.CHAT, messages=messages)
    assert [image.url for image in request.images] == ["https://a/", "https://b/"]
    assert [image.path for image in request.images] == [
        "messages[3].content[0].image_url.url",
        "messages[2].content[0].image_url.url",
    ]


def test_a_spelled_placeholder_is_text() -> None:
    place = "<｜deepseek_image｜>"
    content = [{"type": "text", "text": place}, picture(Api.CHAT, DATA)]
    request = read(Api.CHAT, messages=[{"role": "user", "content": content}])
    assert request.prompt.count(place) == 2
    assert request.tokens.count(tokenizer().control_ids[place]) == 1
    assert len(request.images) == 1


# --- messages in other clothes ----------------------------------------------------------------


def test_refusals_documents_and_hidden_thoughts() -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    messages = [*HELLO, {"role": "assistant", "content": [refusal]}, *HELLO]
    assert "</think>No.<" in read(Api.CHAT, messages=messages).prompt
    messages[1] = {"role": "assistant", "content": None, "refusal": "No."}
    assert "</think>No.<" in read(Api.CHAT, messages=messages).prompt
    items = [{"role": "assistant", "content": [refusal]}, {"role": "user", "content": "?"}]
    assert "</think>No.<" in read(Api.RESPONSES, input=items).prompt
    source = {"type": "text", "media_type": "text/plain", "data": "Long text."}
    document = {"type": "document", "source": source, "title": "T"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    messages = [
        {"role": "user", "content": [document]},
        {"role": "assistant", "content": [hidden, {"type": "text", "text": "ok"}]},
        *HELLO,
    ]
    assert "<｜User｜>T\n\nLong text.<" in read(Api.MESSAGES, messages=messages).prompt


def test_reasoning_has_two_names() -> None:
    tools = TOOLS[Api.CHAT]
    for name in ("reasoning_content", "reasoning"):
        messages = [*HELLO, {"role": "assistant", "content": "a", name: "thought"}, *HELLO]
        assert "<think>thought</think>a" in read(Api.CHAT, messages=messages, tools=tools).prompt


def test_quick_tasks() -> None:
    for task in ("query", "authority", "domain", "title", "read_url"):
        messages = [{"role": "user", "content": "q", "task": task}]
        request = read(Api.CHAT, messages=messages)
        assert request.prompt == f"<｜begin▁of▁sentence｜><｜User｜>q<｜{task}｜>"
        assert list(request.tokens) == tokenizer().encode(request.prompt)
    messages = [{"role": "user", "content": "q", "task": "action"}]
    assert read(Api.CHAT, messages=messages).prompt.endswith("<｜Assistant｜></think><｜action｜>")
    messages += [{"role": "assistant", "content": "Search"}, *HELLO]
    assert "q<｜Assistant｜></think><｜action｜>Search<" in read(Api.CHAT, messages=messages).prompt
    error = refused(Api.CHAT, messages=[*messages[:1], *HELLO])
    assert error.param == "messages[0].task"
    assert "Turn it off" in str(refused(Api.CHAT, reasons=True, messages=messages[:1]))


# --- tokenizers -----------------------------------------------------------------------------


def test_a_tokenizer_without_control_tokens_is_refused() -> None:
    fields = json.loads(tokenizer().raw.to_str())
    fields["added_tokens"] = [
        token for token in fields["added_tokens"] if token["content"] != "<｜User｜>"
    ]
    with pytest.raises(DataError, match="has no control tokens <｜User｜>"):
        ChatProtocol(
            Tokenizer(json.dumps(fields)), models=["m"], default_thinking=True, accepts_images=False
        )


def test_a_missing_optional_token_is_told_when_it_is_needed() -> None:
    fields = json.loads(tokenizer().raw.to_str())
    fields["added_tokens"] = [
        token for token in fields["added_tokens"] if token["content"] != "<｜latest_reminder｜>"
    ]
    chosen = ChatProtocol(
        Tokenizer(json.dumps(fields)), models=["cedar"], default_thinking=True, accepts_images=False
    )
    body = body_of(Api.CHAT, messages=[{"role": "latest_reminder", "content": "x"}, *HELLO])
    with pytest.raises(ProtocolError, match="needs the control token <｜latest_reminder｜>"):
        chosen.read(Api.CHAT, json.dumps(body).encode())
    assert chosen.read(Api.CHAT, json.dumps(body_of(Api.CHAT)).encode())


def test_the_other_spelling_of_the_placeholder() -> None:
    content = tokenizer().raw.to_str().replace("<｜deepseek_image｜>", "<｜image｜>")
    other = Tokenizer(content)
    chosen = ChatProtocol(other, models=["cedar"], default_thinking=True, accepts_images=True)
    body = body_of(Api.CHAT, **pictures(Api.CHAT, DATA))
    request = chosen.read(Api.CHAT, json.dumps(body).encode())
    assert request.tokens.count(other.control_ids["<｜image｜>"]) == 1


def test_a_prompt_beyond_all_room_is_refused_before_it_is_tokenised() -> None:
    class NoEncoder(Tokenizer):
        def encode(self, text: str, *, control: bool = True) -> list[int]:
            raise AssertionError("it was tokenised")

    def ask(size: int, kind: type[Tokenizer]) -> ChatRequest:
        protocol = ChatProtocol(
            kind(chat_setting.tokenizer("tiny").raw.to_str()),
            models=[chat_setting.MODEL],
            default_thinking=False,
            accepts_images=False,
            max_prompt_bytes=1000,
        )
        messages = [{"role": "user", "content": "é" * size}]
        return protocol.read(Api.CHAT, json.dumps(body_of(Api.CHAT, messages=messages)).encode())

    with pytest.raises(ProtocolError, match="1000 bytes at most") as raised:
        ask(500, NoEncoder)
    assert raised.value.code == "context_length_exceeded"
    assert ask(400, Tokenizer).tokens
    with pytest.raises(AssertionError, match="tokenised"):
        ask(400, NoEncoder)  # negative control


@pytest.mark.parametrize("content", ["", "x"])
def test_an_effort_with_only_a_system_message(content: str) -> None:
    messages = [{"role": "system", "content": content}]
    body = body_of(Api.CHAT, messages=messages, reasoning_effort=33)
    prompt = chat_setting.protocol().read(Api.CHAT, json.dumps(body).encode()).prompt
    assert ("Reasoning Effort: 33 " in prompt) == bool(content)
