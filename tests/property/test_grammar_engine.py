"""Documents of the bundled model, a poor writer, held to twenty schemas: with and without drafts,
with and without reasoning before.
"""

import json
from functools import cache
from typing import Any

import pytest

from cedar.engine.build import LoadedModel, load_model
from cedar.engine.grammar import GrammarFactory
from cedar.engine.params import SamplingParams
from grammar_setting import constraint, read_calls, validator
from real_engine import make_core

_NULL: dict[str, Any] = {"type": "null"}
_WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
_SHORT = {"type": "string", "maxLength": 12}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    closed = {"additionalProperties": False, "required": list(properties)}
    return {"type": "object", "properties": properties} | closed | more


SCHEMAS: dict[str, dict[str, Any]] = {
    "object": _object({"name": _SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 130}}),
    "optional": _object({"a": _DIGIT, "b": _WORD, "c": _NULL}, required=["b"]),
    "nested": _object({"at": _object({"x": _DIGIT, "deep": _object({"y": _WORD})}), "n": _DIGIT}),
    "array": {"type": "array", "items": _DIGIT, "minItems": 2, "maxItems": 4},
    "matrix": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        "minItems": 1,
        "maxItems": 3,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [_WORD, _DIGIT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "enum": {"enum": ["red", "green", 3, None, {"mixed": [1, 2.5]}]},
    "const": _object({"version": {"const": 2}, "kind": {"const": 'exact "quoted" text'}}),
    "anyOf": {
        "anyOf": [_object({"ok": {"const": True}, "value": _DIGIT}), _object({"error": _WORD})]
    },
    "oneOf, tagged": {
        "oneOf": [
            _object({"kind": {"const": "circle"}, "radius": _DIGIT}),
            _object({"kind": {"const": "square"}, "side": _DIGIT}),
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 99}, {"multipleOf": 7}]},
    "$defs": {
        "$defs": {"point": _object({"x": _DIGIT, "y": _DIGIT})},
        **_object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "recursive": {
        "$defs": {
            "leaf": _object({"value": _DIGIT}),
            "tree": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/branch"}]},
            "branch": _object(
                {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}}
            ),
        },
        "$ref": "#/$defs/tree",
    },
    "pattern": _object({"plate": {"type": "string", "pattern": "^[A-Z]{1,3}-[0-9]{1,4}$"}}),
    "formats": _object(
        {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}}
    ),
    "times": _object(
        {
            "at": {"type": "string", "format": "date-time", "maxLength": 20},
            "host": {"type": "string", "format": "ipv4"},
        }
    ),
    "numbers": _object(
        {
            "share": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
            "below": {"type": "integer", "exclusiveMaximum": 0, "minimum": -40},
        }
    ),
    "nullable": _object({"note": {"type": ["string", "null"], "maxLength": 6}, "n": _DIGIT}),
    "map": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,5}$": _DIGIT},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "lengths": {
        "type": "array",
        "items": {"type": "string", "minLength": 3, "maxLength": 5},
        "maxItems": 3,
    },
}


@cache
def _loaded() -> LoadedModel:
    return load_model("cedar-tiny")


@cache
def _factory() -> GrammarFactory:
    config = _loaded().model.config
    return GrammarFactory(_loaded().tokenizer, config.vocab_size, config.eos_token_id)


def _prompt(text: str, *, thinking: bool) -> list[int]:
    tokenizer = _loaded().tokenizer
    controls = tokenizer.control_ids
    opening = controls["<think>"] if thinking else controls["</think>"]
    return [
        0,
        controls["<｜User｜>"],
        *tokenizer.encode(text, control=False),
        controls["<｜Assistant｜>"],
        opening,
    ]


def _generate(
    constraints: dict[str, Any],
    *,
    draft: bool,
    thinking: bool,
    masked: bool = True,
    most: int = 400,
) -> tuple[dict[str, tuple[list[int], str | None]], Any]:
    """Name -> tokens and how the text ended; and the engine's figures."""
    core = make_core(
        _loaded(),
        page_tokens=None,
        pool_tokens=20_000,
        token_budget=512,
        draft=draft,
        max_running=24,
    )
    end = _loaded().tokenizer.control_ids["</think>"]
    for seed, (name, each) in enumerate(constraints.items()):
        params = SamplingParams(
            max_tokens=most,
            seed=seed,
            # The bundled model has not learnt to come to the end of its reasoning.
            logit_bias={end: 14.5} if thinking else {},
        )
        prompt = _prompt(f"Describe {name} as JSON.", thinking=thinking)
        masks = _factory().check(each, after=end if thinking else None) if masked else None
        core.submit(core.request(prompt, params, id=name), masks=masks)
    found: dict[str, tuple[list[int], str | None]] = {name: ([], None) for name in constraints}
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            found[output.id] = (found[output.id][0] + list(output.tokens), output.finish_reason)
    stats = core.stats()
    core.close()
    return found, stats


def _answer(tokens: list[int], *, thinking: bool) -> str:
    """The text behind the reasoning, without the end-of-text token."""
    if thinking:
        end = _loaded().tokenizer.control_ids["</think>"]
        tokens = tokens[tokens.index(end) + 1 :]
    controls = set(_loaded().tokenizer.control_ids.values())
    assert not controls.intersection(token for token in tokens if token != 1)
    return _loaded().tokenizer.decode([token for token in tokens if token != 1])


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("draft", [False, True])
def test_every_document_is_valid(draft: bool, thinking: bool) -> None:
    constraints = {name: constraint("json_schema", schema) for name, schema in SCHEMAS.items()}
    found, stats = _generate(constraints, draft=draft, thinking=thinking)
    assert len(found) == 20
    for name, (tokens, reason) in found.items():
        text = _answer(tokens, thinking=thinking)
        assert reason == "stop", (name, text)
        errors = [error.message for error in validator(SCHEMAS[name]).iter_errors(json.loads(text))]
        assert not errors, (name, text)
    if draft:
        # Drafts know nothing of the grammar: some are kept, most are not.
        assert sum(stats.drafted) > sum(stats.accepted) > 0
    else:
        assert not stats.drafted
    if thinking:
        end = _loaded().tokenizer.control_ids["</think>"]
        lengths = [tokens.index(end) for tokens, _ in found.values()]
        assert max(lengths) > 3
        assert all(1 not in tokens[: tokens.index(end)] for tokens, _ in found.values())


def test_without_the_mask_there_are_no_documents() -> None:
    some = {name: constraint("json_schema", SCHEMAS[name]) for name in ("object", "array", "enum")}
    found, _ = _generate(some, draft=False, thinking=False, masked=False, most=25)
    for name, (tokens, _) in found.items():
        text = _loaded().tokenizer.decode([token for token in tokens if token != 1])
        try:
            document = json.loads(text)
        except ValueError:
            continue
        assert not validator(SCHEMAS[name]).is_valid(document)


_TOOLS = [
    {
        "name": "look_up",
        "strict": True,
        "parameters": _object({"word": _SHORT, "n": _DIGIT, "kind": {"enum": ["noun", None]}}),
    },
    {"name": "stop", "strict": True, "parameters": {}},
]


@pytest.mark.parametrize("draft", [False, True])
def test_forced_calls(draft: bool) -> None:
    forced = {
        f"calls {k}": constraint("tools", _TOOLS, required=True, max_calls=k) for k in (1, 2, 3)
    }
    found, _ = _generate(forced, draft=draft, thinking=False)
    for name, (tokens, reason) in found.items():
        text = _loaded().tokenizer.decode([token for token in tokens if token != 1])
        content, calls = read_calls(text)
        assert (reason, content) == ("stop", "")
        assert 1 <= len(calls) <= forced[name].max_calls
        for called, arguments in calls:
            schema = next(each["parameters"] for each in _TOOLS if each["name"] == called)
            assert validator(schema).is_valid(arguments), text


def test_a_document_that_is_cut_off() -> None:
    found, _ = _generate(
        {"cut": constraint("json_schema", SCHEMAS["formats"])}, draft=False, thinking=False, most=8
    )
    tokens, reason = found["cut"]
    assert (len(tokens), reason) == (8, "length")
    assert _loaded().tokenizer.decode(tokens).startswith("{")


def test_each_sample_has_its_own_document() -> None:
    core = make_core(_loaded(), page_tokens=None, pool_tokens=10_000, token_budget=512, draft=True)
    schema = SCHEMAS["array"]
    params = SamplingParams(max_tokens=100, seed=1, n=4, temperature=1.5)
    masks = _factory().check(constraint("json_schema", schema))
    core.submit(core.request(_prompt("Four", thinking=False), params, id="x"), masks=masks)
    texts = ["", "", "", ""]
    while core.has_work:
        for output in core.step():
            assert output.error is None
            texts[output.index] += output.text
    core.close()
    assert len(set(texts)) > 1
    for text in texts:
        assert validator(schema).is_valid(json.loads(text)), text


def test_a_bias_against_the_grammar_ends_one_request_only() -> None:
    """Where the two together allow nothing, that request ends with the reason why."""
    core = make_core(_loaded(), page_tokens=None, pool_tokens=10_000, token_budget=512)
    masks = _factory().check(constraint("json_schema", SCHEMAS["array"]))
    tokenizer = _loaded().tokenizer
    brackets = {
        token: float("-inf")
        for token in range(tokenizer.vocab_size)
        if b"[" in tokenizer.token_bytes(token)
    }
    prompt = _prompt("Two", thinking=False)
    for id, bias in (("good", {}), ("bad", brackets)):
        params = SamplingParams(max_tokens=60, seed=2, logit_bias=bias)
        core.submit(core.request(prompt, params, id=id), masks=masks)
    reasons = {}
    while core.has_work:
        for output in core.step():
            if output.finish_reason is not None:
                reasons[output.id] = (output.finish_reason, output.error)
    core.close()
    assert reasons["good"][0] == "stop"
    assert reasons["bad"][0] == "error"
    assert "no token is allowed" in str(reasons["bad"][1])
