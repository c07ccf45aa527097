"""Fused norm, rotation and cast in Triton's interpreter against the operations one by one."""

import pytest
import torch
from torch import Tensor

from cedar.ops.kv_write import RowWrite
from cedar.ops.latent import Append, InPlace
from cedar.ops.latent import reference as plain
from cedar.ops.latent import triton as latent
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, BlockFormat
from cedar.testing import assert_bitwise, assert_close
from triton_interpreter import repair

repair()

FORMATS = [None, FP8_ROW, FP4_MAIN, FP4_ROW]
EPS = 1e-6


def inputs(
    shape: tuple[int, ...], turned: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    angle = torch.randn(shape[0], turned, generator=g) * 3
    x = torch.randn(*shape, generator=g).to(dtype)
    return x, (1 + 0.1 * torch.randn(shape[-1], generator=g)).to(dtype), (angle.cos(), angle.sin())


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: "none" if fmt is None else fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "turned"), [((3, 64), 16), ((2, 3, 96), 8), ((1, 2, 512), 32), ((2, 32), 16)]
)
def test_rotation_and_cast_bit_for_bit(
    shape: tuple[int, ...], turned: int, dtype: torch.dtype, fmt: BlockFormat | None
) -> None:
    x, _, rotary = inputs(shape, turned, dtype)
    for inverse in (False, True):
        found = latent.latent(x, None, EPS, rotary, fmt, inverse)
        want = plain.latent(x, None, EPS, rotary, fmt, inverse)
        assert_bitwise(found, want)
    # Negative control: the direction matters.
    assert not torch.equal(latent.latent(x, None, EPS, rotary, fmt), want)
    if fmt is None:
        assert_bitwise(latent.rotate(x, *rotary, True), want)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: "none" if fmt is None else fmt.name)
def test_norm(fmt: BlockFormat | None) -> None:
    x, weight, rotary = inputs((4, 96), 8, torch.float32)
    normed = latent.latent(x, weight, EPS, rotary, None)
    assert_close(normed, plain.latent(x, weight, EPS, rotary, None), "float32 op")
    if fmt is not None:
        nothing = (torch.ones(4, 0), torch.zeros(4, 0))
        want = plain.latent(normed, None, EPS, nothing, fmt)
        assert_bitwise(latent.latent(x, weight, EPS, rotary, fmt), want)


def test_norm_in_bfloat16_rounds_between_the_steps() -> None:
    """As often as the operations one by one do: all but a few values are the same."""
    x, weight, rotary = inputs((16, 512), 32, torch.bfloat16)
    found = latent.latent(x, weight, EPS, rotary, None)
    want = plain.latent(x, weight, EPS, rotary, None)
    once = plain.latent(x.float(), weight.float(), EPS, rotary, None).bfloat16()
    assert (found != want).float().mean() < 0.002
    assert (once != want)[:, -64:].float().mean() > 0.05  # negative control: rounded once only


@pytest.mark.parametrize("fmt", [FP8_ROW, FP4_MAIN, FP4_ROW], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("paged", [False, True])
def test_write(fmt: BlockFormat, paged: bool) -> None:
    x, weight, rotary = inputs((5, 96), 8, torch.bfloat16)
    raw = torch.full((7, 5, fmt.bytes_per_row(96)), 0xA5, dtype=torch.uint8)
    table = torch.tensor([[3, 6, 0], [2, 5, 1]], dtype=torch.int32) if paged else None
    number = torch.tensor([14, 2, -1, 7, 8])
    write = RowWrite(x, raw, fmt, table, torch.arange(5) % 2, number)
    for scale in (None, weight):
        other = write._replace(raw=raw.clone())
        latent.latent_write(write, scale, EPS, rotary)
        plain.latent_write(other, scale, EPS, rotary)
        same = (write.raw == other.raw).float().mean()
        assert same == 1.0 if scale is None else same > 0.98
        assert (write.raw != 0xA5).any()


def jobs(dtype: torch.dtype) -> tuple[InPlace | Append, ...]:
    """What a full layer does at decode: queries, window row, entry, index key, index queries."""
    x, weight, rotary = inputs((5, 96), 8, dtype)
    number = torch.tensor([14, 2, -1, 7, 8])
    at = torch.arange(5) % 2, number
    table = torch.tensor([[3, 6, 0], [2, 5, 1]], dtype=torch.int32)

    def raw(fmt: BlockFormat, width: int) -> Tensor:
        return torch.full((7, 5, fmt.bytes_per_row(width)), 0xA5, dtype=torch.uint8)

    queries = inputs((5, 3, 96), 8, dtype)[0]
    index = inputs((5, 4, 64), 8, dtype)[0]
    both = torch.cat((x, x), dim=1)  # a part of a wider product: rows are far apart
    return (
        InPlace(queries, None, rotary),
        Append(RowWrite(both[:, :96], raw(FP8_ROW, 96), FP8_ROW, None, *at), weight, rotary),
        Append(RowWrite(x * 2, raw(FP4_MAIN, 96), FP4_MAIN, table, *at), None, rotary),
        Append(RowWrite(x[:, :64], raw(FP4_ROW, 64), FP4_ROW, table, *at), weight[:64], rotary),
        InPlace(index, None, rotary, FP4_ROW),
        InPlace(x[:, :64].clone().view(5, 64), weight[:64], rotary, FP8_ROW, True),
    )


def results(some: tuple[InPlace | Append, ...]) -> list[Tensor]:
    return [job.write.raw if isinstance(job, Append) else job.x for job in some]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_several_jobs(count: int, dtype: torch.dtype) -> None:
    ours, other = jobs(dtype)[:count], jobs(dtype)[:count]
    before = [v.clone() for v in results(ours)]
    latent.latents(ours, EPS)
    plain.latents(other, EPS)
    for job, a, b, old in zip(ours, results(ours), results(other), before, strict=True):
        weight = job.weight
        assert a.equal(b) if weight is None else (a == b).float().mean() > 0.98
        assert not torch.equal(a, old)


def test_jobs_alone_and_together() -> None:
    together, alone = jobs(torch.bfloat16), jobs(torch.bfloat16)
    latent.latents(together, EPS)
    for job in alone:
        latent.latents((job,), EPS)
    for a, b in zip(results(together), results(alone), strict=True):
        assert_bitwise(a, b)


def test_jobs_the_kernel_cannot_take() -> None:
    x, _, rotary = inputs((5, 96), 8, torch.float32)
    apart = x.t().contiguous().t()
    want = plain.latent(x, None, EPS, rotary, None)
    latent.latents((InPlace(apart, None, rotary), InPlace(x[:0], None, rotary)), EPS)
    assert_bitwise(apart, want)
    latent.latents((), EPS)


def test_what_it_cannot_take_goes_to_the_reference() -> None:
    x, weight, rotary = inputs((3, 64), 16, torch.float32)
    assert latent.unsupported(x, weight.requires_grad_(), rotary, None) is not None
    assert latent.latent(x, weight, EPS, rotary, FP8_ROW).requires_grad
    wide = x[:, :40]
    assert latent.unsupported(wide, None, rotary, FP8_ROW) is not None
    assert_bitwise(
        latent.latent(wide, None, EPS, rotary, FP8_ROW),
        plain.latent(wide, None, EPS, rotary, FP8_ROW),
    )
    assert latent.latent(x[:0], None, EPS, (rotary[0][:0], rotary[1][:0]), None).shape == (0, 64)
