"""A model's tokens as the grammar library sees them."""

from collections.abc import Sequence
from typing import Any

import torch
from llguidance import LLTokenizer, TokenizerWrapper
from torch import Tensor

from cedar.errors import RequestError
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["MARKER", "GrammarVocabulary"]

# The control token of tool calls. Replies are read as text, so its spelling counts as well.
MARKER = "｜DSML｜"


class GrammarVocabulary:
    """What grammars need of a tokenizer. Made once; all grammars share it.

    Every added token is a control token here: text never holds one, whatever its flags say.

    library: the tokens for the grammar library. eos: the end-of-text token. marker: the control
    token of tool calls, None if there is none. reasoning_V: bool, what may be written while the
    reasoning goes on: all but the end of the text and tool calls, for either would bring a reply
    to its end without what its grammar promises.
    Raises `RequestError` if single tokens have no bytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: int) -> None:
        if not tokenizer.byte_level:
            raise RequestError(
                "answers cannot be held to a grammar here: single tokens of this model's tokenizer "
                "have no bytes (it has no ByteLevel decoder). Leave the format of the answer open."
            )
        self.size = vocab_size
        self.eos = eos
        self.marker = tokenizer.control_ids.get(MARKER)
        controls = sorted(set(tokenizer.control_ids.values()))
        known = min(vocab_size, tokenizer.vocab_size)
        self._bytes = [tokenizer.token_bytes(token) for token in range(known)]
        self._controls = frozenset(controls)
        bos = tokenizer.control_ids.get("<｜begin▁of▁sentence｜>")
        tokens = _Tokens(
            tokenizer, [*self._bytes, *[b""] * (vocab_size - known)], controls, eos, bos
        )
        self.library = LLTokenizer(TokenizerWrapper(tokens), n_vocab=vocab_size)
        self._spelled = self._spelling()
        self.reasoning_V = torch.ones(vocab_size, dtype=torch.bool)
        self.reasoning_V[[eos, *([] if self.marker is None else [self.marker])]] = False

    def spelling(self, progress: int) -> Tensor:
        """Ids of the tokens of text that complete the marker's spelling.

        progress: how many of its bytes have just been written; see `advanced`.
        """
        return self._spelled[progress]

    def advanced(self, progress: int, token: int) -> int:
        """How many bytes of the marker's spelling the text ends in after one more token."""
        if self.marker is None or token in self._controls or token >= len(self._bytes):
            return 0
        return _follow(progress, self._bytes[token])[0]

    def _spelling(self) -> list[Tensor]:
        count = len(MARKER.encode()) if self.marker is not None else 1
        found: list[list[int]] = [[] for _ in range(count)]
        if self.marker is not None:
            last = MARKER.encode()[-1:]
            for token, text in enumerate(self._bytes):
                if last in text and token not in self._controls:
                    for progress in range(count):
                        if _follow(progress, text)[1]:
                            found[progress].append(token)
        return [torch.tensor(ids, dtype=torch.int64) for ids in found]


def _follow(progress: int, text: bytes) -> tuple[int, bool]:
    """Progress after more bytes, and whether the whole marker was among them."""
    marker = MARKER.encode()
    seen = marker[:progress] + text
    whole = marker in seen
    longest = min(len(seen), len(marker) - 1)
    ends = (n for n in range(longest, 0, -1) if seen.endswith(marker[:n]))
    return next(ends, 0), whole


class _Tokens:
    """A tokenizer in the form that `TokenizerWrapper` reads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: Sequence[bytes],
        controls: Sequence[int],
        eos: int,
        bos: int | None,
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = [token for token in controls if token < len(tokens)]
        self.eos_token_id = eos
        self.bos_token_id = bos
        self._tokenizer = tokenizer

    def __call__(self, text: Any) -> list[int]:
        if not isinstance(text, str):  # the wrapper tries bytes first
            raise TypeError("expected text")
        return self._tokenizer.encode(text, control=False)
