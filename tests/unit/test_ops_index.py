"""Index scores, group pooling and RMSNorm."""

import pytest
import torch
from torch import Tensor

from cedar.ops.compress.reference import compress
from cedar.ops.index_score.reference import index_score, index_score_rows
from cedar.ops.norm.reference import rms_norm
from cedar.testing import assert_bitwise, assert_close


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_as_written() -> None:
    q, w, keys = random(4, 3, 8), random(4, 3, seed=1), random(6, 8, seed=2)
    got = index_score(q, w, keys)
    for t in range(4):
        for s in range(6):
            want = sum(w[t, h] * (q[t, h] @ keys[s]).clamp_min(0) for h in range(3))
            assert_close(got[t, s], torch.as_tensor(want), "float64")
    assert (got < 0).any()  # head weights may be negative
    linear = torch.einsum("thj,sj,th->ts", q, keys, w)
    assert not torch.allclose(got, linear)  # negative control: the relu acts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_equal_columns(dtype: torch.dtype) -> None:
    """Scoring named rows is scoring all and picking; rows may repeat and be in any order."""
    q, w, keys = random(5, 2, 32), random(5, 2, seed=1), random(9, 32, seed=2)
    q, w, keys = (x.to(dtype) for x in (q, w, keys))
    rows = torch.randint(0, 9, (5, 7), generator=torch.Generator().manual_seed(3))
    picked = index_score(q, w, keys).gather(1, rows)
    tolerance = {torch.float64: "float64", torch.float32: "float32 op"}.get(dtype, "bfloat16 op")
    assert_close(index_score_rows(q, w, keys, rows), picked, tolerance)


def test_rows_touch_nothing_else() -> None:
    q, w, keys = random(5, 2, 8), random(5, 2, seed=1), random(9, 8, seed=2)
    rows = torch.tensor([[1, 3, 3]]).expand(5, -1)
    want = index_score_rows(q, w, keys, rows)
    keys[[0, 2, 4, 5, 6, 7, 8]] = torch.nan
    assert_bitwise(index_score_rows(q, w, keys, rows), want)
    assert index_score(q, w, keys).isnan().any()  # negative control


def test_bfloat16_rounds_products_but_not_the_sum() -> None:
    """Dot, relu and weighting in bfloat16, the sum over heads in float32, one rounding."""
    q, w, keys = random(6, 4, 32), random(6, 4, seed=1), random(7, 32, seed=2)
    q, w, keys = q.bfloat16(), w.bfloat16(), keys.bfloat16()
    dots = torch.einsum("thj,sj->ths", q.double(), keys.double()).bfloat16()
    weighted = dots.relu() * w.unsqueeze(-1)
    assert weighted.dtype == torch.bfloat16
    want = weighted.float().sum(1).bfloat16()
    got = index_score(q, w, keys)
    assert_close(got, want, "bfloat16 op")
    exact = index_score(q.float(), w.float(), keys.float()).bfloat16()
    assert not torch.equal(exact, got)  # negative control: rounding once would show


def test_no_entries_and_no_queries() -> None:
    q, w = random(3, 2, 8), random(3, 2)
    assert index_score(q, w, torch.empty(0, 8, dtype=torch.float64)).shape == (3, 0)
    assert index_score(q[:0], w[:0], random(4, 8)).shape == (0, 4)
    none = torch.empty(3, 0, dtype=torch.int64)
    assert index_score_rows(q, w, random(4, 8), none).shape == (3, 0)


def test_pooling_is_a_softmax_per_channel() -> None:
    kv, gate = random(3, 4, 5), random(3, 4, 5, seed=1)
    got = compress(kv, gate)
    for g in range(3):
        for c in range(5):
            weights = gate[g, :, c].exp() / gate[g, :, c].exp().sum()
            assert_close(got[g, c], weights @ kv[g, :, c], "float64")
    assert_close(compress(kv, 0 * gate), kv.mean(1), "float64")
    assert_close(compress(kv, gate + 7.0), got, "float64")  # a common gate does not matter
    assert not torch.allclose(compress(kv, gate), compress(kv.flip(1), gate))
    assert compress(kv[:0], gate[:0]).shape == (0, 5)
    assert_bitwise(compress(kv[:, :1], gate[:, :1]), kv[:, 0])


def test_rms_norm() -> None:
    x, weight = random(4, 8), random(8, seed=1)
    want = weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(rms_norm(x, weight, 1e-6), want, "float64")
    assert (rms_norm(torch.zeros(2, 8), weight.float(), 1e-20) == 0).all()
    small = rms_norm(x * 1e-9, weight, 1e-20)
    assert not torch.allclose(small, rms_norm(x, weight, 1e-20))  # eps shows around its root
    assert rms_norm(x.bfloat16(), weight.float(), 1e-6).dtype == torch.bfloat16
