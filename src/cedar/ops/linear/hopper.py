"""Launches of the linear kernels for compute capability 9.0.

Up to 32 tokens, or 8 of them: `cedar.ops.linear.hopper_few`; up to 128: `hopper_many`. Weights are
parameters that were there before the launch before: the kernels begin to read them while that one
still runs.
"""

# mypy: ignore-errors

import torch
from torch import Tensor

from cedar.ops.linear import hopper_few, hopper_many
from cedar.ops.linear.plans import MANY_TOKENS, Plan, plan_for
from cedar.quant import FP8_ROW, QuantTensor

__all__ = ["COUNTERS", "MOST", "choose", "launch"]

Weights = tuple[Tensor | QuantTensor, ...]
Norm = tuple[Tensor, float]
COUNTERS = 1 << 14  # tiles of a launch that splits the channels, at most
MOST = 128  # tokens
_WEIGHTS = 3  # of a launch
_PROCESSORS = 132  # of an H200
_STAGES = 4  # buffers of tokens


def choose(x_TK: Tensor, weights: Weights, norm: Norm | None, groups: int) -> Plan | None:
    """How to serve inputs; None if these kernels do not take them."""
    width = weights[0].shape[1]
    rows = [weight.shape[0] for weight in weights]
    fp8 = isinstance(weights[0], QuantTensor)
    if x_TK.dtype != torch.bfloat16 or width % 32 or any(n // groups % 32 for n in rows):
        return None
    if not fp8 and any(w.dtype != torch.bfloat16 for w in weights if isinstance(w, Tensor)):
        return None
    if norm is not None and norm[0].dtype != torch.bfloat16:
        return None
    plan = plan_for(width, rows, len(x_TK), fp8)
    if plan is None or any(n // groups % plan.rows for n in rows):
        return None
    blocks = -(-len(x_TK) // MANY_TOKENS)
    if plan.splits > 1 and sum(rows) // plan.rows * blocks > COUNTERS:
        return None
    return plan


def launch(
    x_TK: Tensor,
    weights: Weights,
    outs: tuple[Tensor, ...],
    plan: Plan,
    counters: Tensor,
    *,
    norm: Norm | None = None,
    cast: bool = False,
    groups: int = 1,
    prepared: bool = False,
    prepare: bool = False,
) -> None:
    """``outs[i] [T, out_i]`` of ``x [T, in]`` (``[T, groups · in]``) and up to three weights.

    All weights are packed FP8 or all bfloat16; x is bfloat16, normalised and cast on the way only
    with the former. counters: zeros, one for each tile if the channels are split; zeros after.
    With plans for many tokens, ``prepare``: results are cast and ordered as the input of a launch
    with ``prepared``.
    """
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 8 or x_TK.storage_offset() % 8:
        x_TK = x_TK.contiguous()
    rows = [weight.shape[0] for weight in weights] + [0, 0]
    held: list[Tensor] = []
    for w, y in zip(weights, outs, strict=True):
        if isinstance(w, QuantTensor):
            held += [w.codes.view(torch.int16), w.scale, y]
        else:
            held += [w.view(torch.int16), w, y]
    held += held[:3] * (_WEIGHTS - len(weights))
    if not plan.many:
        _few(x_TK, weights, held, rows, plan, counters, norm, cast, groups)
        return
    if not prepared:
        x_TK = _prepared(x_TK, norm, cast)
    _many(x_TK, weights, held, rows, plan, counters, groups, prepare)


def _few(
    x_TK: Tensor, weights: Weights, held: list[Tensor], rows: list[int], plan: Plan,
    counters: Tensor, norm: Norm | None, cast: bool, groups: int,
) -> None:  # fmt: skip
    count, width = len(x_TK), weights[0].shape[1]
    fp8 = isinstance(weights[0], QuantTensor)
    elements, kind, per = (width // 2, torch.int32, 2) if fp8 else (width, torch.int16, 1)
    tokens = max(1 << (count - 1).bit_length(), 1 if plan.hold else 8)
    tiles = [n // plan.rows for n in rows]
    total = sum(tiles)
    parts = _partial(plan, total, max(tokens, 8), counters)
    programs = total
    if plan.programs is not None:
        programs = min(total, max(_PROCESSORS * plan.programs // plan.splits, 1))
    if groups > 1:
        programs = max(programs // groups, 1) * groups
    turns = -(-elements // (32 * plan.warps * plan.splits))
    weight, eps = (x_TK, 0.0) if norm is None else norm
    hopper_few.kernel[(programs, plan.splits)](
        x_TK.view(kind), weight.view(kind), *held, parts, counters,
        count, x_TK.stride(0) // per, rows[0], rows[1], rows[2], tiles[0], tiles[1], total, eps,
        K=width, R=plan.rows, TOKENS=tokens, TURNS=turns, SPLITS=plan.splits, FP8=fp8,
        NORM=norm is not None, CAST=cast, GROUP=rows[0] // groups if groups > 1 else 0,
        HOLD=plan.hold, AHEAD=min(plan.ahead, turns), X_AHEAD=min(plan.x_ahead, turns),
        PDL=True, num_warps=plan.warps, maxnreg=plan.registers, launch_pdl=True,
    )  # fmt: skip


def _prepared(x_TK: Tensor, norm: Norm | None, cast: bool) -> Tensor:
    count, whole = x_TK.shape
    x = torch.empty((count, whole), dtype=x_TK.dtype, device=x_TK.device)
    warps = 4 if whole % 256 == 0 else 2
    turns = -(-whole // (64 * warps))
    weight, eps = (x_TK, 0.0) if norm is None else norm
    hopper_many.prepare_kernel[(-(-count // 8), turns)](
        x_TK.view(torch.int32), weight.view(torch.int32), x, count, x_TK.stride(0) // 2, whole,
        eps, K=whole, TURNS=turns, NORM=norm is not None, CAST=cast, PDL=True,
        num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return x


def _many(
    x_TK: Tensor, weights: Weights, held: list[Tensor], rows: list[int], plan: Plan,
    counters: Tensor, groups: int, prepare: bool,
) -> None:  # fmt: skip
    count, width = len(x_TK), weights[0].shape[1]
    tokens = min(max(1 << (count - 1).bit_length(), 8), MANY_TOKENS)
    blocks = -(-count // tokens)
    tiles = [n // plan.rows for n in rows]
    total = sum(tiles)
    steps = width // hopper_many.STEP // plan.splits
    parts = _partial(plan, total * blocks, tokens, counters)
    hopper_many.kernel[(blocks, total, plan.splits)](
        x_TK, *held, parts, counters,
        count, x_TK.stride(0), rows[0], rows[1], rows[2], tiles[0], tiles[1], total,
        K=width, N=tokens, STEPS=steps, SPLITS=plan.splits,
        GROUP=rows[0] // groups if groups > 1 else 0, AHEAD=min(plan.ahead, steps),
        STAGES=_STAGES, PREPARE=prepare, FLOOR=FP8_ROW.amax_floor, PDL=True, num_warps=plan.warps,
        maxnreg=plan.registers, launch_pdl=True,
    )  # fmt: skip


def _partial(plan: Plan, tiles: int, tokens: int, other: Tensor) -> Tensor:
    """Room for what the programs that split the channels have of a tile."""
    if plan.splits == 1:
        return other
    size = tiles * plan.splits * plan.rows * tokens
    return torch.empty(size, dtype=torch.float32, device=other.device)
