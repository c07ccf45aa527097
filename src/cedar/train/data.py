"""Batches as a pure function of (seed, step): shuffled documents, packed, sequences kept apart.

Nothing is remembered between steps, so a resumed run needs the step number alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedar.config import ModelConfig
from cedar.errors import DataError
from cedar.inputs.tokenizer import Tokenizer
from cedar.model import Batch
from cedar.train.config import TrainConfig
from cedar.train.packing import pack_best_fit, split_documents
from cedar.train.tokens import TokenFile, tokenize

__all__ = [
    "IGNORED",
    "Corpus",
    "DeviceBatch",
    "HeldOut",
    "HostBatch",
    "TrainData",
    "choose_anchors",
    "open_corpus",
    "prefetch",
    "to_device",
    "with_corpus",
]

IGNORED = -100  # target of positions whose next token belongs to another sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBatch:
    """One forward pass as it lies in host memory.

    Attributes:
        tokens_T: int64 packed tokens.
        targets_T: int64 next token of the same sequence, IGNORED at each sequence's end.
        lengths: tokens of each sequence.
        anchors_N: int64 rows of draft anchors, ascending; empty when no draft head is trained.
        num_targets: targets that count.
    """

    tokens_T: NDArray[np.int64]
    targets_T: NDArray[np.int64]
    lengths: tuple[int, ...]
    anchors_N: NDArray[np.int64]
    num_targets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBatch:
    """The same on the training device; `batch` is what the model takes."""

    batch: Batch
    targets_T: Tensor
    anchors_N: Tensor
    num_targets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Forward passes over whole held-out documents, and the UTF-8 bytes of their text."""

    batches: tuple[HostBatch, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Training and held-out documents of a run (both may live in one file)."""

    train: TokenFile
    train_documents: NDArray[np.int64]
    valid: TokenFile
    valid_documents: NDArray[np.int64]

    @property
    def digest(self) -> str:
        """Identifies tokenizer, text and split; a resumed run has to find the same."""
        split = f"{self.train.digest} {self.valid.digest} {len(self.train_documents)}"
        return hashlib.blake2b(split.encode(), digest_size=16).hexdigest()


def with_corpus(config: TrainConfig, path: Path) -> TrainConfig:
    """The same run on other text: one file (part of it is held out), or a directory with
    `train.jsonl` and `heldout.jsonl`, each perhaps with `.xz` at the end.

    Raises:
        DataError: there is no such text.
    """
    if path.is_file():
        data = replace(config.data, train=str(path), valid="")
    elif path.is_dir():
        data = replace(config.data, train=_one_of(path, "train"), valid=_one_of(path, "heldout"))
    else:
        raise DataError(f"The corpus {path} does not exist.")
    return replace(config, data=data)


def _one_of(directory: Path, stem: str) -> str:
    names = [f"{stem}.jsonl", f"{stem}.jsonl.xz"]
    for name in names:
        if (directory / name).is_file():
            return str(directory / name)
    raise DataError(f"The corpus directory {directory} holds neither {names[0]} nor {names[1]}.")


def open_corpus(config: TrainConfig, cache: Path) -> Corpus:
    """Tokenise (or find tokenised) the corpus that `config.data` names.

    Raises:
        DataError: a file is missing or malformed, or tokenizer and model do not fit.
    """
    data = config.data

    def opened(path: str) -> TokenFile:
        return open_tokens(Path(path), Path(data.tokenizer), config.model, cache)

    train = opened(data.train)
    everything = np.arange(train.num_documents)
    if data.valid:
        valid = opened(data.valid)
        return Corpus(
            train=train,
            train_documents=everything,
            valid=valid,
            valid_documents=np.arange(valid.num_documents),
        )
    held_out = everything % data.holdout_every == data.holdout_every - 1
    if not held_out.any():
        raise DataError(
            f"{data.train} holds {train.num_documents} documents, fewer than data.holdout_every = "
            f"{data.holdout_every}, so none is left to evaluate on; lower it or set data.valid."
        )
    return Corpus(
        train=train,
        train_documents=everything[~held_out],
        valid=train,
        valid_documents=everything[held_out],
    )


class TrainData:
    """The forward passes of every step, computed from (seed, step).

    One epoch is one shuffled pass over all pieces, packed anew.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        self._config = config
        self._corpus = corpus
        self._capacity = config.data.tokens_per_step // config.data.accumulate
        self._pieces = split_documents(
            corpus.train.offsets, corpus.train_documents, config.data.seq_len
        )
        # The packing of an epoch is pure; keeping the two newest avoids packing again each step.
        self._packed = lru_cache(maxsize=2)(self._pack_epoch)
        self._ends: list[int] = []  # forward passes in epochs 0 … e together

    @property
    def tokens_per_epoch(self) -> int:
        return int(self._pieces[:, 1].sum())

    def step(self, step: int, anchors: int = 0) -> list[HostBatch]:
        """The `accumulate` forward passes of step `step` (from 0), `anchors` shared out."""
        count = self._config.data.accumulate
        rng = np.random.default_rng([self._config.seed, 1, step])
        return [
            self._host_batch(self._locate(step * count + i), anchors // count, rng)
            for i in range(count)
        ]

    def epoch_of(self, step: int) -> int:
        """Which pass over the corpus the first forward pass of `step` belongs to."""
        self._locate(step * self._config.data.accumulate)
        number = step * self._config.data.accumulate
        return next(epoch for epoch, end in enumerate(self._ends) if number < end)

    def held_out(self, tokens: int, anchors: int = 0) -> HeldOut:
        """Whole held-out documents of about `tokens` tokens in all (0: every one).

        The choice depends on the corpus and `tokens` alone, never on the step or the seed: every
        evaluation of every run sees the same text.
        """
        file = self._corpus.valid
        rng = np.random.default_rng(0)
        chosen = rng.permutation(self._corpus.valid_documents)
        if tokens:
            sizes = np.diff(file.offsets)[chosen]
            chosen = chosen[: max(1, int(np.searchsorted(np.cumsum(sizes), tokens, side="right")))]
        seq_len = self._config.data.seq_len
        return hold_out(file, chosen, seq_len, self._capacity, anchors, self._block, rng)

    @property
    def _block(self) -> int:
        return self._config.model.dspark_block_size

    def _locate(self, number: int) -> NDArray[np.int64]:
        """The pieces [n, 2] of forward pass `number`, counted from the start of training."""
        epoch = 0
        while True:
            if epoch == len(self._ends):
                start = self._ends[-1] if self._ends else 0
                self._ends.append(start + len(self._packed(epoch)))
            if number < self._ends[epoch]:
                start = self._ends[epoch - 1] if epoch else 0
                return self._pieces[self._packed(epoch)[number - start]]
            epoch += 1

    def _pack_epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        rng = np.random.default_rng([self._config.seed, 0, epoch])
        order = rng.permutation(len(self._pieces))
        bins = pack_best_fit(self._pieces[order, 1].tolist(), self._capacity)
        return [order[pieces] for pieces in bins]

    def _host_batch(
        self, pieces: NDArray[np.int64], anchors: int, rng: np.random.Generator
    ) -> HostBatch:
        return _assemble(self._corpus.train, pieces, anchors, self._block, rng)


def hold_out(
    file: TokenFile,
    documents: NDArray[np.int64],
    seq_len: int,
    capacity: int,
    anchors: int,
    block: int,
    rng: np.random.Generator,
) -> HeldOut:
    """Documents cut into sequences of `seq_len`, in forward passes of `capacity` tokens."""
    pieces = split_documents(file.offsets, documents, seq_len)
    groups: list[list[int]] = []
    room = 0
    for index, length in enumerate(pieces[:, 1].tolist()):
        if length > room:
            groups.append([])
            room = capacity
        groups[-1].append(index)
        room -= length
    batches = tuple(_assemble(file, pieces[g], anchors, block, rng) for g in groups)
    return HeldOut(batches=batches, num_bytes=int(file.num_bytes[documents].sum()))


def open_tokens(path: Path, tokenizer_file: Path, model: ModelConfig, cache: Path) -> TokenFile:
    """The documents of one file as tokens, from the cache or made now.

    Raises:
        DataError: a file is missing or malformed, or tokenizer and model do not fit.
    """
    tokenizer = Tokenizer.from_file(tokenizer_file)
    digest = hashlib.blake2b(tokenizer_file.read_bytes(), digest_size=16).hexdigest()
    return tokenize(
        path,
        cache,
        tokenizer_digest=digest,
        encode_many=lambda texts: [tokenizer.encode(text, control=False) for text in texts],
        bos=model.bos_token_id,
        eos=model.eos_token_id,
        vocab_size=model.vocab_size,
    )


def _assemble(
    file: TokenFile,
    pieces: NDArray[np.int64],
    anchors: int,
    block: int,
    rng: np.random.Generator,
) -> HostBatch:
    tokens_T = np.concatenate([file.tokens[s : s + n] for s, n in pieces.tolist()]).astype(np.int64)
    lengths = tuple(int(n) for n in pieces[:, 1])
    targets_T = np.roll(tokens_T, -1)
    targets_T[np.cumsum(lengths) - 1] = IGNORED
    return HostBatch(
        tokens_T=tokens_T,
        targets_T=targets_T,
        lengths=lengths,
        anchors_N=choose_anchors(lengths, anchors, block, rng),
        num_targets=len(tokens_T) - len(lengths),
    )


def choose_anchors(
    lengths: tuple[int, ...], count: int, block: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw up to `count` anchor rows, without repetition, ascending.

    A row p qualifies when the rows p + 1 … p + block + 1 lie in its sequence: the draft's `block`
    positions stand at p + 1 … p + block and each needs a next token.
    """
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    starts = np.cumsum([0, *lengths[:-1]])
    rows = np.concatenate(
        [
            np.arange(start, start + max(0, length - block - 1))
            for start, length in zip(starts.tolist(), lengths, strict=True)
        ]
    ).astype(np.int64)
    return np.sort(rng.choice(rows, size=min(count, len(rows)), replace=False))


def to_device(host: HostBatch, device: torch.device) -> DeviceBatch:
    """Copy a forward pass to `device`; on a GPU from pinned memory, without waiting."""

    def moved(array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        if device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    return DeviceBatch(
        batch=Batch(
            tokens_T=moved(host.tokens_T),
            lengths=host.lengths,
            slots=tuple(range(len(host.lengths))),
        ),
        targets_T=moved(host.targets_T),
        anchors_N=moved(host.anchors_N),
        num_targets=host.num_targets,
    )


def prefetch(
    data: TrainData, start: int, stop: int, *, anchors: int, device: torch.device
) -> Generator[list[DeviceBatch], None, None]:
    """Yield the device batches of steps start … stop - 1, assembling one step ahead."""

    def load(step: int) -> list[DeviceBatch]:
        return [to_device(host, device) for host in data.step(step, anchors)]

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        pending: Future[list[DeviceBatch]] | None = None
        for step in range(start, stop):
            current = pending.result() if pending else load(step)
            pending = pool.submit(load, step + 1) if step + 1 < stop else None
            yield current
