"""Index scores straight from packed keys: unpack, dot, ReLU, head weights and head sum in one pass.

Keys are the rows of the product and heads its columns (32 heads as rows would waste half of every
tensor-core instruction), so each row's sum over heads stays within a few threads.

`index_scan` reads every visible key of a sequence once for all its query tokens (1 to 8: decoding
and verified drafts) through the page table; programs take tiles of keys in turn, so
the grid does not depend on the context. It can leave maxima of blocks, and of groups of blocks,
beside the scores, from which `cedar.ops.select.triton.select_scan` selects.
`index_pool` reads the keys of each query's candidate blocks only: its cost does not depend on the
context either.

Bytes, released sizes: scan ``S x 68`` a sequence and ``T x S x 2`` for bfloat16 scores; pool
``T x 16384 x (68 + 2)``. FLOP: 2 x 32 x 128 = 8192 a query and key. Bound by memory from some
tens of thousands of keys on.

Numbers: keys are exact (E2M1 x a power of two: the largest exponent of a key's blocks is taken out
and put back after the sum, so nothing leaves bfloat16); per-head products, then their weighting,
are rounded to q's type, the sum over heads is float32 and rounded once. The kernels by hand
(`cedar.ops.index_score.hopper`) take queries as the indexer makes them, with values that FP4_ROW
can hold: other bfloat16 values they round to E4M3, with a scale a head.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.aligned import aligned_rows
from cedar.ops.dependent_launch import dependent
from cedar.ops.devices import is_hopper
from cedar.ops.index_score import PagedKeys, Scan
from cedar.ops.index_score import reference as plain
from cedar.ops.packed import row_width
from cedar.ops.triton_unpack import key_tile, value_tile
from cedar.quant import FP4_ROW

try:  # Gluon is young and cannot be interpreted; without it the portable kernels do everything
    from cedar.ops.index_score import hopper
except Exception:
    hopper = None

__all__ = ["MOST_QUERIES", "index_pool", "index_scan", "unsupported"]

MOST_QUERIES = 8
_KEYS = 128
_PROGRAMS = 264  # two for each multiprocessor of an H200
_FAN = 8  # blocks of a group
# Of the kernels by hand: programs that are there at once, their registers, pieces of their rings.
_AT_ONCE = 528
_REGISTERS = 128
_STAGES = 2
_FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


@triton.jit
def _scores(
    q_even, q_odd, weight, raw, row_K, filled_K, STRIDE: tl.constexpr, J: tl.constexpr,
    PAIRS: tl.constexpr, Q: tl.constexpr, SLOTS: tl.constexpr, DTYPE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """float32 scores ``[K, Q]`` of the keys at ``row_K``."""
    precision: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    k_even, k_odd, top = key_tile(raw, row_K, filled_K, STRIDE, J, PAIRS, DTYPE, FAST)
    dot = tl.dot(k_even, tl.trans(q_even), input_precision=precision)
    dot = tl.dot(k_odd, tl.trans(q_odd), dot, input_precision=precision)
    dot = tl.maximum(dot.to(DTYPE).to(tl.float32), 0.0)
    dot = (dot * weight[None, :]).to(DTYPE).to(tl.float32)
    total = tl.sum(tl.reshape(dot, (row_K.shape[0], Q, SLOTS)), 2)
    return total * top[:, None]


@triton.jit
def _scan(
    q, w, raw, table, first, visible, out, best, wide, table_stride, q_stride, w_stride,
    out_stride, best_stride, wide_stride, page,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, J: tl.constexpr, PAIRS: tl.constexpr,
    STRIDE: tl.constexpr, KEYS: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr,
    FAN: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    start = tl.load(first + sequence).to(tl.int64)
    stop = tl.load(first + sequence + 1).to(tl.int64)
    # Columns of the product: heads of query 0, heads of query 1, ...
    column = tl.arange(0, Q * SLOTS)
    token, head = start + column // SLOTS, column % SLOTS
    known = (token < stop) & (head < HEADS)
    q_even, q_odd = value_tile(q, token * q_stride + head * J, known, J, PAIRS, DTYPE, FAST)
    weight = tl.load(w + token * w_stride + head, mask=known, other=0.0).to(tl.float32)
    query = start + tl.arange(0, Q)
    asked = query < stop
    seen = tl.load(visible + query, mask=asked, other=0)
    longest = tl.max(seen, 0)
    lane = tl.arange(0, KEYS)
    for tile in tl.range(split, tl.cdiv(longest, KEYS), tl.num_programs(0), num_stages=STAGES):
        entry = (tile * KEYS + lane).to(tl.int32)
        filled = entry < longest
        place = tl.load(table + sequence * table_stride + entry // page, mask=filled, other=0)
        row = place.to(tl.int64) * page + entry % page
        total = _scores(
            q_even, q_odd, weight, raw, row, filled, STRIDE, J, PAIRS, Q, SLOTS, DTYPE, FAST
        )
        hidden = entry[:, None] >= seen[None, :]
        score = tl.where(hidden, float("-inf"), total).to(DTYPE)
        target = out + query[None, :] * out_stride + entry[:, None]
        tl.store(target, score, mask=filled[:, None] & asked[None, :])
        if BLOCK > 0:
            most = tl.max(tl.reshape(score.to(tl.float32), (KEYS // BLOCK, BLOCK, Q)), 1)
            block = tile * (KEYS // BLOCK) + tl.arange(0, KEYS // BLOCK)
            target = best + query[None, :] * best_stride + block[:, None]
            inside = (block * BLOCK < longest)[:, None] & asked[None, :]
            tl.store(target, most.to(DTYPE), mask=inside)
            GROUPS: tl.constexpr = KEYS // (BLOCK * FAN)
            most = tl.max(tl.reshape(most, (GROUPS, FAN, Q)), 1)
            group = tile * GROUPS + tl.arange(0, GROUPS)
            target = wide + query[None, :] * wide_stride + group[:, None]
            inside = (group * (BLOCK * FAN) < longest)[:, None] & asked[None, :]
            tl.store(target, most.to(DTYPE), mask=inside)


@triton.jit
def _pool(
    q, w, raw, table, sequence, visible, blocks, out, best, table_stride, q_stride, w_stride,
    out_stride, blocks_stride, best_stride, page, count,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, J: tl.constexpr, PAIRS: tl.constexpr,
    STRIDE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, SLOTS)
    known = head < HEADS
    q_even, q_odd = value_tile(
        q, t * q_stride + head.to(tl.int64) * J, known, J, PAIRS, DTYPE, FAST
    )
    weight = tl.load(w + t * w_stride + head, mask=known, other=0.0).to(tl.float32)
    seen = tl.load(visible + t)
    pages = table + tl.load(sequence + t).to(tl.int64) * table_stride
    lane = tl.arange(0, KEYS)
    for tile in tl.range(split, tl.cdiv(count, KEYS), tl.num_programs(0), num_stages=STAGES):
        member = tile * KEYS + lane
        inside = member < count
        block = tl.load(blocks + t * blocks_stride + member // BLOCK, mask=inside, other=-1)
        entry = block.to(tl.int32) * BLOCK + member % BLOCK
        filled = (block >= 0) & (entry < seen)
        place = tl.load(pages + entry // page, mask=filled, other=0)
        row = place.to(tl.int64) * page + tl.where(filled, entry % page, 0)
        total = _scores(
            q_even, q_odd, weight, raw, row, filled, STRIDE, J, PAIRS, 1, SLOTS, DTYPE, FAST
        )
        score = tl.where(filled, tl.reshape(total, (KEYS,)), float("-inf")).to(DTYPE)
        tl.store(out + t * out_stride + member, score, mask=inside)
        most = tl.max(tl.reshape(score.to(tl.float32), (KEYS // BLOCK, BLOCK)), 1)
        place = tile * (KEYS // BLOCK) + tl.arange(0, KEYS // BLOCK)
        tl.store(best + t * best_stride + place, most.to(DTYPE), mask=place * BLOCK < count)


_COMPILED = isinstance(_scan, triton.JITFunction)  # or run by Triton's interpreter


def unsupported(q_TIJ: Tensor, keys: PagedKeys) -> str | None:
    """Why the kernels cannot take these inputs; None if they can."""
    width = q_TIJ.shape[2]
    if q_TIJ.dtype not in _FLOATS:
        return f"queries in {q_TIJ.dtype}"
    if width not in (32, 64, 128, 256):
        return f"index width {width}: expected 32, 64, 128 or 256"
    if row_width(keys.raw.shape[2], FP4_ROW) != width:
        return "keys of another width"
    if not keys.raw.is_contiguous() or q_TIJ.stride(1) != width or q_TIJ.stride(2) != 1:
        return "strided keys or queries"
    return None


def index_scan(
    q_TIJ: Tensor,
    w_TI: Tensor,
    keys: PagedKeys,
    visible_T: Tensor,
    *,
    capacity: int,
    queries: int,
    block: int = 0,
    by_hand: bool | None = None,
) -> Scan:
    """`cedar.ops.index_score.IndexScan`; more than `MOST_QUERIES` go to the reference.

    by_hand: use the kernel of `cedar.ops.index_score.hopper`; by default where it fits.
    """
    odd = block and _KEYS % (block * _FAN)
    if unsupported(q_TIJ, keys) is not None or queries > MOST_QUERIES or odd:
        return plain.index_scan(
            q_TIJ, w_TI, keys, visible_T, capacity=capacity, queries=queries, block=block
        )
    count, heads, width = q_TIJ.shape
    scores = aligned_rows(count, capacity, q_TIJ)
    best = wide = scores  # nothing is written to them without a block
    if block:
        best = aligned_rows(count, triton.cdiv(capacity, block), q_TIJ)
        wide = aligned_rows(count, triton.cdiv(capacity, block * _FAN), q_TIJ)
    found = Scan(scores, best, wide, block) if block else Scan(scores)
    if not count or not capacity:
        return found
    sequences = keys.table.shape[0]
    if by_hand if by_hand is not None else _fits_hopper(q_TIJ, keys, block):
        splits = min(triton.cdiv(capacity, 256), max(1, _AT_ONCE // sequences))
        hopper.scan[(splits, sequences)](
            q_TIJ, w_TI, keys.raw.view(torch.int32), keys.table, keys.first, visible_T, scores,
            best, wide, keys.table.stride(0), q_TIJ.stride(0), w_TI.stride(0), scores.stride(0),
            best.stride(0), wide.stride(0), Q=queries + queries % 2 if queries > 1 else 1,
            PAGE=keys.raw.shape[1], STAGES=_STAGES, PARTS=4 if queries == 1 else 2, num_warps=4,
            maxnreg=_REGISTERS, **dependent(q_TIJ.device, splits * sequences),
        )  # fmt: skip
        return found
    at_once = triton.next_power_of_2(max(queries, 1))
    padded = max(16 // at_once, triton.next_power_of_2(heads))
    splits = max(1, min(triton.cdiv(capacity, _KEYS), _PROGRAMS // sequences))
    _scan[(splits, sequences)](
        q_TIJ, w_TI, keys.raw, keys.table, keys.first, visible_T, scores, best, wide,
        keys.table.stride(0), q_TIJ.stride(0), w_TI.stride(0), scores.stride(0), best.stride(0),
        wide.stride(0), keys.raw.shape[1],
        HEADS=heads, SLOTS=padded, J=width, PAIRS=width // 2, STRIDE=keys.raw.shape[2],
        KEYS=_KEYS, Q=at_once, BLOCK=block, FAN=_FAN, DTYPE=_FLOATS[q_TIJ.dtype],
        FAST=_fast(q_TIJ, keys), STAGES=3, num_warps=8,
    )  # fmt: skip
    return found


def index_pool(
    q_TIJ: Tensor,
    w_TI: Tensor,
    keys: PagedKeys,
    sequence_T: Tensor,
    visible_T: Tensor,
    blocks_TM: Tensor,
    block: int,
    *,
    by_hand: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`cedar.ops.index_score.IndexPool`; ``by_hand`` as for `index_scan`."""
    if unsupported(q_TIJ, keys) is not None or _KEYS % block:
        return plain.index_pool(q_TIJ, w_TI, keys, sequence_T, visible_T, blocks_TM, block)
    count, heads, width = q_TIJ.shape
    members = blocks_TM.shape[1]
    size = members * block
    scores, best = (aligned_rows(count, n, q_TIJ) for n in (size, members))
    if not scores.numel():
        return scores, best
    if by_hand if by_hand is not None else _fits_hopper(q_TIJ, keys, block):
        splits = max(1, min(triton.cdiv(members, 8), _AT_ONCE // count))
        hopper.pool[(splits, count)](
            q_TIJ, w_TI, keys.raw.view(torch.int32), keys.table, sequence_T, visible_T, blocks_TM,
            scores, best, keys.table.stride(0), q_TIJ.stride(0), w_TI.stride(0), scores.stride(0),
            blocks_TM.stride(0), best.stride(0), members, PAGE=keys.raw.shape[1], STAGES=_STAGES,
            num_warps=4, maxnreg=_REGISTERS, **dependent(q_TIJ.device, splits * count),
        )  # fmt: skip
    else:
        padded = max(16, triton.next_power_of_2(heads))
        splits = max(1, min(triton.cdiv(size, _KEYS), _PROGRAMS // count))
        _pool[(splits, count)](
            q_TIJ, w_TI, keys.raw, keys.table, sequence_T, visible_T, blocks_TM, scores, best,
            keys.table.stride(0), q_TIJ.stride(0), w_TI.stride(0), scores.stride(0),
            blocks_TM.stride(0), best.stride(0), keys.raw.shape[1], size,
            HEADS=heads, SLOTS=padded, J=width, PAIRS=width // 2, STRIDE=keys.raw.shape[2],
            KEYS=_KEYS, BLOCK=block, DTYPE=_FLOATS[q_TIJ.dtype],
            FAST=_fast(q_TIJ, keys), STAGES=3, num_warps=8,
        )  # fmt: skip
    return scores, best


def _fits_hopper(q_TIJ: Tensor, keys: PagedKeys, block: int) -> bool:
    """Whether the hand-written kernels take these inputs: their one shape."""
    shape = q_TIJ.dtype is torch.bfloat16 and q_TIJ.shape[1:] == (32, 128)
    if not shape or block != _FAN or keys.raw.shape[1] % 8 or keys.raw.numel() >= 1 << 35:
        return False
    if hopper is None or not q_TIJ.is_cuda or keys.raw.data_ptr() % 16:
        return False
    return is_hopper(q_TIJ.device)


def _fast(q_TIJ: Tensor, keys: PagedKeys) -> bool:
    """Whether rows can be read as whole words and unpacked by packed instructions."""
    words = keys.raw.shape[2] % 4 == 0 and keys.raw.data_ptr() % 4 == 0
    return _COMPILED and words and q_TIJ.dtype is torch.bfloat16
