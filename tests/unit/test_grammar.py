"""Grammars: the mask, the tokens it knows, what is refused and how."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine.grammar import GrammarFactory, GrammarMask
from cedar.engine.grammar.compiler import GrammarCompiler
from cedar.engine.grammar.pattern import full_match
from cedar.engine.grammar.vocabulary import GrammarVocabulary
from cedar.engine.params import SamplingParams
from cedar.engine.sampler import Sampler
from cedar.engine.speculate import verify_keyed
from cedar.errors import RequestError
from cedar.inputs.tokenizer import Tokenizer
from grammar_setting import (
    EOS,
    MARKER,
    VOCAB,
    accepts,
    constraint,
    factory,
    fits,
    spelled,
    takes,
    tiny_tokenizer,
    walk,
)

THINK_END = tiny_tokenizer().control_ids["</think>"]
MARK = tiny_tokenizer().control_ids[MARKER]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def mask(kind: str, value: Any = None, **more: Any) -> GrammarMask:
    made = factory().check(constraint(kind, value), **more)()
    assert isinstance(made, GrammarMask)
    return made


def follow(grammar: GrammarMask, text: str) -> GrammarMask:
    """The grammar after a text."""
    for token in spelled(text):
        grammar.accept(token)
    return grammar


def refusal(schema: Any) -> str:
    with pytest.raises(RequestError) as caught:
        factory().check(constraint("json_schema", schema))
    return str(caught.value)


# --- the mask -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1\n}', '{"é": "✓"}'])
def test_any_object(text: str) -> None:
    assert accepts(mask("json_object"), spelled(text))
    assert takes(mask("json_object"), text)


@pytest.mark.parametrize(
    "text", ["[]", "1", '"a"', "null", "", " {}", "{} ", "{}\n", '{"a": 1', "x"]
)
def test_what_is_no_object(text: str) -> None:
    assert not takes(mask("json_object"), text)


def test_the_mask_has_the_models_vocabulary() -> None:
    allowed = mask("json_object").allowed()
    assert allowed.dtype == torch.bool
    assert list(allowed.shape) == [VOCAB]
    assert tiny_tokenizer().vocab_size < VOCAB


def test_a_complete_document_leaves_the_end_only() -> None:
    grammar = follow(mask("json_schema", PERSON), '{"name": "x", "age": 3')
    assert not grammar.complete
    assert not grammar.allowed()[EOS]
    follow(grammar, "}")
    assert grammar.complete
    assert grammar.allowed().nonzero().flatten().tolist() == [EOS]
    for _ in range(3):  # with ignore_eos the text goes on
        grammar.accept(EOS)
        assert grammar.allowed().nonzero().flatten().tolist() == [EOS]


def test_blanks_are_bounded() -> None:
    for text in ("{ ", "{\n" + " " * 16):
        grammar = follow(mask("json_object"), text)
        for token in grammar.allowed().nonzero().flatten().tolist():
            assert not tiny_tokenizer().token_bytes(token).startswith((b" ", b"\n", b"\t"))


def test_control_tokens_are_no_text() -> None:
    """In no place of any answer; the marker is one, whatever its flag in the file says."""
    controls = sorted(set(tiny_tokenizer().control_ids.values()) - {EOS})
    assert MARK in controls
    unknown = list(range(tiny_tokenizer().vocab_size, VOCAB))
    rng = random.Random(1)
    for each in (constraint("json_object"), constraint("regex", "(?:.|\n)*")):
        for _ in range(5):
            grammar = factory().check(each)()
            tokens = walk(factory().check(each)(), rng) or []
            for token in tokens:
                allowed = grammar.allowed()
                assert allowed is not None
                assert not allowed[controls + unknown].any()
                grammar.accept(token)


def _token(text: bytes) -> int:
    return next(t for t in range(3, 300) if tiny_tokenizer().token_bytes(t) == text)


@pytest.mark.parametrize("before", ["", "x", "｜", "｜DS", "｜DSML-", "｜DSM｜"])
def test_the_marker_cannot_be_spelled(before: str) -> None:
    """Replies are read as text, so that ordinary tokens could forge a tool call."""
    grammar = follow(mask("json_object"), '{"a": "' + before)
    whole = tiny_tokenizer().encode("｜", control=False)
    for part in MARKER[:-1]:
        for token in tiny_tokenizer().encode(part, control=False):
            assert grammar.allowed()[token]
            grammar.accept(token)
    # The last character begins with bytes of many others.
    first, second, third = (_token(bytes([byte])) for byte in "｜".encode())
    assert len(whole) != 1 or not grammar.allowed()[whole[0]]
    for token in (first, second):
        assert grammar.allowed()[token]
        grammar.accept(token)
    assert not grammar.allowed()[third]
    assert grammar.allowed()[_token(b"\x9d")]  # the character after it
    grammar.accept(_token(b"\x9d"))
    assert grammar.allowed()[first]


def test_the_marker_can_be_spelled_where_it_is_no_token() -> None:
    """Shows that it is our doing, not the grammar's."""
    fields = json.loads((_tiny_file()).read_text(encoding="utf-8"))
    fields["added_tokens"] = [t for t in fields["added_tokens"] if t["content"] != MARKER]
    plain = Tokenizer(json.dumps(fields))
    grammars = GrammarFactory(plain, VOCAB, EOS)
    tokens = plain.encode('{"a": "' + MARKER + '"}', control=False)
    assert accepts(grammars.check(constraint("json_object"))(), tokens)
    with pytest.raises(RequestError, match="no ｜DSML｜ token"):
        grammars.check(constraint("tools", [{"name": "f", "parameters": {}, "strict": True}]))


def _tiny_file() -> Path:
    return Path(locate_checkpoint("cedar-tiny")) / "tokenizer.json"


def test_a_token_that_is_not_allowed() -> None:
    grammar = mask("json_object")
    with pytest.raises(RequestError, match="cannot be followed any further"):
        grammar.accept(spelled("x")[0])
    with pytest.raises(RequestError, match="cannot be followed any further"):
        grammar.allowed()


def test_the_end_before_the_document_is_complete() -> None:
    with pytest.raises(RequestError, match="cannot be followed"):
        mask("json_object").accept(EOS)


def test_each_sample_has_its_own_state() -> None:
    masks = factory().check(constraint("json_schema", PERSON))
    one, two = masks(), masks()
    for token in spelled('{"name": "x", "age": 3}'):
        one.accept(token)
    assert accepts(two, spelled('{"name": "y", "age": 4}'))
    assert accepts(masks(), spelled('{"name": "z", "age": 5}'))


# --- reasoning first ----------------------------------------------------------------------------


def test_the_grammar_begins_after_the_reasoning() -> None:
    grammar = mask("json_schema", PERSON, after=THINK_END)
    for token in (*spelled("Let me see: [ } "), tiny_tokenizer().control_ids["<think>"]):
        forbidden = (~grammar.allowed()).nonzero().flatten().tolist()
        assert forbidden == sorted([EOS, MARK])
        assert not grammar.complete
        grammar.accept(token)
    grammar.accept(THINK_END)
    assert not grammar.allowed()[THINK_END]
    assert accepts(grammar, spelled('{"name": "x", "age": 3}'))


def test_the_end_of_the_reasoning_counts_once() -> None:
    """Without reasoning before the answer, the same token is one of those that are no text."""
    assert not mask("json_object").allowed()[THINK_END]
    assert mask("json_object", after=THINK_END).allowed()[THINK_END]


# --- together with the sampler ------------------------------------------------------------------


def _logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_rejected_drafts_leave_no_trace() -> None:
    """Each block is drafted half right, and the text is that without drafts."""
    masks = factory().check(constraint("json_schema", PERSON))
    alone = Sampler(SamplingParams(seed=4), VOCAB, mask=masks())
    while alone.history[-1:] != [EOS]:
        alone.choose(_logits(1, len(alone.history))[0])
    drafted = Sampler(SamplingParams(seed=4), VOCAB, mask=masks())
    kept = 0
    while drafted.history[-1:] != [EOS]:
        at = len(drafted.history)
        drafts = [*alone.history[at : at + 2], 7, 8, 9]
        logits = torch.cat([_logits(1, at + k) for k in range(len(drafts) + 1)])
        found = verify_keyed(drafted, logits, drafts, finished=lambda token: token == EOS)
        kept += found.accepted
    assert drafted.history == alone.history
    assert kept >= len(alone.history) // 2


# --- compiled once ------------------------------------------------------------------------------


def test_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = GrammarCompiler.compiled

    def counting(self: GrammarCompiler, grammar: str, name: str) -> Any:
        compiled.append(grammar)
        return compile_(self, grammar, name)

    monkeypatch.setattr(GrammarCompiler, "compiled", counting)
    grammars = GrammarFactory(tiny_tokenizer(), VOCAB, EOS, kept=2)
    one, two, three = ({"type": kind} for kind in ("null", "boolean", "integer"))
    for schema in (one, two, one, two, one):
        grammars.check(constraint("json_schema", schema))
    assert len(compiled) == 2
    grammars.check(constraint("json_schema", one), after=THINK_END)  # the same grammar
    assert len(compiled) == 2
    grammars.check(constraint("json_schema", three))  # drops the one not used for longest
    grammars.check(constraint("json_schema", one))
    assert len(compiled) == 3
    grammars.check(constraint("json_schema", two))
    assert len(compiled) == 4


def test_key_order_makes_another_grammar() -> None:
    """Properties come in the order in which the schema names them."""
    first = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    second = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    assert fits(first, '{"a": null, "b": null}')
    assert not fits(second, '{"a": null, "b": null}')


def test_several_threads() -> None:
    def use(seed: int) -> bool:
        grammars = factory().check(constraint("json_schema", {"enum": [seed % 5, "x"]}))
        return accepts(grammars(), spelled(str(seed % 5)))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(60)))


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "parts"),
    [
        ({"type": "array", "uniqueItems": True}, ["uniqueItems at #/uniqueItems"]),
        (
            {"properties": {"a/b": {"patern": "x"}}},
            ["patern at #/properties/a~1b/patern", "did you mean pattern?"],
        ),
        ({"items": {"not": {}}}, ["not at #/items/not", "anyOf"]),
        ({"$defs": {"x": {"if": {}}}, "$ref": "#/$defs/x"}, ["if at #/$defs/x/if"]),
        ({"type": "string", "nullable": True}, ["nullable at #/nullable", '[..., "null"]']),
        ({"type": "string", "format": "iri"}, ["format at #/format", '"iri"', "date-time"]),
        ({"type": "integer", "format": "int32"}, ["format at #/format"]),
        ({"items": {"pattern": "(?=a)b"}}, ["pattern at #/items/pattern", "(?=a"]),
        ({"patternProperties": {"(": {}}}, ["#/patternProperties/(", "not closed"]),
        ({"patternProperties": {"^a": {}, "b$": {}}}, ["patternProperties at", "disjoint"]),
        ({"patternProperties": {r"^\-": {}, "^-": {}}}, ["patternProperties at", "same"]),
        ({"minProperties": 2}, ["minProperties at #/minProperties"]),
        ({"enum": [1, [2**60]]}, ["enum at #/enum", "2^53"]),
        ({"maximum": 1.9100000000000001}, ["maximum at #/maximum", "not read exactly"]),
        ({"enum": [{"a": 8.4e-30}]}, ["enum at #/enum", "not read exactly"]),
        ({"minimum": -(2**60)}, ["minimum at #/minimum", "2^53"]),
        ({"properties": {"a\x01b": {}}}, ["#/properties/a\x01b", "control character"]),
        ({"const": [{"\0": 1}]}, ["const at #/const", "control character"]),
        ({"required": ["\x7f"]}, ["required at #/required", "control character"]),
        ({"$ref": "#/$defs/none"}, ["$ref at #/$ref", "'#/$defs/none'"]),
        ({"$ref": "https://example.com/x"}, ["$ref at #/$ref"]),
        ({"$ref": "#/x-a", "x-a": {"not": {}}}, ["$ref at #/$ref"]),
        ({"$ref": "#/const", "const": {"not": {}}}, ["$ref at #/$ref"]),
        ({"$ref": "#"}, ["$ref at #/$ref", "no text fits"]),
        ({"type": "text"}, ["type at #/type", "text"]),
        ({"properties": [1]}, ["properties at #/properties", "an object of schemas"]),
        ({"anyOf": {}}, ["anyOf at #/anyOf", "a list of schemas"]),
        ({"properties": {"a": 5}}, ["#/properties/a", "5 is no schema"]),
        ({"pattern": 3}, ["pattern at #/pattern", "a string"]),
        ({"minLength": 3, "maxLength": 1, "type": "string"}, ["minLength at #/minLength"]),
        ({"x-guidance": {"lenient": True}}, ["x-guidance at #/x-guidance"]),
        ({"enum": [f"a{MARKER}"]}, ["enum at #/enum", MARKER]),
        (
            {"anyOf": [{"type": "null"}, {"oneOf": [{"type": "integer"}, {"type": "number"}]}]},
            ["oneOf at #/anyOf/1/oneOf", "anyOf"],
        ),
        (
            {
                "$defs": {"odd": {"type": "integer", "multipleOf": 999999937}},
                "properties": {"a": {"type": "null"}, "b": {"items": {"$ref": "#/$defs/odd"}}},
            },
            ["multipleOf at #/$defs/odd/multipleOf"],
        ),
        (
            {"allOf": [{"type": "string"}, {"type": "null"}]},
            ["allOf at #/allOf", "incompatible types"],
        ),
        ({"enum": [f"word {k}" for k in range(120_000)]}, ["enum at #/enum", "too big"]),
    ],
)
def test_a_schema_that_cannot_be_enforced(schema: dict[str, Any], parts: list[str]) -> None:
    message = refusal(schema)
    for part in ("the answer's schema", *parts):
        assert part in message


def test_schemas_that_are_no_schemas() -> None:
    for value in (None, [], "x", 3, True):
        assert "expected an object" in refusal(value)
    assert "Unicode" in refusal({"const": "\ud800"})
    assert "finite" in refusal({"const": float("nan")})
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    assert "levels deep" in refusal(deep)


def test_depth_that_is_allowed() -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(90):
        deep = {"type": "array", "items": deep}
    assert fits(deep, "[" * 90 + "null" + "]" * 90)


def test_what_constrains_nothing_is_accepted() -> None:
    schema = {
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [2],
        "deprecated": True,
        "readOnly": True,
        "$comment": "c",
        "x-order": 3,
        "nullable": False,
        "uniqueItems": False,
        "discriminator": {"propertyName": "kind"},
        "type": "array",
    }
    assert fits(schema, "[1, 1]")


def test_a_tokenizer_without_bytes() -> None:
    """The model is of use without grammars, so only asking for one is a mistake."""
    fields = json.loads(_tiny_file().read_text(encoding="utf-8"))
    fields["decoder"] = None
    grammars = GrammarFactory(Tokenizer(json.dumps(fields)), VOCAB, EOS)
    with pytest.raises(RequestError, match="no ByteLevel decoder"):
        grammars.check(constraint("json_object"))


# --- regular expressions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "good", "bad"),
    [
        ("[0-9]{2,3}", ["12", "123"], ["1", "1234", "12a"]),
        ("^yes|no$", ["yes", "no"], ["yesno", "y"]),
        ("a/b\\/c", ["a/b/c"], ["a/b"]),
        ('"[^"]*"', ['""', '"a b"'], ['"', '"a""']),
        ("(?<word>x+?)y", ["xy", "xxy"], ["y"]),
        (".*", ["", "ab"], ["a\nb", "a\rb", "a\u2028b"]),
        (r"\u{1F600}\ud83d\ude00", ["😀😀"], ["😀"]),
        (r"[\w.-]+@[a-z]+", ["a.b-c@d"], ["a b@d"]),
        ("{}", ["{}"], [""]),
    ],
)
def test_an_answer_by_expression(expression: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert takes(mask("regex", expression), text), text
    for text in bad:
        assert not takes(mask("regex", expression), text), text


_REFUSED = (
    *("(?=a)b", "(?<!a)b", r"(a)\1", r"a\b", r"\Aa", "(?i)a", "a++", "a{2}+", "[]", "[", "(", "a)"),
    *(
        "[a--b]",
        r"[\b]",
        r"\ud800",
        r"\cA",
        "\\",
        "x(^a)",
        "(a$)b",
        r"\p{Nothing}",
        r"a\x00",
        "a\0",
    ),
    *(r"\u{110000}", r"\k<a>", "*", "a**"),
)


@pytest.mark.parametrize("expression", _REFUSED)
def test_an_expression_that_cannot_be_enforced(expression: str) -> None:
    with pytest.raises(RequestError, match="cannot be enforced"):
        factory().check(constraint("regex", expression))


def test_an_expression_that_is_none() -> None:
    with pytest.raises(RequestError, match="expected a string"):
        factory().check(constraint("regex", 3))


_DIALECT = (
    *("a.c", r"\s\S", r"[\s\S]", r"[^\s]", "[a-z&&b]", "[[a]", "[~a]", "[-a]", "[a-]", "(a|^)b"),
    *(r"\d\D\w\W", r"[^\W\d]", "^a|b$", "a{2,}?", r"\{x", r"x\}", r"\-\/\.", "(?:a|b)c", '[^"]'),
    *(r"^\t\n", r"[\w.-]+$", r"[^\]\\]", r"^[\x00-\x21]", r"^\P{L}$", r"^\p{Cc}", r"[^\x00-\x1f]"),
)


@pytest.mark.parametrize("expression", _DIALECT)
def test_expressions_mean_what_they_mean_elsewhere(expression: str) -> None:
    """In a schema, and searched for in the text of a tool's parameter."""
    schema = {"type": "string", "pattern": expression}
    validator = jsonschema_rs.validator_for(schema)
    compiler = GrammarCompiler(GrammarVocabulary(tiny_tokenizer(), VOCAB, EOS))
    try:
        plain = compiler.compiled(f"start: /{full_match(expression, search=True)}/", "text")
    except RequestError:
        assert expression == "(a|^)b"
        plain = None
    masks = factory().check(constraint("json_schema", schema))
    outcomes = set()
    for text in _texts():
        valid = validator.is_valid(text)
        outcomes.add(valid)
        written = json.dumps(text, ensure_ascii=False)
        if "\r" in text or "\x01" in text:
            # As in ECMA-262 a full stop is no line end, and there are no \\u escapes.
            assert valid or not takes(masks(), written)
            continue
        assert takes(masks(), written) == valid, text
        if plain is not None:
            grammar = GrammarMask(compiler.vocabulary, plain.deep_copy())
            assert takes(grammar, text) == valid, text
    assert len(outcomes) == 2


def test_an_expression_of_another_dialect() -> None:
    """Shows that the test above can fail: here both mean something, but not the same."""
    schema = {"type": "string", "pattern": "^[a-z&&b]$"}
    library = GrammarCompiler(GrammarVocabulary(tiny_tokenizer(), VOCAB, EOS))
    grammar = GrammarMask(library.vocabulary, library.compiled("start: /[a-z&&b]/", "it"))
    assert jsonschema_rs.validator_for(schema).is_valid("c")
    assert not takes(grammar, "c")
    assert fits(schema, '"c"')


def _texts() -> list[str]:
    letters = 'aAbx0_-.&~[]{}/ \t\n\\"\x01'
    pairs = (a + b for a in "ab0 \t[" for b in letters)
    return ["", *letters, *pairs, "aac", "{x", "x}", "-/.", "0a_-", "a\rc", "abc", "a😀c"]
