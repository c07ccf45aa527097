"""Number formats: bit for bit against golden numbers, and what must hold for any input."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from cedar.ops.linear.reference import linear
from cedar.quant import (
    FP4_MAIN,
    FP4_ROW,
    FP8_BLOCK,
    FP8_ROW,
    BlockFormat,
    Element,
    QuantTensor,
    Scale,
    fake_quantize,
    quantize,
)
from cedar.testing import assert_bitwise, assert_close, assert_unbiased, same_bits

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "quant.safetensors")
FORMATS = {"fp8": FP8_ROW, "fp4_e8m0": FP4_ROW, "fp4_e4m3": FP4_MAIN}
ALL = (FP8_ROW, FP8_BLOCK, FP4_ROW, FP4_MAIN)
LARGEST = 2.0**127  # near the very end of float32 a rounding up may overflow
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
by_name = pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
few = settings(max_examples=60, deadline=None, derandomize=True)


def golden_cases() -> list[tuple[str, str]]:
    return [(kind, dtype) for kind in FORMATS for dtype in ("f32", "bf16")]


def golden_input(kind: str, dtype: str) -> Tensor:
    return GOLDEN.get(f"{kind}.{dtype}.in", GOLDEN[f"in.{dtype}"])


def without_minus_zero(x: Tensor) -> Tensor:
    return x + 0.0


@pytest.mark.parametrize(("kind", "dtype"), golden_cases())
def test_golden_activations(kind: str, dtype: str) -> None:
    x = golden_input(kind, dtype)
    fmt = FORMATS[kind]
    q = quantize(x, fmt)
    want = GOLDEN[f"{kind}.{dtype}." + ("codes" if kind == "fp8" else "packed")]
    assert_bitwise(q.codes, want, "codes")
    assert_bitwise(q.scale.view(torch.uint8), GOLDEN[f"{kind}.{dtype}.scales"], "scales")
    assert_bitwise(
        without_minus_zero(q.dequantize()),
        without_minus_zero(GOLDEN[f"{kind}.{dtype}.dequant_f32"]),
        "dequantised",
    )
    assert_bitwise(
        without_minus_zero(fake_quantize(x, fmt)),
        without_minus_zero(GOLDEN[f"{kind}.{dtype}.roundtrip"]),
        "round trip",
    )


@pytest.mark.parametrize(("kind", "fmt"), [("fp8", FP8_BLOCK), ("fp4", FP4_ROW)])
def test_golden_weights_and_products(kind: str, fmt: BlockFormat) -> None:
    q = quantize(GOLDEN["weight.f32"], fmt)
    assert_bitwise(q.codes, GOLDEN[f"weight.{kind}." + ("codes" if kind == "fp8" else "packed")])
    assert_bitwise(q.scale, GOLDEN[f"weight.{kind}.scales"])
    assert_bitwise(q.dequantize() + 0.0, GOLDEN[f"weight.{kind}.dequant_f32"] + 0.0)
    x = fake_quantize(GOLDEN["gemm.in"], FP8_ROW)
    assert_close(linear(x.float(), q), GOLDEN[f"gemm.{kind}.out_f32"], "float32 op")
    assert_close(linear(x, q), GOLDEN[f"gemm.{kind}.out_bf16"], "bfloat16 op")


def test_golden_notices_wrong_rules() -> None:
    """Negative control: another floor, another block or another rounding changes golden codes."""
    x, want = golden_input("fp8", "f32"), GOLDEN["fp8.f32.codes"]

    def changed(**fields: object) -> bool:
        values = {name: getattr(FP8_ROW, name) for name in FP8_ROW.__dataclass_fields__}
        return not same_bits(quantize(x, BlockFormat(**{**values, **fields})).codes, want)

    assert not changed()
    assert changed(cols=64)
    assert changed(amax_floor=1e-3)
    assert changed(scale=Scale.E4M3)
    packed = GOLDEN["fp4_e8m0.f32.packed"]
    swapped = (packed >> 4) | (packed << 4)
    assert not same_bits(quantize(golden_input("fp4_e8m0", "f32"), FP4_ROW).codes, swapped)


# --- elements -------------------------------------------------------------------------------


def e4m3_values() -> list[float]:
    """The non-negative E4M3 numbers from their definition (bias 7, no infinities)."""
    values = []
    for code in range(127):
        exponent, fraction = code >> 3, code & 7
        if exponent == 0:
            values.append(fraction / 8 * 2.0**-6)
        else:
            values.append((1 + fraction / 8) * 2.0 ** (exponent - 7))
    return values


def nearest_even(value: float, table: list[float] | tuple[float, ...]) -> int:
    """Index of the nearest entry; in the middle the even index (whose last bit is 0)."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - value), i % 2))


def edge_values(table: list[float]) -> list[float]:
    """Every number of the grid, every middle, and both float32 neighbours of each."""
    points = table + [(a + b) / 2 for a, b in pairwise(table)]
    t = torch.tensor(points)
    below, above = torch.nextafter(t, torch.tensor(-1.0)), torch.nextafter(t, torch.tensor(1e9))
    return torch.cat((t, below, above)).clamp(0, table[-1]).tolist()


@pytest.mark.parametrize(
    ("fmt", "table"),
    [(FP8_ROW, e4m3_values()), (FP4_ROW, list(E2M1)), (FP4_MAIN, list(E2M1))],
    ids=["e4m3", "e2m1 e8m0", "e2m1 e4m3"],
)
def test_elements_round_to_nearest_even(fmt: BlockFormat, table: list[float]) -> None:
    points = edge_values(table)
    # The largest code at the head of every block keeps the scale at one.
    x = torch.zeros(2 * len(points), fmt.cols)
    x[:, 0] = table[-1]
    x[: len(points), 1] = torch.tensor(points)
    x[len(points) :, 1] = -torch.tensor(points)
    want = torch.tensor([table[nearest_even(p, table)] for p in points])
    want = torch.cat((want, -want))
    q = quantize(x, fmt)
    assert (q.factors() == 1).all()
    assert_bitwise(q.dequantize()[:, 1] + 0.0, want + 0.0, "codes")
    assert_bitwise(fake_quantize(x, fmt)[:, 1] + 0.0, want + 0.0, "round trip")


@few
@given(st.floats(-6, 6, width=32))
def test_e2m1_of_any_float(value: float) -> None:
    x = torch.tensor([[6.0, value] + [0.0] * 30])
    want = math.copysign(E2M1[nearest_even(abs(value), E2M1)], value)
    assert quantize(x, FP4_ROW).dequantize()[0, 1].item() == want
    assert fake_quantize(x, FP4_ROW)[0, 1].item() == want


def test_every_byte_unpacks() -> None:
    byte = torch.arange(256, dtype=torch.uint8).view(16, 16)  # 32 values a row, one scale each
    q = QuantTensor(byte, torch.full((16, 1), 127, dtype=torch.uint8), FP4_ROW)
    assert q.shape == (16, 32)
    for signed in (byte, byte.view(torch.int8)):  # files call the type int8
        values = QuantTensor(signed, q.scale, FP4_ROW).dequantize().flatten()
        table = [*E2M1, *(-v for v in E2M1)]
        assert values[0::2].tolist() == [table[b & 15] for b in range(256)]  # even: low nibble
        assert values[1::2].tolist() == [table[b >> 4] for b in range(256)]


@few
@given(st.integers(0, 2**32 - 1), st.sampled_from([FP4_ROW, FP4_MAIN]))
def test_codes_survive_unpack_and_pack(seed: int, fmt: BlockFormat) -> None:
    """Any codes of a full-range block come back from their own values."""
    generator = torch.Generator().manual_seed(seed)
    nibbles = torch.randint(0, 16, (3, 2, fmt.cols), generator=generator, dtype=torch.uint8)
    nibbles[nibbles == 8] = 0  # minus zero reads as zero
    nibbles[..., 0] = 7  # a six keeps the scale
    flat = nibbles.flatten(1)
    codes = flat[:, 0::2] | (flat[:, 1::2] << 4)
    scale = torch.randint(100, 150, (3, 2), generator=generator, dtype=torch.uint8)
    if fmt.scale is Scale.E4M3:
        scale = torch.randint(8, 127, (3, 2), generator=generator, dtype=torch.uint8)
        scale = scale.view(torch.float8_e4m3fn)
    again = quantize(QuantTensor(codes, scale, fmt).dequantize(), fmt)
    assert_bitwise(again.codes, codes)
    assert_bitwise(again.scale, scale)


# --- scales ---------------------------------------------------------------------------------


@few
@given(
    st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=64),
    st.sampled_from(ALL),
)
def test_scales_and_values_are_always_numbers(values: list[float], fmt: BlockFormat) -> None:
    values = values + [0.0] * (len(values) % 2)
    x = torch.tensor([values])
    q = quantize(x, fmt)
    if fmt.scale is Scale.E8M0:
        assert (q.scale < 255).all()  # byte 255 is NaN
    else:
        assert (q.scale.view(torch.uint8) < 127).all()  # 127 is NaN, and a scale has no sign
        assert (q.factors() > 0).all()
    assert q.dequantize().isfinite().all()
    assert fake_quantize(x, fmt).isfinite().all()


@pytest.mark.parametrize("fmt", [FP8_ROW, FP8_BLOCK, FP4_ROW], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("power", [-12, -3, 0, 1, 7, 60])
def test_power_of_two_scales_round_up(fmt: BlockFormat, power: int) -> None:
    exact = torch.tensor(fmt.largest * 2.0**power)
    above = torch.nextafter(exact, torch.tensor(torch.inf))
    below = torch.nextafter(exact, torch.tensor(0.0))
    for amax, want in ((exact, power), (above, power + 1), (below, power)):
        x = torch.zeros(32, 32)
        x[3, 5] = -amax
        q = quantize(x, fmt)
        assert q.scale.flatten()[0 if fmt.rows > 1 else 3].item() == want + 127


def test_floors() -> None:
    zeros = torch.zeros(1, 32)
    assert quantize(zeros, FP8_ROW).scale.item() == 127 + math.ceil(math.log2(1e-4 / 448))
    assert quantize(zeros, FP4_ROW).scale.item() == 1
    assert quantize(zeros, FP4_MAIN).factors().tolist() == [[2.0**-9, 2.0**-9]]
    for fmt in ALL:
        assert (fake_quantize(zeros, fmt) == 0).all()
        assert (fake_quantize(zeros + 1e-45, fmt).abs() <= fmt.amax_floor).all()


def test_e4m3_scale_saturates() -> None:
    """Above an amax of 2688 the scale stays 448 and the elements clamp at six of it."""
    x = torch.zeros(4, 16)
    x[:, 0] = torch.tensor([2688.0, 2689.0, -1e5, 3e38])
    x[:, 1] = 448.0
    q = quantize(x, FP4_MAIN)
    assert q.factors().flatten().tolist() == [448.0] * 4
    assert q.dequantize()[:, 0].tolist() == [2688.0, 2688.0, -2688.0, 2688.0]
    assert q.dequantize()[:, 1].tolist() == [448.0] * 4
    assert_bitwise(fake_quantize(x, FP4_MAIN), q.dequantize())


def test_rounded_down_scales_clamp_the_largest() -> None:
    """An E4M3 scale may be smaller than amax / 6; the largest element clamps then."""
    x = torch.zeros(1, 16)
    x[0, 0] = 6 * 1.05  # the scale rounds down to one
    assert quantize(x, FP4_MAIN).factors().item() == 1.0
    assert fake_quantize(x, FP4_MAIN)[0, 0].item() == 6.0


# --- whole tensors --------------------------------------------------------------------------


@by_name
@few
@given(
    seed=st.integers(0, 2**32 - 1), power=st.integers(-5, 10), width=st.sampled_from([16, 40, 64])
)
def test_idempotent(fmt: BlockFormat, seed: int, power: int, width: int) -> None:
    """A value on the grid stays: casting twice is casting once, in both implementations.

    (Not so for E4M3 scales below 2^-6, whose own steps are coarse: see the next test.)
    """
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    if fmt is FP4_MAIN:
        x[:, 0::16] = 6 * 2.0**-5
    once = fake_quantize(x, fmt)
    assert_bitwise(fake_quantize(once, fmt) + 0.0, once + 0.0)
    q = quantize(x, fmt)
    assert_bitwise(q.dequantize() + 0.0, once + 0.0, "codes against round trip")
    assert_bitwise(quantize(q.dequantize(), fmt).dequantize(), q.dequantize())


def test_tiny_global_entries_are_not_idempotent() -> None:
    """Negative control, and a property of the format: 9·2^-9 → 8·2^-9 → 6·2^-9."""
    x = torch.zeros(1, 16)
    x[0, 0] = 9 * 2.0**-9
    once = fake_quantize(x, FP4_MAIN)
    assert once[0, 0].item() == 8 * 2.0**-9
    assert fake_quantize(once, FP4_MAIN)[0, 0].item() == 6 * 2.0**-9


@by_name
@pytest.mark.parametrize("shape", [(1, 32), (3, 2), (2, 5, 48), (70, 34), (33, 32)])
def test_shapes_bytes_and_broken_blocks(fmt: BlockFormat, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    q = quantize(x, fmt)
    codes, scales = fmt.packed_shapes(shape)
    assert (q.shape, q.codes.shape, q.scale.shape) == (shape, codes, scales)
    assert q.nbytes == q.codes.numel() + q.scale.numel()
    if fmt.rows == 1:
        assert q.nbytes == fmt.bytes_per_row(shape[-1]) * math.prod(shape[:-1])
    # An incomplete block is a block with zeros added.
    pad = (0, -shape[-1] % fmt.cols, 0, -shape[-2] % fmt.rows if fmt.rows > 1 else 0)
    whole = fake_quantize(torch.nn.functional.pad(x, pad), fmt)
    assert_bitwise(fake_quantize(x, fmt), whole[..., : shape[-2], : shape[-1]])


def test_released_bytes_per_row() -> None:
    assert FP4_MAIN.bytes_per_row(512) == 288
    assert FP4_ROW.bytes_per_row(128) == 68
    with pytest.raises(ValueError, match="shares its scales"):
        FP8_BLOCK.bytes_per_row(32)


@by_name
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_straight_through_gradient(fmt: BlockFormat, dtype: torch.dtype) -> None:
    """The gradient passes unchanged, saturated elements included; the values do not change."""
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(2)) * 2000).to(dtype)
    leaf = x.clone().requires_grad_()
    out = fake_quantize(leaf, fmt)
    assert out.dtype == dtype
    assert torch.equal(out, fake_quantize(x, fmt))
    upstream = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    (gradient,) = torch.autograd.grad(out, leaf, upstream)
    assert_bitwise(gradient, upstream)
    assert not torch.equal(out, leaf)  # negative control: this was not the identity
    with torch.no_grad():
        assert not fake_quantize(leaf, fmt).requires_grad


@by_name
def test_unbiased(fmt: BlockFormat) -> None:
    """Over values that fill the grid evenly, roundings up and down cancel; truncation does not."""
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(4096, 64, generator=generator) * fmt.largest
    x[:, :: fmt.cols] = fmt.largest  # the scale of every block is one
    error = fake_quantize(x, fmt) - x
    assert_unbiased(error, fmt.name)
    table = torch.tensor(E2M1 if fmt.element is Element.E2M1 else e4m3_values())
    truncated = table[torch.searchsorted(table, x, right=True) - 1]
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(truncated - x)
