"""The prefill and training kernels compiled for Hopper: tensor cores in use, nothing spilled.

Their numbers: `tests/interpreted/kernel_prefill.py` and `tests/gpu/test_kernels_prefill.py`.
"""

from types import ModuleType

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

import triton_compile  # noqa: E402
from cedar.ops.sparse_attention import (  # noqa: E402
    Rows,
    prefill,
    prefill_gluon_backward,
    prefill_gluon_forward,
    prefill_triton,
)
from triton_compile import Launch, recorded  # noqa: E402

MOST_SHARED = 227 * 1024  # bytes that one program can have
Inputs = tuple[Tensor, tuple[Rows, ...], Tensor]


@pytest.fixture(autouse=True)
def eight_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of which only the number of multiprocessors is asked."""
    monkeypatch.setattr(prefill, "multiprocessors", lambda device: 8)


def inputs(heads: int, width: int, slots: tuple[int, ...], dtype: torch.dtype) -> Inputs:
    q = torch.empty((64, heads, width), dtype=dtype, device="meta")
    sources = tuple(
        Rows(
            torch.empty((1024, width), dtype=dtype, device="meta"),
            torch.empty((64, count), dtype=torch.int64, device="meta"),
        )
        for count in slots
    )
    return q, sources, torch.empty(heads, device="meta")


def forward(module: ModuleType, case: Inputs, *, save: bool = True) -> Launch:
    q, sources, sink = case
    log_sum = torch.empty(q.shape[:2], device="meta") if save else None
    kernels = "triton" if module is prefill_triton else "gluon"
    with recorded(module) as launches:
        prefill.forward(q, sources, sink, 0.1, torch.empty_like(q), log_sum, kernels=kernels)
    (launch,) = launches
    return launch


def backward(module: ModuleType, case: Inputs, *, deterministic: bool) -> list[Launch]:
    q, sources, _ = case
    log_sum = torch.empty(q.shape[:2], device="meta")
    kernels = "triton" if module is prefill_triton else "gluon"
    with recorded(prefill_triton) as around, recorded(module) as launches:
        prefill.backward(
            q, sources, 0.1, torch.empty_like(q), log_sum, q, deterministic, kernels=kernels
        )
    return around if module is prefill_triton else launches


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compile, "ASTSource", GluonASTSource)


RELEASED = inputs(64, 512, (128, 512), torch.bfloat16)


@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
def test_hopper_forward(heads: int, save: bool) -> None:
    built = forward(
        prefill_gluon_forward, inputs(heads, 512, (128, 512), torch.bfloat16), save=save
    ).compile()
    assert built.stack == 0
    assert built.shared <= MOST_SHARED
    assert built.uses("HGMMA")
    assert built.uses("LDGSTS.E.BYPASS.128")
    assert not built.uses("STL", "LDL", "HMMA")


@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("deterministic", [False, True])
def test_hopper_backward(deterministic: bool) -> None:
    (launch,) = backward(prefill_gluon_backward, RELEASED, deterministic=deterministic)
    built = launch.compile()
    assert built.stack == 0
    assert built.shared <= MOST_SHARED
    assert built.uses("HGMMA")
    assert built.uses("LDGSTS.E.BYPASS.128")
    assert built.uses("RED") is not deterministic
    assert not built.uses("STL", "LDL", "HMMA")


@pytest.mark.usefixtures("gluon")
def test_as_many_slots_as_promised_fit_in_shared_memory() -> None:
    most = prefill._MOST_SLOTS - 62
    case = inputs(64, 512, (128, most - 128), torch.bfloat16)
    (launch,) = backward(prefill_gluon_backward, case, deterministic=False)
    assert launch.arguments["SLOTS"] == prefill._MOST_SLOTS
    assert launch.compile().shared <= MOST_SHARED


def test_portable_kernels_at_a_research_size() -> None:
    """8 heads of 128: sixteen rows of a product, for which Hopper has the older instruction."""
    case = inputs(8, 128, (128, 128), torch.bfloat16)
    built = forward(prefill_triton, case).compile()
    assert built.stack == 0
    assert built.uses("HMMA")
    delta, main = backward(prefill_triton, case, deterministic=False)
    assert delta.compile().stack == 0
    built = main.compile()
    assert built.stack == 0
    assert built.uses("HMMA")
    assert built.uses("RED")
    *_, near, far = backward(prefill_triton, case, deterministic=True)
    assert near.kernel is far.kernel is prefill_triton.sum_kernel
    assert near.compile().stack == 0


def test_portable_forward_at_released_size() -> None:
    built = forward(prefill_triton, RELEASED).compile()
    assert built.stack == 0
    assert built.uses("HGMMA")


def test_a_spill_would_be_seen() -> None:
    """Negative control: the accumulator alone does not fit in the registers of four warps."""
    q, sources, sink = RELEASED
    with recorded(prefill_triton) as launches:
        prefill.forward(
            q, sources, sink, 0.1, torch.empty_like(q), None, kernels="triton", tile=16, warps=4
        )
    built = launches[0].compile()
    assert built.stack > 0
    assert built.uses("STL", "LDL")
