"""Index scores and selections compile for Hopper as their wrappers launch them.

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

from cedar.ops.index_score import PagedKeys, Scan  # noqa: E402
from cedar.ops.index_score import hopper as index_hopper  # noqa: E402
from cedar.ops.index_score import triton as index_score  # noqa: E402
from cedar.ops.select import Place  # noqa: E402
from cedar.ops.select import triton as select  # noqa: E402
from triton_compile import Compiled, recorded  # noqa: E402

I32, I64, U8 = torch.int32, torch.int64, torch.uint8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def paged_keys(sequences: int, page: int = 64) -> PagedKeys:
    table, first = empty(sequences, 512, dtype=I32), empty(sequences + 1, dtype=I32)
    return PagedKeys(empty(4096, page, 68, dtype=U8), table, first)


def scan(sequences: int, tokens: int, by_hand: bool, page: int = 64) -> None:
    count = sequences * tokens
    index_score.index_scan(
        empty(count, 32, 128), empty(count, 32), paged_keys(sequences, page),
        empty(count, dtype=I64), capacity=32768, queries=tokens, block=8, by_hand=by_hand,
    )  # fmt: skip


def pool(by_hand: bool) -> None:
    index_score.index_pool(
        empty(2, 32, 128), empty(2, 32), paged_keys(2), empty(2, dtype=I64), empty(2, dtype=I64),
        empty(2, 2048, dtype=I64), 8, by_hand=by_hand,
    )  # fmt: skip


def choose() -> None:
    seen = empty(4, dtype=I64)
    select.select_entries(empty(4, 131072), 512, seen)
    select.select_best(empty(4, 16384), seen, 8, 2048)
    place = Place(empty(4, 16384, dtype=I32), seen, 64)
    for width in (1 << 17, 1 << 20):
        scored = Scan(empty(4, width), empty(4, width // 8), empty(4, width // 64), 8)
        select.select_scan(scored, seen, 512, blocks=2048, place=place)
    scores, best = empty(4, 16384), empty(4, 2048)
    select.select_pool(scores, best, empty(4, 2048, dtype=I64), 8, 512, place=place)


def compiled(*modules: object) -> list[Compiled]:
    """What the launches recorded from the calls in the last argument compile to."""
    *kernels, call = modules
    with recorded(*kernels) as launches:  # type: ignore[arg-type]
        call()  # type: ignore[operator]
    assert launches
    return [launch.compile() for launch in launches]


@pytest.mark.parametrize(("tokens", "page"), [(1, 64), (1, 32), (2, 64), (6, 64), (8, 64)])
def test_index_scan_by_hand(tokens: int, page: int) -> None:
    """Keys are copied in units of 16 bytes; tensor cores multiply their codes and add the heads."""
    (kernel,) = compiled(index_hopper, lambda: scan(4, tokens, True, page))
    assert kernel.uses("LDGSTS.E.BYPASS.128")
    assert kernel.uses("QGMMA")
    assert kernel.uses("HMMA")
    assert not kernel.overwritten
    # One more program on a multiprocessor is worth some spilled words (measured).
    assert kernel.stack <= (16 if tokens == 1 else 384)
    # Four programs fit a multiprocessor.
    assert kernel.registers <= 128
    assert kernel.shared <= 57000


def test_index_pool_by_hand() -> None:
    (kernel,) = compiled(index_hopper, lambda: pool(by_hand=True))
    assert kernel.uses("LDGSTS.E.BYPASS.128")
    assert kernel.uses("QGMMA")
    assert kernel.uses("HMMA")
    assert not kernel.overwritten
    assert kernel.stack == 0
    assert kernel.registers <= 128


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
    """No spills, and no wide tensor takes the way through shared memory to be stored."""
    kernels = compiled(select, choose)
    assert len(kernels) == 6
    assert all(kernel.stack == 0 for kernel in kernels)
    assert all(kernel.shared <= 8192 for kernel in kernels)
