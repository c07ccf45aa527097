"""What the tests of grammars share: random texts under a grammar, and a reader of tool calls."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs

from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine.grammar import GrammarFactory
from cedar.engine.sampler import TokenMask
from cedar.errors import RequestError
from cedar.inputs.chat import Constraint
from cedar.inputs.tokenizer import Tokenizer

__all__ = [
    "EOS",
    "MARKER",
    "VOCAB",
    "accepts",
    "constraint",
    "factory",
    "fits",
    "read_calls",
    "spelled",
    "takes",
    "texts",
    "tiny_tokenizer",
    "validator",
    "walk",
]

EOS = 1
MARKER = "｜DSML｜"
VOCAB = 2700  # wider than the tokenizer, as a model's logits may be
_CLOSING = '"}],</'


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(Path(locate_checkpoint("cedar-tiny")))


@cache
def factory() -> GrammarFactory:
    return GrammarFactory(tiny_tokenizer(), VOCAB, EOS)


def constraint(kind: Any, value: Any = None, **more: Any) -> Constraint:
    return Constraint(kind=kind, value=value, **more)


def spelled(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    """Tokens of a text in which the marker, and the marker only, is a control token."""
    tokenizer = tokenizer or tiny_tokenizer()
    found: list[int] = []
    for place, part in enumerate(text.split(MARKER)):
        if place:
            found.append(tokenizer.control_ids[MARKER])
        found += tokenizer.encode(part, control=False)
    return found


@cache
def _bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte -> token of that byte alone."""
    controls = set(tokenizer.control_ids.values())
    tokens = [token for token in range(tokenizer.vocab_size) if token not in controls]
    texts = [tokenizer.token_bytes(token) for token in tokens]
    return {text[0]: token for text, token in zip(texts, tokens, strict=True) if len(text) == 1}


def accepts(mask: TokenMask, tokens: Sequence[int]) -> bool:
    """Whether a grammar lets exactly this text be the whole answer."""
    for token in tokens:
        allowed = mask.allowed()
        assert allowed is not None
        if not allowed[token]:
            return False
        mask.accept(token)
    allowed = mask.allowed()
    return allowed is not None and bool(allowed[EOS])


def takes(mask: TokenMask, text: str) -> bool:
    """As `accepts`, whatever the tokens: byte by byte.

    Where only one text can follow, a mask allows only the tokens that text usually has.
    """
    for part in re.split(f"({MARKER})", text):
        tokens = [_bytes(tiny_tokenizer())[byte] for byte in part.encode()]
        for token in [tiny_tokenizer().control_ids[MARKER]] if part == MARKER else tokens:
            try:
                mask.accept(token)
            except RequestError:
                return False
    allowed = mask.allowed()
    return allowed is not None and bool(allowed[EOS])


def fits(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema takes a document."""
    return takes(factory().check(constraint("json_schema", schema))(), text)


def walk(
    mask: TokenMask,
    rng: random.Random,
    *,
    most: int = 400,
    start: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
) -> list[int] | None:
    """A random text under a grammar that begins with ``start``; None if it does not end.

    Long texts are made unlikely: brackets, quotes and tags are closed often.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    single = _bytes(tokenizer)
    closing = [single[ord(character)] for character in _CLOSING]
    marker = tokenizer.control_ids[MARKER]
    eager = rng.choice([0.1, 0.4, 0.7])
    tokens = list(start)
    for token in start:
        mask.accept(token)
    while len(tokens) < most:
        allowed = mask.allowed()
        assert allowed is not None
        assert allowed.any(), f"nothing may follow {tokenizer.decode(tokens)!r}"
        if allowed[EOS] and (allowed.sum() == 1 or rng.random() < 0.5):
            return tokens
        ends = [marker] if allowed[marker] else [token for token in closing if allowed[token]]
        ids = ends if ends and rng.random() < eager else []
        if not ids and rng.random() < 0.5:
            ids = [token for token in single.values() if allowed[token]]
        if not ids:
            ids = [token for token in allowed.nonzero().flatten().tolist() if token != EOS]
        tokens.append(rng.choice(ids))
        mask.accept(tokens[-1])
    return None


def validator(schema: Any) -> Any:
    return jsonschema_rs.validator_for(schema, validate_formats=True)


def texts(
    make: Callable[[], TokenMask],
    count: int,
    *,
    seed: int = 0,
    most: int = 400,
    start: str = "",
    tokenizer: Tokenizer | None = None,
) -> Iterator[str]:
    """Random texts under a grammar, those that end."""
    tokenizer = tokenizer or tiny_tokenizer()
    rng = random.Random(seed)
    for _ in range(count):
        first = spelled(start, tokenizer)
        tokens = walk(make(), rng, most=most, start=first, tokenizer=tokenizer)
        if tokens is not None:
            yield tokenizer.decode(tokens)


def read_calls(text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Content and calls of an answer, by the rules of the prompt protocol's strict parser.

    Fails for whatever is not exactly in its form.
    """
    content, block, rest = text.partition(f"\n\n<{MARKER} calls>\n")
    assert MARKER not in content
    if not block:
        return content, []
    calls = []
    while not rest.startswith(f"</{MARKER} calls>"):
        head = re.match(rf'<{MARKER} invoke name="([^"]+)">\n', rest)
        assert head is not None, rest
        rest = rest[head.end() :]
        arguments: dict[str, Any] = {}
        if rest.startswith("\n"):
            rest = rest[1:]
        else:
            while rest.startswith(f"<{MARKER} parameter"):
                found = re.match(
                    rf'<{MARKER} parameter name="([^"]+)" string="(true|false)">(.*?)'
                    rf"</{MARKER} parameter>\n",
                    rest,
                    re.DOTALL,
                )
                assert found is not None, rest
                rest = rest[found.end() :]
                name, is_text, value = found.groups()
                assert name not in arguments
                assert MARKER not in value
                arguments[name] = value if is_text == "true" else json.loads(value)
                assert is_text == "true" or not isinstance(arguments[name], str)
            assert arguments
        assert rest.startswith(f"</{MARKER} invoke>\n"), rest
        rest = rest[len(f"</{MARKER} invoke>\n") :]
        calls.append((head.group(1), arguments))
    assert rest == f"</{MARKER} calls>"
    assert calls
    return content, calls
