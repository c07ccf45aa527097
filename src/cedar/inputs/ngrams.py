"""The compressed token map: which tokens count as equal when Engram hashes n-grams.

Tokens whose text is the same after normalisation ("The", " the", "THE") share a class, so that an
n-gram finds its table row whatever its case or spacing. The map is not part of a checkpoint: it
follows from the tokenizer, and every row of the tables depends on it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, normalizers

from cedar.errors import DataError
from cedar.inputs.tokenizer import Tokenizer

__all__ = ["RELEASED_DIGEST", "RELEASED_NUM_CLASSES", "TokenMap", "token_map"]

RELEASED_NUM_CLASSES = 99092
RELEASED_DIGEST = "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"

# Stands for a token that is one space while outer blanks are stripped; a private-use character.
_LONE_SPACE = "\ue000"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenMap:
    """``classes[id]`` is the class of a token: int64 [vocab_size], numbered by first appearance.

    ``digest`` is the SHA-256 of the map as little-endian int64.
    """

    classes: npt.NDArray[np.int64]
    num_classes: int
    digest: str


def token_map(tokenizer: Tokenizer | str | Path, vocab_size: int | None = None) -> TokenMap:
    """The compressed token map of a tokenizer, by the released recipe.

    Each id is decoded alone, special tokens included. Text that is not valid UTF-8 keys as the raw
    vocabulary string; any other text is normalised (NFKC, NFD, no accents, lower case, runs of
    blanks as one space, outer blanks stripped unless nothing else is left). ``vocab_size`` is the
    model's; ids that the tokenizer does not have share one class. Raises DataError if the tokenizer
    has more ids than the model.
    """
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_file(tokenizer)
    if vocab_size is None:
        vocab_size = tokenizer.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is "
            f"{vocab_size}; they do not belong together."
        )
    normalize = _normalizer().normalize_str
    raw = tokenizer.raw
    texts: list[str] = raw.decode_batch(
        [[number] for number in range(vocab_size)], skip_special_tokens=False
    )
    numbers: dict[str, int] = {}
    classes = np.empty(vocab_size, dtype=np.int64)
    for number, text in enumerate(texts):
        key = raw.id_to_token(number) if "\ufffd" in text else normalize(text) or text
        classes[number] = numbers.setdefault(key, len(numbers))
    classes.flags.writeable = False
    return TokenMap(
        classes=classes,
        num_classes=len(numbers),
        digest=hashlib.sha256(classes.astype("<i8").tobytes()).hexdigest(),
    )


def _normalizer() -> Any:
    # The library's normalizers, not Python's unicodedata: the released tables were built with
    # them, and the two follow different versions of Unicode.
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
