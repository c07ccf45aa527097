"""Tool calls under a grammar: the markup to the letter, the parameters by their schemas."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cedar.engine.grammar import GrammarFactory
from cedar.errors import RequestError
from cedar.inputs.chat import Api, ChatProtocol, UsageDetails
from cedar.inputs.tokenizer import Tokenizer
from grammar_setting import (
    MARKER,
    accepts,
    constraint,
    factory,
    read_calls,
    spelled,
    takes,
    texts,
    tiny_tokenizer,
    validator,
    walk,
)
from real_tokenizer import rebuild

_NO_MORE = {"additionalProperties": False}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "$defs": {"when": {"anyOf": [{"const": "now"}, {"type": "boolean"}]}},
        "properties": {
            "unit": {"enum": ["c", "f", None]},
            "location": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "options": {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
                **_NO_MORE,
            },
            "day": {"type": "string", "format": "date"},
            "code": {
                "type": ["string", "integer"],
                "pattern": "^[a-c]{2}$",
                "maximum": 3,
                "minimum": 0,
            },
            "when": {"$ref": "#/$defs/when"},
            "mark": {"type": "string", "pattern": "[!?]", "maxLength": 4},
        },
        "required": ["location", "days"],
        **_NO_MORE,
    },
}
# 2^40 ways to the same string.
_WAYS: dict[str, Any] = {
    f"s{k}": {"anyOf": [{"$ref": f"#/$defs/s{k + 1}"}] * 2} for k in range(40)
} | {"s40": {"type": "string"}}
NOW: dict[str, Any] = {"name": "clock::now", "strict": True, "parameters": {}}


def tool(parameters: Any, *, strict: bool = True, name: str = "f") -> dict[str, Any]:
    return {"name": name, "parameters": parameters, "strict": strict}


def call(parameters: str, name: str = "f") -> str:
    return f'<{MARKER} invoke name="{name}">\n{parameters}</{MARKER} invoke>\n'


def given(name: str, value: str, *, text: bool) -> str:
    kind = "true" if text else "false"
    return f'<{MARKER} parameter name="{name}" string="{kind}">{value}</{MARKER} parameter>\n'


def block(*calls: str) -> str:
    return f"\n\n<{MARKER} calls>\n{''.join(calls)}</{MARKER} calls>"


def fit(tools: list[dict[str, Any]], answer: str, *, opened: bool = False, **more: Any) -> bool:
    made = factory().check(constraint("tools", tools, **more), starts_in_tools=opened)
    return takes(made(), answer)


def refusal(parameters: Any) -> str:
    with pytest.raises(RequestError) as caught:
        factory().check(constraint("tools", [tool(parameters)]))
    return str(caught.value)


# --- the block ----------------------------------------------------------------------------------

_EMPTY = call("\n")


def test_required_calls_come_at_once() -> None:
    tools = [tool({})]
    assert fit(tools, block(_EMPTY), required=True)
    assert fit(tools, block(_EMPTY, _EMPTY, _EMPTY), required=True)
    for answer in ("", "Hello", "Hi" + block(_EMPTY), block(), block(_EMPTY) + "\n", _EMPTY):
        assert not fit(tools, answer, required=True), answer


def test_calls_are_left_to_the_model() -> None:
    tools = [tool({})]
    text = "Text with <b>tags</b>,\n\n< and\n\n</more"
    for answer in ("", text, block(_EMPTY), text + block(_EMPTY), "\n\n" + block(_EMPTY, _EMPTY)):
        assert fit(tools, answer), answer
    for answer in (block(), f"x<{MARKER}", block(_EMPTY) + "x", f"x\n<{MARKER} calls>\n"):
        assert not fit(tools, answer), answer


def test_the_prompt_may_have_opened_the_block() -> None:
    tools = [tool({})]
    inside = block(_EMPTY).removeprefix(f"\n\n<{MARKER} calls>\n")
    for required in (False, True):
        assert fit(tools, inside, opened=True, required=required)
        assert not fit(tools, block(_EMPTY), opened=True, required=required)
        assert not fit(tools, "text", opened=True, required=required)


def test_the_most_calls() -> None:
    tools = [tool({})]
    for opened in (False, True):
        for count in range(1, 5):
            answer = block(*[_EMPTY] * count)
            if opened:
                answer = answer.removeprefix(f"\n\n<{MARKER} calls>\n")
            assert fit(tools, answer, opened=opened, required=True, max_calls=3) == (count <= 3)
            assert fit(tools, answer, opened=opened, required=True)


def test_an_answer_without_calls_may_have_a_form() -> None:
    tools = [tool({})]
    for form, good in (
        (constraint("json_object"), '{"a": 1}'),
        (constraint("regex", "ab+"), "abb"),
    ):
        assert fit(tools, good, fallback=form)
        assert fit(tools, block(_EMPTY), fallback=form)
        for answer in ("text", good + block(_EMPTY), ""):
            assert not fit(tools, answer, fallback=form), answer


def test_only_these_tools() -> None:
    tools = [tool({}, name="one"), tool({}, name="space::two")]
    for name, good in (("one", True), ("space::two", True), ("three", False), ("on", False)):
        assert fit(tools, block(call("\n", name)), required=True) == good


def test_control_tokens_are_no_text() -> None:
    controls = sorted(set(tiny_tokenizer().control_ids.values()))
    marker = tiny_tokenizer().control_ids[MARKER]
    controls = [token for token in controls if token not in (1, marker)]
    masks = factory().check(constraint("tools", [WEATHER], required=True))
    rng = random.Random(0)
    for _ in range(5):
        grammar = masks()
        for token in walk(masks(), rng, most=300) or []:
            allowed = grammar.allowed()
            assert allowed is not None
            assert not allowed[controls].any()
            grammar.accept(token)


# --- parameters ---------------------------------------------------------------------------------


def test_any_order_each_once_the_required_ones_always() -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    tools = [tool({"properties": dict.fromkeys("abc", digit), "required": ["b"]})]
    orders = ["b", "ab", "ba", "bc", "cba", "acb"]
    for names in orders:
        parameters = "".join(given(name, "1", text=False) for name in names)
        assert fit(tools, block(call(parameters)), required=True), names
    for names in ("", "a", "ac", "bb", "abca", "d", "bd"):
        parameters = "".join(given(name, "1", text=False) for name in names) or "\n"
        assert not fit(tools, block(call(parameters)), required=True), names


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "string"},
            [("", True), ("a\nb </b> <", True), ("1", True), ("</", True)],
            [('"a"', False), ("1", False)],
        ),
        ({"type": "integer"}, [("-12", False)], [("12", True), ("1.5", False), ("", False)]),
        (
            {"enum": ["a", "b\n", 3, None]},
            [("a", True), ("b\n", True), ("3", False)],
            [("c", True)],
        ),
        ({"const": "a"}, [("a", True)], [("b", True), ('"a"', False), ("null", False)]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, [("é😀", True)], [("a", True)]),
        ({"type": "string", "pattern": "b"}, [("abc", True), ("b\n", True)], [("ac", True)]),
        ({"type": "string", "pattern": "^a|b$"}, [("ax", True), ("xb", True)], [("xax", True)]),
        ({"type": "string", "format": "date"}, [("2024-02-29", True)], [("2023-02-29", True)]),
        (
            {"type": ["string", "null"], "maxLength": 2},
            [("ab", True), ("null", False), ("", True)],
            [("abc", True), ('"ab"', False)],
        ),
        (
            {
                "anyOf": [
                    {"type": "string", "pattern": "^[0-9]+$"},
                    {"type": "array", "maxItems": 1},
                ]
            },
            [("12", True), ("[]", False), ('["x"]', False)],
            [("x", True), ("12", False), ("[1, 2]", False)],
        ),
        (
            {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}]},
            [("ab", True)],
            [("a", True), ("b", True)],
        ),
        (True, [("x", True), ("[1]", False), ("null", False)], [('"x"', False), ("x", False)]),
        (
            {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
            [('{"k": "</a> <"}', False)],
            [("{}", False), ('{"k": "a"}', True)],
        ),
    ],
)
def test_values(schema: Any, good: list[tuple[str, bool]], bad: list[tuple[str, bool]]) -> None:
    tools = [tool({"properties": {"p": schema}})]
    for value, text in good:
        answer = block(call(given("p", value, text=text)))
        assert fit(tools, answer, required=True), value
        _, calls = read_calls(answer)
        assert validator(schema).is_valid(calls[0][1]["p"])
    for value, text in bad:
        assert not fit(tools, block(call(given("p", value, text=text))), required=True), value


def test_a_value_cannot_forge_markup() -> None:
    """The spelling of the marker in ordinary tokens, with which a parser would be led astray."""
    mask = factory().check(constraint("tools", [tool({"properties": {"p": {}}})], required=True))()
    start = block(call("")).split(f"</{MARKER} invoke>")[0]
    for token in spelled(start + f'<{MARKER} parameter name="p" string="true">x</'):
        mask.accept(token)
    tokens = tiny_tokenizer().encode(MARKER, control=False)
    for token in tokens[:-1]:
        mask.accept(token)
    allowed = mask.allowed()
    assert allowed is not None
    assert not allowed[tokens[-1]]


@pytest.mark.parametrize("more", [{"required": True}, {"required": True, "max_calls": 1}, {}])
def test_random_calls(more: dict[str, Any]) -> None:
    masks = factory().check(constraint("tools", [WEATHER, NOW], **more))
    start = "" if more else f"Well.\n\n<{MARKER}"
    judge = validator(WEATHER["parameters"])
    used: set[str] = set()
    for answer in texts(masks, 40, start=start, most=500):
        content, calls = read_calls(answer)
        assert content == ("" if more else "Well.")
        assert 1 <= len(calls) <= more.get("max_calls", 100)
        for name, arguments in calls:
            used |= {name, *arguments}
            if name == "get_weather":
                assert judge.is_valid(arguments), arguments
            else:
                assert (name, arguments) == ("clock::now", {})
    assert used == {"get_weather", "clock::now", *WEATHER["parameters"]["properties"]}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_reply_has_the_calls_that_were_written(choice: str) -> None:
    """From a request through the grammar to the response, by the protocol's own parser."""
    protocol = ChatProtocol(
        tiny_tokenizer(), models=["m"], default_thinking=False, accepts_images=False
    )
    function = {"name": WEATHER["name"], "parameters": WEATHER["parameters"], "strict": True}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }
    request = protocol.read(Api.CHAT, json.dumps(body).encode())
    assert request.constraint is not None
    masks = factory().check(request.constraint, starts_in_tools=request.starts_in_tools)
    start = f"Well.\n\n<{MARKER}" if choice == "auto" else ""
    for answer in texts(masks, 12, start=start, most=400):
        whole = block("").split("</")[0] + answer if request.starts_in_tools else answer
        _, written = read_calls(whole)
        reply = protocol.reply(request, "id", 0)
        reply.begin(1, 0)
        reply.push(answer, spelled(answer))
        reply.finish("stop", UsageDetails(completion_tokens=1))
        message = reply.response()["choices"][0]["message"]
        read = [each["function"] for each in message["tool_calls"]]
        assert [(each["name"], json.loads(each["arguments"])) for each in read] == written


# --- tools that are not strict ------------------------------------------------------------------


def test_what_can_be_enforced_of_a_tool_that_is_not_strict() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "tags": {"type": "array", "uniqueItems": True},  # there is no grammar for it
        },
        "required": ["n"],
    }
    tools = [tool(schema, strict=False)]
    number, tags = given("n", "3", text=False), given("tags", '["a", "a"]', text=False)
    assert fit(tools, block(call(number + tags)), required=True)
    assert not fit(tools, block(call(tags)), required=True)
    assert not fit(tools, block(call(given("n", "x", text=True))), required=True)
    assert "uniqueItems at #/properties/tags/uniqueItems" in refusal(schema)


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}},
        {"anyOf": [{"type": "object", "properties": {"p": {}}}, {"type": "object"}]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {f"p{k}": {} for k in range(61)}},
        {"type": "object", "properties": {'a"b': {}}},
        {"properties": {"any": {"$ref": "#/properties/more"}, "more": {"items": {"$ref": "#"}}}},
        {"properties": {"any": {"$ref": "#/$defs/s0"}, "more": 5}, "$defs": _WAYS},
    ],
)
def test_parameters_that_are_not_listed(parameters: Any) -> None:
    tools = [tool(parameters, strict=False)]
    assert fit(tools, block(call("\n")), required=True)
    one, two = given("any", "x", text=True), given("more", "[1]", text=False)
    assert fit(tools, block(call(one + two)), required=True)
    assert not fit(tools, block(call(given("more", "[1", text=False))), required=True)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "parts"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, ["'f'", "#/properties/a/uniqueItems"]),
        ({"anyOf": [{}]}, ["'f'", "anyOf at #/anyOf", '"properties"']),
        ({"$ref": "#/$defs/x", "$defs": {"x": {}}}, ["$ref at #/$ref"]),
        ({"type": "object", "minProperties": 1}, ["minProperties at #/minProperties"]),
        ({"type": "string"}, ["type at #/type", "object"]),
        ({"properties": {'a"': {}}}, ["'f'", "'a\"'"]),
        ({"properties": {f"p{k}": {} for k in range(61)}}, ["61 parameters", "60"]),
        ({"properties": {"a": {"const": MARKER}}}, ["const at #/properties/a/const", MARKER]),
        ({"properties": {"a": {"pattern": "^(a$|b)"}}}, ["'f', parameter 'a'", "^ and $"]),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, ["parameter 'a'", "#/$defs/"]),
        ({"properties": {"a": {"items": {"$ref": "#"}}}}, ["parameter 'a'", "'#'", "#/$defs/"]),
        ({"properties": {"a": 5}}, ["#/properties/a", "5 is no schema"]),
        ({"properties": {"a": {"$ref": "#/$defs/s0"}}, "$defs": _WAYS}, ["parameter 'a'", "ways"]),
        (
            {"required": ["z"], "additionalProperties": False, "type": "object"},
            ["required at #/required", "'z'"],
        ),
    ],
)
def test_parameters_that_cannot_be_enforced(parameters: Any, parts: list[str]) -> None:
    message = refusal(parameters)
    for part in parts:
        assert part in message


def test_tools_that_are_none() -> None:
    for tools in ([], None, "x"):
        with pytest.raises(RequestError, match="one or more"):
            factory().check(constraint("tools", tools))
    for name in ('a"b', "a\nb", "a<b", "", MARKER):
        with pytest.raises(RequestError):
            factory().check(constraint("tools", [tool({}, name=name)]))


def test_a_parameter_that_may_not_be_given() -> None:
    never = {"type": "string", "const": "ab", "maxLength": 1}
    tools = [tool({"properties": {"a": False, "b": never, "c": {"type": "null"}}})]
    assert fit(tools, block(call(given("c", "null", text=False))), required=True)
    for name in "ab":
        assert not fit(tools, block(call(given(name, "ab", text=True))), required=True)


# --- the released tokenizer ---------------------------------------------------------------------


@cache
def _released(folder: Path) -> tuple[Tokenizer, GrammarFactory]:
    tokenizer = Tokenizer.from_file(rebuild(folder))
    return tokenizer, GrammarFactory(tokenizer, 129_280, 1)


def test_the_released_tokens_of_a_call(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The usual tokens of the protocol's own example, each of them allowed at its place."""
    tokenizer, grammars = _released(tmp_path_factory.getbasetemp() / "released")
    weather = tool(
        {
            "properties": {"location": {"type": "string"}, "n": {"type": "integer"}, "opts": {}},
            "required": ["location"],
        },
        name="get_weather",
    )
    calls = [
        given("location", "Paris", text=True) + given("n", "2", text=False),
        given("location", "Rome", text=True)
        + given("opts", '{"a": [1, 2.5, null, true]}', text=False),
    ]
    answer = "Let me see." + block(*(call(each, "get_weather") for each in calls))
    tokens = spelled(answer, tokenizer)
    assert tokens.count(128825) == 14
    assert accepts(grammars.check(constraint("tools", [weather]))(), tokens)
    assert not accepts(grammars.check(constraint("tools", [weather], required=True))(), tokens)
    mask = grammars.check(constraint("tools", [weather]), after=128822)()
    for token in tokenizer.encode("So</think>"):
        mask.accept(token)
    assert accepts(mask, tokens)
