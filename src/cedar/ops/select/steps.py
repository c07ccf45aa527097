"""Device functions that choose the k best of a row, narrowing down from maxima to columns.

A step turns its scores into integers of the same order, halves the interval around the k-th
largest (each time counting what reaches the middle), and compacts what is above and as many of its
equals as there is room for by one prefix sum. What a step has found bounds the next one: its
threshold is little below that of the next, and the largest score is the same.

Threads hold eight neighbouring columns; sums within them, over the lanes of a warp and over warps
are separate, which keeps the code short where warps are many.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["above", "narrow"]


@triton.jit
def _key(score):
    """int32 in the order of the scores; 0 and −0 are equal. That of bfloat16 fits 16 bits."""
    bits = (score.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key >> 16 if score.dtype == tl.bfloat16 else key


@triton.jit
def _beyond(key, least, NARROW: tl.constexpr):
    """−1 for keys that reach ``least``, else 0."""
    if NARROW:  # the sign of a difference takes half the instructions of a comparison
        return (least - 1 - key) >> 31
    return -(key >= least).to(tl.int32)


@triton.jit
def _total(count):
    """The sum of ``[rows, columns]``; threads have whole rows."""
    return tl.sum(tl.sum(count, 1), 0)


@triton.jit
def _before(count):
    """Sums ``[rows]`` of all rows before each; by warps, then over them."""
    ROWS: tl.constexpr = count.shape[0]
    if ROWS <= 32:
        before = tl.cumsum(count, 0) - count
    else:
        lanes = tl.reshape(count, (ROWS // 32, 32))
        warps = tl.arange(0, ROWS // 32)
        total = tl.where(warps[None, :] < warps[:, None], tl.sum(lanes, 1)[None, :], 0)
        before = tl.sum(total, 1)[:, None] + tl.cumsum(lanes, 1) - lanes
        before = tl.reshape(before, (ROWS,))
    return before


@triton.jit
def _put(target, value, chosen, COMPILED: tl.constexpr):
    """Store the chosen values. Wide tensors stay where they are, which `tl.store` would not do."""
    if COMPILED:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            setp.ne.s32 p, $3, 0;
            @p st.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r",
            [target, value, chosen],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(target, value, mask=chosen != 0)


@triton.jit
def _pairs(key):
    """The bfloat16 scores of neighbouring columns in one int32 ``[rows, columns / 2]``."""
    bits = key ^ ((key >> 31) & 0x7FFF)
    lower, upper = tl.split(tl.reshape(bits, (key.shape[0], key.shape[1] // 2, 2)))
    return (lower & 0xFFFF) | (upper << 16)


@triton.jit
def _reach(key, pairs, least, NARROW: tl.constexpr, PAIRED: tl.constexpr):
    """How many keys reach ``least``; counted in pairs of scores where there are such."""
    if PAIRED:
        bound = (least ^ ((least >> 31) & 0x7FFF)) & 0xFFFF
        mask = tl.inline_asm_elementwise(
            "set.ge.u32.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, bound * 0x10001], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
        # A half is -1 if its score reaches: a sum is 65536 (lower - upper) - lower.
        total = _total(mask)
        lower = -total & 0xFFFF
        count = 2 * lower - ((total + lower) >> 16)
    else:
        count = -_total(_beyond(key, least, NARROW))
    return count


@triton.jit
def _choose(
    key, first, k, groups, least, most, notes, LOWEST: tl.constexpr, COMPILED: tl.constexpr
):
    """Note the columns of the k largest keys above LOWEST in order; of equal ones, the first.

    key: ``[rows, columns]``, of the columns from ``first`` on, ascending from row to row. These are
    the columns of so many groups; of k, if their smallest maximum is ``least``, and ``most`` is the
    largest. Returns how many are chosen, and their smallest and the largest key.
    """
    NARROW: tl.constexpr = LOWEST > -65536
    PAIRED: tl.constexpr = COMPILED and NARROW
    pairs = _pairs(key) if PAIRED else key
    # ``low`` is reached by at least ``kept`` keys (the bound by little more), ``high`` by fewer.
    low = least
    high = most + 1
    reach_low = tl.full((), 0x7FFFFFFF, tl.int32)  # unknown
    # Steps grow from a bound close below, or, where there is none, from the largest key down.
    up = tl.full((), 4 if NARROW else 4 << 16, tl.int32)
    down = tl.full((), 1 << 30, tl.int32)
    if groups < k:
        NONE: tl.constexpr = 0x8000 if NARROW else 0x7FFFFFFE
        low = tl.min(tl.min(tl.where(key > LOWEST, key, NONE), 1), 0)
        reach_low = _reach(key, pairs, LOWEST + 1, NARROW, PAIRED)
        up = tl.full((), 1 << 30, tl.int32)
        down = tl.full((), 128 if NARROW else 128 << 16, tl.int32)
    kept = tl.minimum(reach_low, k)
    reach_high = kept * 0
    while (high > low + 1) & (reach_low > kept):
        middle = (low & high) + ((low ^ high) >> 1)
        middle = tl.where(middle - low > up, low + up, middle)
        middle = tl.where(high - middle > down, high - down, middle)
        up = tl.minimum(up, 1 << 28) * 4
        down = tl.minimum(down, 1 << 28) * 4
        reach = _reach(key, pairs, middle, NARROW, PAIRED)
        enough = reach >= kept
        low = tl.where(enough, middle, low)
        reach_low = tl.where(enough, reach, reach_low)
        high = tl.where(enough, high, middle)
        reach_high = tl.where(enough, reach_high, reach)
    # Of those equal to ``low`` there is room for all if it is reached by just enough.
    room = tl.where(reach_low > kept, kept - reach_high, 0x7FFF)
    reached = _beyond(key, low, NARROW)
    beyond = _beyond(key, low + 1, NARROW)
    # Counts of both, those above in the upper half.
    count = (beyond & 0x10000) + beyond - reached
    running = tl.cumsum(count, 1) + _before(tl.sum(count, 1))[:, None]
    rank = running & 0xFFFF
    chosen = beyond | (reached & ((rank - 1 - room) >> 31))
    target = (running >> 16) + tl.minimum(rank, room) - 1
    column = first[:, None] + tl.arange(0, key.shape[1])[None, :]
    _put(notes + target, column, chosen, COMPILED)
    tl.debug_barrier()
    return kept, low, most


@triton.jit
def _read(
    row, column, there, size, newest, LOWEST: tl.constexpr, PIN: tl.constexpr, EVEN: tl.constexpr
):
    """Keys of a row's columns; the newest counts as +∞, those from ``size`` on as nothing."""
    # Whole vectors are loaded where a row is made of them.
    held = there & (column < tl.cdiv(size, 8) * 8) if EVEN else there & (column < size)
    key = _key(tl.load(row + column, mask=held, other=float("-inf")))
    if PIN:
        HIGHEST: tl.constexpr = 0x7F80 if LOWEST > -65536 else 0x7F800000
        key = tl.where(column == newest, HIGHEST, key)
    return tl.where(column < size, key, LOWEST)


@triton.jit
def _first(
    row, size, newest, k, notes, START: tl.constexpr, LOWEST: tl.constexpr, PIN: tl.constexpr,
    EVEN: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Choose among the first ``size`` columns of a row."""
    first = tl.arange(0, START // 8) * 8
    column = first[:, None] + tl.arange(0, 8)[None, :]
    key = _read(row, column, column >= 0, size, newest, LOWEST, PIN, EVEN)
    most = tl.max(tl.max(key, 1), 0)
    return _choose(key, first, k, most * 0, most, most, notes, LOWEST, COMPILED)


@triton.jit
def _next(
    row, size, newest, k, groups, kept, least, most, notes, SLOTS: tl.constexpr, FAN: tl.constexpr,
    LOWEST: tl.constexpr, PIN: tl.constexpr, EVEN: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Choose among the columns of the ``kept`` groups of FAN that the step before noted."""
    slot = tl.arange(0, SLOTS)
    group = tl.load(groups + slot, mask=slot < kept, other=0x1000000)
    column = group[:, None] * FAN + tl.arange(0, FAN)[None, :]
    key = _read(row, column, (slot < kept)[:, None], size, newest, LOWEST, PIN, EVEN)
    return _choose(key, group * FAN, k, kept, least, most, notes, LOWEST, COMPILED)


@triton.jit
def above(newest, FAN: tl.constexpr):
    """The group of the newest column; −1 for none."""
    return tl.where(newest >= 0, newest // FAN, -1)


@triton.jit
def narrow(
    fine, middle, coarse, notes, count, newest, k,
    START: tl.constexpr, SLOTS: tl.constexpr, STEPS: tl.constexpr, FAN: tl.constexpr,
    PIN: tl.constexpr, EVEN: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The columns chosen, int32 ``[SLOTS]``, and how many they are.

    fine: a row of ``count`` columns; middle: maxima of groups of FAN of them, coarse: of FAN of
    these; so far as there are more STEPS than one. The first step reads START numbers.
    PIN: ``newest`` is always chosen, −1 for none. notes: ``3 SLOTS`` int32 of the program's.
    """
    LOWEST: tl.constexpr = -32641 if fine.dtype.element_ty == tl.bfloat16 else -2139095041  # −∞
    newer = above(newest, FAN)
    groups = tl.cdiv(count, FAN)
    last = notes + 2 * SLOTS
    if STEPS == 1:
        kept, _, _ = _first(fine, count, newest, k, last, START, LOWEST, PIN, EVEN, COMPILED)
    else:
        inner = notes + SLOTS
        if STEPS == 2:
            kept, least, most = _first(
                middle, groups, newer, k, inner, START, LOWEST, PIN, EVEN, COMPILED
            )
        else:
            kept, least, most = _first(
                coarse, tl.cdiv(groups, FAN), above(newer, FAN), k, notes, START, LOWEST, PIN,
                EVEN, COMPILED,
            )  # fmt: skip
            kept, least, most = _next(
                middle, groups, newer, k, notes, kept, least, most, inner, SLOTS, FAN, LOWEST, PIN,
                EVEN, COMPILED,
            )  # fmt: skip
        kept, _, _ = _next(
            fine, count, newest, k, inner, kept, least, most, last, SLOTS, FAN, LOWEST, PIN, EVEN,
            COMPILED,
        )  # fmt: skip
    slot = tl.arange(0, SLOTS)
    return tl.load(last + slot, mask=slot < kept, other=-1), kept
