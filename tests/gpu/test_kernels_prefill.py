"""The prefill and training kernels on a device against the plain reference in float64."""

import pytest
import torch
from torch import Tensor

from cedar.ops.sparse_attention import Rows, Source
from cedar.ops.sparse_attention import reference as plain
from cedar.testing import assert_bitwise
from kernel_cases import attention_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.sparse_attention import prefill

Case = tuple[Tensor, tuple[Source, ...], Tensor, float]


def is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def values(**named: object) -> Case:
    named = {
        "seed": 1, "kinds": ("values", "values"), "slots": (128, 100), "rows": 300, "queries": 70,
        "heads": 64, "width": 512, "dtype": torch.bfloat16, "device": "cuda", **named,
    }  # fmt: skip
    return attention_case(**named)  # type: ignore[arg-type]


def run(case: Case, grad: Tensor, deterministic: bool | None) -> tuple[Tensor, ...]:
    """Output and gradients of q, sinks and rows; None: the reference in float64."""
    q, sources, sink, scale = case
    exact = deterministic is None
    leaves = [
        (x.double() if exact else x.detach()).requires_grad_()
        for x in (q, sink, *(s.rows_RH for s in sources if isinstance(s, Rows)))
    ]
    held = tuple(Rows(x, s.slots_TK) for x, s in zip(leaves[2:], sources, strict=True))
    if exact:
        out = plain.sparse_attention(leaves[0], held, leaves[1], scale)
    else:
        out = prefill.sparse_attention(
            leaves[0], held, leaves[1], scale, deterministic=deterministic
        )
    return out.detach(), *torch.autograd.grad(
        out, leaves, grad.to(out.dtype), materialize_grads=True
    )


def check(case: Case, *, deterministic: bool = False) -> tuple[Tensor, ...]:
    g = torch.Generator(device="cuda").manual_seed(2)
    grad = torch.randn(case[0].shape, generator=g, device="cuda").to(case[0].dtype)
    found, wanted = run(case, grad, deterministic), run(case, grad, None)
    bound = 2**-7 if case[0].dtype is not torch.float32 else 1e-5
    for name, one, other in zip(("out", "q", "sink", "near", "far"), found, wanted, strict=False):
        assert one.isfinite().all(), name
        # A sink's gradient is a sum of terms of both signs, from outputs that were rounded.
        most = 4 * bound if name == "sink" else bound
        assert (one.double() - other).norm() <= most * other.norm() + 1e-30, name
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("heads", "slots", "queries", "kernels"),
    [
        (64, (128, 512), 150, "gluon"),
        (80, (100, 37), 300, "gluon"),  # two groups of heads, both sources end within a tile
        (33, (1, 70), 3, "gluon"),
        (64, (50,), 140, "gluon"),
        (16, (128, 40), 20, "triton"),
    ],
)
def test_released_width(
    heads: int, slots: tuple[int, ...], queries: int, kernels: str, deterministic: bool
) -> None:
    case = values(heads=heads, slots=slots, queries=queries, kinds=("values",) * len(slots))
    rows = tuple(s for s in case[1] if isinstance(s, Rows))
    if is_hopper():
        assert prefill.kernels_for(case[0], rows).name == kernels
    found = check(case, deterministic=deterministic)
    assert (found[0][0] == 0).all()  # query 0 sees nothing
    assert (found[1][0] == 0).all()


@pytest.mark.parametrize(
    ("heads", "width", "dtype"),
    [
        (8, 128, torch.bfloat16),
        (4, 64, torch.bfloat16),
        (5, 40, torch.bfloat16),
        (70, 256, torch.bfloat16),
        (3, 32, torch.float32),
        (8, 128, torch.float16),
    ],
)
def test_any_size(heads: int, width: int, dtype: torch.dtype) -> None:
    for deterministic in (False, True):
        check(
            values(heads=heads, width=width, slots=(40, 70), dtype=dtype),
            deterministic=deterministic,
        )


def test_deterministic_gradients_are_the_same_bits() -> None:
    """3 rows that every query names, so that thousands of additions meet."""
    case = values(rows=3, queries=300, slots=(64, 64))
    grad = case[0]
    first, second = run(case, grad, True), run(case, grad, True)
    for one, other in zip(first, second, strict=True):
        assert_bitwise(one, other)
    check(case)


def test_both_kernels_agree() -> None:
    if not is_hopper():
        pytest.skip("the second implementation is for compute capability 9.0")
    q, sources, sink, scale = values(slots=(128, 200), queries=150)
    rows = tuple(s for s in sources if isinstance(s, Rows))
    results = []
    for kernels in ("gluon", "triton"):
        out = torch.full_like(q, torch.nan)
        log_sum = torch.full(q.shape[:2], torch.nan, device="cuda")
        prefill.forward(q, rows, sink, scale, out, log_sum, kernels=kernels)
        grads = prefill.backward(q, rows, scale, out, log_sum, q, True, kernels=kernels)
        results.append((log_sum, out, grads[0], *grads[1]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    for one, other in zip(*results, strict=True):
        finite = one.isfinite()
        assert torch.equal(finite, other.isfinite())
        one, other = one[finite].double(), other[finite].double()
        assert (one - other).norm() <= 2**-7 * other.norm()


def test_sinks_far_above_and_below() -> None:
    q, sources, sink, scale = values(slots=(40, 30), queries=20)
    for shift in (200.0, 1e5, -1e5):
        check((q, sources, sink + shift, scale))


def test_rows_beyond_two_gib() -> None:
    """Row numbers whose offsets, and whose gradients', do not fit in 31 bits."""
    q, sources, sink, scale = values(slots=(128, 64), queries=10)
    near = sources[0]
    assert isinstance(near, Rows)
    count = (2**31 // 512) + 400
    far = torch.full((count, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    far[-300:] = near.rows_RH
    slots = torch.where(near.slots_TK >= 0, near.slots_TK + count - 300, -1)
    small = run((q, (near,), sink, scale), q, True)
    large = run((q, (Rows(far, slots),), sink, scale), q, True)
    assert_bitwise(large[0], small[0])
    assert_bitwise(large[1], small[1])
    assert_bitwise(large[3][-300:], small[3])


def test_strides_and_alignment() -> None:
    """Rows with a pitch are read in place, those that begin anywhere by the portable kernels."""
    q, sources, sink, scale = values(pitch=64, queries=20)
    check((q, sources, sink, scale))
    moved = tuple(
        Rows(
            torch.empty(len(s.rows_RH) * 512 + 1, dtype=s.rows_RH.dtype, device="cuda")[1:]
            .view(-1, 512)
            .copy_(s.rows_RH),
            s.slots_TK,
        )
        for s in sources
        if isinstance(s, Rows)
    )
    if is_hopper():
        assert "16 bytes" in prefill.kernels_for(q, moved).reason
    check((q, moved, sink, scale))
