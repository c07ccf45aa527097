"""Engram: hashing against Python integers, look-back, and the gate."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.cache import DenseKV
from cedar.model import Batch
from cedar.model.engram import hash_multipliers
from cedar.model.layout import lookback
from cedar.ops.engram_gate.reference import engram_gate
from cedar.ops.engram_hash.reference import engram_hash
from cedar.testing import assert_bitwise, assert_close, tiny_config

PAD = 5


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), order=st.integers(2, 4), heads=st.integers(1, 3))
def test_hash_with_python_integers(seed: int, order: int, heads: int) -> None:
    g = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 99092, (7, order), generator=g)
    bound = (2**63 - 1) // 99092 // 2
    multipliers = torch.randint(0, bound, (order,), generator=g) * 2 + 1
    primes = torch.tensor([101, 103, 107, 109, 113, 127, 131, 137, 139])[: (order - 1) * heads]
    offsets = primes.cumsum(0) - primes
    got = engram_hash(classes, multipliers, primes.view(order - 1, heads), offsets)
    assert got.dtype == torch.int64
    for t in range(7):
        for n in range(2, order + 1):
            mixed = 0
            for k in range(n):
                mixed ^= int(classes[t, k]) * int(multipliers[k])  # no 64-bit limit here
            for head in range(heads):
                column = (n - 2) * heads + head
                row = mixed % int(primes[column])
                assert got[t, column] == row + int(offsets[column])
                # Rows of a head stay within its own part of the table.
                assert offsets[column] <= got[t, column] < offsets[column] + primes[column]


def test_released_multipliers_never_wrap() -> None:
    """The largest class times the largest multiplier stays below 2^63."""
    config = tiny_config(engram_compressed_vocab_size=99092)
    for layer in (1, 14):
        drawn = hash_multipliers(config, layer)
        assert (drawn % 2 == 1).all()
        assert int(drawn.max()) * 99091 < 2**63
    assert not torch.equal(hash_multipliers(config, 1), hash_multipliers(config, 14))


def naive_lookback(history: list[int], order: int) -> list[int]:
    """The newest class first; after a hole or the start everything is the pad class."""
    row, alive = [], True
    for k in range(order):
        known = len(history) > k and history[-1 - k] >= 0
        alive = alive and known
        row.append(history[-1 - k] if alive else PAD)
    return row


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sequences=st.lists(
        st.lists(st.integers(-1, 9), min_size=1, max_size=9), min_size=1, max_size=3
    ),
    order=st.integers(2, 4),
)
def test_lookback(sequences: list[list[int]], order: int) -> None:
    """Histories end at the start of their sequence and at image tokens (−1), also by the way."""
    batch = Batch.pack([[0] * len(s) for s in sequences])
    classes = torch.tensor([c for s in sequences for c in s])
    got = lookback(classes, batch, None, order, PAD)
    want = [naive_lookback(s[: t + 1], order) for s in sequences for t in range(len(s))]
    assert got.tolist() == want
    # Token by token, through the store.
    store = DenseKV(tiny_config(engram_max_ngram_size=order), len(sequences))
    rows: list[list[list[int]]] = [[] for _ in sequences]
    for t in range(max(map(len, sequences))):
        running = [i for i, s in enumerate(sequences) if t < len(s)]
        step = Batch.pack([[0]] * len(running), slots=running)
        now = torch.tensor([sequences[i][t] for i in running])
        got = lookback(now, step, store, order, PAD)
        for i, row, one in zip(running, got.tolist(), now.split(1), strict=True):
            rows[i].append(row)
            store.extend_history(i, one)
    assert [row for one in rows for row in one] == want


# --- gate -----------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gate_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        random(4, 3, 8),
        random(4, 3, 8, seed=1),
        random(4, 8, seed=2),
        random(3, 8, seed=3),
        random(3, 8, seed=4),
    )


def test_gate_as_written() -> None:
    x, key, value, wq, wk = gate_inputs()
    got = engram_gate(x, key, value, wq, wk, 1e-20, None)
    for t in range(4):
        for i in range(3):
            u = float((x[t, i] * wq[i] * wk[i] * key[t, i]).sum())
            u /= float(x[t, i].square().mean().sqrt() * key[t, i].square().mean().sqrt())
            u /= math.sqrt(8)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(u), 1e-6)), u)))
            assert_close(got[t, i], x[t, i] + gate * value[t], "float64")


def test_only_the_product_of_the_weights_matters() -> None:
    x, key, value, wq, wk = gate_inputs()
    got = engram_gate(x, key, value, wq, wk, 1e-20, None)
    assert_close(engram_gate(x, key, value, wq * wk, wk / wk, 1e-20, None), got, "float64")
    assert not torch.allclose(engram_gate(x, key, value, wq, wq, 1e-20, None), got)


def test_closed_tokens_and_zero_values_change_nothing() -> None:
    x, key, value, wq, wk = gate_inputs()
    open_ = torch.tensor([True, False, True, False])
    got = engram_gate(x, key, value, wq, wk, 1e-20, open_)
    assert_bitwise(got[~open_], x[~open_])
    assert_bitwise(engram_gate(x, key, 0 * value, wq, wk, 1e-20, None), x)
    everywhere = engram_gate(x, key, value, wq, wk, 1e-20, None)
    assert_bitwise(got[open_], everywhere[open_])
    assert not torch.equal(everywhere[~open_], x[~open_])  # negative control


@pytest.mark.parametrize("zero", ["streams", "keys", "weights"])
def test_a_zero_product_opens_the_gate_half(zero: str) -> None:
    """sgn(0) is 0, so the gate is one half and nothing divides by zero."""
    x, key, value, wq, wk = gate_inputs()
    x = 0 * x if zero == "streams" else x
    key = 0 * key if zero == "keys" else key
    wq = 0 * wq if zero == "weights" else wq
    got = engram_gate(x, key, value, wq, wk, 1e-20, None)
    assert_close(got, x + 0.5 * value.unsqueeze(1), "float64")
