"""The portable experts kernel in Triton's interpreter: bit for bit the reference's sums."""

import pytest
import torch

from cedar.ops.experts import reference as plain
from cedar.ops.experts import triton as kernel
from cedar.ops.experts.tiles import tile_visits
from cedar.quant import FP4_ROW, FP8_ROW, QuantTensor, quantize
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
    found = kernel.experts(x, chosen, routing, w1, w2, w3, **options)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(
        found, want, rtol=tolerance, atol=tolerance * float(want.abs().max())
    )
    other = kernel.experts(x, chosen.roll(1, 0), routing, w1, w2, w3, **options)
    if tokens > 1:
        assert not torch.allclose(other, want, rtol=0.1)  # negative control


@pytest.mark.parametrize("per_tile", [1, 4, 16])
def test_tiles(per_tile: int) -> None:
    """Every visit has one row, in a tile of its expert; idle tiles name no expert."""
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(11)])
    tiles = tile_visits(chosen, 7, per_tile)
    assert tiles.row_TA.unique().numel() == chosen.numel()
    assert torch.equal(tiles.expert_M[tiles.row_TA // per_tile].long(), chosen)
    assert torch.equal(tiles.source_R[tiles.row_TA].flatten().long(), torch.arange(33))
    assert torch.equal(tiles.token_R[tiles.row_TA].long(), torch.arange(11)[:, None].expand(-1, 3))
    empty = torch.ones(len(tiles.source_R), dtype=torch.bool)
    empty[tiles.row_TA.flatten()] = False
    assert bool((tiles.source_R[empty] == -1).all())
    assert bool((tiles.expert_M <= 7).all())
