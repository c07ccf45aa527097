"""Index scores of many queries on a device against the plain reference."""

import pytest
import torch
from torch import Tensor

from cedar.ops.index_score import PagedKeys, Scan
from cedar.ops.index_score import reference as plain
from cedar.ops.packed import pack_rows
from cedar.ops.select import reference as plain_select
from cedar.quant import FP4_ROW, fake_quantize
from cedar.testing import assert_bitwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    from cedar.ops.index_score import prefill
    from cedar.ops.index_score import triton as decode
    from cedar.ops.select import triton as select

BF16, F32 = torch.bfloat16, torch.float32
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def case(
    tokens: int, entries: int, heads: int = 32, width: int = 128, dtype: torch.dtype = BF16,
    start: int = 0,
) -> Inputs:  # fmt: skip
    """Query t of ``tokens`` sees ``start + t`` entries."""
    g = torch.Generator("cuda").manual_seed(tokens + entries)

    def rounded(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=g, device="cuda")
        return fake_quantize(x, FP4_ROW).to(dtype)

    w = torch.randn(tokens, heads, generator=g, device="cuda").to(dtype)
    visible = (start + torch.arange(tokens, device="cuda")).clamp_max(entries)
    return rounded(tokens, heads, width), w, rounded(entries, width), visible


def near(found: Scan, want: Scan, dtype: torch.dtype) -> None:
    """Equal where nothing is; a product that rounds the other way moves a sum by a unit of it."""
    for a, b in zip(found[:3], want[:3], strict=True):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        assert a.shape == b.shape
        assert ((a == -torch.inf) == (b == -torch.inf)).all()
        error = (a.double() - b.double()).nan_to_num(0.0).abs()
        limit = (1e-5 if dtype is F32 else 2**-6) * b[b > -torch.inf].abs().max()
        assert error.max() <= limit
        assert error.mean() <= 0.1 * limit


def wide(inputs: Inputs) -> Inputs:
    q, w, keys, visible = inputs
    return q.double(), w.double(), keys.double(), visible


@pytest.mark.parametrize(
    ("tokens", "entries", "heads", "width", "dtype", "start"),
    [
        (16, 512, 32, 128, BF16, 400),
        (100, 3000, 32, 128, BF16, 2900),
        (333, 5001, 32, 128, BF16, 0),
        (1, 7, 32, 128, BF16, 7),
        (40, 9000, 32, 128, BF16, 9000),
        (200, 1000, 32, 128, F32, 0),
        (70, 900, 4, 32, BF16, 0),
        (70, 900, 3, 64, F32, 800),
        (130, 300, 8, 256, BF16, 100),
    ],
)
def test_index_prefill(
    tokens: int, entries: int, heads: int, width: int, dtype: torch.dtype, start: int
) -> None:
    inputs = case(tokens, entries, heads, width, dtype, start)
    for block in (8, 0):
        want = plain.index_prefill(*wide(inputs), block=block)
        near(plain.index_prefill(*inputs, block=block), want, dtype)
        for by_hand in (None, False):
            found = prefill.index_prefill(*inputs, block=block, by_hand=by_hand)
            near(found, want, dtype)


def test_a_score_does_not_depend_on_what_else_there_is() -> None:
    """Nor on how queries are split over calls; and maxima are those of the scores."""
    q, w, keys, visible = case(300, 6000, start=5700)
    whole = prefill.index_prefill(q, w, keys, visible, block=8)
    for part in (slice(0, 37), slice(37, 300)):
        found = prefill.index_prefill(q[part], w[part], keys, visible[part], block=8)
        for a, b in zip(found[:3], whole[:3], strict=True):
            assert_bitwise(a, b[part])
    fewer = prefill.index_prefill(q[:5], w[:5], keys[:5704], visible[:5])
    assert_bitwise(fewer.scores_TS, whole.scores_TS[:5, :5704])
    assert_bitwise(whole.best_TM, whole.scores_TS.unflatten(1, (-1, 8)).amax(2))


def test_it_scores_as_the_scan_of_packed_keys() -> None:
    q, w, keys, visible = case(6, 2048, start=2000)
    raw = pack_rows(keys.float(), FP4_ROW).view(32, 64, 68)
    table = torch.arange(32, device="cuda", dtype=torch.int32).unsqueeze(0)
    first = torch.tensor([0, 6], device="cuda", dtype=torch.int32)
    packed = PagedKeys(raw, table, first)
    scan = decode.index_scan(q, w, packed, visible, capacity=2048, queries=6, block=8)
    found = prefill.index_prefill(q, w, keys, visible, block=8)
    assert_bitwise(found.scores_TS[:, :2005], scan.scores_TS[:, :2005])


def test_rows_further_apart_than_their_width() -> None:
    q, w, keys, visible = case(50, 700)
    q2, w2, keys2 = (torch.cat((x, x), -1) for x in (q.flatten(1), w, keys))
    spread = q2[:, : q[0].numel()].unflatten(1, q.shape[1:]), w2[:, :32], keys2[:, :128]
    assert spread[0].stride(0) == 2 * q[0].numel()
    for by_hand in (None, False):
        found = prefill.index_prefill(*spread, visible, block=8, by_hand=by_hand)
        want = prefill.index_prefill(q, w, keys, visible, block=8, by_hand=by_hand)
        assert_bitwise(found.scores_TS, want.scores_TS)


def test_scores_beyond_two_gibibytes() -> None:
    """Elements past 2^31: the last rows of a large result."""
    entries = 300_000
    q, w, keys, visible = case(32, entries, start=entries)
    tokens = (1 << 31) // entries + 40
    place = torch.arange(tokens, device="cuda") % 32
    found = prefill.index_prefill(q[place], w[place], keys, visible[place], block=8)
    want = prefill.index_prefill(q, w, keys, visible, block=8)
    assert found.scores_TS.numel() > 2**31
    for a, b in zip(found[:3], want[:3], strict=True):
        assert_bitwise(a[-16:], b[place[-16:]])


def test_the_selection_takes_it() -> None:
    q, w, keys, visible = case(64, 20000, start=19950)
    scan = prefill.index_prefill(q, w, keys, visible, block=8)
    found = select.select_scan(scan, visible, 512, blocks=100)
    want = plain_select.select_scan(scan, visible, 512, blocks=100)
    assert_bitwise(found.entries_TK, want.entries_TK)
    assert found.blocks_TM is not None
    assert want.blocks_TM is not None
    assert_bitwise(found.blocks_TM, want.blocks_TM)


def test_it_is_captured_in_a_graph() -> None:
    q, w, keys, visible = case(40, 3000)
    graph = torch.cuda.CUDAGraph()
    prefill.index_prefill(q, w, keys, visible, block=8)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = prefill.index_prefill(q, w, keys, visible, block=8)
    for seen in (3000, 700, 0):
        visible.fill_(seen)
        graph.replay()
        want = prefill.index_prefill(q, w, keys, visible, block=8)
        for a, b in zip(found[:3], want[:3], strict=True):
            assert_bitwise(a, b)
