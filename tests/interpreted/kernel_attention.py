"""The sparse-attention kernel in Triton's interpreter against the plain reference."""

import pytest
import torch

from cedar.ops.rope.reference import rotate
from cedar.ops.sparse_attention import PackedRows, Rows
from cedar.ops.sparse_attention import reference as plain
from cedar.ops.sparse_attention import triton as kernel
from cedar.quant import FP4_MAIN, FP8_ROW
from cedar.testing import assert_bitwise, assert_close
from kernel_cases import attention_case, filled_slots, pack
from triton_interpreter import repair

repair()

FLOAT32 = "float32 op"


def both(case: tuple, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel into a poisoned output, and the reference in float64."""
    q, sources, sink, scale = case
    out = torch.full_like(q, torch.nan)
    assert kernel.unsupported(q, sources) is None
    kernel.launch(q, sources, sink, scale, out, **options)
    exact = tuple(
        Rows(s.rows_RH.double(), s.slots_TK) if isinstance(s, Rows) else s for s in sources
    )
    return out, plain.sparse_attention(q.double(), exact, sink.double(), scale)


@pytest.mark.parametrize(
    ("kinds", "slots"),
    [
        (("window", "main"), (16, 33)),
        (("values", "main"), (5, 48)),
        (("values", "values"), (17, 3)),
        (("main", "window"), (16, 1)),
        (("main",), (40,)),
        (("window",), (31,)),
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_equals_the_reference(kinds: tuple[str, ...], slots: tuple[int, ...], splits: int) -> None:
    case = attention_case(seed=1, queries=3, heads=3, width=64, kinds=kinds, slots=slots, pitch=32)
    out, want = both(case, splits=splits)
    assert_close(out, want.float(), FLOAT32)
    assert (out[0] == 0).all()  # query 0 sees nothing
    assert out[1:].abs().max() > 0.1


@pytest.mark.parametrize("slots", [(16, 8), (17, 150), (64, 9)])
def test_exponentials_are_rounded_where_the_reference_rounds_them(slots: tuple[int, int]) -> None:
    """In bfloat16, bit for bit: tiles are the reference's, from one source into the other."""
    case = attention_case(
        seed=8, queries=9, heads=4, width=64, kinds=("values", "values"), slots=slots,
        dtype=torch.bfloat16,
    )  # fmt: skip
    q, sources, sink, scale = case
    out = torch.full_like(q, torch.nan)
    kernel.launch(q, sources, sink, scale, out, splits=1)
    assert_bitwise(out, plain.sparse_attention(q, sources, sink, scale))


@pytest.mark.parametrize(("heads", "width"), [(1, 32), (5, 96), (20, 32), (4, 128)])
def test_any_number_of_heads_and_widths(heads: int, width: int) -> None:
    case = attention_case(
        seed=2, queries=2, heads=heads, width=width, kinds=("window", "main"), slots=(9, 20)
    )
    out, want = both(case)
    assert_close(out, want.float(), FLOAT32)


def test_bfloat16() -> None:
    case = attention_case(
        seed=3, queries=4, heads=8, width=64, kinds=("window", "main"), slots=(16, 48),
        dtype=torch.bfloat16,
    )  # fmt: skip
    out, want = both(case, splits=2)
    # The exponentials are rounded to bfloat16 on the way: two roundings of 2^-9.
    assert (out.double() - want).abs().max() <= 2**-8 * want.abs().max()
    assert out.dtype is torch.bfloat16


def test_large_queries_and_sinks_do_not_overflow() -> None:
    for size, shift in ((1e15, 0.0), (1.0, 200.0), (1.0, -200.0)):
        q, sources, sink, scale = attention_case(
            seed=4, queries=3, heads=2, width=32, kinds=("window", "main"), slots=(8, 20), size=size
        )
        out, want = both((q, sources, sink + shift, scale), splits=2)
        assert out.isfinite().all()
        if shift:
            assert_close(out, want.float(), FLOAT32)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "width", "turned"), [(3, 64, 16), (5, 96, 96), (4, 32, 2), (20, 64, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_on_the_way_in_and_out(
    heads: int, width: int, turned: int, splits: int, dtype: torch.dtype
) -> None:
    q, sources, sink, scale = attention_case(
        seed=11, queries=3, heads=heads, width=width, kinds=("window", "main"), slots=(9, 40),
        dtype=dtype,
    )  # fmt: skip
    g = torch.Generator().manual_seed(12)
    angle = torch.randn(3, turned // 2, generator=g) * 3
    rotary = (angle.cos(), angle.sin())
    out, apart = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    kernel.launch(q, sources, sink, scale, out, rotary, splits=splits)
    kernel.launch(rotate(q, *rotary), sources, sink, scale, apart, splits=splits)
    assert_bitwise(out, rotate(apart, *rotary, inverse=True))
    assert (out != apart).any()
    if dtype is torch.float32:
        want = plain.rotated_attention(q.double(), sources, sink.double(), scale, rotary)
        assert_close(out, want.float(), FLOAT32)


def test_rotated_attention_takes_every_input() -> None:
    """More channels than there are go nowhere; gradients and odd widths go to the reference."""
    q, sources, sink, scale = attention_case(
        seed=13, queries=3, heads=2, width=32, kinds=("values", "values"), slots=(5, 20)
    )
    angle = torch.arange(24.0).view(3, 8)
    rotary = (angle.cos(), angle.sin())
    rotated = kernel.AttentionKernels().rotated_attention
    assert "34 rotated" in (kernel.unsupported(q, sources, (torch.ones(3, 17),) * 2) or "")
    want = plain.rotated_attention(q, sources, sink, scale, rotary)
    assert_close(rotated(q, sources, sink, scale, rotary), want, FLOAT32)
    assert rotated(q[:0], tuple(s._replace(slots_TK=s.slots_TK[:0]) for s in sources), sink,
                   scale, (rotary[0][:0], rotary[1][:0])).shape == (0, 2, 32)  # fmt: skip
    odd = tuple(s._replace(rows_RH=s.rows_RH[:, :24]) for s in sources if isinstance(s, Rows))
    assert_bitwise(
        rotated(q[..., :24], odd, sink, scale, rotary),
        plain.rotated_attention(q[..., :24], odd, sink, scale, rotary),
    )
    learned = q.clone().requires_grad_()
    out = rotated(learned, sources, sink, scale, rotary)
    assert_close(out.detach(), want, FLOAT32)
    (found,) = torch.autograd.grad(out.sum(), learned)
    (exact,) = torch.autograd.grad(
        plain.rotated_attention(learned, sources, sink, scale, rotary).sum(), learned
    )
    assert_close(found, exact, FLOAT32)


def test_every_code_of_both_formats() -> None:
    """Rows with all codes and far-apart scales give the reference's values bit for bit."""
    width = 64
    g = torch.Generator().manual_seed(5)
    for fmt in (FP4_MAIN, FP8_ROW):
        rows = torch.randn(24, width, generator=g)
        rows = rows * torch.exp2(torch.arange(24.0).unsqueeze(1) - 12)
        raw = pack(rows, fmt)
        slots = torch.arange(24, dtype=torch.int32).unsqueeze(1)
        source = PackedRows(raw, slots, fmt)
        # One slot and a sink far below: the output is the row itself.
        q = torch.zeros(24, 1, width)
        out = torch.full_like(q, torch.nan)
        kernel.launch(q, (source,), torch.tensor([-200.0]), 1.0, out)
        want = plain.sparse_attention(q, (source,), torch.tensor([-200.0]), 1.0)
        assert_bitwise(out + 0.0, want + 0.0)
        assert len(want.unique()) > 100


def test_a_wrong_scale_would_be_seen() -> None:
    """Negative control: one scale byte changed in one selected row."""
    q, sources, sink, scale = attention_case(
        seed=6, queries=2, heads=2, width=64, kinds=("window", "main"), slots=(8, 20)
    )
    _, want = both((q, sources, sink, scale))
    main = sources[1]
    assert isinstance(main, PackedRows)
    row = int(main.slots_TK[1].max())
    damaged = main.raw_RB.clone()
    damaged[row, -1] ^= 8
    out, _ = both((q, (sources[0], PackedRows(damaged, main.slots_TK, main.format)), sink, scale))
    with pytest.raises(AssertionError, match="tolerance"):
        assert_close(out, want.float(), FLOAT32)


def test_rows_of_nan_in_empty_slots_stay_out() -> None:
    """Row 0 holds NaN codes; nobody names it, and empty slots must not read it either."""
    q, sources, sink, scale = attention_case(
        seed=7, queries=2, heads=2, width=32, kinds=("window", "main"), slots=(8, 20)
    )
    poisoned = []
    for source in sources:
        assert isinstance(source, PackedRows)
        raw = source.raw_RB.clone()
        raw[0] = 0x7F
        slots = torch.where(source.slots_TK == 0, 1, source.slots_TK)
        poisoned.append(PackedRows(raw, slots, source.format))
    out, want = both((q, tuple(poisoned), sink, scale))
    assert out.isfinite().all()
    assert_close(out, want.float(), FLOAT32)


def test_strided_queries_and_slots() -> None:
    q, sources, sink, scale = attention_case(
        seed=8, queries=6, heads=8, width=32, kinds=("window", "main"), slots=(8, 20)
    )
    wide = torch.full((6, 8, 64), torch.nan)
    wide[..., :32] = q
    strided = wide[::2, ::2, :32]
    picked = tuple(s._replace(slots_TK=s.slots_TK[::2].t().contiguous().t()) for s in sources)
    out, want = both((strided, picked, sink[::2].contiguous(), scale))
    assert_close(out, want.float(), FLOAT32)


def test_what_it_cannot_take_goes_to_the_reference() -> None:
    attention = kernel.AttentionKernels()
    q, sources, sink, scale = attention_case(
        seed=9, queries=2, heads=2, width=32, kinds=("window", "main"), slots=(8, 20)
    )
    g = torch.Generator().manual_seed(9)
    third = Rows(torch.randn(4, 32, generator=g), filled_slots(2, 3, 4, g))
    for case, why in (
        ((q.double(), sources), "float64"),
        ((q, (*sources, third)), "3 sources"),
        ((q.clone().requires_grad_(), sources), "gradient"),
        ((q[..., :24].contiguous(), (third,)), "width 24"),
    ):
        assert why in (kernel.unsupported(*case) or "")
    found = attention.sparse_attention(q, (*sources, third), sink, scale)
    assert_bitwise(found, plain.sparse_attention(q, (*sources, third), sink, scale))
    learned = attention.sparse_attention(q.requires_grad_(), sources, sink, scale)
    assert learned.requires_grad


def test_nothing_to_do() -> None:
    attention = kernel.AttentionKernels()
    q, sources, sink, scale = attention_case(
        seed=10, queries=2, heads=2, width=32, kinds=("window", "main"), slots=(8, 20)
    )
    assert attention.sparse_attention(
        q[:0], tuple(s._replace(slots_TK=s.slots_TK[:0]) for s in sources), sink, scale
    ).shape == (0, 2, 32)
    nothing = tuple(s._replace(slots_TK=s.slots_TK[:, :0]) for s in sources)
    for few in (
        (),
        nothing,
        (sources[0]._replace(raw_RB=sources[0].raw_RB[:0], slots_TK=torch.full((2, 8), -1)),),
    ):
        assert_bitwise(attention.sparse_attention(q, few, sink, scale), torch.zeros_like(q))
