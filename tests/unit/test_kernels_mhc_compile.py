"""The launch of mHC for few tokens compiles for Hopper, as it is launched."""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

from cedar.ops.mhc import MhcMix, MhcParameters, hopper_few
from triton_compile import recorded


def wide(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def narrow(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("update", [True, False])
def test_few(update: bool) -> None:
    """Every product once, 4 streams x 2 steps of 16 channels x 3 tiles of 16 rows; all programs
    find a place at once."""
    count, width = 16, 5120

    def mix() -> MhcMix:
        return MhcMix(wide(count, 4), wide(count, 4), wide(count, 4, 4))

    with recorded(hopper_few) as launches:
        hopper_few.Few().launch(
            narrow(count, 4, width), (narrow(count, width), mix()) if update else None,
            wide(count, 4), MhcParameters(wide(24, 4 * width), wide(24), wide(3)), narrow(width),
            narrow(count, 4, width), mix(), narrow(count, width),
            norm_eps=1e-20, hc_eps=1e-6, sinkhorn_iters=20,
        )  # fmt: skip
    (launch,) = launches
    assert launch.grid == (2 * (40 + 8),)
    assert launch.grid[0] <= 132
    compiled = launch.compile()
    assert compiled.stack == 0
    assert compiled.shared <= 48 << 10
    assert sum(n for name, n in compiled.operations.items() if name.startswith("HMMA")) == 24
