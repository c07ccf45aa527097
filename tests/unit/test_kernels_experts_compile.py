"""The experts kernels compile for Hopper: registers, spills, and operands that stay apart."""

import itertools
import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels; this process interprets them", allow_module_level=True)

from cedar.ops.experts import gluon  # noqa: E402
from cedar.ops.experts import triton as portable  # noqa: E402
from cedar.quant import FP4_ROW, FP8_ROW, QuantTensor  # noqa: E402
from triton_compile import Launch, recorded  # noqa: E402

EXPERTS, DIM, INNER = 384, 5120, 2304


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(rows: int, columns: int) -> QuantTensor:
    codes = empty(EXPERTS, rows, columns // 2, dtype=torch.uint8)
    return QuantTensor(codes, empty(EXPERTS, rows, columns // 32, dtype=torch.uint8), FP4_ROW)


def launches(tokens: int) -> list[Launch]:
    w1, w2, w3 = packed(INNER, DIM), packed(DIM, INNER), packed(INNER, DIM)
    chosen = empty(tokens, 6, dtype=torch.int64)
    routing = empty(tokens, 6, dtype=torch.float32)
    with recorded(gluon, portable) as found:
        gluon.experts(
            empty(tokens, DIM), chosen, routing, w1, w2, w3, limit=10.0, input_format=FP8_ROW
        )
    return found


@pytest.mark.parametrize("tokens", [1, 2048, 4096, 8192])
def test_no_spills_and_no_shared_operands(tokens: int) -> None:
    """Tiles of 16, 32, 64 and 128 tokens.

    Products run while others are begun, and nothing but disjoint registers keeps the operands of
    those in flight apart: eight of `down`, sixteen of `gate_up`, four registers each.
    """
    found = launches(tokens)
    assert len(found) == 3  # the last one adds up
    for launch, products in zip(found[:2], (16, 8), strict=True):
        compiled = launch.compile()
        assert compiled.stack == 0
        assert compiled.registers <= 255
        assert compiled.uses("HGMMA")
        # No operand takes the way through shared memory.
        assert not compiled.uses("LDSM")
        first = sorted(compiled.operands)
        assert len(first) == products
        assert all(b - a >= 4 for a, b in itertools.pairwise(first))
