"""Index scores of many queries compile for Hopper as their wrapper launches them.

No GPU is needed: Triton brings compiler and assembler. What a kernel computes is for
`test_kernels_interpreted.py` and `tests/gpu`.
"""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels; this process interprets them", allow_module_level=True)

from cedar.ops.index_score import prefill, prefill_hopper
from triton_compile import Compiled, recorded

BF16, F32 = torch.bfloat16, torch.float32


def compiled(
    *, by_hand: bool, block: int, heads: int = 32, width: int = 128, dtype: torch.dtype = BF16
) -> Compiled:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recorded(prefill, prefill_hopper) as launches:
        prefill.index_prefill(
            empty(2048, heads, width), empty(2048, heads), empty(32768, width),
            empty(2048, dtype=torch.int64), block=block, by_hand=by_hand,
        )  # fmt: skip
    (launch,) = launches
    return launch.compile()


@pytest.mark.parametrize("block", [0, 8])
def test_by_hand(block: int) -> None:
    """Keys go from memory to registers to the tensor cores, and tensor cores add the heads."""
    kernel = compiled(by_hand=True, block=block)
    assert kernel.uses("HGMMA")
    assert kernel.uses("HMMA")
    assert kernel.operations["LDG.E.128"] >= 16
    assert not kernel.overwritten
    assert kernel.stack == 0


@pytest.mark.parametrize("block", [0, 8])
def test_portable(block: int) -> None:
    kernel = compiled(by_hand=False, block=block)
    assert kernel.uses("HGMMA")
    assert kernel.stack == 0


@pytest.mark.parametrize(
    ("heads", "width", "dtype"), [(4, 32, BF16), (8, 256, BF16), (32, 128, F32)]
)
def test_other_shapes(heads: int, width: int, dtype: torch.dtype) -> None:
    kernel = compiled(by_hand=False, block=8, heads=heads, width=width, dtype=dtype)
    assert kernel.stack == 0
