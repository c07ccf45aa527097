"""The Hopper kernels of the experts, computed on a CPU: equal to the reference."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

from cedar.ops.experts import few_gluon, many_gluon
from cedar.ops.experts import reference as plain
from cedar.quant import (
    FP4_ROW,
    FP8_BLOCK,
    FP8_ROW,
    QuantTensor,
    fake_quantize,
    quantize,
)
from expert_tiles import tile_visits
from gluon_interpreter import launch

DIM, INNER, COUNT, ACTIVE = 256, 128, 3, 2
PLACES = {"few": "bjQqohi", "many": "bjohQqi"}


def ordered(x: Tensor, kind: str) -> Tensor:
    """Through FP8, in the kernels' order, times 2^63."""
    k = torch.arange(x.shape[1])
    place = k // 128 * 128
    for at, name in enumerate(reversed(PLACES[kind])):
        place = place + ((k >> "ojibhqQ".index(name) & 1) << at)
    out = torch.empty_like(x)
    out[:, place] = fake_quantize(x, FP8_ROW) * 2.0**63
    return out


def case(tokens: int) -> tuple[Tensor, Tensor, Tensor, tuple[QuantTensor, ...]]:
    torch.manual_seed(tokens)
    shapes = ((COUNT, INNER, DIM), (COUNT, DIM, INNER), (COUNT, INNER, DIM))
    w = tuple(quantize(torch.randn(*shape) * 0.2, FP4_ROW) for shape in shapes)
    chosen = torch.stack([torch.randperm(COUNT)[:ACTIVE] for _ in range(tokens)])
    return torch.randn(tokens, DIM).bfloat16(), chosen, torch.rand(tokens, ACTIVE), w


def poisoned(rows: int, width: int) -> Tensor:
    return torch.full((rows, width), torch.nan, dtype=torch.bfloat16)


def close(found: Tensor, want: Tensor) -> bool:
    return bool((found - want).norm() < 1e-3 * want.norm())


def few(
    x: Tensor, chosen: Tensor, routing: Tensor, w: tuple[QuantTensor, ...],
    shared: tuple[QuantTensor, ...], per_tile: int, limit: float,
) -> Tensor:  # fmt: skip
    """Rows of all visits, then of the shared expert."""
    tokens, visits = len(x), chosen.numel()
    tiles = tile_visits(chosen, COUNT, per_tile)
    hidden, down = poisoned(visits + tokens, INNER), poisoned(visits + tokens, DIM)
    sizes: dict[str, Any] = {"num_experts": COUNT, "tokens": tokens, "visits": visits}
    sizes |= {"shared_tiles": -(-tokens // 16), "DIM": DIM, "INNER": INNER, "TOKENS": per_tile}
    sizes |= {"SHARED_TOKENS": 16, "source_R": tiles.source_R, "expert_M": tiles.expert_M}
    sizes |= {"PDL": True}
    programs = len(tiles.expert_M) + sizes["shared_tiles"]
    fours = [each.codes.view(torch.int32) for each in w]
    eights = [each.codes.view(torch.int64) for each in shared]
    launch(
        few_gluon.gate_up_kernel, (INNER // 32, programs), warps=4, x=ordered(x, "few"),
        weight_V=routing, codes1=fours[0], scales1=w[0].scale, codes3=fours[2],
        scales3=w[2].scale, shared1=eights[0], shared1_scales=shared[0].scale,
        shared3=eights[2], shared3_scales=shared[2].scale, hidden=hidden, limit=limit,
        ACTIVE=ACTIVE, FLOOR=FP8_ROW.amax_floor, ROWS=64, AHEAD=2, SHARED_AHEAD=1, **sizes,
    )  # fmt: skip
    launch(
        few_gluon.down_kernel, (DIM // 32, programs), warps=2, hidden=hidden, codes=fours[1],
        scales=w[1].scale, shared=eights[1], shared_scales=shared[1].scale, out=down,
        ROWS=32, AHEAD=3, SHARED_AHEAD=2, **sizes,
    )  # fmt: skip
    return down


@pytest.mark.parametrize(("tokens", "per_tile", "limit"), [(1, 8, 10.0), (19, 16, 0.3)])
def test_few(tokens: int, per_tile: int, limit: float) -> None:
    x, chosen, routing, w = case(tokens)
    shapes = ((INNER, DIM), (DIM, INNER), (INNER, DIM))
    shared = tuple(quantize(torch.randn(*shape) * 0.2, FP8_BLOCK) for shape in shapes)
    down = few(x, chosen, routing, w, shared, per_tile, limit)
    visits = chosen.numel()
    options: dict[str, Any] = {"limit": limit, "input_format": FP8_ROW}
    want = plain.experts(x, chosen, routing, *w, **options)
    found = down[:visits].view(tokens, ACTIVE, DIM).float().sum(1)
    assert close(found, want)
    both = plain.experts(x, chosen, routing, *w, **options, shared=shared)
    assert close((found + down[visits:]).bfloat16().float(), both.float())
    other = few(x, (chosen + 1) % COUNT, routing, w, shared, per_tile, limit)
    assert not close(other[:visits].view(tokens, ACTIVE, DIM).float().sum(1), want)


@pytest.mark.parametrize(("tokens", "some", "limit"), [(5, 32, 10.0), (50, 32, 0.3)])
def test_many(tokens: int, some: int, limit: float) -> None:
    """Tiles that fit, tiles with more, and experts with several."""
    x, chosen, routing, w = case(tokens)
    tiles = tile_visits(chosen, COUNT, some + some // 4)
    visits = chosen.numel()
    hidden, down = poisoned(visits, INNER), poisoned(visits, DIM)
    words = [(each.codes.view(torch.int32), each.scale.view(torch.int32)) for each in w]
    sizes: dict[str, Any] = {"num_experts": COUNT, "DIM": DIM, "INNER": INNER, "SOME": some}
    sizes |= {"MORE": some // 4, "STAGES": 4}
    sizes |= {"source_R": tiles.source_R, "expert_M": tiles.expert_M}
    launch(
        many_gluon.gate_up_kernel, (INNER // 64, len(tiles.expert_M)), warps=8,
        x=ordered(x, "many"), weight_V=routing, codes1=words[0][0], scales1=words[0][1],
        codes3=words[2][0], scales3=words[2][1], hidden=hidden, limit=limit, ACTIVE=ACTIVE,
        FLOOR=FP8_ROW.amax_floor, **sizes,
    )  # fmt: skip
    launch(
        many_gluon.down_kernel, (DIM // 128, len(tiles.expert_M)), warps=8, hidden=hidden,
        codes=words[1][0], scales=words[1][1], out=down, **sizes,
    )  # fmt: skip
    found = down.view(tokens, ACTIVE, DIM).float().sum(1)
    assert close(found, plain.experts(x, chosen, routing, *w, limit=limit, input_format=FP8_ROW))
