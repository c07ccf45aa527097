"""The repaired interpreter rounds and multiplies as PyTorch does; unrepaired it still does not."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from triton_interpreter import AS_IT_COMES, repair, round_trip

repair()

TYPES = [
    (tl.float16, torch.float16),
    (tl.bfloat16, torch.bfloat16),
    (tl.float8e4nv, torch.float8_e4m3fn),
    (tl.float8e5, torch.float8_e5m2),
]


def values() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(4096, generator=g) * torch.exp2(
        torch.randint(-12, 6, (4096,), generator=g).float()
    )


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = row * SIZE + col
    tl.store(out + place, tl.dot(tl.load(a + place), tl.load(b + place)))


@pytest.mark.parametrize(("kind", "dtype"), TYPES, ids=lambda value: str(value))
def test_casts(kind: tl.dtype, dtype: torch.dtype) -> None:
    x = values()
    assert torch.equal(round_trip(x, kind), x.to(dtype).float())


def test_products_of_bfloat16() -> None:
    a, b = (values()[:256].view(16, 16) + n for n in range(2))
    a, b = a.bfloat16(), b.bfloat16()
    out = torch.full((16, 16), torch.nan)
    product[(1,)](a, b, out, SIZE=16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_the_repair_is_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, a new Triton rounds by itself and `triton_interpreter` can go."""
    monkeypatch.setattr(interpreter, "_convert_float", AS_IT_COMES[0])
    x = values()
    assert not torch.equal(round_trip(x, tl.bfloat16), x.bfloat16().float())
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", AS_IT_COMES[1])
    one = torch.ones(16, 16, dtype=torch.bfloat16)
    out = torch.zeros(16, 16)
    with np.errstate(all="ignore"):
        product[(1,)](one, one, out, SIZE=16)
    assert not torch.equal(out, torch.full((16, 16), 16.0))
