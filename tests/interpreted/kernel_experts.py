"""The portable experts kernel in Triton's interpreter, and what all kernels begin and end with."""

import pytest
import torch

from cedar.ops.experts import reference as plain
from cedar.ops.experts import triton as kernel
from cedar.ops.experts.dispatch import COUNTERS, dispatch, takes
from cedar.ops.experts.prepare import EIGHTHS, FEW, MANY, combine, prepare
from cedar.ops.route import Gating, Routing
from cedar.ops.route import triton as route
from cedar.quant import FP4_ROW, FP8_ROW, QuantTensor, fake_quantize, quantize
from cedar.testing import assert_bitwise
from expert_tiles import tile_visits
from triton_interpreter import repair

repair()


def weights(*shape: int) -> QuantTensor:
    return quantize(torch.randn(*shape) * 0.1, FP4_ROW)


@pytest.mark.parametrize(
    ("tokens", "dim", "inner", "count", "active", "dtype"),
    [
        (1, 64, 32, 8, 2, torch.float32),
        (5, 96, 64, 8, 3, torch.bfloat16),
        (40, 64, 96, 4, 2, torch.float32),
        (3, 32, 32, 5, 1, torch.bfloat16),
    ],
)
def test_sums(
    tokens: int, dim: int, inner: int, count: int, active: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, dim).to(dtype)
    w1, w2, w3 = weights(count, inner, dim), weights(count, dim, inner), weights(count, inner, dim)
    chosen = torch.stack([torch.randperm(count)[:active] for _ in range(tokens)])
    routing = torch.rand(tokens, active)
    # The limit is low, so that gates and ups are clamped.
    options = {"limit": 0.3, "input_format": FP8_ROW}
    want = plain.experts(x, chosen, routing, w1, w2, w3, **options)
    found = kernel.experts(x, chosen, routing, w1, w2, w3, limit=0.3)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(
        found, want, rtol=tolerance, atol=tolerance * float(want.abs().max())
    )
    other = kernel.experts(x, chosen.roll(1, 0), routing, w1, w2, w3, limit=0.3)
    if tokens > 1:
        assert not torch.allclose(other, want, rtol=0.1)  # negative control


@pytest.mark.parametrize("per_tile", [1, 4, 16])
def test_tiles(per_tile: int) -> None:
    """Every visit has one row, in a tile of its expert; idle tiles name no expert."""
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(11)])
    tiles = tile_visits(chosen, 7, per_tile)
    source = tiles.source_R.view(-1, per_tile)
    filled = source >= 0
    assert torch.equal(source[filled].sort().values.long(), torch.arange(33))
    expert = tiles.expert_M.long()[:, None].expand(-1, per_tile)
    assert torch.equal(expert[filled], chosen.flatten()[source[filled].long()])
    assert bool((tiles.expert_M <= 7).all())
    assert not bool(filled[tiles.expert_M == 7].any())


@pytest.mark.parametrize(("tokens", "count", "per_tile"), [(1, 8, 8), (9, 5, 2), (400, 70, 16)])
@pytest.mark.parametrize("order", [EIGHTHS, FEW, MANY])
def test_prepare(tokens: int, count: int, per_tile: int, order: int) -> None:
    """Tiles as in plain PyTorch, counted here or before; inputs through FP8, in their order."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 256).bfloat16()
    chosen = torch.stack([torch.randperm(count)[:3] for _ in range(tokens)])
    want = tile_visits(chosen, count, per_tile)
    busy = (want.expert_M < count).repeat_interleave(per_tile)
    ordered, tiles = prepare(x, chosen, count, per_tile, order)
    assert torch.equal(tiles.expert_M, want.expert_M)
    assert torch.equal(tiles.source_R[busy], want.source_R[busy])
    k = torch.arange(256)
    if order == EIGHTHS:
        place = k % 8 * 32 + k // 8
    else:
        bits = {name: k >> at & 1 for at, name in enumerate("ojibhqQ")}
        places = {FEW: "bjQqohi", MANY: "bjohQqi"}[order]
        place = k // 128 * 128
        for at, name in enumerate(reversed(places)):
            place = place + (bits[name] << at)
    assert_bitwise(ordered[:, place], fake_quantize(x, FP8_ROW) * 2.0**63)


def test_more_visits_than_are_counted_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cedar.ops.experts.prepare._COUNT_HERE", 20)
    test_prepare(40, 9, 4, FEW)


@pytest.mark.parametrize("shared", [False, True])
def test_combine(shared: bool) -> None:
    torch.manual_seed(1)
    down, more = torch.randn(15, 700).bfloat16(), torch.randn(5, 700).bfloat16()
    out = torch.full((5, 700), torch.nan, dtype=torch.bfloat16 if shared else torch.float32)
    found = combine(down, more if shared else None, 3, out)
    rows = down.view(5, 3, 700).float()
    want = rows[:, 0] + rows[:, 1] + rows[:, 2]
    assert_bitwise(found, (want + more.float()).bfloat16() if shared else want)


@pytest.mark.parametrize(
    ("tokens", "dim", "count", "active", "per_tile"),
    [(1, 256, 12, 3, 8), (3, 640, 7, 2, 2), (24, 512, 70, 6, 4), (32, 1024, 9, 1, 1)],
)
def test_dispatch(tokens: int, dim: int, count: int, active: int, per_tile: int) -> None:
    """All that the router's launches and `prepare` find, and counters as they were."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, dim).bfloat16()
    weight = (torch.randn(count, dim) * dim**-0.5).bfloat16()
    gating = Gating(weight, torch.randn(tokens, count), active, 1.3, "sigmoid", True, 2.5)
    real = torch.rand(tokens) < 0.7
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    for mask in (None, real):
        routing, ordered, tiles = dispatch(x, gating, mask, counters, per_tile, FEW)
        want: Routing = route.router(x, **gating._asdict(), real_T=mask)
        for found, expected in zip(routing, want, strict=True):
            assert_bitwise(found, expected)
        wanted = tile_visits(want.experts_TA, count, per_tile)
        busy = (wanted.expert_M < count).repeat_interleave(per_tile)
        assert torch.equal(tiles.expert_M, wanted.expert_M)
        assert torch.equal(tiles.source_R[busy], wanted.source_R[busy])
        assert_bitwise(ordered, prepare(x, want.experts_TA, count, per_tile, FEW)[0])
        assert not counters[0]


def test_dispatch_is_for_few_tokens() -> None:
    gating = Gating(torch.randn(9, 512), torch.zeros(9), 2, 1.0, "sigmoid", True, 1.0)
    assert takes(torch.randn(2, 512), gating)
    assert not takes(torch.randn(3, 512), gating)  # two programs can wait for two tokens at most
    assert not takes(torch.randn(9, 1 << 14), gating)
