"""Documents to token ids, once: a cached file of all tokens of a corpus.

A cache entry is a directory named by a hash of the tokenizer, the document file and the control
ids, so a changed file never meets old tokens. It appears by one rename when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cedar.errors import DataError
from cedar.inputs.documents import read_documents

__all__ = ["TokenFile", "tokenize"]

EncodeMany = Callable[[list[str]], list[list[int]]]

FORMAT = b"cedar tokens 1"
DOCUMENTS_PER_CALL = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """All documents of one corpus file as token ids.

    Attributes:
        tokens: every document, BOS + text + EOS, one after the other; memory-mapped.
        offsets: [documents + 1] where each document begins in `tokens`.
        num_bytes: [documents] UTF-8 bytes of each document's text.
        digest: names tokenizer and text; equal digests mean equal tokens.
    """

    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    digest: str

    @property
    def num_documents(self) -> int:
        return len(self.num_bytes)


def tokenize(
    path: Path,
    cache: Path,
    *,
    tokenizer_digest: str,
    encode_many: EncodeMany,
    bos: int,
    eos: int,
    vocab_size: int,
) -> TokenFile:
    """Tokenise the documents of `path`, or open what an earlier run left in `cache`.

    Args:
        path: `.jsonl` or `.jsonl.xz`.
        cache: directory of cache entries; made when missing.
        tokenizer_digest: identifies the tokenizer.
        encode_many: texts to token ids, without control tokens.
        bos, eos: put before and after every document.
        vocab_size: ids have to be below; up to 65,536 they are kept as 16 bits.

    Raises:
        DataError: unreadable or empty corpus, or a token outside the vocabulary.
    """
    if vocab_size > 1 << 32:
        raise DataError(f"A vocabulary of {vocab_size} tokens does not fit 32-bit ids.")
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    digest = _digest(path, tokenizer_digest, f"{bos} {eos} {np.dtype(dtype).name}")
    entry = cache / digest
    if entry.is_dir():
        return _open(entry, dtype, digest)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=cache))
    except OSError as error:
        raise DataError(
            f"The token cache {cache} cannot be written ({error.strerror}); "
            "set data.cache to a directory of yours."
        ) from None
    try:
        _write(path, work, encode_many, bos, eos, vocab_size, dtype)
        try:
            os.replace(work, entry)
        except OSError:
            # Another run finished the same entry meanwhile; theirs is as good.
            if not entry.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _open(entry, dtype, digest)


def _write(
    path: Path,
    directory: Path,
    encode_many: EncodeMany,
    bos: int,
    eos: int,
    vocab_size: int,
    dtype: type[np.uint16] | type[np.uint32],
) -> None:
    lengths: list[int] = []
    num_bytes: list[int] = []
    documents = read_documents(path)
    with open(directory / "tokens.bin", "wb") as file:
        while texts := list(islice(documents, DOCUMENTS_PER_CALL)):
            for text, ids in zip(texts, encode_many(texts), strict=True):
                tokens = np.array([bos, *ids, eos], dtype=np.int64)
                if tokens.max() >= vocab_size or tokens.min() < 0:
                    raise DataError(
                        f"{path}: the tokenizer gives the id {int(tokens.max())}, but the model's "
                        f"vocab_size is {vocab_size}; they do not belong together."
                    )
                file.write(tokens.astype(dtype).tobytes())
                lengths.append(len(tokens))
                num_bytes.append(len(text.encode()))
    if not lengths:
        raise DataError(f"{path} holds no document.")
    np.save(directory / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    np.save(directory / "num_bytes.npy", np.array(num_bytes, dtype=np.int64))


def _open(entry: Path, dtype: type[np.uint16] | type[np.uint32], digest: str) -> TokenFile:
    try:
        tokens = np.memmap(entry / "tokens.bin", dtype=dtype, mode="r")
        offsets = np.load(entry / "offsets.npy", allow_pickle=False)
        num_bytes = np.load(entry / "num_bytes.npy", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"The token cache {entry} is damaged ({error}); delete it.") from None
    if len(tokens) != offsets[-1] or len(num_bytes) != len(offsets) - 1:
        raise DataError(
            f"The token cache {entry} is damaged: {len(tokens)} tokens, expected {offsets[-1]}; "
            "delete it."
        )
    return TokenFile(tokens=tokens, offsets=offsets, num_bytes=num_bytes, digest=digest)


def _digest(path: Path, tokenizer_digest: str, details: str) -> str:
    state = hashlib.blake2b(FORMAT, digest_size=16)
    state.update(f"{tokenizer_digest} {details} ".encode())
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
    except OSError as error:
        raise DataError(
            f"The corpus {path} cannot be read: {error.strerror}. Give one with --corpus, or build "
            "that of cedar-tiny with tools/corpus/build.py."
        ) from None
    return state.hexdigest()
