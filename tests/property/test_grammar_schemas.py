"""What a schema says is enforced or refused: random documents under grammars of all keywords."""

import contextlib
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from cedar.engine.grammar.compiler import GrammarCompiler
from cedar.engine.grammar.formats import FORMATS
from cedar.engine.grammar.keywords import ANNOTATIONS
from cedar.engine.params import SamplingParams
from cedar.engine.sampler import Sampler
from cedar.errors import RequestError
from grammar_cases import ENFORCED, IDENTIFYING, KEYWORDS, REFUSED, TOGETHER, schemas
from grammar_setting import (
    EOS,
    VOCAB,
    constraint,
    factory,
    fits,
    texts,
    tiny_tokenizer,
    validator,
)

_NULL = {"type": "null"}
_BOOLEAN = {"type": "boolean"}
# Keywords by which others find schemas.
_NEEDED = {"$anchor", "$defs", "$id", "$schema", "definitions", "id"}


def check_documents(schema: dict[str, Any], count: int, *, seed: int = 0) -> int:
    """Random documents under a grammar are valid; returns how many there were."""
    masks = factory().check(constraint("json_schema", schema))
    judge = validator(schema)
    found = 0
    for text in texts(masks, count, seed=seed, most=300):
        document = json.loads(text)
        assert judge.is_valid(document), (schema, text)
        found += 1
    return found


# --- every keyword ------------------------------------------------------------------------------


def test_each_keyword_is_enforced_refused_or_says_nothing() -> None:
    assert set(KEYWORDS) <= {*ENFORCED, *REFUSED, *ANNOTATIONS, *_NEEDED}


@pytest.mark.parametrize("keyword", ENFORCED)
def test_an_enforced_keyword(keyword: str) -> None:
    schema, good, bad = ENFORCED[keyword]
    _compare(schema, good, bad)
    without = {key: value for key, value in schema.items() if key != keyword}
    for document in bad if keyword in schema else ():  # shows that it is this keyword
        assert fits(without, json.dumps(document, ensure_ascii=False))
    assert check_documents(schema, 12) > 2


@pytest.mark.parametrize(("schema", "good", "bad"), IDENTIFYING)
def test_keywords_that_name_things(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    _compare(schema, good, bad)


def _compare(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    judge = validator(schema)
    for document in good:
        assert judge.is_valid(document), document
        assert fits(schema, json.dumps(document, ensure_ascii=False)), document
    for document in bad:
        assert not judge.is_valid(document), document
        assert not fits(schema, json.dumps(document, ensure_ascii=False)), document


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("kind", ["object", "array", "null"])
def test_a_refused_keyword(keyword: str, kind: str) -> None:
    """Also beside types that it says nothing of, and deep inside."""
    schema = {"type": kind, keyword: REFUSED[keyword]}
    for each in (schema, {"type": "object", "properties": {"a": {"items": schema}}}):
        with pytest.raises(RequestError, match="cannot be enforced") as caught:
            factory().check(constraint("json_schema", each))
        assert f"{keyword} at #/" in str(caught.value)


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_an_annotation(keyword: str) -> None:
    assert fits({"type": "null", keyword: "anything"}, "null")


# --- together -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOGETHER)
def test_documents_are_valid(name: str) -> None:
    assert check_documents(TOGETHER[name], 15) > 2


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_valid(name: str) -> None:
    assert check_documents({"type": "string", "format": name}, 25) > 2


def _text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (_text(format="date"), '"2023-02-29"'),
        (_text(format="date-time"), '"1999-01-01T12:00:60Z"'),
        (_text(format="time"), '"12:00:60Z"'),
        (_text(format="email"), f'"x@{"a" * 64}"'),
        (_text(format="hostname"), '"ab--c"'),
        (_text(pattern='^[^"]$'), '"\\""'),
        (_text(pattern="^[a-z&&b]$"), '"c"'),
        ({"const": 2**60 + 1}, str(2**60)),
        ({"const": 1.9100000000000001}, "1.9100000000000001"),
        ({"type": "object", "minProperties": 2}, '{"a": 1, "a": 1}'),
        (
            {"type": "object", "properties": {"a": _NULL}, "additionalProperties": _BOOLEAN},
            '{"\\u0061": true}',
        ),
        ({"type": "object", "patternProperties": {"^a": _NULL}}, '{"\\u0061": true}'),
    ],
)
def test_the_library_alone_takes_less_care(schema: dict[str, Any], text: str) -> None:
    """Shows that the tests above can fail: what it takes, or refuses, is not always right."""
    compiler = factory()._compiler
    assert isinstance(compiler, GrammarCompiler)
    grammar = LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}")
    matcher = LLMatcher(compiler.vocabulary.library, grammar)
    tokens = tiny_tokenizer().encode(text, control=False)
    taken = matcher.try_consume_tokens(tokens) == len(tokens)
    assert taken != validator(schema).is_valid(json.loads(text))
    with contextlib.suppress(RequestError):  # some are refused as a whole
        assert fits(schema, text) == validator(schema).is_valid(json.loads(text))


def test_a_key_has_one_spelling() -> None:
    schema = {"type": "object", "properties": {"é": _NULL}, "additionalProperties": _BOOLEAN}
    assert fits(schema, '{"é": null, "x": true}')
    for text in ('{"\\u00e9": true}', '{"é": true}', '{"é": null, "é": true}'):
        assert not fits(schema, text)


# --- random schemas -----------------------------------------------------------------------------


@given(schema=schemas, seed=st.integers(0, 1000))
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_random_schemas(schema: dict[str, Any], seed: int) -> None:
    try:
        factory().check(constraint("json_schema", schema))
    except RequestError:  # no document fits, or it is more than can be enforced
        assume(False)
    check_documents(schema, 4, seed=seed)


# --- random logits ------------------------------------------------------------------------------


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_random_logits_give_valid_documents() -> None:
    """Ten thousand tokens of no model at all."""
    schema = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
                "n": {"type": "integer", "minimum": -5, "maximum": 500},
                "note": {"type": ["string", "null"], "maxLength": 10},
            },
            "required": ["id", "n"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 5,
    }
    masks = factory().check(constraint("json_schema", schema))
    judge = validator(schema)
    drawn = documents = 0
    while drawn < 10_000:
        sampler = Sampler(SamplingParams(seed=drawn), VOCAB, mask=masks())
        while not sampler.history or sampler.history[-1] != EOS:
            sampler.choose(_logits(drawn))
            drawn += 1
        document = json.loads(tiny_tokenizer().decode(sampler.history[:-1]))
        assert judge.is_valid(document), document
        documents += 1
    assert documents > 20
