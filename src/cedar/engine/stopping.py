"""When a text ends, and which part of it may be shown already. No torch."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from cedar.engine.params import SamplingParams

__all__ = ["FinishReason", "Progress", "StopChecker", "TextSource"]


class FinishReason(StrEnum):
    """Why a text ended."""

    STOP = "stop"
    LENGTH = "length"


class TextSource(Protocol):
    """Tokens to text, one at a time; `cedar.inputs.tokenizer.TextStream` is one."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""

    def finish(self) -> str:
        """The rest."""


class Progress(NamedTuple):
    """Text that can be shown now, and why the generation ended if it did."""

    text: str
    finish_reason: FinishReason | None


class StopChecker:
    """Follows one text: stop strings, stop tokens, end of text, length.

    A stop string and what follows it are never shown, wherever the tokens' boundaries are: text
    that may be the beginning of one is held back until that is decided. Of several, the one that
    is complete first counts, and of those the longest: what reading character by character finds.

    eos: the end-of-text token, or several. It and the stop tokens add nothing to the text.
    max_tokens: a limit below the request's own, as the model's last position.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos: int | Sequence[int],
        stream: TextSource,
        *,
        max_tokens: int | None = None,
    ) -> None:
        ends = () if params.ignore_eos else ((eos,) if isinstance(eos, int) else tuple(eos))
        self._ends = frozenset((*ends, *params.stop_token_ids))
        self._stop = params.stop
        self._stream = stream
        self._room = min(params.max_tokens, params.max_tokens if max_tokens is None else max_tokens)
        self._held = ""
        self.num_tokens = 0
        """Tokens that belong to the text: without the token that ended it."""
        self.finish_reason: FinishReason | None = None
        self.stopped_by: int | str | None = None
        """The token or the string that ended the text."""

    def push(self, token: int) -> Progress:
        """One more generated token. Must not be called after the end."""
        if self.finish_reason is not None:
            raise RuntimeError(f"token {token} was pushed after the text ended")
        if token in self._ends:
            self.stopped_by = token
            return self._end(FinishReason.STOP)
        self.num_tokens += 1
        text = self._certain(self._stream.push(token))
        if self.finish_reason is None and self.num_tokens >= self._room:
            return self._end(FinishReason.LENGTH, text)
        return Progress(text, self.finish_reason)

    def flush(self) -> str:
        """What is held back, for a text that is ended from outside (a deadline, say)."""
        text = self._certain(self._stream.finish()) + self._held
        self._held = ""
        return text

    def _end(self, reason: FinishReason, text: str = "") -> Progress:
        text += self._certain(self._stream.finish())
        # The stream's rest may have completed a stop string.
        if self.finish_reason is None:
            self.finish_reason = reason
        text, self._held = text + self._held, ""
        return Progress(text, self.finish_reason)

    def _certain(self, new: str) -> str:
        """Takes in text; the part that no stop string can claim any more."""
        text = self._held + new
        # Nothing that was shown can be part of a stop string, so only ``text`` is searched.
        ends = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if ends:
            _, start, found = min(ends)
            self._held, self.finish_reason = "", FinishReason.STOP
            self.stopped_by = found
            return text[:start]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins, shorter than ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
