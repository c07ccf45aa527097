"""Exact top-k by threshold: the k largest scores of a row, ties to the lowest column, ascending.

A program takes up to 8192 columns of a row into registers as order-preserving integers, closes in
on the k-th largest between the smallest and the largest (each step counts what reaches a guess;
guesses interpolate, every second one halves), and compacts what is above it, and as many of its
equals as there is room for, by one prefix sum. No atomics: the result is reproducible.

Rows that one program cannot hold are narrowed down first, in either of two exact ways:

* by *maxima*: the k best groups of neighbouring columns hold the k best columns, so a row needs
  its groups' maxima selected (recursively), then their columns. The maxima may come from whoever
  made the scores (`cedar.ops.index_score`), else they cost one read;
* by *parts*: each part leaves its own k best with their columns, in order, and the same program
  selects among those; ties keep their order.

Shapes: scores ``[T, S]``, out int64 ``[T, k]``. Bytes: ``T x S x 2`` (bfloat16) read once. Bound by
launches and latency except for many long rows. With ``visible``, what lies behind it is skipped on
the device.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.select import reference as plain

__all__ = ["block_maxima", "select_best", "select_blocks", "select_entries", "unsupported"]

_PART = 8192
_MOST = 4096
_GROUP = 16


@triton.jit
def _ordered(score):
    """int32 in the order of the scores; 0 and −0 are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _select(
    scores, keys_in, columns_in, visible, keys_out, columns_out, row_stride, in_stride, width,
    out_stride, k,
    PART: tl.constexpr, SLOTS: tl.constexpr, NARROW: tl.constexpr, LEVEL: tl.constexpr,
    LAST: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr, PIN: tl.constexpr,
    GROUP: tl.constexpr, MOST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One part of one row.

    LEVEL 0 reads scores, later ones what the parts of ``MOST`` columns before them left, k each.
    GROUP: the candidates are the columns of ``columns_in``'s groups of so many, −1 for none.
    LAST: write int64 columns; else int32 keys and columns. LIMITED: only ``visible`` columns
    count. BLOCK: columns are blocks of so many entries, and ``visible`` counts entries. PIN: the
    block of the newest of them is always kept.
    """
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    LOWEST: tl.constexpr = -2139095041  # the key of −∞
    HIGHEST: tl.constexpr = 2139095040  # of +∞
    place = part * PART + tl.arange(0, PART)
    seen = width
    entries = 0
    if LIMITED or BLOCK > 0:
        entries = tl.load(visible + t).to(tl.int32)
    if LIMITED:
        seen = tl.cdiv(entries, BLOCK) if BLOCK > 0 else entries
        for _level in tl.static_range(LEVEL):
            seen = tl.cdiv(seen, MOST) * k
        seen = tl.minimum(seen, width)
    if LAST or part * PART < seen:
        if GROUP > 0:
            group = tl.load(
                columns_in + t * in_stride + place // GROUP,
                mask=place < in_stride * GROUP,
                other=-1,
            ).to(tl.int32)
            column = group * GROUP + place % GROUP
            inside = (group >= 0) & (column < seen)
            score = tl.load(scores + t * row_stride + column, mask=inside, other=float("-inf"))
            key = _ordered(score.to(tl.float32))
        else:
            column = place
            inside = place < seen
            # Whole vectors are loaded where a row is made of them.
            held = place < tl.cdiv(seen, 16) * 16 if EVEN else inside
            if LEVEL == 0:
                score = tl.load(scores + t * row_stride + place, mask=held, other=float("-inf"))
                key = _ordered(score.to(tl.float32))
                if BLOCK > 0 and PIN:
                    newest = tl.where(entries > 0, (entries - 1) // BLOCK, -1)
                    key = tl.where(place == newest, HIGHEST, key)
            else:
                key = tl.load(keys_in + t * in_stride + place, mask=held, other=LOWEST)
        if NARROW:
            # The low half of a bfloat16's bits is constant.
            order = ((key >> 16) + 32768).to(tl.uint32)
            floor = tl.full((), 127, tl.uint32)
        else:
            order = key.to(tl.uint32, bitcast=True) ^ 0x80000000
            floor = tl.full((), 0x007FFFFF, tl.uint32)
        order = tl.where(inside, order, 0)
        there = tl.sum((order > floor).to(tl.int32), 0)
        kept = tl.minimum(there, k)
        # ``low`` is reached by at least ``kept`` keys, ``high`` by fewer.
        low = floor.to(tl.int64) + 1
        high = tl.max(order, 0).to(tl.int64) + 1
        reach_low = there
        reach_high = there * 0
        halve = there < 0
        while (high - low > 1) & (reach_low > kept):
            share = (reach_low - kept).to(tl.float32) / (reach_low - reach_high).to(tl.float32)
            step = ((high - low).to(tl.float32) * share).to(tl.int64)
            step = tl.where(halve, (high - low) // 2, step)
            guess = low + tl.minimum(tl.maximum(step, 1), high - low - 1)
            reach = tl.sum((order >= guess.to(tl.uint32)).to(tl.int32), 0)
            enough = reach >= kept
            low = tl.where(enough, guess, low)
            reach_low = tl.where(enough, reach, reach_low)
            high = tl.where(enough, high, guess)
            reach_high = tl.where(enough, reach_high, reach)
            halve = halve == 0
        threshold = low.to(tl.uint32)
        room = kept - tl.sum((order > threshold).to(tl.int32), 0)
        level = order == threshold
        running = tl.cumsum(((order > threshold).to(tl.int32) << 16) | level.to(tl.int32), 0)
        rank = running & 0xFFFF
        chosen = ((order > threshold) | (level & (rank <= room))) & (kept > 0)
        target = (running >> 16) + tl.minimum(rank, room) - 1
        slot = tl.arange(0, SLOTS)
        rest = (slot >= kept) & (slot < k)
        start = t * out_stride + part * k
        if LEVEL > 0:
            column = tl.load(columns_in + t * in_stride + place, mask=chosen, other=-1)
        if LAST:
            tl.store(columns_out + start + target, column.to(tl.int64), mask=chosen)
            tl.store(columns_out + start + slot, tl.full((SLOTS,), -1, tl.int64), mask=rest)
        else:
            if NARROW:
                key = ((order.to(tl.int32) - 32768) << 16) | tl.where(order < 32768, 0xFFFF, 0)
            else:
                key = (order ^ 0x80000000).to(tl.int32, bitcast=True)
            tl.store(columns_out + start + target, column, mask=chosen)
            tl.store(keys_out + start + target, key, mask=chosen)
            tl.store(columns_out + start + slot, tl.full((SLOTS,), -1, tl.int32), mask=rest)
            tl.store(keys_out + start + slot, tl.full((SLOTS,), LOWEST, tl.int32), mask=rest)


@triton.jit
def _maxima(
    scores, best, visible, row_stride, best_stride, width, blocks, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, COUNT: tl.constexpr, LIMITED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Maxima of ``COUNT`` blocks of one row; blocks behind ``visible`` are left alone."""
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    seen = width
    if LIMITED:
        seen = tl.minimum(tl.load(visible + t).to(tl.int32), width)
    if tl.program_id(1) * COUNT * BLOCK < seen or not LIMITED:
        lane = tl.arange(0, WIDE)
        column = block[:, None] * BLOCK + lane[None, :]
        inside = (lane < BLOCK)[None, :] & (column < seen)
        held = column < tl.cdiv(seen, 16) * 16 if EVEN else inside
        score = tl.load(scores + t * row_stride + column, mask=held, other=float("-inf"))
        most = tl.max(tl.where(inside, score.to(tl.float32), float("-inf")), 1)
        tl.store(best + t * best_stride + block, most.to(score.dtype), mask=block < blocks)


def unsupported(scores_TS: Tensor, k: int) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if scores_TS.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"scores in {scores_TS.dtype}"
    if k > _MOST:
        return f"k is {k}: expected at most {_MOST}"
    if scores_TS.shape[1] and scores_TS.stride(1) != 1:
        return "scores with a strided last dimension"
    return None


def select_entries(
    scores_TS: Tensor,
    k: int,
    visible_T: Tensor | None = None,
    *,
    best_TM: Tensor | None = None,
    group: int = _GROUP,
) -> Tensor:
    """`cedar.ops.select.SelectEntries`; inputs it cannot take go to the reference.

    best: maxima of groups of ``group`` columns, where somebody has them already (undefined behind
    ``visible``).
    """
    if unsupported(scores_TS, k) is not None:
        return plain.select_entries(scores_TS, k, visible_T)
    if scores_TS.shape[1] <= _PART or group * k > _PART:
        return _launch(scores_TS, k, visible_T)
    if best_TM is None:
        best_TM = block_maxima(scores_TS, group, visible_T)
    groups = _launch(best_TM, k, visible_T, block=group if visible_T is not None else 0, pin=False)
    return _launch(scores_TS, k, visible_T, groups_TK=groups, group=group)


def select_blocks(scores_TS: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor:
    """`cedar.ops.select.SelectBlocks`; inputs it cannot take go to the reference."""
    if unsupported(scores_TS, k) is not None:
        return plain.select_blocks(scores_TS, visible_T, block, k)
    return _launch(block_maxima(scores_TS, block), k, visible_T, block=block, limited=False)


def select_best(best_TM: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor:
    """`cedar.ops.select.SelectBest`; inputs it cannot take go to the reference."""
    if unsupported(best_TM, k) is not None:
        return plain.select_best(best_TM, visible_T, block, k)
    return _launch(best_TM, k, visible_T, block=block)


def block_maxima(scores_TS: Tensor, block: int, visible_T: Tensor | None = None) -> Tensor:
    """Maxima ``[T, ⌈S / block⌉]`` of blocks of ``block`` columns, of the visible ones only."""
    count, width = scores_TS.shape
    blocks = triton.cdiv(width, block)
    best = torch.empty((count, blocks), dtype=scores_TS.dtype, device=scores_TS.device)
    if best.numel():
        wide = triton.next_power_of_2(block)
        at_once = max(1, 4096 // wide)
        _maxima[(count, triton.cdiv(blocks, at_once))](
            scores_TS, best, visible_T, scores_TS.stride(0), best.stride(0), width, blocks,
            BLOCK=block, WIDE=wide, COUNT=at_once, LIMITED=visible_T is not None,
            EVEN=wide == block and width % 16 == 0 and scores_TS.stride(0) % 16 == 0, num_warps=4,
        )  # fmt: skip
    return best


def _launch(
    scores_TS: Tensor,
    k: int,
    visible_T: Tensor | None,
    *,
    limited: bool | None = None,
    block: int = 0,
    pin: bool = True,
    groups_TK: Tensor | None = None,
    group: int = 0,
    most: int = _PART,
    elements: int = 32,
    registers: int | None = None,
) -> Tensor:
    """Select level by level until one program holds a whole row.

    limited: read only what ``visible`` counts (default: if it is given), in blocks of ``block``
    entries if there are any; the newest is kept in any case unless ``pin`` is False. groups: take
    only the columns of these groups of ``group``.
    """
    count, width = scores_TS.shape
    device = scores_TS.device
    limited = visible_T is not None if limited is None else limited
    out = torch.empty((count, k), dtype=torch.int64, device=device)
    if not out.numel():
        return out
    keys, columns = None, groups_TK
    row_stride, level = scores_TS.stride(0), 0
    in_stride, size = (0, width) if groups_TK is None else (k, k * group)
    while True:
        # Short rows do not pay for long ones.
        last = size <= most
        part = max(16, triton.next_power_of_2(size)) if last else most
        parts = 1 if last else triton.cdiv(size, part)
        if last:
            next_keys = next_columns = out
        else:
            if groups_TK is not None or (level and parts * k >= size):
                raise ValueError(f"parts of {most} columns cannot be narrowed down to {k}")
            next_keys = torch.empty((count, parts * k), dtype=torch.int32, device=device)
            next_columns = torch.empty_like(next_keys)
        _select[(count, parts)](
            scores_TS, keys, columns, visible_T, next_keys, next_columns, row_stride, in_stride,
            width if groups_TK is not None else size, next_columns.stride(0), k,
            PART=part, SLOTS=triton.next_power_of_2(k), NARROW=scores_TS.dtype is torch.bfloat16,
            LEVEL=level, LAST=last, LIMITED=limited, BLOCK=block, PIN=pin, GROUP=group, MOST=most,
            EVEN=size % 16 == 0 and (row_stride if level == 0 else in_stride) % 16 == 0,
            num_warps=max(1, min(32, part // (32 * elements))), maxnreg=registers,
        )  # fmt: skip
        if last:
            return out
        keys, columns, level = next_keys, next_columns, level + 1
        size = in_stride = parts * k
