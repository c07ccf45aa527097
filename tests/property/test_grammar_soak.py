"""Grammars for longer, and with the released vocabulary of 129,280 tokens."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cedar.engine.grammar import GrammarFactory
from cedar.engine.grammar.formats import FORMATS
from cedar.errors import RequestError
from cedar.inputs.tokenizer import Tokenizer
from grammar_cases import ENFORCED, TOGETHER, schemas
from grammar_setting import MARKER, constraint, factory, read_calls, texts, validator
from real_tokenizer import rebuild

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

_ALL: dict[str, dict[str, Any]] = {
    **{keyword: schema for keyword, (schema, _, _) in ENFORCED.items()},
    **TOGETHER,
    **{name: {"type": "string", "format": name} for name in FORMATS},
}


@cache
def _released(folder: Path) -> tuple[Tokenizer, GrammarFactory]:
    tokenizer = Tokenizer.from_file(rebuild(folder))
    return tokenizer, GrammarFactory(tokenizer, 129_280, 1)


@pytest.fixture
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, GrammarFactory]:
    return _released(tmp_path_factory.getbasetemp() / "released")


@pytest.mark.parametrize("name", _ALL)
def test_many_documents(name: str) -> None:
    judge = validator(_ALL[name])
    for text in texts(factory().check(constraint("json_schema", _ALL[name])), 300, seed=7):
        assert judge.is_valid(json.loads(text)), text


@pytest.mark.parametrize("name", _ALL)
def test_documents_of_the_released_vocabulary(
    name: str, released: tuple[Tokenizer, GrammarFactory]
) -> None:
    tokenizer, grammars = released
    judge = validator(_ALL[name])
    masks = grammars.check(constraint("json_schema", _ALL[name]))
    for text in texts(masks, 25, seed=3, most=200, tokenizer=tokenizer):
        assert judge.is_valid(json.loads(text)), text


def test_calls_of_the_released_vocabulary(released: tuple[Tokenizer, GrammarFactory]) -> None:
    """One parameter for each schema, some of them in a call."""
    tokenizer, grammars = released
    names = [name for name in _ALL if not {"$defs", "definitions"} & _ALL[name].keys()]
    properties = {f"p{k}": _ALL[name] for k, name in enumerate(names[:60])}
    parameters = {"type": "object", "properties": properties}
    tool = {"name": "many", "parameters": parameters, "strict": True}
    masks = grammars.check(constraint("tools", [tool]))
    start = f"Well.\n\n<{MARKER}"
    used = set()
    for text in texts(masks, 60, start=start, most=1500, tokenizer=tokenizer):
        _, calls = read_calls(text)
        for _, arguments in calls:
            used |= arguments.keys()
            for name, value in arguments.items():
                assert validator(properties[name]).is_valid(value), (properties[name], value)
    assert len(used) > 30


@given(schema=schemas, seed=st.integers(0, 10_000))
@settings(
    max_examples=3000,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_many_random_schemas(schema: dict[str, Any], seed: int) -> None:
    try:
        masks = factory().check(constraint("json_schema", schema))
    except RequestError:  # no document fits, or it is more than can be enforced
        assume(False)
    judge = validator(schema)
    for text in texts(masks, 5, seed=seed, most=300):
        assert judge.is_valid(json.loads(text)), text
