"""One launch from a sublayer's output to the next one's input (single-pass mHC, section 1).

For each token: ``X' = post · y + combᵀ X``; the next coefficients from X' (one RMS statistic, one
projection, sigmoids, Sinkhorn); the collapsed input ``Σ_j pre_j X'_j`` and its RMSNorm. A program
takes a few tokens through all channels once; X and y are read and X' is written once.

Shapes: x ``[T, 4, D]``, y ``[T, D]``, fn ``[24, 4 D]`` float32, h ``[T, D]``. Bytes of 16-bit
streams: ``T x 10 D x 2`` (released: T x 102.4 KB) and the 1.97 MB of fn, which every program reads
from L2. FLOP: ``T x 4 D x 24 x 2``: T x 0.98 M. Bound by memory. The normalised input needs its
statistic first, so h is written twice; the rewrite finds it in L2.

The projection runs on tensor cores: X' is exact in bfloat16 there and float32 weights are cut
into two bfloat16 parts, 16 bits of mantissa together; float32 streams use float32.

Few tokens are split over the channels. The programs of a token block are then all running (there
are no more than two a multiprocessor), wait for one another, and each normalises its own channels;
the first ones add up the parts of the projection, in their order. In the interpreter, which runs
one program after the other, the last one does all of that.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of kernels knows sums of tuples, no unpacking)

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.mhc import MhcMix, MhcParameters, hopper, hopper_few
from cedar.ops.mhc import reference as plain
from cedar.ops.mhc.sinkhorn_triton import sinkhorn

__all__ = ["MhcStepKernel", "unsupported"]

_PROGRAMS = 132  # multiprocessors of an H200
_COLUMNS = 32  # 24 coefficients, padded
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _into(comb, post, token_T, known_T, STREAM: tl.constexpr):
    """The five weights of new stream ``STREAM``: of the four old ones, and of y."""
    line = comb + token_T * 16 + STREAM
    c0 = tl.load(line, mask=known_T, other=0.0)[:, None]
    c1 = tl.load(line + 4, mask=known_T, other=0.0)[:, None]
    c2 = tl.load(line + 8, mask=known_T, other=0.0)[:, None]
    c3 = tl.load(line + 12, mask=known_T, other=0.0)[:, None]
    return c0, c1, c2, c3, tl.load(post + token_T * 4 + STREAM, mask=known_T, other=0.0)[:, None]


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """float32 to the streams' type. The assembly is declared impure so that the compiler moves
    results between layouts instead of computing every stream once for each of its uses."""
    if FAST:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=False, pack=2
        )
    return x.to(DTYPE)


@triton.jit
def _project(z, stream, weight, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """``z + stream · weightᵀ`` with float32 weights ``[COLUMNS, channels]``."""
    if DTYPE == tl.float32:  # noqa: SIM300
        z = tl.dot(stream, tl.trans(weight), z, input_precision="ieee")
    else:
        if FAST:
            high, low = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 m, n;
                prmt.b32 $0, $2, $3, 0x7632;
                and.b32 m, $2, 0xFFFF0000;
                and.b32 n, $3, 0xFFFF0000;
                sub.f32 m, $2, m;
                sub.f32 n, $3, n;
                cvt.rn.bf16x2.f32 $1, n, m;
                }
                """,
                "=r,=r,r,r",
                [weight],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            high = weight.to(tl.bfloat16)
            low = (weight - high.to(tl.float32)).to(tl.bfloat16)
        narrow = stream.to(tl.bfloat16)
        z = tl.dot(narrow, tl.trans(high), z)
        z = tl.dot(narrow, tl.trans(low), z)
    return z


@triton.jit
def _coefficients(
    z,
    base,
    scale,
    pre_out,
    post_out,
    comb_out,
    token_T,
    known_T,
    eps,
    ITERATIONS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sigmoids and Sinkhorn of projected, normalised rows; a token's 16 weights in registers."""
    column = tl.arange(0, z.shape[1])
    factor = tl.where(
        column < 4,
        tl.load(scale),
        tl.where(column < 8, tl.load(scale + 1), tl.load(scale + 2)),
    )
    z = z * factor[None, :] + tl.load(base + column, mask=column < 24, other=0.0)[None, :]
    gate = 1.0 / (1.0 + tl.exp(-z))
    place = token_T[:, None] * 4 + column[None, :]
    tl.store(pre_out + place, gate + eps, mask=known_T[:, None] & (column < 4)[None, :])
    is_post = (column >= 4) & (column < 8)
    tl.store(post_out + place - 4, 2.0 * gate, mask=known_T[:, None] & is_post[None, :])

    # Through memory, since taking columns out of z would need a barrier for each.
    place = token_T[:, None] * 16 + column[None, :]
    is_comb = (column >= 8) & (column < 24)
    tl.store(comb_out + place - 8, z, mask=known_T[:, None] & is_comb[None, :])
    tl.debug_barrier()
    line = comb_out + token_T * 16
    logits = ()
    for n in tl.static_range(16):
        logit = tl.load(line + n, mask=known_T, other=0.0, cache_modifier=".cg")
        logits = logits + (logit,)
    tl.debug_barrier()
    comb = sinkhorn(logits, eps, ITERATIONS, FAST)
    for n in tl.static_range(16):
        tl.store(line + n, comb[n], mask=known_T)


@triton.jit
def _step(
    x, y, comb, post, pre, fn, base, scale, weight, x_out, pre_out, post_out, comb_out, h,
    parts, counters, count, norm_eps, hc_eps,
    D: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
    SWEEP: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, PER_SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr, GROUP: tl.constexpr, UPDATE: tl.constexpr,
    ITERATIONS: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    split = tl.program_id(1)
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    known = token < count
    channel = tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    mix = pre + token * 4
    p0 = tl.load(mix, mask=known, other=0.0)[:, None]
    p1 = tl.load(mix + 1, mask=known, other=0.0)[:, None]
    p2 = tl.load(mix + 2, mask=known, other=0.0)[:, None]
    p3 = tl.load(mix + 3, mask=known, other=0.0)[:, None]
    if UPDATE:
        c00, c10, c20, c30, q0 = _into(comb, post, token, known, 0)
        c01, c11, c21, c31, q1 = _into(comb, post, token, known, 1)
        c02, c12, c22, c32, q2 = _into(comb, post, token, known, 2)
        c03, c13, c23, c33, q3 = _into(comb, post, token, known, 3)
    z = tl.zeros((TOKENS, COLUMNS), tl.float32)
    # Eight channels lie in one thread: few registers, and no exchange until the end.
    squares = tl.zeros((TOKENS, CHANNELS // 8), tl.float32)
    h_squares = tl.zeros((TOKENS, CHANNELS // 8), tl.float32)
    for d in tl.range(split * PER_SPLIT, (split + 1) * PER_SPLIT, CHANNELS, num_stages=STAGES):
        here = d + channel
        inside = known[:, None] & (here < D)[None, :]
        place = token[:, None] * (4 * D) + here[None, :]
        s0 = tl.load(x + place, mask=inside, other=0.0)
        s1 = tl.load(x + place + D, mask=inside, other=0.0)
        s2 = tl.load(x + place + 2 * D, mask=inside, other=0.0)
        s3 = tl.load(x + place + 3 * D, mask=inside, other=0.0)
        if UPDATE:
            new = tl.load(y + token[:, None] * D + here[None, :], mask=inside, other=0.0)
            new = new.to(tl.float32)
            f0, f1, f2, f3 = (
                s0.to(tl.float32),
                s1.to(tl.float32),
                s2.to(tl.float32),
                s3.to(tl.float32),
            )
            s0 = q0 * new + (c00 * f0 + c10 * f1 + c20 * f2 + c30 * f3)
            s0 = _rounded(s0, DTYPE, FAST)
            s1 = q1 * new + (c01 * f0 + c11 * f1 + c21 * f2 + c31 * f3)
            s1 = _rounded(s1, DTYPE, FAST)
            s2 = q2 * new + (c02 * f0 + c12 * f1 + c22 * f2 + c32 * f3)
            s2 = _rounded(s2, DTYPE, FAST)
            s3 = q3 * new + (c03 * f0 + c13 * f1 + c23 * f2 + c33 * f3)
            s3 = _rounded(s3, DTYPE, FAST)
            tl.store(x_out + place, s0, mask=inside)
            tl.store(x_out + place + D, s1, mask=inside)
            tl.store(x_out + place + 2 * D, s2, mask=inside)
            tl.store(x_out + place + 3 * D, s3, mask=inside)
        # One product for all streams: places (stream, channel), float32 weights in two halves.
        streams = tl.join(tl.join(s0, s2), tl.join(s1, s3))
        streams = tl.reshape(tl.permute(streams, (0, 2, 3, 1)), (TOKENS, 4 * CHANNELS))
        place_4 = tl.arange(0, 4 * CHANNELS)
        there = d + place_4 % CHANNELS
        line = fn + column[:, None] * (4 * D) + (place_4 // CHANNELS * D + there)[None, :]
        rows = (column < 24)[:, None] & (there < D)[None, :]
        z = _project(z, streams, tl.load(line, mask=rows, other=0.0), DTYPE, FAST)
        f0, f1, f2, f3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
        wide = f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3
        squares += tl.sum(tl.reshape(wide, (TOKENS, CHANNELS // 8, 8)), 2)
        collapsed = _rounded(p0 * f0 + p1 * f1 + p2 * f2 + p3 * f3, DTYPE, FAST)
        tl.store(h + token[:, None] * D + here[None, :], collapsed, mask=inside)
        wide = collapsed.to(tl.float32)
        h_squares += tl.sum(tl.reshape(wide * wide, (TOKENS, CHANNELS // 8, 8)), 2)
    total = tl.sum(squares, 1)
    h_total = tl.sum(h_squares, 1)
    PART: tl.constexpr = TOKENS * (COLUMNS + 2)
    row = tl.arange(0, TOKENS)
    start, stop = split * PER_SPLIT, tl.minimum((split + 1) * PER_SPLIT, D)
    finish = True
    if SPLITS > 1:
        mine = parts + (block * SPLITS + split).to(tl.int64) * PART
        tl.store(mine + row[:, None] * COLUMNS + column[None, :], z, mask=known[:, None])
        tl.store(mine + TOKENS * COLUMNS + row, total)
        tl.store(mine + TOKENS * (COLUMNS + 1) + row, h_total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + block, 1)
        if TOGETHER:
            complete = (arrived // SPLITS + 1) * SPLITS
            while tl.atomic_add(counters + block, 0) < complete:
                pass
        else:
            finish = arrived % SPLITS == SPLITS - 1
            start, stop = 0, D
    if finish:
        tl.debug_barrier()
        if SPLITS > 1:
            # Past L1, which may be stale.
            theirs = parts + (block * SPLITS).to(tl.int64) * PART
            share = tl.arange(0, SLOTS)
            line = theirs + share[:, None] * PART + TOKENS * (COLUMNS + 1) + row[None, :]
            there = (share < SPLITS)[:, None] & known[None, :]
            h_total = tl.sum(tl.load(line, mask=there, other=0.0, cache_modifier=".cg"), 0)
        h_rate = tl.rsqrt(h_total / D + norm_eps)[:, None]
        sweep = tl.arange(0, SWEEP)
        for d in tl.range(start, stop, SWEEP):
            here = d + sweep
            inside = known[:, None] & (here < stop)[None, :]
            place = h + token[:, None] * D + here[None, :]
            raw = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
            w = tl.load(weight + here, mask=here < stop, other=0.0).to(tl.float32)[None, :]
            tl.store(place, (w * (raw * h_rate)).to(DTYPE), mask=inside)
        # The coefficients of ``GROUP`` tokens each fall to the first programs.
        if split * GROUP < TOKENS or not TOGETHER:
            if SPLITS == 1:
                z_G, total_G, token_G, known_G = z, total, token, known
            else:
                mine_G = (split * GROUP if TOGETHER else 0) + tl.arange(0, GROUP)
                token_G = block.to(tl.int64) * TOKENS + mine_G
                known_G = token_G < count
                z_G = tl.zeros((GROUP, COLUMNS), tl.float32)
                # Unrolled, so that all loads are under way at once.
                for part in tl.static_range(SPLITS):
                    piece = theirs + part * PART + mine_G[:, None] * COLUMNS + column[None, :]
                    z_G += tl.load(piece, mask=known_G[:, None], other=0.0, cache_modifier=".cg")
                sums = theirs + share[:, None] * PART + TOKENS * COLUMNS + mine_G[None, :]
                theres = (share < SPLITS)[:, None] & known_G[None, :]
                total_G = tl.sum(tl.load(sums, mask=theres, other=0.0, cache_modifier=".cg"), 0)
            z_G = z_G * tl.rsqrt(total_G / (4 * D) + norm_eps)[:, None]
            _coefficients(
                z_G, base, scale, pre_out, post_out, comb_out, token_G, known_G, hc_eps,
                ITERATIONS, FAST,
            )  # fmt: skip


def unsupported(x_TCD: Tensor, parameters: MhcParameters) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if x_TCD.dtype not in _FLOATS:
        return f"streams in {x_TCD.dtype}"
    if x_TCD.shape[1] != 4:
        return f"{x_TCD.shape[1]} streams: expected 4"
    if parameters.fn.dtype != torch.float32 or not parameters.fn.is_contiguous():
        return "coefficient weights that are not contiguous float32"
    if torch.is_grad_enabled() and (x_TCD.requires_grad or parameters.fn.requires_grad):
        return "a gradient is wanted"
    return None


class MhcStepKernel:
    """`cedar.ops.mhc.MhcStep`; inputs it cannot take go to the reference.

    Holds counters of the programs that arrived, for every number of splits; between launches they
    are multiples of it, so launches that may overlap need instances of their own. The first call
    with a number allocates them, so it must not be captured in a graph.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[torch.device, int], Tensor] = {}
        self._few = hopper_few.Few()
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
        grad = update is not None and torch.is_grad_enabled() and update[0].requires_grad
        if grad or unsupported(x_TCD, parameters) is not None:
            return plain.mhc_step(x_TCD, update, pre_TC, parameters, norm_weight, **settings)
        count, _, width = x_TCD.shape
        device = x_TCD.device
        wide = {"dtype": torch.float32, "device": device}
        mix = MhcMix(
            torch.empty((count, 4), **wide),
            torch.empty((count, 4), **wide),
            torch.empty((count, 4, 4), **wide),
        )
        h = torch.empty((count, width), dtype=x_TCD.dtype, device=device)
        x_out = torch.empty(x_TCD.shape, dtype=x_TCD.dtype, device=device) if update else x_TCD
        if count:
            self.launch(
                x_TCD.contiguous(), update, pre_TC, parameters, norm_weight, x_out, mix, h,
                **settings,
            )  # fmt: skip
        return x_out, mix, h

    def launch(
        self,
        x_TCD: Tensor,
        update: tuple[Tensor, MhcMix] | None,
        pre_TC: Tensor,
        parameters: MhcParameters,
        norm_weight: Tensor,
        x_out: Tensor,
        mix: MhcMix,
        h_TD: Tensor,
        *,
        norm_eps: float,
        hc_eps: float,
        sinkhorn_iters: int,
        tokens: int | None = None,
        channels: int = 32,
        splits: int | None = None,
        stages: int = 3,
        warps: int | None = None,
        registers: int | None = None,
        by_hand: bool | None = None,
    ) -> None:
        """Run the kernel; a program takes ``tokens`` tokens and 1/``splits`` of the channels.

        ``by_hand`` chooses the launch of `cedar.ops.mhc.hopper`, by default for many tokens where
        it can run; that of `cedar.ops.mhc.hopper_few` is a default only.
        """
        count, _, width = x_TCD.shape
        if by_hand is None and _COMPILED and self._few.takes(x_TCD, update, norm_weight):
            self._few.launch(
                x_TCD, update, pre_TC, parameters, norm_weight, x_out, mix, h_TD,
                norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters,
            )  # fmt: skip
            return
        if by_hand is None:
            by_hand = _COMPILED and self._persistent.takes(x_TCD, norm_weight)
        if by_hand:
            self._persistent.launch(
                x_TCD, update, pre_TC, parameters, norm_weight, x_out, mix, h_TD,
                norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters,
            )  # fmt: skip
            return
        if tokens is None:
            tokens = 16 if count <= 128 else 64
        if warps is None:
            warps = 8 if tokens == 64 else 4
        if registers is None and warps == 8:
            registers = 128  # two programs fit on a multiprocessor
        programs = _PROGRAMS * (2 if warps * (registers or 255) <= 1024 else 1)
        sweep = 128 * 32 * warps // tokens  # as many values as fit in registers
        blocks = triton.cdiv(count, tokens)
        steps = triton.cdiv(width, channels)
        if splits is None:
            # Few different numbers, since each is a kernel of its own.
            most = max(1, min(programs // blocks, 80))
            splits = max(n for n in range(1, most + 1) if steps % n == 0)
        per_split = triton.cdiv(steps, splits) * channels
        splits = triton.cdiv(width, per_split)
        together = _COMPILED and splits > 1 and blocks * splits <= programs
        parts = counters = h_TD
        if splits > 1:
            parts = torch.empty(
                (blocks, splits, tokens * (_COLUMNS + 2)), dtype=torch.float32, device=h_TD.device
            )
            counters = self._arrivals(blocks, splits, h_TD.device)
        y, old = update if update is not None else (None, MhcMix(pre_TC, pre_TC, pre_TC))
        _step[(blocks, splits)](
            x_TCD, None if y is None else y.contiguous(), old.comb_TCC.contiguous(),
            old.post_TC.contiguous(), pre_TC.contiguous(), parameters.fn, parameters.base,
            parameters.scale, norm_weight, x_out, mix.pre_TC, mix.post_TC, mix.comb_TCC, h_TD,
            parts, counters, count, norm_eps, hc_eps,
            D=width, TOKENS=tokens, CHANNELS=channels, COLUMNS=_COLUMNS,
            SWEEP=min(sweep, triton.next_power_of_2(per_split)), SPLITS=splits,
            SLOTS=triton.next_power_of_2(splits), PER_SPLIT=per_split,
            TOGETHER=together,
            GROUP=max(1, tokens // min(8, 1 << (splits.bit_length() - 1))) if together else tokens,
            UPDATE=update is not None, ITERATIONS=sinkhorn_iters, DTYPE=_TL[x_TCD.dtype],
            FAST=_COMPILED and x_TCD.dtype is torch.bfloat16, STAGES=stages, num_warps=warps,
            maxnreg=registers,
        )  # fmt: skip

    def _arrivals(self, blocks: int, splits: int, device: torch.device) -> Tensor:
        held = self._counters.get((device, splits))
        if held is None or len(held) < blocks:
            held = torch.zeros(max(blocks, _PROGRAMS), dtype=torch.int64, device=device)
            self._counters[device, splits] = held
        return held


_COMPILED = isinstance(_step, triton.JITFunction)  # or run by Triton's interpreter
_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
