"""The Engram kernels in Triton's interpreter against the plain references."""

import pytest
import torch
from torch import Tensor

from cedar.ops.engram_gate import reference as plain_gate
from cedar.ops.engram_gate import triton as gate
from cedar.ops.engram_rows import reference as plain_rows
from cedar.ops.engram_rows import triton as rows
from cedar.quant import FP8_ROW, quantize
from cedar.testing import assert_bitwise, assert_close
from triton_interpreter import repair

repair()


def gate_case(count: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Keys and value are parts of one projection, as in the model."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, width, generator=g).to(dtype)
    kv = torch.randn(count, 5 * width, generator=g).to(dtype)
    keys, value = kv.split((4 * width, width), dim=1)
    weights = (1 + 0.3 * torch.randn(2, 4, width, generator=g)).to(dtype)
    return x, keys.unflatten(1, (4, width)), value, weights[0], weights[1]


@pytest.mark.parametrize(("count", "width"), [(1, 64), (5, 80), (3, 200)])
@pytest.mark.parametrize("closed", [False, True])
def test_gate(count: int, width: int, closed: bool) -> None:
    case = gate_case(count, width, torch.float32)
    opened = (torch.arange(count) % 2 == 0) if closed else None
    assert gate.unsupported(*case) is None
    found = gate.engram_gate(*case, 1e-6, opened)
    assert_close(found, plain_gate.engram_gate(*case, 1e-6, opened), "float32 op")
    if closed:
        assert_bitwise(found[1::2], case[0][1::2])
    assert not torch.equal(found[0], case[0][0])  # negative control


def test_gate_of_nothing_and_of_what_is_opposite() -> None:
    """Zero keys leave the gate half open; opposite ones nearly close it."""
    x, _, value, q, k = gate_case(2, 64, torch.float32)
    for keys in (torch.zeros_like(x), -x):
        found = gate.engram_gate(x, keys, value, q, k, 1e-6, None)
        assert_close(found, plain_gate.engram_gate(x, keys, value, q, k, 1e-6, None), "float32 op")


def test_gate_in_bfloat16() -> None:
    case = gate_case(4, 128, torch.bfloat16)
    found = gate.engram_gate(*case, 1e-6, None)
    want = plain_gate.engram_gate(*case, 1e-6, None)
    assert (found != want).float().mean() < 0.01
    assert_close(found, want.float(), "bfloat16 op")


def test_gate_leaves_the_rest_to_the_reference() -> None:
    case = gate_case(2, 64, torch.float32)
    learned = (case[0].requires_grad_(), *case[1:])
    assert gate.unsupported(*learned) is not None
    assert gate.engram_gate(*learned, 1e-6, None).requires_grad
    assert gate.engram_gate(*gate_case(0, 64, torch.float32), 1e-6, None).shape == (0, 4, 64)


def table(count: int, width: int) -> tuple[Tensor, Tensor]:
    """Codes and scales as parts of packed rows; scale bytes from one end to the other."""
    g = torch.Generator().manual_seed(2)
    q = quantize(torch.randn(count, width, generator=g), FP8_ROW)
    packed = torch.cat((q.codes.view(torch.uint8), q.scale), dim=1)
    packed[0, width:] = 0
    packed[1, width:] = 240
    return packed[:, :width].view(torch.float8_e4m3fn), packed[:, width:]


@pytest.mark.parametrize("width", [32, 96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows(width: int, dtype: torch.dtype) -> None:
    codes, scale = table(20, width)
    ids = torch.tensor([[0, 1, 19], [7, 7, 3]])
    assert rows.unsupported(codes, scale, ids, dtype) is None
    found = rows.engram_rows(codes, scale, ids, dtype)
    assert_bitwise(found, plain_rows.engram_rows(codes, scale, ids, dtype))
    assert not torch.equal(found, rows.engram_rows(codes, scale, ids.flip(1), dtype))
    assert rows.engram_rows(codes, scale, ids[:0], dtype).shape == (0, 3, width)
