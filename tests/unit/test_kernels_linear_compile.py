"""The linear kernels compile for Hopper: no spilled registers, wide loads, tensor cores."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cedar.ops.linear import hopper, hopper_few, hopper_many
from cedar.ops.linear import triton as portable
from cedar.quant import FP8_BLOCK, QuantTensor
from triton_compile import Launch, recorded


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(rows: int, width: int) -> QuantTensor:
    codes = empty(rows, width, dtype=torch.float8_e4m3fn)
    return QuantTensor(codes, empty(rows // 32, width // 32, dtype=torch.uint8), FP8_BLOCK)


def launched(
    tokens: int, width: int, rows: tuple[int, ...], *, normed: bool, cast: bool, groups: int
) -> list[Launch]:
    x, weights = empty(tokens, groups * width), tuple(packed(n, width) for n in rows)
    norm = (empty(width), 1e-6) if normed else None
    plan = hopper.choose(x, weights, norm, groups)
    assert plan is not None
    outs = tuple(empty(tokens, n) for n in rows)
    counters = empty(hopper.COUNTERS, dtype=torch.int32)
    with recorded(hopper_few, hopper_many) as launches:
        hopper.launch(x, weights, outs, plan, counters, norm=norm, cast=cast, groups=groups)
    return launches


SHAPES = [
    (5120, (1280, 512), False, True, 1),
    (1280, (32768, 4096), True, True, 1),
    (4096, (8192,), False, False, 8),
    (8192, (5120,), False, True, 1),
    (5120, (2304, 2304), False, True, 1),
    (6144, (25600,), False, True, 1),
]


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize(("width", "rows", "normed", "cast", "groups"), SHAPES)
def test_few_tokens(
    tokens: int, width: int, rows: tuple[int, ...], normed: bool, cast: bool, groups: int
) -> None:
    """One launch; products of 16 x 8 x 16 straight from registers, weights in wide loads."""
    (launch,) = launched(tokens, width, rows, normed=normed, cast=cast, groups=groups)
    compiled = launch.compile()
    assert compiled.stack == 0
    assert compiled.shared <= 227 << 10
    assert compiled.uses("HMMA")
    assert compiled.uses("LDG.E.128")
    assert not compiled.uses("LDSM")
    assert compiled.operations["LDG.E.U8"] <= compiled.operations["LDG.E.128"]


@pytest.mark.parametrize("tokens", [32, 128])
@pytest.mark.parametrize(("width", "rows", "normed", "cast", "groups"), SHAPES[:3])
def test_many_tokens(
    tokens: int, width: int, rows: tuple[int, ...], normed: bool, cast: bool, groups: int
) -> None:
    found = launched(tokens, width, rows, normed=normed, cast=cast, groups=groups)
    prepared, multiplied = (launch.compile() for launch in found)
    assert prepared.stack == 0
    assert multiplied.stack == 0
    assert multiplied.shared <= 227 << 10
    assert multiplied.uses("HGMMA")
    assert multiplied.uses("LDG.E.128")
    assert multiplied.overwritten == ()


@pytest.mark.parametrize("tokens", [32, 128])
def test_a_product_that_prepares_the_next(tokens: int) -> None:
    """A launch each behind the one that prepares the first one's tokens."""
    counters = empty(hopper.COUNTERS, dtype=torch.int32)
    x, y, out = empty(tokens, 8 * 4096), empty(tokens, 8192), empty(tokens, 5120)
    first, second = packed(8192, 4096), packed(5120, 8192)
    with recorded(hopper_many) as found:
        for given, weight, result, groups in ((x, first, y, 8), (y, second, out, 1)):
            plan = hopper.choose(given, (weight,), None, groups)
            assert plan is not None
            hopper.launch(
                given, (weight,), (result,), plan, counters, groups=groups,
                prepare=groups > 1, prepared=groups == 1,
            )  # fmt: skip
    assert len(found) == 3
    for launch in found[1:]:
        compiled = launch.compile()
        assert compiled.stack == 0
        assert compiled.uses("HGMMA")
        assert compiled.overwritten == ()


def test_wide_weights() -> None:
    x, weight = empty(6, 5120), empty(384, 5120)
    plan = hopper.choose(x, (weight,), None, 1)
    assert plan is not None
    counters = empty(hopper.COUNTERS, dtype=torch.int32)
    with recorded(hopper_few) as launches:
        out = empty(6, 384, dtype=torch.float32)
        hopper.launch(x, (weight,), (out,), plan, counters)
    compiled = launches[0].compile()
    assert compiled.stack == 0
    assert compiled.uses("HMMA")


def test_what_the_kernel_does_not_take() -> None:
    x = empty(6, 5120)
    assert hopper.choose(x, (packed(64, 5120),), None, 1) is not None
    assert hopper.choose(x.float(), (packed(64, 5120),), None, 1) is None
    assert hopper.choose(x, (empty(64, 5120, dtype=torch.float32),), None, 1) is None
    assert hopper.choose(x, (empty(40, 5120),), None, 1) is None
    assert hopper.choose(x[:, :40], (empty(64, 40),), None, 1) is None


def test_portable_kernels() -> None:
    with recorded(portable) as launches:
        portable.product(empty(6, 5120), packed(1280, 5120), torch.bfloat16)
        portable.product(empty(6, 5120), empty(384, 5120), torch.float32)
        portable.product(empty(40, 512, dtype=torch.float32), packed(64, 512), torch.float32)
        portable.dense(packed(1280, 5120), torch.bfloat16)
    compiled = [launch.compile() for launch in launches]
    assert len(compiled) == 4
    for result in compiled:
        assert result.stack == 0
    assert all(result.uses("HMMA", "HGMMA") for result in compiled[:2])
