"""Casts and appends of cache rows in Triton's interpreter: bit for bit what `cedar.quant` gives."""

import pytest
import torch
from torch import Tensor

from cedar.ops.cast import reference as plain_cast
from cedar.ops.cast import triton as cast
from cedar.ops.kv_write import RowWrite
from cedar.ops.kv_write import reference as plain_write
from cedar.ops.kv_write import triton as write
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_BLOCK, FP8_ROW, BlockFormat
from cedar.testing import assert_bitwise
from triton_interpreter import repair

repair()

FORMATS = [FP8_ROW, FP4_MAIN, FP4_ROW]


def values(fmt: BlockFormat, rows: int, width: int, seed: int = 0) -> Tensor:
    """Random blocks of very different size, zeros of both signs, ties, block maxima at the edge."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width // fmt.cols, fmt.cols, generator=g)
    x = x * torch.exp2(torch.randint(-30, 12, (*x.shape[:2], 1), generator=g).float())
    flat = x.view(-1, fmt.cols)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, 0.0, -0.0])
    flat[0, :12] = ties
    flat[0, 12:] = 0.0
    flat[1] = 0.0
    flat[2] = fmt.largest * 2.0**-3  # the scale exactly a power of two
    flat[3] = flat[2].nextafter(torch.tensor(torch.inf))
    return x.flatten(1)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast(fmt: BlockFormat, dtype: torch.dtype) -> None:
    x = values(fmt, 5, 192).to(dtype)
    assert cast.unsupported(x, fmt) is None
    found = cast.cast(x, fmt)
    assert_bitwise(found, plain_cast.cast(x, fmt))
    assert not torch.equal(found, x)  # negative control: something was rounded
    assert_bitwise(cast.cast(x.t().contiguous().t(), fmt), found)


def test_cast_passes_gradients_straight_through() -> None:
    x = values(FP8_ROW, 3, 64).requires_grad_()
    g = torch.randn(3, 64)
    (found,) = torch.autograd.grad(cast.cast(x, FP8_ROW), x, g)
    assert_bitwise(found, g)


def test_cast_leaves_the_rest_to_the_reference() -> None:
    x = torch.randn(32, 48)
    for fmt in (FP8_ROW, FP8_BLOCK):
        assert cast.unsupported(x, fmt) is not None
        assert_bitwise(cast.cast(x, fmt), plain_cast.cast(x, fmt))
    assert cast.cast(torch.zeros(0, 64), FP8_ROW).shape == (0, 64)


def row_write(fmt: BlockFormat, numbers: list[int], width: int, *, paged: bool) -> RowWrite:
    x = values(fmt, max(len(numbers), 4), width)[: len(numbers)]
    raw = torch.full((7, 5, fmt.bytes_per_row(width)), 0xA5, dtype=torch.uint8)
    table = torch.tensor([[3, 6, 0], [2, 5, 1]], dtype=torch.int32) if paged else None
    sequence = torch.arange(len(numbers)) % 2
    return RowWrite(x, raw, fmt, table, sequence, torch.tensor(numbers, dtype=torch.int64))


def both(writes: tuple[RowWrite, ...]) -> None:
    """The kernel and the reference write the same bytes, and nothing else."""
    other = tuple(w._replace(raw=w.raw.clone()) for w in writes)
    before = [w.raw.clone() for w in writes]
    write.kv_write(writes)
    plain_write.kv_write(other)
    for a, b, old in zip(writes, other, before, strict=True):
        assert_bitwise(a.raw, b.raw)
        if (a.number >= 0).any():
            assert not torch.equal(a.raw, old)
        else:
            assert_bitwise(a.raw, old)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("width", [32, 96, 512])
def test_write(fmt: BlockFormat, width: int) -> None:
    both((row_write(fmt, [14, 3, 0, 7, -1], width, paged=True),))
    both((row_write(fmt, [1012, 3, 4, 7, -1], width, paged=False),))


def test_three_writes_in_one_launch() -> None:
    window = row_write(FP8_ROW, [17, 18], 64, paged=False)
    entries = row_write(FP4_MAIN, [4, -1, 9], 64, paged=True)
    keys = row_write(FP4_ROW, [4, 1, 9, 2], 32, paged=True)
    assert all(write.unsupported(w) is None for w in (window, entries, keys))
    both((window, entries, keys))
    keys, window = (w._replace(raw=torch.zeros_like(w.raw)) for w in (keys, window))
    both((keys, window))
    entries, keys, window = (
        w._replace(raw=torch.zeros_like(w.raw)) for w in (entries, keys, window)
    )
    both((entries, keys, window, row_write(FP8_ROW, [1, 2], 32, paged=False)))


def test_nothing_to_write() -> None:
    empty = row_write(FP8_ROW, [], 64, paged=False)
    both((empty, row_write(FP4_ROW, [3], 32, paged=True)))
    write.kv_write(())


def test_strided_values() -> None:
    one = row_write(FP4_MAIN, [1, 2, 3], 64, paged=True)
    wide = torch.full((3, 100), torch.nan)
    wide[:, :64] = one.values
    both((one._replace(values=wide[:, :64]),))


def test_the_page_of_another_sequence_is_seen() -> None:
    """Negative control: rows of exchanged sequences land elsewhere."""
    one = row_write(FP8_ROW, [1, 2, 3], 64, paged=True)
    write.kv_write((one,))
    other = one._replace(raw=torch.full_like(one.raw, 0xA5), sequence=1 - one.sequence)
    plain_write.kv_write((other,))
    assert not torch.equal(one.raw, other.raw)


def test_a_storage_it_cannot_take_goes_to_the_reference() -> None:
    one = row_write(FP8_ROW, [1, 2], 64, paged=False)
    wide = torch.zeros(7, 5, 100, dtype=torch.uint8)[..., :66]
    odd = one._replace(raw=torch.zeros(7, 5, 66, dtype=torch.uint8))
    assert write.unsupported(one._replace(raw=wide)) is not None
    assert write.unsupported(odd) is None
    assert write.unsupported(one._replace(values=torch.zeros(2, 48))) is not None
