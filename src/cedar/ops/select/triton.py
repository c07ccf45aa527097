"""Exact top-k by threshold: the k largest scores of a row, ties to the lowest column, ascending.

One program selects for one row, and narrows long rows down first: the k best groups of
neighbouring columns hold the k best columns, so it selects among the maxima of groups of 64
columns, then among the maxima of blocks of 8 inside the chosen groups, then among the columns of
the chosen blocks. No step holds more than 16384 numbers, whatever the row; rows of up to 16384
columns take one step. The maxima come with the scores (`cedar.ops.index_score`), else they cost
one read (`_maxima`).

The steps are in `cedar.ops.select.steps`. No atomics: the result is reproducible, and a row's does
not depend on the others.

`select_scan` chooses entries and candidate blocks side by side in one launch. Selections of
entries can leave physical rows beside them (`cedar.ops.select.Place`).

Shapes: scores ``[T, S]``, out int64 ``[T, k]``. Bytes: ``T x S x 2`` (bfloat16) once if there are
no maxima, else ``T x S / 32`` and what the chosen groups hold. Bound by latency except for many
long rows. With ``visible``, what lies behind it is skipped on the device.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.aligned import aligned_rows
from cedar.ops.dependent_launch import dependent, hand_over
from cedar.ops.index_score import Scan
from cedar.ops.select import Chosen, Place
from cedar.ops.select import reference as plain
from cedar.ops.select.steps import above, narrow

__all__ = [
    "block_maxima",
    "place",
    "select_best",
    "select_entries",
    "select_pool",
    "select_scan",
    "unsupported",
]

_STEP = 16384  # most numbers that one step selects among
_FAN = 8  # blocks of a group, and columns of a block
_MOST = _STEP // _FAN
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["width"])
def _select(
    fine, middle, coarse, notes, visible, out, fine_stride, middle_stride, coarse_stride,
    out_stride, width, k, pool, table, sequence, rows, pool_stride, table_stride, rows_stride,
    blocks_out, blocks_stride, blocks_k,
    START: tl.constexpr, SLOTS: tl.constexpr, STEPS: tl.constexpr, FAN: tl.constexpr,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr, PIN: tl.constexpr, PER_PAGE: tl.constexpr,
    POOL: tl.constexpr, BLOCKS_START: tl.constexpr, BLOCKS_SLOTS: tl.constexpr,
    BLOCKS_STEPS: tl.constexpr, NOTES: tl.constexpr, EVEN: tl.constexpr, COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The selection of one row; of a second program the blocks of a scan.

    LIMITED: only ``visible`` columns exist; BLOCK: columns are blocks of so many entries, which
    ``visible`` counts; PIN: the newest is always kept. POOL: columns are the entries of the blocks
    of ``pool`` of so many; their numbers are wanted. PER_PAGE: leave physical rows, too.
    """
    if PDL:
        hand_over()
    t = tl.program_id(0).to(tl.int64)
    seen = tl.full((), width, tl.int32)
    newest = tl.full((), -1, tl.int32)
    if LIMITED or PIN:
        entries = tl.load(visible + t).to(tl.int32)
        if PIN:
            newest = above(entries - 1, BLOCK)
        if LIMITED:
            seen = tl.minimum(tl.cdiv(entries, BLOCK), width)
    fine += t * fine_stride
    middle += t * middle_stride
    coarse += t * coarse_stride
    notes += (t * tl.num_programs(1) + tl.program_id(1)) * NOTES
    slot = tl.arange(0, SLOTS)
    if BLOCKS_STEPS == 0 or tl.program_id(1) == 0:
        column, kept = narrow(
            fine, middle, coarse, notes, seen, newest, k, START, SLOTS, STEPS, FAN, PIN, EVEN,
            COMPILED,
        )  # fmt: skip
        there = slot < kept
        if POOL > 0:
            group = tl.load(pool + t * pool_stride + column // POOL, mask=there, other=0)
            column = tl.where(there, group.to(tl.int32) * POOL + column % POOL, -1)
        tl.store(out + t * out_stride + slot, column.to(tl.int64), mask=slot < k)
        if PER_PAGE > 0:
            table += tl.load(sequence + t).to(tl.int64) * table_stride
            page = tl.load(table + column // PER_PAGE, mask=there, other=0)
            row = tl.where(there, page * PER_PAGE + column % PER_PAGE, -1)
            tl.store(rows + t * rows_stride + slot, row, mask=slot < k)
    if BLOCKS_STEPS > 0:  # noqa: SIM102 - known when it is compiled
        if tl.program_id(1) == 1:
            block, _ = narrow(
                middle, coarse, coarse, notes, tl.cdiv(seen, FAN), above(seen - 1, FAN), blocks_k,
                BLOCKS_START, BLOCKS_SLOTS, BLOCKS_STEPS, FAN, True, EVEN, COMPILED,
            )  # fmt: skip
            place = tl.arange(0, BLOCKS_SLOTS)
            blocks_out += t * blocks_stride
            tl.store(blocks_out + place, block.to(tl.int64), mask=place < blocks_k)


@triton.jit(do_not_specialize=["width", "blocks", "groups"])
def _maxima(
    scores, best, wide, visible, row_stride, best_stride, wide_stride, width, blocks, groups,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, FAN: tl.constexpr,
    LIMITED: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Maxima of ``COUNT`` blocks of one row and of FAN blocks; none behind ``visible``."""
    if PDL:
        hand_over()
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    seen = tl.full((), width, tl.int32)
    if LIMITED:
        seen = tl.minimum(tl.cdiv(tl.load(visible + t).to(tl.int32), UNIT), width)
    if tl.program_id(1) * COUNT * BLOCK < seen or not LIMITED:
        lane = tl.arange(0, PADDED)
        column = block[:, None] * BLOCK + lane[None, :]
        inside = (lane < BLOCK)[None, :] & (column < seen)
        # Whole vectors are loaded where a row is made of them.
        held = column < tl.cdiv(seen, 16) * 16 if EVEN else inside
        score = tl.load(scores + t * row_stride + column, mask=held, other=float("-inf"))
        most = tl.max(tl.where(inside, score.to(tl.float32), float("-inf")), 1)
        tl.store(best + t * best_stride + block, most.to(score.dtype), mask=block < blocks)
        if FAN > 0:
            most = tl.max(tl.reshape(most, (COUNT // FAN, FAN)), 1)
            group = tl.program_id(1) * (COUNT // FAN) + tl.arange(0, COUNT // FAN)
            tl.store(wide + t * wide_stride + group, most.to(score.dtype), mask=group < groups)


@triton.jit
def _place(
    entries, table, sequence, rows, entries_stride, table_stride, rows_stride, k,
    SLOTS: tl.constexpr, PER_PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        hand_over()
    t = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    entry = tl.load(entries + t * entries_stride + slot, mask=slot < k, other=-1).to(tl.int32)
    table += tl.load(sequence + t).to(tl.int64) * table_stride
    page = tl.load(table + entry // PER_PAGE, mask=entry >= 0, other=0)
    row = tl.where(entry >= 0, page * PER_PAGE + entry % PER_PAGE, -1)
    tl.store(rows + t * rows_stride + slot, row, mask=slot < k)


_COMPILED = isinstance(_select, triton.JITFunction)  # or run by Triton's interpreter


def unsupported(scores_TS: Tensor, k: int) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if scores_TS.dtype not in _FLOATS:
        return f"scores in {scores_TS.dtype}"
    if k > _MOST:
        return f"k is {k}: expected at most {_MOST}"
    if scores_TS.shape[1] > 2 * _STEP * _FAN**2:
        return f"{scores_TS.shape[1]} columns: expected at most {2 * _STEP * _FAN**2}"
    if scores_TS.shape[1] and scores_TS.stride(1) != 1:
        return "scores with a strided last dimension"
    return None


def select_entries(scores_TS: Tensor, k: int, visible_T: Tensor | None = None) -> Tensor:
    """`cedar.ops.select.SelectEntries`; inputs it cannot take go to the reference."""
    if unsupported(scores_TS, k) is not None:
        return plain.select_entries(scores_TS, k, visible_T)
    best, wide = None, None
    if scores_TS.shape[1] > _STEP:
        best, wide = block_maxima(scores_TS, _FAN, visible_T)
    return _launch(scores_TS, best, wide, k, visible_T).entries_TK


def select_best(best_TM: Tensor, visible_T: Tensor, block: int, k: int) -> Tensor:
    """`cedar.ops.select.SelectBest`; inputs it cannot take go to the reference."""
    if unsupported(best_TM, k) is not None:
        return plain.select_best(best_TM, visible_T, block, k)
    middle, coarse = None, None
    if best_TM.shape[1] > _STEP:
        middle, coarse = block_maxima(best_TM, _FAN, visible_T, block)
    return _launch(best_TM, middle, coarse, k, visible_T, block=block, pin=True).entries_TK


def select_scan(
    scan: Scan, visible_T: Tensor, k: int, *, blocks: int = 0, place: Place | None = None
) -> Chosen:
    """`cedar.ops.select.SelectScan`; inputs it cannot take go to the reference."""
    scores, best, wide, block = scan
    fits = unsupported(scores, max(k, blocks)) is None and block == _FAN
    if not fits or best is None or wide is None:
        return plain.select_scan(scan, visible_T, k, blocks=blocks, place=place)
    return _launch(scores, best, wide, k, visible_T, where=place, blocks=blocks)


def select_pool(
    scores_TC: Tensor,
    best_TM: Tensor,
    blocks_TM: Tensor,
    block: int,
    k: int,
    *,
    place: Place | None = None,
) -> Chosen:
    """`cedar.ops.select.SelectPool`; inputs it cannot take go to the reference."""
    if unsupported(scores_TC, k) is not None or block != _FAN:
        return plain.select_pool(scores_TC, best_TM, blocks_TM, block, k, place=place)
    return _launch(scores_TC, best_TM, None, k, None, where=place, pool=blocks_TM)


def place(entries_TK: Tensor, where: Place) -> Tensor:
    """`cedar.ops.select.PlaceEntries`."""
    count, k = entries_TK.shape
    rows = torch.empty((count, k), dtype=torch.int32, device=entries_TK.device)
    if rows.numel():
        _place[(count, triton.cdiv(k, 1024))](
            entries_TK, where.table, where.sequence_T, rows, entries_TK.stride(0),
            where.table.stride(0), rows.stride(0), k,
            SLOTS=min(1024, triton.next_power_of_2(k)), PER_PAGE=where.per_page, num_warps=4,
            **dependent(rows.device, count),
        )  # fmt: skip
    return rows


def block_maxima(
    scores_TS: Tensor, block: int, visible_T: Tensor | None = None, unit: int = 1
) -> tuple[Tensor, Tensor]:
    """Maxima of blocks of ``block`` columns, and of 8 blocks.

    With ``visible``, which counts columns of ``unit`` entries, of the visible ones only; undefined
    behind them.
    """
    count, width = scores_TS.shape
    blocks = triton.cdiv(width, block)
    groups = triton.cdiv(blocks, _FAN)
    best = aligned_rows(count, blocks, scores_TS)
    wide = aligned_rows(count, groups, scores_TS)
    if best.numel():
        padded = triton.next_power_of_2(block)
        at_once = max(_FAN, 4096 // padded)
        programs = triton.cdiv(blocks, at_once)
        _maxima[(count, programs)](
            scores_TS, best, wide, visible_T, scores_TS.stride(0), best.stride(0), wide.stride(0),
            width, blocks, groups, BLOCK=block, PADDED=padded, COUNT=at_once, FAN=_FAN,
            LIMITED=visible_T is not None, UNIT=unit,
            EVEN=padded == block and width % 16 == 0 and scores_TS.stride(0) % 16 == 0, num_warps=4,
            **dependent(best.device, count * programs),
        )  # fmt: skip
    return best, wide


def _steps(width: int, k: int, levels: int) -> tuple[int, int]:
    """How many steps select k of ``width`` columns fastest, and how many numbers the first reads.

    levels: scores and how many levels of maxima there are.
    """
    each = k * _FAN + 2048  # what one more step costs, in numbers that a step reads
    starts = [-(-width // _FAN**n) for n in range(levels)]
    costs = [start + n * each if start <= 2 * _STEP else 2**40 for n, start in enumerate(starts)]
    steps = costs.index(min(costs))
    return steps + 1, max(16, triton.next_power_of_2(starts[steps]))


def _launch(
    fine_TS: Tensor,
    middle: Tensor | None,
    coarse: Tensor | None,
    k: int,
    visible_T: Tensor | None,
    *,
    block: int = 1,
    pin: bool = False,
    where: Place | None = None,
    pool: Tensor | None = None,
    blocks: int = 0,
    elements: int = 32,
) -> Chosen:
    """Select k of ``fine``'s columns; of ``middle``'s, the blocks of a scan, ``blocks`` as well.

    middle, coarse: maxima of 8 columns each and of 8 of these. visible: only the columns that it
    counts exist (as blocks of ``block`` entries); pin: the newest is always kept.
    pool: columns are the entries of these blocks of 8.
    """
    count, width = fine_TS.shape
    device = fine_TS.device
    entries = torch.empty((count, k), dtype=torch.int64, device=device)
    rows = torch.empty((count, k), dtype=torch.int32, device=device) if where else None
    kept = torch.empty((count, blocks), dtype=torch.int64, device=device) if blocks else None
    if not count or not k:
        return Chosen(entries, rows, kept)
    levels = 1 if middle is None else 2 if coarse is None else 3
    steps, start = _steps(width, k, levels)
    slots = max(2, triton.next_power_of_2(k))
    lanes = max(start, slots * _FAN if steps > 1 else 0)
    other_steps, other_start, other_slots = 0, 16, 16
    if blocks:
        other_steps, other_start = _steps(triton.cdiv(width, _FAN), blocks, levels - 1)
        other_slots = max(2, triton.next_power_of_2(blocks))
        lanes = max(lanes, other_start, other_slots * _FAN if other_steps > 1 else 0)
    programs = 2 if blocks else 1
    size = 3 * max(slots, other_slots)
    notes = torch.empty((count, programs, size), dtype=torch.int32, device=device)
    absent = fine_TS  # stands in for what a kernel is not going to read
    middle = absent if middle is None else middle
    coarse = absent if coarse is None else coarse
    _select[(count, programs)](
        fine_TS, middle, coarse, notes, visible_T, entries, fine_TS.stride(0), middle.stride(0),
        coarse.stride(0), entries.stride(0), width, k, pool, where.table if where else None,
        where.sequence_T if where else None, rows, pool.stride(0) if pool is not None else 0,
        where.table.stride(0) if where else 0, k, kept, blocks, blocks,
        START=start, SLOTS=slots, STEPS=steps, FAN=_FAN,
        LIMITED=visible_T is not None, BLOCK=block, PIN=pin,
        PER_PAGE=where.per_page if where else 0, POOL=_FAN if pool is not None else 0,
        BLOCKS_START=other_start, BLOCKS_SLOTS=other_slots, BLOCKS_STEPS=other_steps, NOTES=size,
        EVEN=all(x.stride(0) % 16 == 0 for x in (fine_TS, middle, coarse)), COMPILED=_COMPILED,
        num_warps=max(1, min(32, lanes // (32 * elements))), **dependent(device, count * programs),
    )  # fmt: skip
    return Chosen(entries, rows, kept)
