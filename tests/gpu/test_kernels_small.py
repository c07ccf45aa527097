"""The small kernels on a device against the plain reference: gradients of mHC, casts, appends."""

import pytest
import torch
from torch import Tensor

from cedar.ops.cast import reference as plain_cast
from cedar.ops.engram_gate import reference as plain_gate
from cedar.ops.engram_rows import reference as plain_rows
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write import reference as plain_write
from cedar.ops.latent import reference as plain_latent
from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc import reference as plain_mhc
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, BlockFormat, quantize
from cedar.testing import assert_bitwise
from kernel_cases import mhc_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.cast import triton as cast
    from cedar.ops.engram_gate import triton as gate
    from cedar.ops.engram_rows import triton as rows
    from cedar.ops.kv_write import triton as write
    from cedar.ops.latent import triton as latent
    from cedar.ops.mhc.backward_triton import MhcStepTraining, backward

SETTINGS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}
NAMES = ("x", "y", "post", "comb", "pre", "fn", "base", "scale", "weight")


def flat(case: tuple) -> tuple[Tensor, ...]:
    x, (y, mix), pre, parameters, weight = case
    return x, y, *mix[1:], pre, *parameters, weight


def gradients(step: object, values: tuple, grads: tuple) -> tuple[Tensor, ...]:
    values = tuple(v.detach().requires_grad_() for v in values)
    x, y, post, comb, pre, fn, base, scale, weight = values
    x, mix, h = step(
        x, (y, MhcMix(pre, post, comb)), pre, MhcParameters(fn, base, scale), weight, **SETTINGS
    )
    return torch.autograd.grad((x, *mix, h), values, grads)


def seeds(values: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Random gradients of the five outputs."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x, y, post, comb, pre, *_ = values
    return tuple(
        torch.randn(like.shape, generator=g, device="cuda").to(like.dtype)
        for like in (x, pre, post, comb, y)
    )


@pytest.mark.parametrize(
    ("count", "width", "dtype", "limit"),
    [
        (1, 5120, torch.bfloat16, 1e-2),
        (133, 5120, torch.bfloat16, 1e-2),
        (300, 200, torch.bfloat16, 1e-2),  # no multiple of 64: the portable kernel
        (70, 320, torch.float32, 2e-5),
    ],
)
def test_mhc_gradients(count: int, width: int, dtype: torch.dtype, limit: float) -> None:
    values = flat(mhc_case(seed=1, count=count, width=width, dtype=dtype, device="cuda"))
    grads = seeds(values, 2)
    found = gradients(MhcStepTraining(), values, grads)
    want = gradients(
        plain_mhc.mhc_step, tuple(v.double() for v in values), tuple(v.double() for v in grads)
    )
    for name, a, b in zip(NAMES, found, want, strict=True):
        assert a.isfinite().all(), name
        assert float((a.double() - b).norm() / b.norm()) < limit, name


@pytest.mark.parametrize("count", [4100, 8200])
def test_mhc_gradients_of_many_tokens(count: int) -> None:
    """Both kernels agree, the tail of tokens among them, and the result is reproducible."""
    values = flat(mhc_case(seed=3, count=count, width=5120, dtype=torch.bfloat16, device="cuda"))
    grads = seeds(values, 4)
    _, _, *saved = MhcStepTraining().forward(SETTINGS, values)
    found = backward(values, tuple(saved), grads, SETTINGS)
    again = backward(values, tuple(saved), grads, SETTINGS)
    other = backward(values, tuple(saved), grads, SETTINGS, fast=False)
    for name, a, b, c in zip(NAMES, found, again, other, strict=True):
        assert torch.equal(a, b), name
        assert float((a.double() - c.double()).norm() / c.double().norm()) < 5e-3, name


FORMATS = [FP8_ROW, FP4_MAIN, FP4_ROW]


def spread(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Blocks of 16 of very different size, among them only zeros."""
    g = torch.Generator(device="cuda").manual_seed(5)
    x = torch.randn(rows, width // 16, 16, generator=g, device="cuda")
    powers = torch.randint(-40, 12, (rows, width // 16, 1), generator=g, device="cuda")
    x = x * torch.exp2(powers.float())
    x[0, :4] = 0.0
    return x.flatten(1).to(dtype)


def angles(count: int, turned: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(6)
    angle = torch.randn(count, turned, generator=g, device="cuda") * 3
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cast(fmt: BlockFormat, dtype: torch.dtype) -> None:
    x = spread(300, 5120, dtype)
    assert_bitwise(cast.cast(x, fmt), plain_cast.cast(x, fmt))


def places(fmt: BlockFormat, width: int, count: int = 90) -> RowWrite:
    g = torch.Generator(device="cuda").manual_seed(7)
    raw = torch.full((40, 64, fmt.bytes_per_row(width)), 0xA5, dtype=torch.uint8, device="cuda")
    table = torch.randperm(40, generator=g, device="cuda").int().view(2, 20)
    number = torch.randperm(20 * 64, generator=g, device="cuda")[:count]
    number[::7] = -1
    sequence = torch.arange(count, device="cuda") % 2
    return RowWrite(spread(count, width), raw, fmt, table, sequence, number)


def test_write() -> None:
    writes = places(FP8_ROW, 512), places(FP4_MAIN, 512, 33), places(FP4_ROW, 128, 50)
    for group in (writes, writes[1:], writes[:1]):
        ours, other = (tuple(w._replace(raw=w.raw.clone()) for w in group) for _ in range(2))
        write.kv_write(ours)
        plain_write.kv_write(other)
        for a, b, untouched in zip(ours, other, group, strict=True):
            assert_bitwise(a.raw, b.raw)
            assert not torch.equal(a.raw, untouched.raw)


def test_write_beyond_two_gibibytes() -> None:
    blocks = (1 << 31) // (64 * 288) + 10
    raw = torch.zeros(blocks, 64, 288, dtype=torch.uint8, device="cuda")
    one = places(FP4_MAIN, 512)._replace(table=None, sequence=torch.full((90,), blocks - 1).cuda())
    one = one._replace(raw=raw, number=torch.arange(90, device="cuda").where(
        torch.arange(90, device="cuda") < 64, -1
    ))  # fmt: skip
    write.kv_write((one,))
    small = one._replace(
        raw=torch.zeros_like(raw[-1:]), sequence=torch.zeros(90, dtype=torch.int64).cuda()
    )
    plain_write.kv_write((small,))
    assert_bitwise(raw[-1:], small.raw)
    assert not raw[:-1].any()


@pytest.mark.parametrize(
    "fmt", [None, *FORMATS], ids=lambda fmt: "none" if fmt is None else fmt.name
)
def test_latent(fmt: BlockFormat | None) -> None:
    for shape, turned in (((50, 64, 512), 32), ((70, 128), 32), ((3, 5, 96), 8)):
        g = torch.Generator(device="cuda").manual_seed(8)
        x = torch.randn(*shape, generator=g, device="cuda").bfloat16()
        weight = torch.randn(shape[-1], generator=g, device="cuda").bfloat16()
        rotary = angles(shape[0], turned)
        for inverse in (False, True):
            found = latent.latent(x, None, 1e-6, rotary, fmt, inverse)
            assert_bitwise(found, plain_latent.latent(x, None, 1e-6, rotary, fmt, inverse))
        found = latent.latent(x, weight, 1e-6, rotary, fmt)
        want = plain_latent.latent(x, weight, 1e-6, rotary, fmt)
        assert (found != want).float().mean() < 0.01  # the order of one sum


def test_latent_write() -> None:
    rotary = angles(90, 32)
    one = places(FP8_ROW, 512)
    other = one._replace(raw=one.raw.clone())
    latent.latent_write(one, None, 1e-6, rotary)
    plain_latent.latent_write(other, None, 1e-6, rotary)
    assert_bitwise(one.raw, other.raw)
    weight = torch.ones(512, device="cuda").bfloat16()
    latent.latent_write(one, weight, 1e-6, rotary)
    assert (one.raw != other.raw).any()


def test_engram() -> None:
    filled = quantize(spread(5000, 256, torch.float32), FP8_ROW)
    g = torch.Generator(device="cuda").manual_seed(9)
    ids = torch.randint(0, 5000, (70, 48), generator=g, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        found = rows.engram_rows(filled.codes, filled.scale, ids, dtype)
        assert_bitwise(found, plain_rows.engram_rows(filled.codes, filled.scale, ids, dtype))
    x = torch.randn(70, 4, 5120, generator=g, device="cuda").bfloat16()
    kv = torch.randn(70, 5 * 5120, generator=g, device="cuda").bfloat16()
    keys, value = kv.split((4 * 5120, 5120), dim=1)
    weight = torch.randn(4, 5120, generator=g, device="cuda").bfloat16()
    opened = torch.arange(70, device="cuda") % 3 > 0
    inputs = (x, keys.unflatten(1, (4, 5120)), value, weight, weight)
    found = gate.engram_gate(*inputs, 1e-6, opened)
    want = plain_gate.engram_gate(*(v.double() for v in inputs), 1e-6, opened)
    assert float((found.double() - want).norm() / want.norm()) < 2**-8
    assert_bitwise(found[::3], x[::3])
