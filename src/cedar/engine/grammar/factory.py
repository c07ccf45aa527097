"""From what a request asks of its answer to grammars."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from cedar.engine.grammar.compiler import GrammarCompiler, inline
from cedar.engine.grammar.mask import GrammarMask
from cedar.engine.grammar.pattern import full_match
from cedar.engine.grammar.schema import check_depth
from cedar.engine.grammar.tools import calls_grammar
from cedar.engine.grammar.vocabulary import MARKER, GrammarVocabulary
from cedar.engine.sampler import TokenMask
from cedar.errors import RequestError
from cedar.inputs.chat import Constraint
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["GrammarFactory"]

_KEPT = 64


class GrammarFactory:
    """Grammars for the answers of one model. May be used by several threads.

    vocab_size: of the model, whose logits may be wider than the tokenizer. eos: its end-of-text
    token. kept: how many compiled grammars are kept, the last ones used.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos: int, *, kept: int = _KEPT
    ) -> None:
        self._compiler: GrammarCompiler | None = None
        self._unfit: RequestError | None = None
        try:
            self._compiler = GrammarCompiler(GrammarVocabulary(tokenizer, vocab_size, eos))
        except RequestError as error:  # the model is of use without
            self._unfit = error
        self._kept = kept
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(
        self,
        constraint: Constraint,
        *,
        after: int | None = None,
        starts_in_tools: bool = False,
    ) -> Callable[[], TokenMask]:
        """What makes the grammar of each sample, ready for `cedar.engine.engine.Engine.submit`.

        after: the token that ends the reasoning, if the answer begins inside of it; until then
        only the end of the text and tool calls are forbidden. starts_in_tools: the prompt has
        opened a block of calls. Takes milliseconds as a rule, but up to a second.
        Raises `RequestError` for what would not be enforced to the letter, naming the keyword and
        its place in the schema.
        """
        if self._compiler is None:
            assert self._unfit is not None
            raise RequestError(str(self._unfit))
        vocabulary = self._compiler.vocabulary
        matcher = self._matcher(constraint, starts_in_tools, self._compiler)

        def mask() -> TokenMask:
            return GrammarMask(vocabulary, matcher.deep_copy(), after=after)

        return mask

    def _matcher(
        self, constraint: Constraint, opened: bool, compiler: GrammarCompiler
    ) -> LLMatcher:
        key = _key(constraint, opened)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return matcher
        matcher = compiler.compiled(_grammar(constraint, opened, compiler), "the answer's format")
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        return matcher


def _grammar(constraint: Constraint, opened: bool, compiler: GrammarCompiler) -> str:
    if constraint.kind != "tools":
        return f"start: {_answer(constraint, compiler)}"
    marker = compiler.vocabulary.marker
    if marker is None:
        raise RequestError(
            f"tool calls cannot be held to a grammar here: this model's tokenizer has no {MARKER} "
            "token. Leave tool_choice at auto, and tools without strict."
        )
    otherwise = constraint.fallback
    return calls_grammar(
        constraint.value,
        compiler,
        marker=marker,
        required=constraint.required,
        max_calls=constraint.max_calls,
        opened=opened,
        otherwise=None if otherwise is None else _answer(otherwise, compiler),
    )


def _answer(constraint: Constraint, compiler: GrammarCompiler) -> str:
    """A rule for a whole answer without calls."""
    name = "the answer's schema"
    if constraint.kind == "json_object":
        return inline(compiler.check({"type": "object"}, name))
    if constraint.kind == "json_schema":
        if not isinstance(constraint.value, dict):
            raise RequestError(f"{name} is {constraint.value!r}; expected an object.")
        return inline(compiler.check(constraint.value, name))
    if constraint.kind != "regex":
        raise RequestError(f"a format of the kind {constraint.kind!r} is unknown here.")
    if not isinstance(constraint.value, str):
        raise RequestError(f"the answer's regex is {constraint.value!r}; expected a string.")
    try:
        return f"/{full_match(constraint.value, search=False)}/"
    except RequestError as error:
        raise RequestError(f"the answer's regex cannot be enforced: {error}.") from None


def _key(constraint: Constraint, opened: bool) -> str:
    """Equal for equal grammars; raises `RequestError` for what is not JSON."""
    parts: list[Any] = [opened]
    each: Constraint | None = constraint
    while each is not None:
        check_depth(each.value, "the answer's format")
        parts += [each.kind, each.value, each.required, each.max_calls]
        each = each.fallback
    try:
        key = json.dumps(parts, ensure_ascii=False, allow_nan=False)
        key.encode()
    except ValueError as error:
        raise RequestError(
            f"the answer's format is not JSON: {error}. Expected finite numbers and valid Unicode."
        ) from None
    return key
