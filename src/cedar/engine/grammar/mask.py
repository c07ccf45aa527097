"""One text's place in its grammar."""

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from cedar.engine.grammar.vocabulary import GrammarVocabulary
from cedar.errors import RequestError

__all__ = ["GrammarMask"]


class GrammarMask:
    """A `cedar.engine.sampler.TokenMask` that holds one text to a grammar.

    matcher: a grammar of its own, at its beginning. after: the token behind which the grammar
    begins, the end of the reasoning; None if it begins at once. When the grammar's text is
    complete, only the end-of-text token is left.
    """

    def __init__(
        self, vocabulary: GrammarVocabulary, matcher: LLMatcher, *, after: int | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._after = after
        self._progress = 0  # in the marker's spelling
        self._ended = False

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self._after is None and (self._ended or self._matcher.is_accepting())

    def allowed(self) -> Tensor:
        """bool ``[V]``. Raises `RequestError` if the grammar became too complex to follow."""
        if self._after is not None:
            return self._vocabulary.reasoning_V
        size = self._vocabulary.size
        if self._ended:
            allowed_V = torch.zeros(size, dtype=torch.bool)
            allowed_V[self._vocabulary.eos] = True
            return allowed_V
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(packed, count=size, bitorder="little")
        allowed_V = torch.from_numpy(bits.view(np.bool_))
        allowed_V[self._vocabulary.spelling(self._progress)] = False
        return allowed_V

    def accept(self, token: int) -> None:
        """The text goes on with this token. Raises `RequestError` if it may not."""
        if self._after is not None:
            if token == self._after:
                self._after = None
            return
        if self._ended:
            return
        if token == self._vocabulary.eos and self.complete:
            self._ended = True
            return
        self._matcher.consume_token(token)
        self._check()
        self._progress = self._vocabulary.advanced(self._progress, token)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = (self._matcher.get_error().splitlines() or ["unknown"])[0]
            raise RequestError(
                f"the grammar of the answer cannot be followed any further: {reason}."
            )
