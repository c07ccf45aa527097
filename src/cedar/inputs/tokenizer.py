"""Text to token ids and back, for any ``tokenizer.json``.

Two rules of the prompt protocol live here. A beginning-of-text token is part of the rendered
prompt, so no method adds one. And text that a user wrote is encoded with ``control=False``: the
added vocabulary (``<｜User｜>``, ``<think>``, ...) is then unknown, so that no message can forge a
control token.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from cedar.errors import DataError, RequestError

__all__ = ["TextStream", "Tokenizer"]


class Tokenizer:
    """A tokenizer file and the two ways to read text with it.

    ``raw`` is the underlying ``tokenizers.Tokenizer``. ``vocab_size`` is the largest id plus one,
    added tokens included. ``control_ids`` maps the spelling of each added token to its id.
    """

    def __init__(self, content: str, *, where: str = "tokenizer.json") -> None:
        """Read the text of a tokenizer file; ``where`` names it in errors.

        Raises DataError if the content is not a tokenizer file.
        """
        try:
            fields = json.loads(content)
        except ValueError as error:
            raise DataError(
                f"{where} is not JSON ({error}). It was probably truncated or is a pointer file: "
                "copy it again."
            ) from None
        if not isinstance(fields, dict) or not isinstance(fields.get("model"), dict):
            raise DataError(
                f'{where} has no "model" section; expected a file of the tokenizers library, '
                "as released next to the weights."
            )
        # Without its added vocabulary the same file is the tokenizer for text of users. The
        # library's own switch (encode_special_tokens) hides only those with the special flag,
        # and most control tokens of the protocol do not have it.
        plain = json.dumps(fields | {"added_tokens": []}, ensure_ascii=False)
        self.raw: Any = _parse(content, where)
        self._plain: Any = _parse(plain, where)
        vocabulary: dict[str, int] = self.raw.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{where} has an empty vocabulary.")
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.control_ids: dict[str, int] = {
            token.content: number
            for number, token in sorted(self.raw.get_added_tokens_decoder().items())
        }
        self._special = frozenset(
            number for number, token in self.raw.get_added_tokens_decoder().items() if token.special
        )
        self._controls = frozenset(self.control_ids.values())
        self._byte_level = _is_byte_level(fields.get("decoder"))
        self._where = where

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Read ``path``: a tokenizer file, or a folder that holds ``tokenizer.json``."""
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            content = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(
                f"{path} does not exist; expected the tokenizer.json that belongs to the weights."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as a tokenizer file: {error}.") from None
        return cls(content, where=str(path))

    def encode(self, text: str, *, control: bool = True) -> list[int]:
        """Token ids of ``text``; nothing is added at either end.

        With ``control=False`` added tokens are not recognised: their spelling is ordinary text.
        Raises RequestError if the text is not valid Unicode.
        """
        tokenizer = self.raw if control else self._plain
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # the library's answer to anything that is not UTF-8
            raise _not_text(text) from None
        if not control and not self._controls.isdisjoint(ids):
            found = next(number for number in ids if number in self._controls)
            raise DataError(
                f"{self._where} turns ordinary text into the control token {found}: an added "
                "token is also a word of its base vocabulary. It cannot be used for text of users."
            )
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        ``skip_special`` leaves out added tokens with the special flag (begin and end of text,
        padding, grounding tokens), but not role and reasoning markers. Raises RequestError for an
        id outside the vocabulary.
        """
        text: str = self.raw.decode(self._checked(ids), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text; the concatenation over ids is their text.

        Raises DataError for a tokenizer that is not byte-level, where no such bytes exist.
        """
        if not self._byte_level:
            raise DataError(
                f"{self._where} has no ByteLevel decoder, so single tokens have no bytes; "
                "decode whole sequences instead."
            )
        (token_id,) = self._checked([token_id])
        token: str | None = self.raw.id_to_token(token_id)
        if token is None:
            return b""  # a hole between the base vocabulary and an added token
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token with a character outside the byte alphabet
            return token.encode()

    def stream(self, *, skip_special: bool = False) -> "TextStream":
        """A new decoder for tokens that arrive one by one; see TextStream."""
        return TextStream(self, skip_special=skip_special)

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode(..., skip_special=True)`` leaves this token out."""
        return token_id in self._special

    @property
    def byte_level(self) -> bool:
        """Whether every token stands for fixed bytes."""
        return self._byte_level

    def _checked(self, ids: Iterable[int]) -> list[int]:
        listed = [int(number) for number in ids]
        for position, number in enumerate(listed):
            if not 0 <= number < self.vocab_size:
                raise RequestError(
                    f"token id {number} at position {position} is outside the vocabulary of "
                    f"{self._where}; expected 0 to {self.vocab_size - 1}."
                )
        return listed


class TextStream:
    """Decode tokens as they arrive, never showing half a character.

    ``push`` returns the text that became certain, ``finish`` the rest (U+FFFD for bytes that never
    became a character). All parts joined equal ``decode`` of all ids.

    Tokens of a tokenizer that is not byte-level have no text of their own: then every push decodes
    everything again, which is slow, and the parts are exact if its decoder only ever appends.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []  # only for tokenizers whose tokens have no bytes of their own
        self._shown = ""

    def push(self, token_id: int) -> str:
        """Add one token; the text that it completes, possibly none."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        if self._tokenizer.byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        # Trailing U+FFFD may be the first bytes of a character, trailing blanks may be stripped
        # or joined by what follows; both wait.
        return self._show(text.rstrip("\ufffd \n"))

    def finish(self) -> str:
        """End of the text; what was held back."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._show(self._tokenizer.decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._shown += new
        return new


def _parse(content: str, where: str) -> Any:
    try:
        return RawTokenizer.from_str(content)
    except Exception as error:  # the library raises a bare Exception
        raise DataError(
            f"{where} cannot be used: {error}. Expected a file of the tokenizers library, version "
            "0.22 or later."
        ) from None


def _not_text(text: object) -> RequestError:
    if not isinstance(text, str):
        return RequestError(f"the text is a {type(text).__name__}; expected a string.")
    position = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), 0)
    return RequestError(
        f"the text holds a lone surrogate ({text[position : position + 1]!r}) at character "
        f"{position}; expected valid Unicode. Decode the text as UTF-8 first."
    )


def _is_byte_level(decoder: object) -> bool:
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Character of the byte-level alphabet -> byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are the code
    points from 256 on.
    """
    printable: Sequence[int] = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
