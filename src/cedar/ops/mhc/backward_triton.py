"""Gradients of `cedar.ops.mhc.MhcStep`: update, coefficients, Sinkhorn, collapse and norm.

Letters as there; ``c = Σ_j pre_j X'_j`` the collapsed input, ``w`` the norm weight, ``r`` and ``ρ``
the two reciprocal RMS, ``z = X' fnᵀ`` the 24 raw columns, primes for gradients' sources:

    dc   = r w dh − r² (Σ h dh / D) c                 dw = Σ_T r c dh          dpre_j = Σ_D dc X'_j
    G_i  = dX'_i + pre_i dc + Σ_k ζ_k fn_k,i − κ X'_i       ζ = ρ dz,  κ = ρ³ (Σ_k dz_k z_k) / 4D
    dx_j = Σ_i comb[j, i] G_i        dy = Σ_i post_i G_i        dfn = Σ_T ζᵀ X'
    dpost_i = Σ_D y G_i              dcomb[j, i] = Σ_D x_j G_i

Three launches: the way back through the coefficients beside the sums Σ h dh; the streams; the sums
of partial results in a fixed order, so that gradients are reproducible. The second reads x, y, dX'
and dh once, recomputes X', and writes dx and dy; a program owns some channels and goes through
tokens, which keeps its part of fn and of dfn on its multiprocessor.

Bytes of 16-bit streams: ``T x (10 read + 5 written) D x 2`` = T x 153.6 KB (released), the minimum
even if z is given, and 1.97 MB each of fn and dfn; here 2 D more for Σ h dh, 15.4 KB a token for
partial sums over channels and 2 MB for each part of dfn, both written and read.
FLOP: ``T x 4 D x 24 x 2 x 2`` = T x 1.97 M on tensor cores. Bound by memory.

ζ is cut into two bfloat16 parts where streams are 16 bits wide, fn is rounded to bfloat16 once.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300 (types are compared as the compiler of kernels knows it)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.mhc import MhcMix, MhcParameters, hopper
from cedar.ops.mhc import backward_gluon as streams
from cedar.ops.mhc import reference as plain
from cedar.ops.mhc.prepare_triton import prepare
from cedar.ops.mhc.sinkhorn_triton import mix_tokens
from cedar.ops.mhc.training_triton import norm_rows, rounded, update_streams
from cedar.ops.mhc.triton import MhcStepKernel

__all__ = ["MhcStepTraining", "untrainable"]

_PROGRAMS = 132  # multiprocessors of an H200
_COLUMNS = 32  # 24 coefficients, padded
_MANY = 1024  # tokens from which on programs beside whole slices pay
_SETUP = 48  # tokens that take as long as a slice's beginning and end
_SUMS = 24  # of a token over the channels: 4 of dpre, 4 of dpost, 16 of dcomb


@triton.jit
def _told(entry_T, number: tl.constexpr, known_T):
    """One of the 32 numbers that the table has of a token."""
    place = entry_T + number // 4 * 64 + number % 4
    return tl.load(place, mask=known_T, other=0.0)[:, None]


@triton.jit
def _into(entry_T, stream: tl.constexpr, known_T):
    """The five weights of a new stream: of the four old ones, and of y."""
    c0, c1 = _told(entry_T, 12 + stream, known_T), _told(entry_T, 16 + stream, known_T)
    c2, c3 = _told(entry_T, 20 + stream, known_T), _told(entry_T, 24 + stream, known_T)
    return c0, c1, c2, c3, _told(entry_T, 8 + stream, known_T)


@triton.jit
def _learn(acc, zeta, stream, DTYPE: tl.constexpr):
    """``acc + ζᵀ · stream``, in full precision with a ζ of two parts."""
    # One way out: what stands behind a return is compiled, too.
    if DTYPE == tl.float32:
        acc = tl.dot(tl.trans(zeta), stream, acc, input_precision="ieee")
    else:
        high = zeta.to(tl.bfloat16)
        low = (zeta - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(tl.trans(high), stream, acc)
        acc = tl.dot(tl.trans(low), stream, acc)
    return acc


@triton.jit
def _reach(zeta, weight, DTYPE: tl.constexpr):
    """``ζ · fn`` of one stream."""
    if DTYPE == tl.float32:
        found = tl.dot(zeta, weight, input_precision="ieee")
    else:
        found = tl.dot(zeta.to(tl.bfloat16), weight)
    return found


@triton.jit
def _streams(
    x, y, fn, weight, table, zeta_of, dx_new, dh, dx, dy, sums, fn_parts, weight_parts, count,
    per_program,
    D: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
    UPDATE: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    owned = channel < D
    rows = (column < 24)[:, None] & owned[None, :]
    line = fn + column[:, None] * (4 * D) + channel[None, :]
    f0 = tl.load(line, mask=rows, other=0.0).to(DTYPE)
    f1 = tl.load(line + D, mask=rows, other=0.0).to(DTYPE)
    f2 = tl.load(line + 2 * D, mask=rows, other=0.0).to(DTYPE)
    f3 = tl.load(line + 3 * D, mask=rows, other=0.0).to(DTYPE)
    w = tl.load(weight + channel, mask=owned, other=0.0).to(tl.float32)[None, :]
    a0 = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    a1 = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    a2 = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    a3 = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    d_weight = tl.zeros((TOKENS, CHANNELS), tl.float32)
    start = tl.program_id(1) * per_program
    for t in tl.range(start, tl.minimum(start + per_program, count), TOKENS, num_stages=STAGES):
        token = t + tl.arange(0, TOKENS).to(tl.int64)
        known = token < count
        inside = known[:, None] & owned[None, :]
        place = token[:, None] * (4 * D) + channel[None, :]
        narrow = token[:, None] * D + channel[None, :]
        s0 = tl.load(x + place, mask=inside, other=0.0)
        s1 = tl.load(x + place + D, mask=inside, other=0.0)
        s2 = tl.load(x + place + 2 * D, mask=inside, other=0.0)
        s3 = tl.load(x + place + 3 * D, mask=inside, other=0.0)
        slope = tl.load(dh + narrow, mask=inside, other=0.0).to(tl.float32)
        entry = table + token // 16 * 512 + token % 16 * 4
        zeta = tl.load(
            zeta_of + token[:, None] * 32 + column[None, :],
            mask=known[:, None] & (column < 24)[None, :],
            other=0.0,
        )
        rate, share = _told(entry, 0, known), _told(entry, 1, known)
        kappa = _told(entry, 2, known)
        p0, p1 = _told(entry, 4, known), _told(entry, 5, known)
        p2, p3 = _told(entry, 6, known), _told(entry, 7, known)
        x0, x1, x2, x3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
        if UPDATE:
            new = tl.load(y + narrow, mask=inside, other=0.0).to(tl.float32)
            c00, c10, c20, c30, q0 = _into(entry, 0, known)
            c01, c11, c21, c31, q1 = _into(entry, 1, known)
            c02, c12, c22, c32, q2 = _into(entry, 2, known)
            c03, c13, c23, c33, q3 = _into(entry, 3, known)
            s0 = rounded(q0 * new + (c00 * x0 + c10 * x1 + c20 * x2 + c30 * x3), DTYPE, FAST)
            s1 = rounded(q1 * new + (c01 * x0 + c11 * x1 + c21 * x2 + c31 * x3), DTYPE, FAST)
            s2 = rounded(q2 * new + (c02 * x0 + c12 * x1 + c22 * x2 + c32 * x3), DTYPE, FAST)
            s3 = rounded(q3 * new + (c03 * x0 + c13 * x1 + c23 * x2 + c33 * x3), DTYPE, FAST)
        a0 = _learn(a0, zeta, s0, DTYPE)
        a1 = _learn(a1, zeta, s1, DTYPE)
        a2 = _learn(a2, zeta, s2, DTYPE)
        a3 = _learn(a3, zeta, s3, DTYPE)
        n0, n1, n2, n3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
        collapsed = (p0 * n0 + p1 * n1 + p2 * n2 + p3 * n3).to(DTYPE).to(tl.float32)
        d_weight += slope * collapsed * rate
        dc = rate * w * slope - share * collapsed
        tile = tl.program_id(0).to(tl.int64) * ((count + 31) // 32) + token // 32
        into = sums + tile * 768 + token % 32
        tl.store(into, tl.sum(dc * n0, 1), mask=known)
        tl.store(into + 32, tl.sum(dc * n1, 1), mask=known)
        tl.store(into + 64, tl.sum(dc * n2, 1), mask=known)
        tl.store(into + 96, tl.sum(dc * n3, 1), mask=known)
        g0 = p0 * dc - kappa * n0 + _reach(zeta, f0, DTYPE)
        g1 = p1 * dc - kappa * n1 + _reach(zeta, f1, DTYPE)
        g2 = p2 * dc - kappa * n2 + _reach(zeta, f2, DTYPE)
        g3 = p3 * dc - kappa * n3 + _reach(zeta, f3, DTYPE)
        if UPDATE:
            g0 += tl.load(dx_new + place, mask=inside, other=0.0).to(tl.float32)
            g1 += tl.load(dx_new + place + D, mask=inside, other=0.0).to(tl.float32)
            g2 += tl.load(dx_new + place + 2 * D, mask=inside, other=0.0).to(tl.float32)
            g3 += tl.load(dx_new + place + 3 * D, mask=inside, other=0.0).to(tl.float32)
            into += 128
            tl.store(into, tl.sum(new * g0, 1), mask=known)
            tl.store(into + 32, tl.sum(new * g1, 1), mask=known)
            tl.store(into + 64, tl.sum(new * g2, 1), mask=known)
            tl.store(into + 96, tl.sum(new * g3, 1), mask=known)
            into += 128
            tl.store(into, tl.sum(x0 * g0, 1), mask=known)
            tl.store(into + 32, tl.sum(x0 * g1, 1), mask=known)
            tl.store(into + 64, tl.sum(x0 * g2, 1), mask=known)
            tl.store(into + 96, tl.sum(x0 * g3, 1), mask=known)
            into += 128
            tl.store(into, tl.sum(x1 * g0, 1), mask=known)
            tl.store(into + 32, tl.sum(x1 * g1, 1), mask=known)
            tl.store(into + 64, tl.sum(x1 * g2, 1), mask=known)
            tl.store(into + 96, tl.sum(x1 * g3, 1), mask=known)
            into += 128
            tl.store(into, tl.sum(x2 * g0, 1), mask=known)
            tl.store(into + 32, tl.sum(x2 * g1, 1), mask=known)
            tl.store(into + 64, tl.sum(x2 * g2, 1), mask=known)
            tl.store(into + 96, tl.sum(x2 * g3, 1), mask=known)
            into += 128
            tl.store(into, tl.sum(x3 * g0, 1), mask=known)
            tl.store(into + 32, tl.sum(x3 * g1, 1), mask=known)
            tl.store(into + 64, tl.sum(x3 * g2, 1), mask=known)
            tl.store(into + 96, tl.sum(x3 * g3, 1), mask=known)
            d_new = q0 * g0 + q1 * g1 + q2 * g2 + q3 * g3
            tl.store(dy + narrow, d_new.to(DTYPE), mask=inside)
            o0 = c00 * g0 + c01 * g1 + c02 * g2 + c03 * g3
            o1 = c10 * g0 + c11 * g1 + c12 * g2 + c13 * g3
            o2 = c20 * g0 + c21 * g1 + c22 * g2 + c23 * g3
            o3 = c30 * g0 + c31 * g1 + c32 * g2 + c33 * g3
        else:
            o0, o1, o2, o3 = g0, g1, g2, g3
        tl.store(dx + place, o0.to(DTYPE), mask=inside)
        tl.store(dx + place + D, o1.to(DTYPE), mask=inside)
        tl.store(dx + place + 2 * D, o2.to(DTYPE), mask=inside)
        tl.store(dx + place + 3 * D, o3.to(DTYPE), mask=inside)
    part = tl.program_id(1).to(tl.int64)
    line = fn_parts + part * (24 * 4 * D) + column[:, None] * (4 * D) + channel[None, :]
    tl.store(line, a0, mask=rows)
    tl.store(line + D, a1, mask=rows)
    tl.store(line + 2 * D, a2, mask=rows)
    tl.store(line + 3 * D, a3, mask=rows)
    tl.store(weight_parts + part * D + channel, tl.sum(d_weight, 0), mask=owned)


@triton.jit
def _add_up(parts, size, here, wanted, PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum over the leading dimension of ``[PARTS, size]`` at the ``wanted`` places ``here``.

    Some at a time, so that many loads are under way at once.
    """
    total = tl.zeros(here.shape, tl.float32)
    for n in tl.range(0, PARTS, AT_ONCE):
        part = (n + tl.arange(0, AT_ONCE)).to(tl.int64)[:, None]
        inside = (part < PARTS) & wanted[None, :]
        total += tl.sum(tl.load(parts + part * size + here[None, :], mask=inside, other=0.0), 0)
    return total


@triton.jit
def _finish(
    fn_parts, dfn, weight_parts, d_weight, sums, dpre, dpost, dcomb, small, dbase, dscale, count,
    solved,
    D: tl.constexpr, TIMES: tl.constexpr, SLICES: tl.constexpr, UPDATE: tl.constexpr,
    BLOCK: tl.constexpr, FN: tl.constexpr, WEIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs 0: base and scale; then FN of dfn, WEIGHT of the norm weight, the rest of tokens:
    8 sums of 32 tokens each."""
    if PDL:
        hand_over()
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 32)
    lane = tl.arange(0, BLOCK)
    if program == 0:
        few = tl.zeros((32, 32), tl.float32)
        for n in tl.range(0, solved, 32):
            row = n + column
            few += tl.load(
                small + row[:, None] * 32 + column[None, :], mask=(row < solved)[:, None], other=0.0
            )
        few_sum = tl.sum(few, 0)
        tl.store(dbase + column, few_sum, mask=column < 24)
        tl.store(dscale + column - 24, few_sum, mask=(column >= 24) & (column < 27))
    elif program < 1 + FN:
        here = (program - 1) * BLOCK + lane
        total = _add_up(fn_parts, 24 * 4 * D, here, here < 24 * 4 * D, TIMES, 8)
        tl.store(dfn + here, total, mask=here < 24 * 4 * D)
    elif program < 1 + FN + WEIGHT:
        here = (program - 1 - FN) * BLOCK + lane
        total = _add_up(weight_parts, D, here, here < D, TIMES, 8)
        tl.store(d_weight + here, total, mask=here < D)
    else:
        number = program - 1 - FN - WEIGHT
        EIGHTS: tl.constexpr = 3 if UPDATE else 1
        block, one = number // EIGHTS, tl.arange(0, 256)
        which, token = number % EIGHTS * 8 + one // 32, block * 32 + one % 32
        known = (token < count) & (which < (24 if UPDATE else 4))
        place = sums + block * 768 + number % EIGHTS * 256
        found = _add_up(place, solved * 768, one, known, SLICES, 32)
        tl.store(dpre + token * 4 + which, found, mask=known & (which < 4))
        if UPDATE:
            is_post = known & (which >= 4) & (which < 8)
            tl.store(dpost + token * 4 + which - 4, found, mask=is_post)
            tl.store(dcomb + token * 16 + which - 8, found, mask=known & (which >= 8))


def untrainable(x_TCD: Tensor, parameters: MhcParameters) -> str | None:
    """Why the gradient kernels cannot take these inputs; None if they can."""
    if x_TCD.dtype not in _TL:
        return f"streams in {x_TCD.dtype}"
    if x_TCD.shape[1] != 4:
        return f"{x_TCD.shape[1]} streams: expected 4"
    if x_TCD.shape[2] <= 32:
        return f"width {x_TCD.shape[2]}: expected more than 32"
    if any(value.dtype != torch.float32 for value in parameters):
        return "coefficient parameters that are not float32"
    return None


class MhcStepTraining:
    """`cedar.ops.mhc.MhcStep` with gradients; inputs it cannot take go to the reference.

    ``plain_step`` takes what needs no gradient.
    """

    def __init__(self) -> None:
        self.plain_step = MhcStepKernel()
        self._persistent = hopper.Persistent()

    def __call__(
        self,
        x_TCD: Tensor,
        update: tuple[Tensor, MhcMix] | None,
        pre_TC: Tensor,
        parameters: MhcParameters,
        norm_weight: Tensor,
        *,
        norm_eps: float,
        hc_eps: float,
        sinkhorn_iters: int,
    ) -> tuple[Tensor, MhcMix, Tensor]:
        settings = {"norm_eps": norm_eps, "hc_eps": hc_eps, "sinkhorn_iters": sinkhorn_iters}
        y, old = update if update is not None else (None, None)
        learned = (x_TCD, y, pre_TC, *(old or ()), *parameters, norm_weight)
        if not torch.is_grad_enabled() or not any(
            v is not None and v.requires_grad for v in learned
        ):
            return self.plain_step(x_TCD, update, pre_TC, parameters, norm_weight, **settings)
        if not len(x_TCD) or untrainable(x_TCD, parameters) is not None:
            return plain.mhc_step(x_TCD, update, pre_TC, parameters, norm_weight, **settings)
        post, comb = (old.post_TC, old.comb_TCC) if old is not None else (None, None)
        x_out, *mix, h = _Step.apply(
            self, settings, x_TCD, y, post, comb, pre_TC, *parameters, norm_weight
        )
        return (x_TCD if update is None else x_out), MhcMix(*mix), h

    def forward(self, settings: dict[str, Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
        """New streams, the mix, h; and what the way back wants: z and ρ, and r of every token."""
        x, y, post, comb, pre, fn, base, scale, weight = values
        count, _, width = x.shape
        wide = {"dtype": torch.float32, "device": x.device}
        iterations = settings["sinkhorn_iters"]
        tokens = 64 if count >= 8192 else 32 if count >= 4096 else 16
        blocks, steps = triton.cdiv(count, tokens), triton.cdiv(width, 32)
        per_split = triton.cdiv(steps, max(1, min(8, steps, _PROGRAMS // blocks))) * 32
        splits = triton.cdiv(width, per_split)
        mix = [torch.empty((count, *more), **wide) for more in ((4,), (4,), (4, 4))]
        h = torch.empty((count, width), dtype=x.dtype, device=x.device)
        x_out = torch.empty_like(x) if y is not None else x
        kept, rates = torch.empty((25, count), **wide), torch.empty(count, **wide)
        if _TUNED and self._persistent.takes(x, weight):
            update = None if y is None else (y, MhcMix(pre, post, comb))
            self._persistent.launch(
                x, update, pre, MhcParameters(fn, base, scale), weight, x_out, MhcMix(*mix), h,
                (kept, rates), **settings,
            )  # fmt: skip
            return x_out, mix, h, kept, rates
        parts = torch.empty((splits, 25, count), **wide)
        update_streams[(blocks, splits)](
            x, y, comb, post, pre, fn, x_out, h, parts, count,
            D=width, TOKENS=tokens, CHANNELS=32, COLUMNS=_COLUMNS, PER_SPLIT=per_split,
            UPDATE=y is not None, DTYPE=_TL[x.dtype], FAST=_fast(x), STAGES=3,
            num_warps=8 if tokens == 64 else 4,
        )  # fmt: skip
        mix_tokens[(triton.cdiv(count, 32),)](
            parts, base, scale, *mix, kept, count, settings["norm_eps"], settings["hc_eps"],
            D=width, SPLITS=splits, ITERATIONS=iterations, num_warps=1,
        )  # fmt: skip
        block = triton.next_power_of_2(width)
        norm_rows[(count,)](
            h, weight, rates, settings["norm_eps"], D=width, BLOCK=block, num_warps=4
        )
        return x_out, mix, h, kept, rates


def backward(
    values: tuple[Any, ...],
    saved: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor],
    settings: dict[str, Any],
    *,
    tokens: int = 32,
    channels: int = 64,
    times: int | None = None,
    stages: int = 2,
    warps: int = 8,
    fast: bool | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, y, post, comb, pre, fn, base, scale and the norm weight.

    saved: the last three results of `MhcStepTraining.forward`. A program of the large launch takes
    ``channels`` channels and 1/``times`` of the tokens, ``tokens`` at a time; ``fast`` chooses the
    launch of `cedar.ops.mhc.backward_gluon`, by default where it can run.
    """
    x, y, post, comb, pre, fn, base, scale, weight = values
    h, kept, rates = saved
    dx_new, dpre, dpost, dcomb, dh = grads
    count, _, width = x.shape
    update = y is not None
    if fast is None:
        fast = _TUNED and update and width % 64 == 0 and _by_hand(x, y, dx_new, dh, weight)
    if fast:
        tokens, channels = 16, 64

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    solved, iterations = triton.cdiv(count, 32), settings["sinkhorn_iters"]
    table, small = wide(2 * solved, 8, 16, 4), wide(solved, 32)
    kind = torch.bfloat16 if fast else torch.float32
    zeta = torch.empty((2 * solved, 2 if fast else 1, 16, 32), dtype=kind, device=x.device)
    prepare[(solved + count,)](
        h, dh, kept, rates, base, scale, dpre, dpost, dcomb, post, pre, comb, table, zeta,
        wide(2 * iterations, 4, count), small, count, settings["hc_eps"],
        D=width, ITERATIONS=iterations, UPDATE=update, CUT=fast, FAST=_TUNED, BLOCK=1024,
        PDL=fast and dependent(x.device)["PDL"], num_warps=1,
    )  # fmt: skip
    slices = triton.cdiv(width, channels)
    extra, tail, each = 0, count, 1
    if times is None:
        # By hand, as many programs as run at once, two on a multiprocessor.
        most = max(1, 2 * _PROGRAMS // slices) if fast else 8
        times = max(1, min(triton.cdiv(count, 64), most))
        if fast and count >= _MANY:
            extra, tail, each = _shares(count, slices, times)
    per_program = triton.cdiv(triton.cdiv(tail, times), tokens) * tokens
    times = triton.cdiv(tail, per_program)
    dx, dy = torch.empty_like(x), None if y is None else torch.empty_like(y)
    parts = times + (extra > 0)
    sums, fn_parts, weight_parts = (
        wide(slices, solved, _SUMS, 32), wide(parts, 24, 4 * width), wide(parts, width)
    )  # fmt: skip
    arguments = (
        x, y, fn, weight, table, zeta, dx_new, dh, dx, dy, sums, fn_parts, weight_parts, count
    )  # fmt: skip
    if fast:
        streams.kernel[(slices * times + extra,)](
            *arguments, tail, per_program, D=width, TIMES=times, EACH=each, num_warps=4,
            **dependent(x.device),
        )  # fmt: skip
    else:
        _streams[(slices, times)](
            *arguments, per_program, D=width, TOKENS=tokens, CHANNELS=channels, COLUMNS=_COLUMNS,
            UPDATE=update, DTYPE=_TL[x.dtype], FAST=_fast(x), STAGES=stages, num_warps=warps,
        )  # fmt: skip
    block = 1024
    programs = triton.cdiv(24 * 4 * width, block), triton.cdiv(width, block)
    d_fn, d_weight = torch.empty_like(fn), torch.empty_like(weight)
    d_base, d_scale = torch.empty_like(base), torch.empty_like(scale)
    d_pre, d_post, d_comb = wide(count, 4), None, None
    if update:
        d_post, d_comb = wide(count, 4), wide(count, 4, 4)
    grid = 1 + sum(programs) + (3 if update else 1) * solved
    _finish[(grid,)](
        fn_parts, d_fn, weight_parts, d_weight, sums, d_pre, d_post, d_comb, small, d_base,
        d_scale, count, solved,
        D=width, TIMES=parts, SLICES=slices, UPDATE=update, BLOCK=block,
        FN=programs[0], WEIGHT=programs[1], num_warps=4, **dependent(x.device, grid),
    )  # fmt: skip
    return dx, dy, d_post, d_comb, d_pre, d_fn, d_base, d_scale, d_weight


def _shares(count: int, slices: int, times: int) -> tuple[int, int, int]:
    """Programs that whole slices leave over, the tokens before those that they take, and of how
    many slices each: all programs are to end at the same time."""
    spare = 2 * _PROGRAMS - slices * times
    each = triton.cdiv(slices, spare) if spare > 0 else slices
    last = (count - times * (each - 1) * _SETUP) // (times * each + 1)
    if spare <= 0 or last < 16:
        return 0, count, 1
    return triton.cdiv(slices, each), (count - last) // (16 * times) * 16 * times, each


def _by_hand(*values: Tensor | None) -> bool:
    """Whether all are bfloat16 and aligned as copies of 16 bytes want it."""
    return all(
        v is not None and v.dtype is torch.bfloat16 and not v.data_ptr() % 16 for v in values
    )


def _fast(x_TCD: Tensor) -> bool:
    """Whether device functions may use PTX for bfloat16."""
    return _TUNED and x_TCD.dtype is torch.bfloat16


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: MhcStepTraining, settings: dict[str, Any], *values: Any) -> Any:
        values = tuple(None if v is None else v.contiguous() for v in values)
        x_out, mix, h, kept, rates = step.forward(settings, values)
        ctx.save_for_backward(*values, h, kept, rates)
        ctx.settings = settings
        return (None if values[1] is None else x_out), *mix, h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *values, h, kept, rates = ctx.saved_tensors
        held = tuple(None if grad is None else grad.contiguous() for grad in grads)
        return None, None, *backward(tuple(values), (h, kept, rates), held, ctx.settings)


_TUNED = isinstance(_streams, triton.JITFunction)  # Triton's interpreter knows nothing of Gluon
_TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
