"""Hostile, damaged and foreign files: each gives one clear error, none is unpickled."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_setting import GOLDEN, entry, raw_file

from cedar.checkpoint import Checkpoint
from cedar.checkpoint.header import read_header
from cedar.errors import CheckpointError

GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("U8", [3], 16, 19)}


class Bomb:
    """Shouts if it is ever unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


def test_a_good_file(tmp_path: Path) -> None:
    header = read_header(raw_file(tmp_path / "x.safetensors", GOOD, bytes(19)))
    assert {n: str(t.spec) for n, t in header.tensors.items()} == {"a": "F32 [2, 2]", "b": "U8 [3]"}


def test_padding_metadata_scalars_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    raw = {
        "__metadata__": {"format": "pt"},
        "scalar": entry("F32", [], 0, 4),
        "empty": entry("F32", [0, 3], 4, 4),
        "last": entry("U8", [1], 4, 5),
        "end": entry("F64", [0], 5, 5),
    }
    path = raw_file(tmp_path / "x.safetensors", raw, bytes(5))
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.read("scalar").shape == ()
        assert checkpoint.read("empty").shape == (0, 3)
        assert checkpoint.read("end").shape == (0,)
    padded = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   '
    assert read_header(raw_file(tmp_path / "y.safetensors", padded, b"1")).tensors.keys() == {"a"}


@pytest.mark.parametrize(
    ("header", "payload", "words"),
    [
        (b'{"a":', b"", "no valid JSON"),
        (b"[1, 2]", b"", "JSON list"),
        (b"\xff\xfe{}", b"", "no valid JSON"),
        (b"[" * 50_000, b"", "no valid JSON"),
        (b'{"a": NaN}', b"", "NaN is not JSON"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
            "'a' occurs twice",
        ),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        ({"a": 3}, b"", "another form of entry"),
        ({"a": {"dtype": "U8", "shape": [1]}}, b"1", "another form of entry"),
        ({"a": entry("U8", [1], 0, 1) | {"code": "x"}}, b"1", "another form of entry"),
        ({"a": entry("COMPLEX", [1], 0, 1)}, b"1", "dtype 'COMPLEX'"),
        ({"a": entry("U8", [-1], 0, 1)}, b"1", "none negative"),
        ({"a": entry("U8", [1.0], 0, 1)}, b"1", "none negative"),
        ({"a": entry("U8", [True], 0, 1)}, b"1", "none negative"),
        ({"a": entry("U8", [2**64], 0, 1)}, b"1", "none negative"),
        ({"a": entry("U8", "1", 0, 1)}, b"1", "none negative"),
        ({"a": entry("U8", [1], 1, 0)}, b"1", "start <= stop"),
        ({"a": entry("U8", [1], -1, 0)}, b"1", "start <= stop"),
        ({"a": entry("U8", [1], 0, 2)}, b"1", "at most 1, the size of the payload"),
        ({"a": entry("F32", [1], 0, 3)}, b"123", "3 bytes; expected 4 for F32 [1]"),
        ({"a": entry("F32", [2**40, 2**40], 0, 4)}, b"1234", "4 bytes; expected"),
        (
            {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)},
            b"123",
            "tensor 'b': found 1 bytes that belong to the tensor before",
        ),
        (
            {"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)},
            b"123",
            "tensor 'b': found a gap of 1 bytes",
        ),
        ({"a": entry("U8", [1], 1, 2)}, b"12", "gap of 1 bytes"),
        ({"a": entry("U8", [1], 0, 1)}, b"12", "1 bytes after the last tensor"),
        ({}, b"12", "2 bytes after the last tensor"),
    ],
)
def test_broken_headers(tmp_path: Path, header: Any, payload: bytes, words: str) -> None:
    path = raw_file(tmp_path / "bad.safetensors", header, payload)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert words in message
    assert "bad.safetensors" in message
    assert "expected" in message


@pytest.mark.parametrize("length", [0, 1, 10**8 + 1, 2**63, 2**64 - 1])
def test_header_length_out_of_range(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "x.safetensors", GOOD, bytes(19), length=length)
    with pytest.raises(CheckpointError, match=f"header length of {length}"):
        read_header(path)


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", GOOD, bytes(19), length=1000)
    with pytest.raises(CheckpointError, match="1008 for the header alone"):
        read_header(path)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 30_000, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    whole = (GOLDEN / "mini_bf16.weights.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        Checkpoint.open(path)


def test_pickles_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save({"a": Bomb()}, buffer)
    for name, content in (("raw", pickle.dumps(Bomb())), ("torch", buffer.getvalue())):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="pickle"):
            Checkpoint.open(path)
    assert not (tmp_path / "unpickled").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "unpickled").exists(), "the bomb itself is a dud"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"GGUF\x03\x00\x00\x00" + bytes(32), "GGUF"),
        (b"\x93NUMPY\x01\x00" + bytes(32), "NumPy"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"", "0 bytes"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_header(path)


def test_a_header_length_that_looks_like_a_magic_is_no_magic(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path = raw_file(tmp_path / "x.safetensors", text + b" " * (0x80 - len(text)), b"1")
    assert path.read_bytes()[:1] == b"\x80"
    assert read_header(path).tensors.keys() == {"a"}


def test_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint.open(tmp_path / "nowhere.safetensors")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        Checkpoint.open(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="no ordinary file"):
        Checkpoint.open(tmp_path / "pipe.safetensors")
