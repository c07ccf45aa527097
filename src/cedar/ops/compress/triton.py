"""Gated pooling at decode in one launch: new rows into the rings, finished groups pooled, normed.

A program takes one token. Rows of a group that came in the same call are read from the batch, older
ones from the ring: no program reads what another one writes. Released sizes (H 512): 4 KB in, 4 KB
to the ring, 1 KB out per token, 4 KB from the ring for a group begun earlier. Bound by the launch.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.compress import Residues
from cedar.ops.compress import reference as plain
from cedar.ops.dependent_launch import dependent, hand_over

__all__ = ["compress_ring", "unsupported"]

_FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_WIDEST = 4096


@triton.jit
def _member(
    kv, gate, ring, slot, position, token, own_slot, number, back, channel, inside,
    KV: tl.constexpr, GATE: tl.constexpr, R: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Rows of the token ``back`` before a sequence's ``number``: of this call, or from the ring."""
    near = tl.maximum(token - back, 0)
    here = tl.load(slot + near).to(tl.int64) == own_slot
    here &= tl.load(position + near).to(tl.int64) == number - back
    held = ring + ((own_slot * R + (number - back) % R) * 2) * H + channel
    value = tl.load(kv + near * KV + channel, mask=inside & here, other=0.0)
    value += tl.load(held, mask=inside & (not here), other=0.0)
    weight = tl.load(gate + near * GATE + channel, mask=inside & here, other=0.0)
    weight += tl.load(held + H, mask=inside & (not here), other=0.0)
    return value, weight


@triton.jit
def _pool(
    kv, gate, ring, slot, position, weight, out, eps,
    KV: tl.constexpr, GATE: tl.constexpr, R: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    RATIO: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    token = tl.program_id(0).to(tl.int64)
    own_slot = tl.load(slot + token).to(tl.int64)
    number = tl.load(position + token).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < H
    pooled = tl.zeros((BLOCK,), tl.float32)
    if own_slot >= 0:
        value = tl.load(kv + token * KV + channel, mask=inside, other=0.0)
        score = tl.load(gate + token * GATE + channel, mask=inside, other=0.0)
        held = ring + ((own_slot * R + number % R) * 2) * H + channel
        tl.store(held, value, mask=inside)
        tl.store(held + H, score, mask=inside)
        if (number + 1) % RATIO == 0:
            largest = score
            for back in tl.static_range(1, RATIO):
                _, other = _member(
                    kv, gate, ring, slot, position, token, own_slot, number, back, channel,
                    inside, KV, GATE, R, H,
                )  # fmt: skip
                largest = tl.maximum(largest, other)
            total = tl.zeros((BLOCK,), tl.float32)
            for back in tl.static_range(RATIO - 1, 0, -1):
                older, other = _member(
                    kv, gate, ring, slot, position, token, own_slot, number, back, channel,
                    inside, KV, GATE, R, H,
                )  # fmt: skip
                share = tl.exp(other - largest)
                total += share
                pooled += share * older
            share = tl.exp(score - largest)
            pooled = (pooled + share * value) / (total + share)
    rounded = pooled.to(DTYPE)
    if weight is not None:
        wide = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
        w = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        # Zeros stay zeros, whatever one over their norm is.
        rounded = tl.where(wide == 0, 0.0, w * (wide * scale)).to(DTYPE)
    tl.store(out + token * H + channel, rounded, mask=inside)


def unsupported(residues: Residues, dtype: torch.dtype, weight: Tensor | None) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    rows = (residues.kv, residues.gate)
    if dtype not in _FLOATS:
        return f"a result in {dtype}"
    if any(v.dtype != torch.float32 for v in (*rows, residues.ring)):
        return "rows or rings that are not float32"
    if not residues.ring.is_contiguous() or any(v.stride(1) != 1 for v in rows):
        return "rows or rings whose channels are not contiguous"
    if residues.kv.shape[1] > _WIDEST:
        return f"rows {residues.kv.shape[1]} wide"
    learned = rows if weight is None else (*rows, weight)
    if torch.is_grad_enabled() and any(v.requires_grad for v in learned):
        return "a gradient is wanted"
    return None


def compress_ring(
    residues: Residues,
    ratio: int,
    dtype: torch.dtype,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`cedar.ops.compress.CompressRing`; inputs it cannot take go to the reference."""
    if unsupported(residues, dtype, weight) is not None:
        return plain.compress_ring(residues, ratio, dtype, weight, eps)
    kv, gate, ring, slot, position = residues
    out = torch.empty(kv.shape, dtype=dtype, device=kv.device)
    if kv.numel():
        width = kv.shape[1]
        _pool[(kv.shape[0],)](
            kv, gate, ring, slot.contiguous(), position.contiguous(), weight, out, eps,
            KV=kv.stride(0), GATE=gate.stride(0), R=ring.shape[1], H=width,
            BLOCK=triton.next_power_of_2(width), RATIO=ratio, DTYPE=_FLOATS[dtype],
            num_warps=4, enable_fp_fusion=False, **dependent(out.device, kv.shape[0]),
        )  # fmt: skip
    return out
