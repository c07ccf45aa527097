"""The prefill and training kernels in Triton's interpreter against the plain reference."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cedar.ops.sparse_attention import Rows, Source, prefill
from cedar.ops.sparse_attention import reference as plain
from cedar.testing import assert_bitwise, assert_close
from kernel_cases import attention_case, filled_slots
from triton_interpreter import repair

repair()

FLOAT32 = "float32 op"
Case = tuple[Tensor, tuple[Source, ...], Tensor, float]
Grads = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that whatever a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def values(**named: object) -> Case:
    named = {"kinds": ("values", "values"), "slots": (9, 20), "rows": 12, **named}
    return attention_case(**named)  # type: ignore[arg-type]


def learned(case: Case, dtype: torch.dtype | None = None) -> tuple[Case, list[Tensor]]:
    """The case with leaves that require gradients: q, sinks and the rows of every source."""
    q, sources, sink, scale = case
    leaves = [
        x.detach().to(dtype or x.dtype).requires_grad_()
        for x in (q, sink, *(s.rows_RH for s in sources if isinstance(s, Rows)))
    ]
    held = tuple(Rows(x, s.slots_TK) for x, s in zip(leaves[2:], sources, strict=True))
    return (leaves[0], held, leaves[1], scale), leaves


def exact(case: Case) -> tuple[Tensor, Grads, Tensor]:
    """Output and gradients of the reference in float64, and a gradient of the output."""
    (q, sources, sink, scale), leaves = learned(case, torch.float64)
    out = plain.sparse_attention(q, sources, sink, scale)
    g = torch.Generator().manual_seed(99)
    grad = torch.randn(out.shape, generator=g, dtype=torch.float64)
    return out.detach(), torch.autograd.grad(out, leaves, grad, materialize_grads=True), grad


def found(case: Case, grad: Tensor, deterministic: bool) -> tuple[Tensor, Grads]:
    (q, sources, sink, scale), leaves = learned(case)
    assert prefill.unsupported(q, sources) is None
    out = prefill.sparse_attention(q, sources, sink, scale, deterministic=deterministic)
    return out.detach(), torch.autograd.grad(
        out, leaves, grad.to(out.dtype), materialize_grads=True
    )


def check(case: Case, deterministic: bool = False) -> tuple[Tensor, Grads]:
    want, want_grads, grad = exact(case)
    out, grads = found(case, grad, deterministic)
    assert_close(out, want.float(), FLOAT32)
    for name, one, other in zip(("q", "sink", "near", "far"), grads, want_grads, strict=False):
        assert one.isfinite().all(), name
        assert_close(one, other.float(), FLOAT32)
    return out, grads


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("slots", [(16, 33), (5, 48), (17, 3), (70, 1)])
def test_equals_the_reference(slots: tuple[int, int], deterministic: bool) -> None:
    """12 rows for four queries: most rows are shared, many are named twice by one query."""
    case = values(seed=1, queries=4, heads=3, width=64, slots=slots, pitch=16)
    out, grads = check(case, deterministic)
    assert (out[0] == 0).all()  # query 0 sees nothing
    assert (grads[0][0] == 0).all()
    assert min(g.abs().max() for g in grads) > 0.01


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (5, 24), (20, 40), (4, 96), (70, 8), (2, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_number_of_heads_and_widths(heads: int, width: int, deterministic: bool) -> None:
    check(values(seed=2, queries=3, heads=heads, width=width), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_source(deterministic: bool) -> None:
    case = values(seed=3, queries=3, heads=2, width=32, kinds=("values",), slots=(40,))
    check(case, deterministic)
    q, sources, sink, scale = values(seed=4, queries=3, heads=2, width=32)
    for nothing in (sources[0]._replace(slots_TK=sources[0].slots_TK[:, :0]),
                    Rows(torch.zeros(0, 32), torch.full((3, 4), -1))):  # fmt: skip
        check((q, (nothing, sources[1]), sink, scale), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_sinks_far_above_and_below(deterministic: bool) -> None:
    q, sources, sink, scale = values(seed=5, queries=3, heads=2, width=32)
    for shift in (30.0, 200.0, 1e5, -200.0, -1e5):
        _, grads = check((q, sources, sink + shift, scale), deterministic)
        if shift >= 200:
            assert (grads[0] == 0).all()


def test_no_sink_at_all() -> None:
    """A sink of −∞ takes nothing and learns nothing, with and without anything to see."""
    q, sources, sink, scale = values(seed=6, queries=3, heads=2, width=32)
    near = torch.full_like(sink, -60.0)
    want, want_grads, grad = exact((q, sources, near, scale))
    out, grads = found((q, sources, torch.full_like(sink, -torch.inf), scale), grad, False)
    assert_close(out, want.float(), FLOAT32)
    assert (out[0] == 0).all()
    assert (grads[1] == 0).all()
    for one, other in zip(grads, want_grads, strict=True):
        assert_close(one, other.float(), FLOAT32)


def test_large_scores_do_not_overflow() -> None:
    case = values(seed=7, queries=3, heads=2, width=32, size=1e15)
    out, grads = found(case, torch.ones(3, 2, 32), False)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


def test_all_queries_empty() -> None:
    q, sources, sink, scale = values(seed=8, queries=3, heads=2, width=32)
    empty = tuple(s._replace(slots_TK=torch.full_like(s.slots_TK, -1)) for s in sources)
    for deterministic in (False, True):
        out, grads = found((q, empty, sink, scale), torch.ones_like(q), deterministic)
        for x in (out, *grads):
            assert_bitwise(x + 0.0, torch.zeros_like(x))


def test_bfloat16() -> None:
    case = values(seed=9, queries=4, heads=8, width=64, slots=(16, 48), dtype=torch.bfloat16)
    want, want_grads, grad = exact(case)
    for deterministic in (False, True):
        out, grads = found(case, grad, deterministic)
        # The output gradient is rounded too, as are probabilities and their gradients.
        for one, other in ((out, want), *zip(grads, want_grads, strict=True)):
            error = (one.double() - other).norm() / other.norm()
            assert error < 2**-7
        assert [g.dtype for g in (out, *grads)] == [
            torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16,
        ]  # fmt: skip


def test_chunks_of_queries_change_nothing() -> None:
    """Deterministic gradients in chunks: the parts of a row still come in the queries' order."""
    q, sources, _, scale = values(seed=10, queries=7, heads=3, width=16)
    sink = torch.zeros(3)
    rows = tuple(s for s in sources if isinstance(s, Rows))
    out, log_sum = torch.empty_like(q), torch.empty(7, 3)
    prefill.forward(q, rows, sink, scale, out, log_sum)
    grad = torch.ones_like(q)
    whole = prefill.backward(q, rows, scale, out, log_sum, grad, True)
    small = prefill.backward(q, rows, scale, out, log_sum, grad, True, part_bytes=2 * 29 * 64)
    assert_bitwise(small[0], whole[0])
    for one, other in zip(small[1], whole[1], strict=True):
        assert_close(one, other, FLOAT32)


def test_strided_inputs() -> None:
    q, sources, sink, scale = values(seed=11, queries=6, heads=8, width=32, slots=(8, 20))
    wide = torch.full((6, 8, 64), torch.nan)
    wide[..., :32] = q
    picked = tuple(
        Rows(s.rows_RH.t().contiguous().t(), s.slots_TK[::2].t().contiguous().t())
        for s in sources
        if isinstance(s, Rows)
    )
    case = (wide[::2, ::2, :32], picked, sink[::2], scale)
    want, _, _ = exact(case)
    out = prefill.sparse_attention(*case)
    assert_close(out, want.float(), FLOAT32)
    # A gradient of the output that was expanded has no strides to speak of.
    (q, held, sink, scale), leaves = learned(case)
    total = prefill.sparse_attention(q, held, sink, scale).sum()
    grads = torch.autograd.grad(total, leaves)
    (q, held, sink, scale), leaves = learned(case, torch.float64)
    wants = torch.autograd.grad(plain.sparse_attention(q, held, sink, scale).sum(), leaves)
    for one, other in zip(grads, wants, strict=True):
        assert_close(one, other.float(), FLOAT32)


def test_rows_of_nan_that_nobody_names_stay_out() -> None:
    q, sources, sink, scale = values(seed=12, queries=3, heads=2, width=32)
    poisoned = []
    for source in sources:
        assert isinstance(source, Rows)
        rows = source.rows_RH.clone()
        rows[0] = torch.nan
        poisoned.append(Rows(rows, torch.where(source.slots_TK == 0, 1, source.slots_TK)))
    for deterministic in (False, True):
        out, grads = found((q, tuple(poisoned), sink, scale), torch.ones_like(q), deterministic)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in grads)
        assert (grads[2][0] == 0).all()


def test_packed_rows_are_dequantised() -> None:
    q, sources, sink, scale = attention_case(
        seed=13, queries=3, heads=2, width=64, kinds=("window", "main"), slots=(8, 20), pitch=7
    )
    want = plain.sparse_attention(q.double(), sources, sink.double(), scale)
    assert_close(prefill.sparse_attention(q, sources, sink, scale), want.float(), FLOAT32)
    leaf = q.clone().requires_grad_()
    prefill.sparse_attention(leaf, sources, sink, scale).sum().backward()
    exactly = q.double().requires_grad_()
    plain.sparse_attention(exactly, sources, sink.double(), scale).sum().backward()
    assert leaf.grad is not None
    assert exactly.grad is not None
    assert_close(leaf.grad, exactly.grad.float(), FLOAT32)


def test_only_what_is_asked_for() -> None:
    """Sinks alone, or nothing at all, may require a gradient."""
    q, sources, sink, scale = values(seed=14, queries=3, heads=2, width=32)
    assert not prefill.sparse_attention(q, sources, sink, scale).requires_grad
    leaf = sink.clone().requires_grad_()
    (grad,) = torch.autograd.grad(prefill.sparse_attention(q, sources, leaf, scale).sum(), [leaf])
    exactly = sink.double().requires_grad_()
    wide = tuple(Rows(s.rows_RH.double(), s.slots_TK) for s in sources if isinstance(s, Rows))
    (want,) = torch.autograd.grad(
        plain.sparse_attention(q.double(), wide, exactly, scale).sum(), [exactly]
    )
    assert_close(grad, want.float(), FLOAT32)


def test_what_it_cannot_take_goes_to_the_reference() -> None:
    q, sources, sink, scale = values(seed=15, queries=2, heads=2, width=32)
    g = torch.Generator().manual_seed(15)
    third = Rows(torch.randn(4, 32, generator=g), filled_slots(2, 3, 4, g))
    for case, why in (
        ((q.double(), sources), "float64"),
        ((q, (*sources, third)), "3 sources"),
        ((torch.zeros(2, 2, 520), sources), "width 520"),
        ((q, ()), "nothing"),
        ((q[:0], sources), "nothing"),
    ):
        assert why in (prefill.unsupported(*case) or "")
    (q, held, sink, scale), leaves = learned((q, (*sources, third), sink, scale))
    out = prefill.sparse_attention(q, held, sink, scale)
    want = plain.sparse_attention(q, held, sink, scale)
    assert_bitwise(out, want)
    for one, other in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        assert_bitwise(one, other)
    assert prefill.kernels_for(q, held).name == "triton"
    assert "9.0" in prefill.kernels_for(q, held).reason


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_wrong_gradient_would_be_seen(place: int) -> None:
    """Negative control: one slot of one query names another row in the backward pass alone."""
    case = values(seed=16, queries=3, heads=2, width=32)
    _, want, grad = exact(case)
    q, sources, sink, scale = case
    moved = []
    for source in sources:
        assert isinstance(source, Rows)
        slots = source.slots_TK.clone()
        k = int((slots[1] >= 0).nonzero()[0])
        slots[1, k] = (slots[1, k] + 1) % len(source.rows_RH)
        moved.append(Rows(source.rows_RH, slots))
    _, grads = found((q, tuple(moved), sink, scale), grad, False)
    with pytest.raises(AssertionError, match="tolerance"):
        assert_close(grads[place], want[place].float(), FLOAT32)
