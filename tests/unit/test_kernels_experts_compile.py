"""The experts kernels compile for Hopper: registers, spills, operands in flight; and the router."""

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels; this process interprets them", allow_module_level=True)

from cedar.ops.experts import dispatch, few, few_gluon, many, many_gluon, prepare  # noqa: E402
from cedar.ops.route import Gating  # noqa: E402
from cedar.ops.route import triton as route  # noqa: E402
from cedar.quant import FP4_ROW, FP8_BLOCK, QuantTensor  # noqa: E402
from triton_compile import Launch, _overwritten, recorded  # noqa: E402

EXPERTS, DIM, INNER = 384, 5120, 2304


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(rows: int, columns: int) -> QuantTensor:
    codes = empty(EXPERTS, rows, columns // 2, dtype=torch.uint8)
    return QuantTensor(codes, empty(EXPERTS, rows, columns // 32, dtype=torch.uint8), FP4_ROW)


def packed_shared(rows: int, columns: int) -> QuantTensor:
    codes = empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = empty(rows // 32, columns // 32, dtype=torch.uint8)
    return QuantTensor(codes, scale, FP8_BLOCK)


def launches(tokens: int, *, shared: bool = False) -> list[Launch]:
    w1, w2, w3 = packed(INNER, DIM), packed(DIM, INNER), packed(INNER, DIM)
    chosen = empty(tokens, 6, dtype=torch.int64)
    routing = empty(tokens, 6, dtype=torch.float32)
    more = (packed_shared(INNER, DIM), packed_shared(DIM, INNER), packed_shared(INNER, DIM))
    with recorded(prepare, few, few_gluon, many, many_gluon) as found:
        if tokens > 1000:
            many.experts(empty(tokens, DIM), chosen, routing, w1, w2, w3, limit=10.0)
        else:
            few.experts(
                empty(tokens, DIM), chosen, routing, w1, w2, w3, limit=10.0,
                shared=more if shared else None,
            )  # fmt: skip
    return found


@pytest.mark.parametrize(("tokens", "shared"), [(1, False), (1, True), (300, True), (900, False)])
def test_few(tokens: int, shared: bool) -> None:
    """Tiles of 8, 16 and 32 tokens: nothing but the last casts goes through shared memory."""
    found = launches(tokens, shared=shared)
    assert len(found) == 4  # prepare, gate and up, down, sum
    for launch in found[1:3]:
        compiled = launch.compile()
        assert compiled.stack == 0
        assert compiled.registers <= 255
        assert compiled.uses("HMMA")
        assert not compiled.uses("LDSM")
        assert compiled.shared <= 512
    assert not found[2].compile().uses("LDS", "STS", "BAR")
    for launch in (found[0], found[3]):
        assert launch.compile().stack == 0


@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
def test_many(tokens: int) -> None:
    """Tiles of 32 + 8, 64 + 16 and 128 + 32 tokens.

    A step's operands may be decoded while the last step's are multiplied, and nothing but
    registers of their own keeps them apart.
    """
    found = launches(tokens)
    assert len(found) == 4
    for launch in found[1:3]:
        compiled = launch.compile()
        assert compiled.stack == 0
        assert compiled.registers <= 255
        assert compiled.uses("HGMMA")
        assert not compiled.uses("LDSM")
        assert not compiled.overwritten


def test_an_overwritten_operand_is_seen() -> None:
    lines = (
        "/*0010*/ HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;",
        "/*0020*/ @P0 LDS.128 R8, [R1] ;",
        "/*0030*/ MOV R7, R9 ;",
        "/*0040*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;",
        "/*0050*/ MOV R4, R9 ;",
    )
    assert list(_overwritten("\n".join(lines))) == ["MOV R7, R9"]


@pytest.mark.parametrize("tokens", [1, 128, 8192])
def test_router(tokens: int) -> None:
    with recorded(route) as found:
        route.router(
            empty(tokens, DIM), empty(EXPERTS, DIM), empty(EXPERTS, dtype=torch.float32), 6,
            temp=1.0, score_func="sqrtsoftplus", normalize=True, route_scale=2.5,
        )  # fmt: skip
    assert len(found) == 2
    products, decision = (launch.compile() for launch in found)
    assert products.stack == 0
    assert products.uses("HGMMA")
    assert decision.stack == 0


@pytest.mark.parametrize("tokens", [1, 8])
def test_dispatch(tokens: int) -> None:
    """One launch in the place of the router's two and `prepare`."""
    gate = empty(EXPERTS, DIM), empty(EXPERTS, dtype=torch.float32)
    gating = Gating(*gate, 6, 1.0, "sqrtsoftplus", True, 2.5)
    real = None if tokens == 1 else empty(tokens, dtype=torch.uint8)
    counters = empty(dispatch.COUNTERS, dtype=torch.int32)
    assert dispatch.takes(empty(tokens, DIM), gating)
    with recorded(dispatch) as found:
        dispatch.dispatch(empty(tokens, DIM), gating, real, counters, 8, prepare.FEW)
    (launch,) = found
    compiled = launch.compile()
    assert compiled.stack == 0
    assert compiled.uses("HGMMA")
