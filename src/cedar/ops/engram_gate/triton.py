"""The Engram gate in one launch.

A program takes one stream of one token: the three sums, the gate, the written stream, with the
stream held in registers. Shapes: x, keys ``[T, 4, D]``, value ``[T, D]``. Bytes of 16-bit streams:
``T (3 x 4 + 1) D x 2`` (released: T x 133 KB), the value's other three reads from L2. FLOP: ``T x 4
D x 10``. Bound by memory. Keys and value may be parts of one projection (any token stride).
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.engram_gate import reference as plain

__all__ = ["engram_gate", "unsupported"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WEIGHT = 64  # small programs that a token's four large ones count as for a dependent launch


@triton.jit
def _add(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _gate(
    x, keys, value, q_weight, k_weight, open_, out, key_stride, value_stride, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    # Streams of a token beside each other: its value is read from memory once.
    token = (tl.program_id(0) // C).to(tl.int64)
    stream = tl.program_id(0) % C
    here = tl.arange(0, BLOCK)
    inside = here < D
    place = (token * C + stream) * D + here
    own = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(keys + token * key_stride + stream * D + here, mask=inside, other=0.0)
    key = key.to(tl.float32)
    weight = tl.load(q_weight + stream * D + here, mask=inside, other=0.0).to(tl.float32)
    weight *= tl.load(k_weight + stream * D + here, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(value + token * value_stride + here, mask=inside, other=0.0).to(tl.float32)
    of_own, of_key, of_both = tl.reduce((own * own, key * key, own * weight * key), 0, _add)
    rate = tl.rsqrt(of_own / D + eps) * tl.rsqrt(of_key / D + eps)
    u = of_both * rate * (1.0 / tl.sqrt(D + 0.0))
    size = tl.sqrt(tl.maximum(tl.abs(u), 1e-6))
    signed = tl.where(u > 0, size, tl.where(u < 0, -size, 0.0))
    gate = 1.0 / (1.0 + tl.exp(-signed))
    if open_ is not None:
        gate = tl.where(tl.load(open_ + token) != 0, gate, 0.0)
    tl.store(out + place, own + gate * new, mask=inside)


def unsupported(x_TCD: Tensor, keys_TCD: Tensor, value_TD: Tensor, *learned: Tensor) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if x_TCD.dtype not in _FLOATS:
        return f"streams in {x_TCD.dtype}"
    width = x_TCD.shape[2]
    if keys_TCD.stride()[1:] != (width, 1) or value_TD.stride(1) != 1:
        return "keys or values whose channels are not contiguous"
    values = (x_TCD, keys_TCD, value_TD, *learned)
    if torch.is_grad_enabled() and any(v.requires_grad for v in values):
        return "a gradient is wanted"
    return None


def engram_gate(
    x_TCD: Tensor,
    keys_TCD: Tensor,
    value_TD: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    open_T: Tensor | None,
) -> Tensor:
    """`cedar.ops.engram_gate.EngramGate`; inputs it cannot take go to the reference."""
    if unsupported(x_TCD, keys_TCD, value_TD, q_weight, k_weight) is not None:
        return plain.engram_gate(x_TCD, keys_TCD, value_TD, q_weight, k_weight, eps, open_T)
    x = x_TCD.contiguous()
    out = torch.empty_like(x)
    count, streams, width = x.shape
    if count:
        opened = None if open_T is None else open_T.to(torch.bool).view(torch.uint8)
        _gate[(count * streams,)](
            x, keys_TCD, value_TD, q_weight.contiguous(), k_weight.contiguous(), opened, out,
            keys_TCD.stride(0), value_TD.stride(0), eps, C=streams, D=width,
            BLOCK=triton.next_power_of_2(width), num_warps=4,
            **dependent(x.device, _WEIGHT * count),
        )  # fmt: skip
    return out
