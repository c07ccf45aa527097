"""Log probabilities in the form of ``/v1/completions``: four lists, one entry a token."""

import math
from collections.abc import Sequence
from typing import Any

from cedar.engine.output import TokenLogprob
from cedar.inputs.tokenizer import Tokenizer
from cedar.server.protocols import EngineLike

__all__ = ["Scores", "spelling"]

_NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_LOWEST = -9999.0  # JSON has no infinity


def spelling(tokenizer: Tokenizer, token: int) -> str:
    r"""A token as a string; one that is not whole characters as ``bytes:\xe2\x80``."""
    if not tokenizer.byte_level:
        return tokenizer.decode([token])
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Scores:
    """Grows with the tokens of one choice. top: how many likeliest tokens each entry has.

    The entry of a token always holds the token itself, too. Offsets count characters of the text
    of the choice, with the prompt if that is echoed.
    """

    def __init__(self, engine: EngineLike, top: int) -> None:
        self._tokenizer, self._bos, self._top = engine.tokenizer, engine.info.bos, top
        self._text = engine.tokenizer.stream()
        self._length = 0
        self._lists: dict[str, list[Any]] = {name: [] for name in _NAMES}
        self._shown = 0

    def prompt(
        self, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], text: str
    ) -> None:
        """The tokens of an echoed prompt; the first has no score."""
        for place, (token, score) in enumerate(zip(tokens, scores, strict=True)):
            # The begin-of-text token that was put before a text is not part of it.
            begin = place == 0 and token == self._bos
            hidden = begin and not text.startswith(spelling(self._tokenizer, token))
            self._append(token, score, hidden=hidden)
        self._length = len(text)

    def add(self, scores: Sequence[TokenLogprob]) -> None:
        """Generated tokens."""
        for score in scores:
            self._append(score.token, score)

    def all(self) -> dict[str, list[Any]]:
        """Every entry."""
        return self._lists

    def new(self) -> dict[str, list[Any]] | None:
        """The entries since the last call; None without any."""
        start, self._shown = self._shown, len(self._lists["tokens"])
        if start == self._shown:
            return None
        return {name: values[start:] for name, values in self._lists.items()}

    def _append(self, token: int, score: TokenLogprob | None, *, hidden: bool = False) -> None:
        name = spelling(self._tokenizer, token)
        lists = self._lists
        lists["tokens"].append(name)
        lists["text_offset"].append(self._length)
        if not hidden:
            self._length += len(self._text.push(token))
        if score is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        own = _finite(score.logprob)
        likeliest: dict[str, float] = {}
        for other, value in score.top[: self._top]:
            likeliest.setdefault(spelling(self._tokenizer, other), _finite(value))
        likeliest.setdefault(name, own)
        lists["token_logprobs"].append(own)
        lists["top_logprobs"].append(likeliest)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST
