"""From documents to packed batches."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_setting import small_config, write_corpus

from cedar.errors import DataError
from cedar.inputs.documents import read_documents
from cedar.train.config import TrainConfig
from cedar.train.data import (
    IGNORED,
    HostBatch,
    TrainData,
    choose_anchors,
    open_corpus,
    prefetch,
    with_corpus,
)
from cedar.train.packing import pack_best_fit, split_documents
from cedar.train.tokens import TokenFile, tokenize

BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_config(tmp_path_factory.mktemp("setting"))


@pytest.fixture(scope="module")
def data(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainData:
    return TrainData(config, open_corpus(config, tmp_path_factory.mktemp("cache")))


def encode(texts: list[str]) -> list[list[int]]:
    return [[3 + byte for byte in text.encode()] for text in texts]


def tokenized(path: Path, cache: Path, digest: str = "t", vocab_size: int = 300) -> TokenFile:
    return tokenize(
        path,
        cache,
        tokenizer_digest=digest,
        encode_many=encode,
        bos=BOS,
        eos=EOS,
        vocab_size=vocab_size,
    )


# --- documents to tokens ----------------------------------------------------------------------


def test_every_document_is_kept_whole(tmp_path: Path) -> None:
    texts = ["abc", "", "zwölf"]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts) + "\n\n", encoding="utf-8")
    file = tokenized(path, tmp_path / "cache")
    documents = [
        file.tokens[a:b].tolist()
        for a, b in zip(file.offsets[:-1].tolist(), file.offsets[1:].tolist(), strict=True)
    ]
    assert documents == [[BOS, *ids, EOS] for ids in encode(texts)]
    assert file.num_bytes.tolist() == [3, 0, 6]
    assert file.tokens.dtype == np.uint16
    assert tokenized(path, tmp_path / "wide", vocab_size=70_000).tokens.dtype == np.uint32


def test_the_cache_is_used_and_follows_text_and_tokenizer(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c.jsonl")
    cache = tmp_path / "cache"
    first = tokenized(path, cache)

    def unusable(texts: list[str]) -> list[list[int]]:
        raise AssertionError("the cache was not used")

    again = tokenize(
        path, cache, tokenizer_digest="t", encode_many=unusable, bos=BOS, eos=EOS, vocab_size=300
    )
    assert again.digest == first.digest
    assert (again.tokens == first.tokens).all()
    assert tokenized(path, cache, digest="other").digest != first.digest
    write_corpus(path, documents=13)
    assert tokenized(path, cache).digest != first.digest
    assert len(list(cache.iterdir())) == 3


def test_xz_text_is_the_same_text(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c.jsonl")
    packed = tmp_path / "c.jsonl.xz"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    assert list(read_documents(packed)) == list(read_documents(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
        ("c.jsonl", b'{"text": "a"}\n{"body": "b"}\n', 'line 2: no "text" string'),
        ("c.jsonl", b'{"text": 7}\n', 'line 1: no "text" string'),
        ("c.jsonl", b'["text"]\n', 'line 1: no "text" string'),
        ("c.jsonl", b"", "holds no document"),
        ("c.jsonl", b'{"text": "\xff"}\n', "not UTF-8"),
        ("c.jsonl.xz", b"no archive", "cannot be read"),
        ("c.txt", b"plain", "has to end in .jsonl"),
    ],
)
def test_a_bad_corpus_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        tokenized(tmp_path / name, tmp_path / "cache")
    assert message in str(caught.value)
    # Nothing half-done is left behind.
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"c\.jsonl cannot be read"):
        tokenized(tmp_path / "c.jsonl", tmp_path / "cache")


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size is 100; they do not belong together"):
        tokenized(write_corpus(tmp_path / "c.jsonl"), tmp_path / "cache", vocab_size=100)


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c.jsonl")
    digest = tokenized(path, tmp_path / "cache").digest
    tokens = tmp_path / "cache" / digest / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(DataError, match="damaged"):
        tokenized(path, tmp_path / "cache")


# --- splitting and packing --------------------------------------------------------------------


@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=20), seq_len=st.integers(2, 30))
def test_split_makes_every_token_a_target_once(lengths: list[int], seq_len: int) -> None:
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    pieces = split_documents(offsets, np.arange(len(lengths)), seq_len)
    targets = np.zeros(offsets[-1], dtype=int)
    for start, length in pieces.tolist():
        assert 2 <= length <= seq_len
        targets[start + 1 : start + length] += 1
    expected = np.ones_like(targets)
    expected[offsets[:-1]] = 0
    assert (targets == expected).all()


@given(
    lengths=st.lists(st.integers(1, 40), max_size=120),
    max_open=st.integers(1, 8),
)
def test_packing_overfills_nothing_and_repeats_nothing(lengths: list[int], max_open: int) -> None:
    bins = pack_best_fit(lengths, 40, max_open)
    packed = [index for pieces in bins for index in pieces]
    assert len(set(packed)) == len(packed)
    assert all(sum(lengths[i] for i in pieces) <= 40 for pieces in bins)
    lost = sum(lengths) - sum(lengths[i] for i in packed)
    assert lost < 20


def test_packing_takes_the_fullest_bin_that_fits() -> None:
    # 5 opens a bin, 8 another; 2 fits both and goes where only 2 is left.
    assert pack_best_fit([5, 8, 2, 5], 10) == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="piece 1 has 11 tokens"):
        pack_best_fit([1, 11], 10)


def test_packing_fills_well() -> None:
    lengths = np.random.default_rng(0).integers(2, 1024, 5000).tolist()
    bins = pack_best_fit(lengths, 8192)
    assert sum(lengths) / (8192 * len(bins)) > 0.995


# --- batches ----------------------------------------------------------------------------------


def sequences(batch: HostBatch) -> list[list[int]]:
    stops = np.cumsum(batch.lengths)[:-1]
    return [part.tolist() for part in np.split(batch.tokens_T, stops)]


def test_targets_never_cross_a_boundary(data: TrainData) -> None:
    several = False
    for step in range(6):
        (batch,) = data.step(step)
        several |= len(batch.lengths) > 1
        ends = np.cumsum(batch.lengths) - 1
        assert (batch.targets_T[ends] == IGNORED).all()
        inner = np.setdiff1d(np.arange(len(batch.tokens_T)), ends)
        assert (batch.targets_T[inner] == batch.tokens_T[inner + 1]).all()
        assert batch.num_targets == len(inner)
    assert several


def test_an_epoch_is_every_piece_once(config: TrainConfig, data: TrainData) -> None:
    steps = [step for step in range(40) if data.epoch_of(step) == 0]
    seen = [tuple(s) for step in steps for batch in data.step(step) for s in sequences(batch)]
    corpus = open_corpus(config, Path(config.data.train).parent / "cache").train
    pieces = split_documents(corpus.offsets, np.arange(corpus.num_documents), 96)
    every = [tuple(corpus.tokens[a : a + n].tolist()) for a, n in pieces.tolist()]
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(every)
    # At most one bin, less than half full, may be left out.
    assert sum(map(len, every)) - sum(map(len, seen)) < 96


def test_batches_follow_from_seed_and_step_alone(
    config: TrainConfig, data: TrainData, tmp_path: Path
) -> None:
    fresh = TrainData(config, open_corpus(config, tmp_path))
    for step in (17, 3, 0, 9):  # in any order
        (one,), (other,) = data.step(step, anchors=4), fresh.step(step, anchors=4)
        assert (one.tokens_T == other.tokens_T).all()
        assert (one.anchors_N == other.anchors_N).all()
    reseeded = TrainData(replace(config, seed=1), open_corpus(config, tmp_path))
    assert sequences(reseeded.step(0)[0]) != sequences(data.step(0)[0])
    epochs = [data.epoch_of(step) for step in range(20)]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 2
    second = epochs.index(1)
    assert [sequences(data.step(s)[0]) for s in range(second)] != [
        sequences(data.step(second + s)[0]) for s in range(second)
    ]


def test_accumulation_cuts_a_step_into_consecutive_passes(
    config: TrainConfig, tmp_path: Path
) -> None:
    whole = replace(config.data, tokens_per_step=192, accumulate=1)
    halves = replace(config.data, tokens_per_step=384, accumulate=2)
    corpus = open_corpus(config, tmp_path)
    one = TrainData(replace(config, data=whole), corpus)
    two = TrainData(replace(config, data=halves), corpus)
    assert [sequences(b) for b in two.step(1)] == [
        sequences(b) for step in (2, 3) for b in one.step(step)
    ]


def test_held_out_text_is_whole_documents(config: TrainConfig, data: TrainData) -> None:
    everything = data.held_out(0)
    texts = list(read_documents(Path(config.data.valid)))
    assert everything.num_bytes == sum(len(t.encode()) for t in texts)
    # Every byte and every end of text is a target once.
    targets = sum(batch.num_targets for batch in everything.batches)
    assert targets == everything.num_bytes + len(texts)
    some = data.held_out(120)
    assert 0 < some.num_bytes < everything.num_bytes
    assert sum(b.num_targets for b in some.batches) - some.num_bytes in (1, 2)


def test_without_a_held_out_file_part_is_held_out(config: TrainConfig, tmp_path: Path) -> None:
    alone = with_corpus(config, Path(config.data.train))
    assert alone.data.valid == ""
    split = replace(alone, data=replace(alone.data, holdout_every=4))
    corpus = open_corpus(split, tmp_path)
    assert corpus.valid_documents.tolist() == [3, 7, 11]
    assert not set(corpus.valid_documents) & set(corpus.train_documents)
    with pytest.raises(DataError, match=r"fewer than data\.holdout_every = 50"):
        open_corpus(alone, tmp_path)


def test_a_corpus_directory_is_recognised(config: TrainConfig, tmp_path: Path) -> None:
    write_corpus(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"neither heldout\.jsonl nor heldout\.jsonl\.xz"):
        with_corpus(config, tmp_path)
    (tmp_path / "heldout.jsonl.xz").write_bytes(lzma.compress(b'{"text": "a"}\n'))
    assert with_corpus(config, tmp_path).data.valid == str(tmp_path / "heldout.jsonl.xz")
    with pytest.raises(DataError, match="does not exist"):
        with_corpus(config, tmp_path / "nowhere")


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=8),
    count=st.integers(0, 40),
    block=st.integers(1, 5),
)
def test_anchors_have_their_block_and_its_targets(
    lengths: list[int], count: int, block: int
) -> None:
    anchors = choose_anchors(tuple(lengths), count, block, np.random.default_rng(0))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    possible = [
        row
        for row in range(len(sequence))
        if row + block + 1 < len(sequence) and sequence[row] == sequence[row + block + 1]
    ]
    assert len(anchors) == min(count, len(possible))
    assert set(anchors.tolist()) <= set(possible)
    assert (np.diff(anchors) > 0).all()


def test_prefetching_changes_nothing(data: TrainData) -> None:
    device = torch.device("cpu")
    batches = list(prefetch(data, 2, 6, anchors=4, device=device))
    assert len(batches) == 4
    for step, (found,) in enumerate(batches, start=2):
        (expected,) = data.step(step, anchors=4)
        assert found.batch.tokens_T.tolist() == expected.tokens_T.tolist()
        assert found.batch.lengths == expected.lengths
        assert found.targets_T.tolist() == expected.targets_T.tolist()
        assert found.anchors_N.tolist() == expected.anchors_N.tolist()
