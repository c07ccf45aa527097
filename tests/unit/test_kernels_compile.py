"""The kernels compile for Hopper as their wrappers launch them: registers, spills, instructions.

No GPU is needed: Triton brings compiler and assembler. What a kernel computes is for
`test_kernels_interpreted.py` and `tests/gpu`.
"""

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels; this process interprets them", allow_module_level=True)

from cedar.ops.index_score import PagedKeys  # noqa: E402
from cedar.ops.index_score import hopper as index_hopper  # noqa: E402
from cedar.ops.index_score import triton as index_score  # noqa: E402
from cedar.ops.mhc import MhcMix, MhcParameters  # noqa: E402
from cedar.ops.mhc import triton as mhc  # noqa: E402
from cedar.ops.select import triton as select  # noqa: E402
from cedar.ops.sparse_attention import PackedRows  # noqa: E402
from cedar.ops.sparse_attention import hopper as attention_hopper  # noqa: E402
from cedar.ops.sparse_attention import triton as attention  # noqa: E402
from cedar.quant import FP4_MAIN, FP8_ROW  # noqa: E402
from triton_compile import Compiled, recorded  # noqa: E402

F32, I32, I64, U8 = torch.float32, torch.int32, torch.int64, torch.uint8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attend(queries: int, heads: int = 64, width: int = 512, **options: bool | int) -> None:
    window, main = empty(4096, width * 33 // 32, dtype=U8), empty(4096, width * 9 // 16, dtype=U8)
    sources = (
        PackedRows(window, empty(queries, 128, dtype=I32), FP8_ROW),
        PackedRows(main, empty(queries, 512, dtype=I32), FP4_MAIN),
    )
    q = empty(queries, heads, width)
    attention.launch(q, sources, empty(heads, dtype=F32), 0.05, empty(*q.shape), **options)


def paged_keys(sequences: int) -> PagedKeys:
    table, first = empty(sequences, 512, dtype=I32), empty(sequences + 1, dtype=I32)
    return PagedKeys(empty(4096, 64, 68, dtype=U8), table, first)


def scan(sequences: int, tokens: int, by_hand: bool) -> None:
    count = sequences * tokens
    index_score.index_scan(
        empty(count, 32, 128), empty(count, 32), paged_keys(sequences), empty(count, dtype=I64),
        capacity=32768, queries=tokens, block=8, by_hand=by_hand,
    )  # fmt: skip


def pool(by_hand: bool) -> None:
    index_score.index_pool(
        empty(2, 32, 128), empty(2, 32), paged_keys(2), empty(2, dtype=I64), empty(2, dtype=I64),
        empty(2, 2048, dtype=I64), 8, by_hand=by_hand,
    )  # fmt: skip


def choose() -> None:
    select.select_entries(empty(4, 131072), 512, empty(4, dtype=I64))
    select.select_best(empty(4, 16384), empty(4, dtype=I64), 8, 2048)


def step(count: int) -> None:
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
        norm_eps=1e-20, hc_eps=1e-6, sinkhorn_iters=20,
    )  # fmt: skip


def compiled(*modules: object) -> list[Compiled]:
    """What the launches recorded from the calls in the last argument compile to."""
    *kernels, call = modules
    with recorded(*kernels) as launches:  # type: ignore[arg-type]
        call()  # type: ignore[operator]
    assert launches
    return [launch.compile() for launch in launches]


@pytest.mark.parametrize("queries", [128, 32])
def test_attention_by_hand(queries: int) -> None:
    """Two warpgroups, every product once: 32 for the scores of a tile, the rest for the output."""
    main, *combine = compiled(attention, attention_hopper, lambda: attend(queries, by_hand=True))
    assert main.uses("HGMMA")
    assert not main.uses("LDL", "STL")
    assert main.stack == 0
    assert main.shared <= 227 << 10
    # A loop for the window and one for main KV, each with its 32 score products.
    whole = sum(n for name, n in main.operations.items() if name.startswith("HGMMA"))
    assert whole == (96 if queries == 128 else 80)
    assert len(combine) == (0 if queries == 128 else 1)
    assert all(part.stack == 0 for part in combine)


def test_portable_attention() -> None:
    main, *_ = compiled(attention, lambda: attend(5, heads=4, width=64))
    assert main.stack == 0
    assert main.uses("HMMA", "HGMMA")


@pytest.mark.parametrize("tokens", [1, 4])
def test_index_scan_by_hand(tokens: int) -> None:
    """Keys go from memory to registers to the tensor cores: few stores to shared memory."""
    (kernel,) = compiled(index_hopper, lambda: scan(4, tokens, by_hand=True))
    assert kernel.uses("HGMMA")
    assert kernel.stack == 0
    assert kernel.registers <= (96 if tokens == 1 else 255)
    assert not kernel.uses("LDSM")


def test_index_pool_by_hand() -> None:
    (kernel,) = compiled(index_hopper, lambda: pool(by_hand=True))
    assert kernel.uses("HGMMA")
    assert kernel.stack == 0
    assert kernel.registers <= 96


@pytest.mark.parametrize("call", [lambda: scan(4, 1, by_hand=False), lambda: pool(by_hand=False)])
def test_portable_index_scores(call: object) -> None:
    (kernel,) = compiled(index_score, call)
    assert kernel.stack == 0
    assert kernel.uses("HGMMA")


def test_copies_of_keys_are_not_too_wide() -> None:
    """Rows are 68 bytes apart, so no copy of them may be wider than 4 bytes."""
    (kernel,) = compiled(index_score, lambda: scan(4, 1, by_hand=False))
    assert kernel.uses("LDGSTS.E")
    assert not kernel.uses("LDGSTS.E.64", "LDGSTS.E.128", "LDGSTS.E.BYPASS")


def test_select() -> None:
    kernels = compiled(select, choose)
    assert len(kernels) >= 5
    assert all(kernel.stack == 0 for kernel in kernels)


def test_mhc() -> None:
    """At 128 registers two programs share a multiprocessor; that is worth a few spilled words."""
    (many,) = compiled(mhc, lambda: step(8192))
    assert many.uses("HGMMA")
    assert many.registers <= 128
    assert many.stack <= 64
    (one,) = compiled(mhc, lambda: step(1))
    assert one.stack == 0
    assert one.uses("HMMA")


def test_a_spill_would_be_seen() -> None:
    """Negative control: the portable kernel at the released shape does spill."""
    main, *_ = compiled(attention, lambda: attend(128, by_hand=False))
    assert main.stack > 0
    assert main.uses("LDL")
