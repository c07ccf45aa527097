"""The experts for few tokens on Hopper in four launches: prepare, two products, sum.

`cedar.ops.experts.dispatch` can take the place of the first launch and of the router's.

Bytes: every visited expert's ``3 D F (1/2 + 1/32)``, the shared one's ``3 D F``, and rows.
FLOP: ``6 T (A + 1) D F``. At decode it is bound by these bytes; what a token gets does not depend
on the others of its batch.
"""

# mypy: ignore-errors

import torch
from torch import Tensor

from cedar.ops.dependent_launch import dependent
from cedar.ops.experts.few_gluon import down_kernel, gate_up_kernel
from cedar.ops.experts.prepare import FEW, Tiles, combine, prepare
from cedar.quant import FP8_ROW, QuantTensor

__all__ = ["experts", "products", "tokens_per_tile"]

_SEVERAL = 4  # tokens; fewer leave multiprocessors with few warps, each has to fetch further ahead
Three = tuple[QuantTensor, QuantTensor, QuantTensor]


def tokens_per_tile(visits: int, num_experts: int) -> int:
    """Twice what an expert gets on average, a power of two from 8 to 32."""
    mean = max(visits // num_experts, 1)
    return min(max(1 << (2 * mean - 1).bit_length(), 8), 32)


def experts(
    x_TD: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: QuantTensor,
    w2: QuantTensor,
    w3: QuantTensor,
    *,
    limit: float,
    shared: Three | None = None,
) -> Tensor:
    """As `cedar.ops.experts.Experts`: bfloat16, packed FP4, inputs in FP8; D, F in whole 128s.

    The shared expert is packed FP8 of the same F.
    """
    num_experts = w1.shape[0]
    block = tokens_per_tile(experts_TA.numel(), num_experts)
    x, tiles = prepare(x_TD, experts_TA, num_experts, block, FEW)
    return products(x, tiles, weights_TA, w1, w2, w3, limit=limit, shared=shared)


def products(
    x_TD: Tensor,
    tiles: Tiles,
    weights_TA: Tensor,
    w1: QuantTensor,
    w2: QuantTensor,
    w3: QuantTensor,
    *,
    limit: float,
    shared: Three | None = None,
) -> Tensor:
    """What follows `prepare`, which made ``x``; float32, with ``shared`` bfloat16."""
    x, (tokens, dim), active = x_TD, x_TD.shape, weights_TA.shape[1]
    num_experts, inner = w1.shape[0], w1.shape[1]
    visits = tokens * active
    block = len(tiles.source_R) // len(tiles.expert_M)
    # The shared expert's weights are read once for every tile of tokens: larger ones.
    some = 0 if shared is None else min(max(1 << (tokens - 1).bit_length(), 8), 16)
    shared_tiles = 0 if shared is None else -(-tokens // some)
    grid_tiles = len(tiles.expert_M) + shared_tiles
    rows = visits + (0 if shared is None else tokens)
    hidden, down = x.new_empty((rows, inner)), x.new_empty((rows, dim))
    s1, s2, s3 = shared if shared is not None else (None, None, None)
    gate_up_kernel[(inner // 32, grid_tiles)](
        x, tiles.source_R, tiles.expert_M, weights_TA.contiguous(),
        _words(w1), w1.scale, _words(w3), w3.scale, *_shared(s1), *_shared(s3), hidden,
        num_experts, tokens, visits, shared_tiles, limit,
        DIM=dim, INNER=inner, ACTIVE=active, FLOOR=FP8_ROW.amax_floor, ROWS=64, TOKENS=block,
        AHEAD=_ahead(dim, (4, 3, 2) if tokens < _SEVERAL else (2, 3)),
        SHARED_TOKENS=some, SHARED_AHEAD=1 if some > 8 else 2, num_warps=4,
        **dependent(x.device),
    )  # fmt: skip
    down_kernel[(dim // 32, grid_tiles)](
        hidden, tiles.source_R, tiles.expert_M, _words(w2), w2.scale, *_shared(s2), down,
        num_experts, tokens, visits, shared_tiles,
        DIM=dim, INNER=inner, ROWS=32, TOKENS=block, AHEAD=_ahead(inner, (3, 4, 2)),
        SHARED_TOKENS=some, SHARED_AHEAD=1 if some > 8 else _ahead(inner, (2, 3)), num_warps=2,
        **dependent(x.device),
    )  # fmt: skip
    if shared is None:
        out = torch.empty((tokens, dim), dtype=torch.float32, device=x.device)
        return combine(down, None, active, out)
    return combine(down, down[visits:], active, torch.empty_like(x))


def _ahead(width: int, choices: tuple[int, ...]) -> int:
    """Of the numbers of steps to fetch early the first that divides a row's."""
    return next((n for n in choices if width // 128 % n == 0), choices[0])


def _words(weight: QuantTensor) -> Tensor:
    return weight.codes.view(torch.int32)


def _shared(weight: QuantTensor | None) -> tuple[Tensor | None, Tensor | None]:
    if weight is None:
        return None, None
    return weight.codes.view(torch.int64), weight.scale
