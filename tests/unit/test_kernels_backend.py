"""Which implementation is chosen for a device and why; packed rows without any kernel."""

from dataclasses import fields

import pytest
import torch

from cedar.ops import Ops, backend, select_ops
from cedar.ops.index_score import reference as index_score
from cedar.ops.packed import row_width, unpack_rows
from cedar.ops.sparse_attention import PackedRows, Rows
from cedar.ops.sparse_attention import reference as sparse_attention
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW
from cedar.testing import assert_bitwise
from kernel_cases import attention_case, index_case


def reasons(device: str, kernels: bool = True) -> dict[str, tuple[str, str]]:
    chosen = select_ops(device, kernels=kernels)
    return {c.op: (c.implementation, c.reason) for c in chosen.describe()}


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_every_operation_is_explained() -> None:
    names = {field.name for field in fields(Ops)} - {"choices"}
    for device in ("cpu", "cuda", "meta"):
        assert reasons(device).keys() == names
    assert all(choice == "reference" for choice, _ in reasons("cpu").values())


def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    pretend(monkeypatch, (9, 0))
    implementation, reason = reasons("cuda", kernels=False)["sparse_attention"]
    assert implementation == "reference"
    assert "kernels=False" in reason


def test_a_gpu_gets_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    pretend(monkeypatch, (9, 0))
    found = reasons("cuda")
    assert found["sparse_attention"][0] == "triton"
    assert "Hopper" in found["index_scan"][1]
    assert found["linear"][0] == "reference"
    assert "no kernel for it yet" in found["linear"][1]
    pretend(monkeypatch, (10, 0))
    assert "for compute capability 9.0" in reasons("cuda")["sparse_attention"][1]


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 0))
    assert reasons("cuda")["index_scan"] == (
        "reference",
        "the kernels read FP8, which needs compute capability 8.9; cuda has 8.0",
    )

    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert "not installed" in reasons("cuda")["index_scan"][1]


def test_packed_rows_are_the_values_they_hold() -> None:
    q, sources, sink, scale = attention_case(
        seed=1, queries=4, heads=2, width=64, kinds=("window", "main"), slots=(9, 40), pitch=16
    )
    values = []
    for source in sources:
        assert isinstance(source, PackedRows)
        rows = unpack_rows(source.raw_RB, source.format, q.dtype)
        values.append(Rows(rows, source.slots_TK.long()))
    plain = tuple(values)
    found = sparse_attention.sparse_attention(q, sources, sink, scale)
    assert_bitwise(found, sparse_attention.sparse_attention(q, plain, sink, scale))
    mass = sparse_attention.attention_mass(q, sources, sink, scale)
    assert_bitwise(mass, sparse_attention.attention_mass(q, plain, sink, scale))


def test_widths_of_packed_rows() -> None:
    assert [row_width(n, f) for n, f in ((288, FP4_MAIN), (528, FP8_ROW), (68, FP4_ROW))] == [
        512,
        512,
        128,
    ]
    for size, fmt in ((287, FP4_MAIN), (0, FP8_ROW), (67, FP4_ROW)):
        with pytest.raises(ValueError, match="no row of"):
            row_width(size, fmt)


def test_scans_and_pools_score_as_the_plain_operation() -> None:
    """The references of the packed operations against `index_score` on each sequence's own keys."""
    case = index_case(seed=2, visible=((30, 31), (), (5,)), heads=3, width=32, page=8)
    scores, best, _, _ = index_score.index_scan(
        case.q_TIJ, case.w_TI, case.keys, case.visible_T, capacity=case.capacity, queries=2, block=4
    )
    assert best is not None
    for t, seen in enumerate(case.visible_T.tolist()):
        table = case.keys.table[case.sequence_T[t]].long()
        held = unpack_rows(case.keys.raw[table].flatten(0, 1)[:seen], FP4_ROW, case.q_TIJ.dtype)
        want = index_score.index_score(case.q_TIJ[t : t + 1], case.w_TI[t : t + 1], held)[0]
        torch.testing.assert_close(scores[t, :seen], want)
        assert (scores[t, seen:] == -torch.inf).all()
        assert best[t, 0] == want[:4].max()
