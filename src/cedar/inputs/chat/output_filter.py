"""Which generated tokens may become text of a reply.

A reply is text and calls; a control token in it that the parser does not look for is a slip of the
model, and its spelling would be noise, or a forgery when the text is sent back. Ordinary tokens
that spell the same are text and stay.
"""

from cedar.inputs.tokenizer import Tokenizer

__all__ = ["OutputFilter", "TextTokens"]

# Marks of places in images: part of an answer about an image.
_GROUNDING = tuple(
    f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/")
)


class TextTokens:
    """The tokens of a tokenizer by their role in replies.

    end: the token that ends the reasoning. markup: the one that begins the tags of calls.
    """

    def __init__(self, tokenizer: Tokenizer, *, end: str, markup: str) -> None:
        controls = tokenizer.control_ids
        kept = {controls[name] for name in (end, markup, *_GROUNDING) if name in controls}
        self.dropped = frozenset(controls.values()) - kept
        self.end = controls[end]
        self.markup = controls[markup]
        self.known = frozenset(tokenizer.raw.get_vocab(with_added_tokens=True).values())
        self._tokenizer = tokenizer

    def ends_of(self, token: int) -> bytes:
        """The last two bytes of a token's text."""
        if not self._tokenizer.byte_level:
            return self._tokenizer.decode([token]).encode()[-2:]
        return self._tokenizer.token_bytes(token)[-2:]


class OutputFilter:
    """Follows the tokens of one reply.

    calls: whether calls are looked for; then markup that opens no tag is dropped, too. reasoning:
    whether the reply begins within the reasoning. ``reasoning_tokens`` counts those of it.
    """

    def __init__(self, tokens: TextTokens, *, calls: bool, reasoning: bool) -> None:
        self.reasoning_tokens = 0
        self._tokens = tokens
        self._calls = calls
        self._reasoning = reasoning
        self._before = b""

    def known(self, token: int) -> bool:
        """Whether the tokenizer has this token; a model's vocabulary may be larger."""
        return token in self._tokens.known

    def keep(self, token: int) -> bool:
        """Whether the next token may become text."""
        self._count(token)
        if token in self._tokens.dropped or not self.known(token):
            return False
        if token == self._tokens.markup and self._calls and not self._opens_tag():
            return False
        self._before = (self._before + self._tokens.ends_of(token))[-2:]
        return True

    def _count(self, token: int) -> None:
        # A call ends the reasoning, too, if the model forgot to.
        ended = token == self._tokens.end or (token == self._tokens.markup and self._calls)
        self._reasoning = self._reasoning and not ended
        self.reasoning_tokens += self._reasoning

    def _opens_tag(self) -> bool:
        return self._before.endswith(b"<") or self._before == b"</"
