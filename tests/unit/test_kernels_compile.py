"""The kernels compile for Hopper as their wrappers launch them: registers, spills, instructions.

No GPU is needed: Triton brings compiler and assembler. What a kernel computes is for
`test_kernels_interpreted.py` and `tests/gpu`. Sparse attention has a file of its own, which also
shows that a spill would be seen.
"""

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels; this process interprets them", allow_module_level=True)

from cedar.ops.mhc import MhcMix, MhcParameters  # noqa: E402
from cedar.ops.mhc import hopper as mhc_hopper  # noqa: E402
from cedar.ops.mhc import triton as mhc  # noqa: E402
from triton_compile import Compiled, recorded  # noqa: E402

F32, I32, I64, U8 = torch.float32, torch.int32, torch.int64, torch.uint8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step(count: int, by_hand: bool | None = None) -> None:
    def mix() -> MhcMix:
        return MhcMix(
            empty(count, 4, dtype=F32), empty(count, 4, dtype=F32), empty(count, 4, 4, dtype=F32)
        )

    parameters = MhcParameters(
        empty(24, 20480, dtype=F32), empty(24, dtype=F32), empty(3, dtype=F32)
    )
    mhc.MhcStepKernel().launch(
        empty(count, 4, 5120), (empty(count, 5120), mix()), empty(count, 4, dtype=F32), parameters,
        empty(5120), empty(count, 4, 5120), mix(), empty(count, 5120),
        norm_eps=1e-20, hc_eps=1e-6, sinkhorn_iters=20, by_hand=by_hand,
    )  # fmt: skip


def compiled(*modules: object) -> list[Compiled]:
    """What the launches recorded from the calls in the last argument compile to."""
    *kernels, call = modules
    with recorded(*kernels) as launches:  # type: ignore[arg-type]
        call()  # type: ignore[operator]
    assert launches
    return [launch.compile() for launch in launches]


def test_mhc_by_hand() -> None:
    """Two programs share a multiprocessor; every product once: 2 halves of a tile x 4 streams x 4
    steps of 16 channels. Two words are kept for the length of a tile."""
    (many,) = compiled(mhc, mhc_hopper, lambda: step(8192))
    assert many.stack <= 8
    assert 2 * (many.shared + 1024) <= 228 << 10
    assert sum(n for name, n in many.operations.items() if name.startswith("HGMMA")) == 32


def test_mhc() -> None:
    """At 128 registers two programs share a multiprocessor; that is worth a few spilled words."""
    (many,) = compiled(mhc, lambda: step(8192, by_hand=False))
    assert many.uses("HGMMA")
    assert many.registers <= 128
    assert many.stack <= 64
    (one,) = compiled(mhc, lambda: step(1))
    assert one.stack == 0
    assert one.uses("HMMA")
