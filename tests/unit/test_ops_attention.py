"""Gather attention with sink: corner cases against loops over single slots."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.ops.sparse_attention import Rows
from cedar.ops.sparse_attention.reference import attention_mass, sparse_attention
from cedar.testing import assert_bitwise, assert_close

SCALE = 0.3


def naive(q: Tensor, sources: tuple[Rows, ...], sink: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the probability of every slot ``[T, N, K]`` per source; one slot at a time."""
    out = torch.zeros_like(q)
    mass = [torch.zeros(*q.shape[:2], s.slots_TK.shape[1], dtype=q.dtype) for s in sources]
    for t in range(q.shape[0]):
        for n in range(q.shape[1]):
            total = math.exp(float(sink[n]))
            for source, probability in zip(sources, mass, strict=True):
                for k, slot in enumerate(source.slots_TK[t].tolist()):
                    if slot >= 0:
                        weight = math.exp(SCALE * float(q[t, n] @ source.rows_RH[slot]))
                        probability[t, n, k] = weight
                        out[t, n] += weight * source.rows_RH[slot]
                        total += weight
            out[t, n] /= total
            for probability in mass:
                probability[t, n] /= total
    return out, mass


def case(seed: int, queries: int, heads: int, widths: list[int], rows: int) -> tuple:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads, 6, generator=g, dtype=torch.float64)
    sources = tuple(
        Rows(
            torch.randn(rows, 6, generator=g, dtype=torch.float64),
            torch.randint(-1, rows, (queries, width), generator=g),
        )
        for width in widths
    )
    return q, sources, torch.randn(heads, generator=g, dtype=torch.float64)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    queries=st.integers(1, 4),
    heads=st.integers(1, 3),
    widths=st.lists(st.sampled_from([0, 1, 3, 63, 64, 65, 130]), max_size=3),
    rows=st.integers(1, 9),
)
def test_equals_loops(seed: int, queries: int, heads: int, widths: list[int], rows: int) -> None:
    """Empty slots, repeated rows, several sources, widths around the block of 64."""
    q, sources, sink = case(seed, queries, heads, widths, rows)
    out, mass = naive(q, sources, sink)
    assert_close(sparse_attention(q, sources, sink, SCALE), out, "float64")
    if sources:
        assert_close(attention_mass(q, sources, sink, SCALE), mass[-1].sum(1), "float64")


def test_nothing_visible_gives_zeros() -> None:
    q, _, sink = case(0, 3, 2, [], 5)
    rows = torch.randn(5, 6, dtype=torch.float64)
    empty = torch.full((3, 4), -1)
    for sources in (
        (),
        (Rows(rows, empty),),
        (Rows(rows[:0], empty),),
        (Rows(rows, empty[:, :0]), Rows(rows[:0], empty)),
    ):
        assert_bitwise(sparse_attention(q, sources, sink, SCALE), torch.zeros_like(q))
        if sources:
            assert (attention_mass(q, sources, sink, SCALE) == 0).all()


def test_no_queries() -> None:
    rows = torch.randn(5, 6)
    out = sparse_attention(
        torch.empty(0, 2, 6), (Rows(rows, torch.empty(0, 3).long()),), torch.zeros(2), SCALE
    )
    assert out.shape == (0, 2, 6)


def test_a_row_named_twice_counts_twice() -> None:
    q, _, sink = case(1, 1, 2, [], 3)
    rows = torch.randn(3, 6, dtype=torch.float64)
    twice = sparse_attention(q, (Rows(rows, torch.tensor([[0, 2, 2]])),), sink, SCALE)
    copies = torch.cat((rows, rows[2:]))
    apart = sparse_attention(q, (Rows(copies, torch.tensor([[0, 2, 3]])),), sink, SCALE)
    assert_bitwise(twice, apart)
    once = sparse_attention(q, (Rows(rows, torch.tensor([[0, 2, -1]])),), sink, SCALE)
    assert not torch.allclose(twice, once)


def test_the_sink_only_enlarges_the_denominator() -> None:
    q, sources, sink = case(2, 4, 2, [5], 7)
    sources = (Rows(sources[0].rows_RH, sources[0].slots_TK.abs()),)
    open_ = sparse_attention(q, sources, torch.full_like(sink, -200.0), SCALE)
    half = sparse_attention(q, sources, sink, SCALE)
    shrink = attention_mass(q[:, :1], sources, sink[:1], SCALE).sum(1)
    assert (shrink < 1).all()
    assert_close(half[:, 0], open_[:, 0] * shrink.unsqueeze(1), "float64")
    closed = sparse_attention(q, sources, torch.full_like(sink, 200.0), SCALE)
    assert closed.abs().max() < 1e-40
    assert half.abs().max() > 0.1  # negative control: an ordinary sink does not close


@pytest.mark.parametrize("size", [1.0, 1e3, 1e15])
def test_large_scores_do_not_overflow(size: float) -> None:
    q, sources, sink = case(3, 4, 2, [9, 70], 5)
    out = sparse_attention((size * q).float(), _float(sources), sink.float(), SCALE)
    assert out.isfinite().all()


def _float(sources: tuple[Rows, ...]) -> tuple[Rows, ...]:
    return tuple(Rows(s.rows_RH.float(), s.slots_TK) for s in sources)


def test_chunks_of_queries_do_not_matter() -> None:
    """More queries than one chunk holds give what each gives alone, bit for bit."""
    g = torch.Generator().manual_seed(4)
    heads, width = 64, 512
    count = 2 * (2**22 // (64 * (width + heads))) + 3
    q = torch.randn(count, heads, width, generator=g)
    rows = torch.randn(3, width, generator=g)
    sources = (Rows(rows, torch.randint(-1, 3, (count, 2), generator=g)),)
    sink = torch.randn(heads, generator=g)
    out = sparse_attention(q, sources, sink, 0.05)
    for t in (0, count // 2, count - 1):
        one = (Rows(rows, sources[0].slots_TK[t : t + 1]),)
        assert_close(out[t : t + 1], sparse_attention(q[t : t + 1], one, sink, 0.05), "float32 op")


def test_bfloat16_rounds_the_exponentials() -> None:
    """In bfloat16 the values meet rounded exponentials: float32 arithmetic differs a little."""
    q, sources, sink = case(5, 8, 2, [6, 70], 9)
    narrow = tuple(Rows(s.rows_RH.bfloat16(), s.slots_TK) for s in sources)
    q16 = q.bfloat16()
    out = sparse_attention(q16, narrow, sink.float(), SCALE)
    assert out.dtype == torch.bfloat16
    wide = tuple(Rows(s.rows_RH.float(), s.slots_TK) for s in narrow)
    exact = sparse_attention(q16.float(), wide, sink.float(), SCALE)
    assert (out.float() - exact).abs().max() < 0.02
    assert not torch.equal(out, exact.bfloat16())


def test_mass_sums_to_one_with_the_sink() -> None:
    q, sources, sink = case(6, 5, 3, [4, 6], 7)
    main = attention_mass(q, sources, sink, SCALE)
    window = attention_mass(q, sources[::-1], sink, SCALE)
    _, mass = naive(q, sources, sink)
    rest = 3 - mass[0].sum((1, 2)) - mass[1].sum((1, 2))
    assert_close(main.sum(1) + window.sum(1) + rest, torch.full_like(rest, 3.0), "float64")
    assert not main.requires_grad
    empty = sources[1].slots_TK < 0
    assert empty.any()
    assert (main[empty] == 0).all()
