import json
from typing import Any

import jsonschema_rs
import pytest

from cedar.errors import RequestError
from cedar.inputs.chat import Api, ProtocolError
from cedar.inputs.chat.body import MAX_DEPTH, parse_arguments, read_body
from cedar.inputs.chat.record import Either, Items, Object, Record, Refused, Tagged
from cedar.inputs.chat.shape import Anything, Choice, Flag, Integer, Notes, Number, Shape, Text
from chat_setting import body_of, protocol

REFUSED: list[tuple[bytes, str]] = [
    (b"", "is not JSON"),
    (b"{", "is not JSON"),
    (b"[]", "is a JSON list; expected an object"),
    (b"null", "is a JSON null"),
    (b'"text"', "is a JSON string"),
    (b"1", "is a JSON number"),
    (b"\xff\xfe", "is not UTF-8: byte 0 is 0xff"),
    ('{"a": "ä"}'.encode("latin-1"), "is not UTF-8: byte 7"),
    ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
    (b"\xef\xbb\xbf{}", "is not JSON"),
    (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    (b'{"x": [{"a": 1, "a": 1}]}', "the key 'a' occurs twice"),
    (b'{"a": NaN}', "NaN is not a JSON number"),
    (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
    (b'{"a": 1e400}', "1e400 is too large"),
    (b'{"a": 18446744073709551616}', "has over 64 bits"),
    (b'{"a": ' + b"9" * 10_000 + b"}", "has over 64 bits"),
    (b'{"a": "\\ud800"}', r"lone surrogate \\ud800"),
    (b'{"\\udfff": 1}', r"lone surrogate \\udfff"),
    (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "more than 100 levels"),
    (b'{"a": ' + b'{"b":' * 101 + b"1" + b"}" * 101 + b"}", "more than 100 levels"),
    (b"[" * 1_000_000, "more than 100 levels"),
    (b'{"a":' * 1_000_000, "more than 100 levels"),
    (b'{"a": "\x01"}', "is not JSON"),
]


@pytest.mark.parametrize(("body", "problem"), REFUSED)
def test_unclear_json_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem) as caught:
        read_body(body)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"
    assert len(str(caught.value)) < 300


def test_a_protocol_error_is_a_request_error() -> None:
    assert issubclass(ProtocolError, RequestError)


def test_clear_json_is_read() -> None:
    body: dict[str, Any] = {
        "a": [1, 2.5, None, True, "ä😀\u0000"],
        "b": {"c": 2**64 - 1, "d": -(2**63)},
    }
    assert read_body(json.dumps(body).encode()) == body
    assert read_body(json.dumps(body, ensure_ascii=False).encode()) == body
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert read_body(json.dumps({"a": deep}).encode()) == {"a": deep}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        (' {"a": 1}\n', {"a": 1}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        ("", {}),
        ("  ", {}),
        ("not json", None),
        ("[1]", None),
        (json.dumps(json.dumps('{"a": 1}')), None),
        ('{"a": 1e999}', None),
        ('{"a": "\\ud800"}', None),
        ("[" * 100_000, None),
    ],
)
def test_arguments(text: str, expected: Any) -> None:
    assert parse_arguments(text) == expected


# --- shapes ---------------------------------------------------------------------------------

POINT = Record({"x": Integer(0, 9), "note": Text()}, required=("x",))
KIND = Tagged(
    "type",
    {"point": POINT, "flag": Record({"on": Flag()})},
    default="point",
    refused={"line": "is not offered."},
)
CASES: list[tuple[Shape, Any, Any]] = [
    (Text(), "", ""),
    (Text(1), "", "expected a string that is not empty, found the string ''"),
    (Text(), 1, "expected a string, found 1"),
    (Text(), None, "found null"),
    (Choice(("red", "green")), "green", "green"),
    (
        Choice(("red", "green")),
        "gren",
        'expected "red" or "green", found the string \'gren\'. Did ',
    ),
    (Flag(), True, True),
    (Flag(), 1, "expected true or false, found 1"),
    (Integer(0, 9), 9, 9),
    (Integer(0, 9), 9.0, 9),
    (Integer(0, 9), 10, "expected an integer from 0 to 9, found 10"),
    (Integer(0, 9), 1.5, "found 1.5"),
    (Integer(0, 9), True, "found true"),
    (Integer(1), 0, "an integer of 1 or more"),
    (Number(0, 1), 1, 1.0),
    (Number(0, 1), 1.01, "expected a number from 0 to 1, found 1.01"),
    (Number(0, 1, above=True), 0, "expected a number above 0 and at most 1, found 0"),
    (Number(0, 1), "1", "found the string '1'"),
    (Object(), {"a": 1}, {"a": 1}),
    (Object(Integer()), {"a": "b"}, "a: expected an integer, found the string 'b'"),
    (Object(), [], "expected an object, found a list"),
    (Items(Integer(), 1, 2), [1, 2], [1, 2]),
    (Items(Integer(), 1, 2), [], "expected a list of 1 to 2 items, found 0"),
    (Items(Integer()), [1, "a"], r"\[1\]: expected an integer"),
    (Either((Text(), Items(Text()))), ["a"], ["a"]),
    (Either((Text(), Items(Text()))), {}, "expected a string or a list, found an object"),
    (POINT, {"x": 1, "note": None}, {"x": 1}),
    (POINT, {"note": "n"}, "x: is missing; expected an integer from 0 to 9"),
    (POINT, {"x": None}, "x: is missing"),
    (POINT, {"x": 1, "other": 2}, {"x": 1}),
    (Record({"colour": Text()}, closed=True), {"color": ""}, 'Did you mean "colour"'),
    (KIND, {"type": "flag", "on": True}, {"type": "flag", "on": True}),
    (KIND, {"x": 3}, {"type": "point", "x": 3}),
    (KIND, {"type": "line"}, 'type: "line" is not offered'),
    (KIND, {"type": "plane"}, 'expected "point" or "flag", found the string \'plane\''),
    (KIND, {"type": 7}, "found 7"),
    (Refused("is not offered.", (1,)), 1, 1),
    (Refused("is not offered.", (1,)), True, "is not offered"),
    (Anything(), [{}], [{}]),
]


@pytest.mark.parametrize(("shape", "value", "expected"), CASES)
def test_shapes(shape: Shape, value: Any, expected: Any) -> None:
    if isinstance(expected, str) and expected != value:
        with pytest.raises(ProtocolError, match=expected):
            shape.check(value, (), Notes())
    else:
        found = shape.check(value, (), Notes())
        assert found == expected
        assert type(found) is type(expected)


def test_paths_are_spelled_as_the_api_does() -> None:
    path = ("messages", 0, "content", 1)
    assert Notes(Api.CHAT).spell(path) == "messages[0].content[1]"
    assert Notes(Api.MESSAGES).spell(path) == "messages.0.content.1"


def test_ignored_names_fit_into_a_header() -> None:
    notes = Notes(Api.CHAT)
    shape = Items(Record({}))
    shape.check([{"a": 1}, {"a": 2, "é\r\nX: y,": 1, "none": None, "off": False}], ("m",), notes)
    assert notes.ignored == ["m[].a", "m[].???X: y?"]
    for number in range(1000):
        notes.ignore((str(number),))
    assert len(notes.ignored) == 50


def test_a_long_value_is_not_repeated_in_errors() -> None:
    with pytest.raises(ProtocolError) as caught:
        Choice(("a",)).check("x" * 10**6, (), Notes())
    assert len(str(caught.value)) < 200


# --- the schemas say the same as the checks ---------------------------------------------------


@pytest.mark.parametrize(("shape", "value", "expected"), CASES)
def test_the_schema_agrees_with_the_check(shape: Shape, value: Any, expected: Any) -> None:
    fits = jsonschema_rs.validator_for(shape.schema()).is_valid(value)
    try:
        shape.check(value, (), Notes())
        taken = True
    except ProtocolError:
        taken = False
    assert fits == taken


@pytest.mark.parametrize("api", list(Api))
def test_the_body_schemas_take_the_least_body(api: Api) -> None:
    validator = jsonschema_rs.validator_for(protocol().schema(api))
    assert validator.is_valid(body_of(api))
    assert not validator.is_valid(body_of(api) | {"temprature": 1})
    assert not validator.is_valid({})


@pytest.mark.parametrize(
    "body", [b"[" * 3_000_000, b'{"a":' * 500_000, b'{"a":' + b"[[],[]," * 200_000]
)
def test_large_nesting_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_body(body)
