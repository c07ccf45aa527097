"""Index scores of many queries of one sequence: dot, ReLU, head weights and head sum in one pass.

A program keeps a tile of keys and goes over the heads of a tile of queries; each head's products
are rounded and weighted in registers and added there, so nothing but the scores is written:
per-head products ``[T, heads, S]`` never exist. Tiles that no query of theirs sees are not
computed. Maxima of blocks, and of groups of blocks, can be left beside the scores, from which
`cedar.ops.select.triton.select_scan` selects.

Shapes: q ``[T, I, J]``, w ``[T, I]``, keys ``[S, J]``, scores ``[T, S]``. FLOP: 2 x I x J = 8192 a
visible pair at the released sizes. Bytes: ``T x S x 2`` for bfloat16 scores and ``S x J x 2`` for
keys, which further tiles of queries find in the L2 cache. Bound by the tensor cores: 48 thousand
pairs a microsecond would be half of what they give.

Numbers: per-head products, then their weighting, are rounded to q's type, the sum over heads is
float32 and rounded once. A score does not depend on what other queries or keys there are.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.ops.aligned import aligned_rows
from cedar.ops.devices import is_hopper
from cedar.ops.index_score import Scan
from cedar.ops.index_score import reference as plain

try:  # Gluon is young and cannot be interpreted; without it the portable kernel does everything
    from cedar.ops.index_score import prefill_hopper as hopper
except Exception:
    hopper = None

__all__ = ["index_prefill", "unsupported"]

_FAN = 8  # blocks of a group
_KEYS = 128  # of a tile
_PROCESSORS = 132  # of an H200
_START = 256  # keys
_FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


@triton.jit
def _tile(
    q, w, keys, visible, out, best, wide, tokens, entries, q_stride, w_stride, key_stride,
    out_stride, best_stride, wide_stride,
    HEADS: tl.constexpr, J: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, FAN: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores of one tile of queries and keys."""
    precision: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    token = tl.program_id(1).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    entry = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    channel = tl.arange(0, J)
    asked = token < tokens
    seen = tl.load(visible + token, mask=asked, other=0).to(tl.int32)
    total = tl.zeros((QUERIES, KEYS), tl.float32)
    if tl.program_id(0) * KEYS < tl.max(seen, 0):
        column = keys + entry.to(tl.int64) * key_stride
        held = tl.load(
            column[None, :] + channel[:, None], mask=(entry < entries)[None, :], other=0.0
        )
        row = q + token * q_stride
        for head in tl.range(0, HEADS, num_stages=STAGES):
            left = tl.load(
                row[:, None] + (head * J + channel)[None, :], mask=asked[:, None], other=0.0
            )
            weight = tl.load(w + token * w_stride + head, mask=asked, other=0.0).to(tl.float32)
            dot = tl.dot(left, held, input_precision=precision)
            dot = tl.maximum(dot.to(DTYPE).to(tl.float32), 0.0)
            total += (dot * weight[:, None]).to(DTYPE).to(tl.float32)
    score = tl.where(entry[None, :] < seen[:, None], total, float("-inf")).to(DTYPE)
    place = out + token[:, None] * out_stride + entry[None, :]
    tl.store(place, score, mask=asked[:, None] & (entry < entries)[None, :])
    if BLOCK > 0:
        BLOCKS: tl.constexpr = KEYS // BLOCK
        most = tl.max(tl.reshape(score.to(tl.float32), (QUERIES, BLOCKS, BLOCK)), 2)
        block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        place = best + token[:, None] * best_stride + block[None, :]
        inside = asked[:, None] & (block * BLOCK < entries)[None, :]
        tl.store(place, most.to(DTYPE), mask=inside)
        GROUPS: tl.constexpr = BLOCKS // FAN
        most = tl.max(tl.reshape(most, (QUERIES, GROUPS, FAN)), 2)
        group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
        place = wide + token[:, None] * wide_stride + group[None, :]
        inside = asked[:, None] & (group * (BLOCK * FAN) < entries)[None, :]
        tl.store(place, most.to(DTYPE), mask=inside)


def unsupported(q_TIJ: Tensor, w_TI: Tensor, keys_SJ: Tensor) -> str | None:
    """Why the kernels cannot take these inputs; None if they can."""
    width = q_TIJ.shape[2]
    if q_TIJ.dtype not in _FLOATS or keys_SJ.dtype != q_TIJ.dtype or w_TI.dtype != q_TIJ.dtype:
        return f"queries in {q_TIJ.dtype}, weights in {w_TI.dtype}, keys in {keys_SJ.dtype}"
    if width not in (16, 32, 64, 128, 256):
        return f"index width {width}: expected 16, 32, 64, 128 or 256"
    if q_TIJ.stride(1) != width or q_TIJ.stride(2) != 1:
        return "strided queries"
    if w_TI.stride(1) != 1 or keys_SJ.stride(1) != 1:
        return "strided weights or keys"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_TIJ, w_TI, keys_SJ)):
        return "a gradient is wanted"
    return None


def index_prefill(
    q_TIJ: Tensor,
    w_TI: Tensor,
    keys_SJ: Tensor,
    visible_T: Tensor,
    *,
    block: int = 0,
    by_hand: bool | None = None,
) -> Scan:
    """`cedar.ops.index_score.IndexPrefill`.

    by_hand: use the kernel of `cedar.ops.index_score.prefill_hopper`; by default where it fits.
    """
    odd = block and _KEYS % (block * _FAN)
    if unsupported(q_TIJ, w_TI, keys_SJ) is not None or odd:
        return plain.index_prefill(q_TIJ, w_TI, keys_SJ, visible_T, block=block)
    (tokens, heads, width), entries = q_TIJ.shape, len(keys_SJ)
    scores = aligned_rows(tokens, entries, q_TIJ)
    best = wide = scores  # nothing is written to them without a block
    if block:
        best = aligned_rows(tokens, triton.cdiv(entries, block), q_TIJ)
        wide = aligned_rows(tokens, triton.cdiv(entries, block * _FAN), q_TIJ)
    found = Scan(scores, best, wide, block) if block else Scan(scores)
    if not tokens or not entries:
        return found
    strides = (
        q_TIJ.stride(0), w_TI.stride(0), keys_SJ.stride(0), scores.stride(0), best.stride(0),
        wide.stride(0),
    )  # fmt: skip
    if by_hand if by_hand is not None else _fits_hopper(q_TIJ, keys_SJ, block):
        groups = triton.cdiv(tokens, hopper.QUERIES.value)
        hopper.prefill[(_splits(groups, entries), groups)](
            q_TIJ, w_TI, keys_SJ, visible_T, scores, best, wide, tokens, entries, *strides,
            BLOCK=block, num_warps=hopper.WARPS.value,
        )  # fmt: skip
        return found
    narrow = q_TIJ.dtype is torch.float32 or width > 128
    queries = 32 if narrow else 64
    _tile[(triton.cdiv(entries, _KEYS), triton.cdiv(tokens, queries))](
        q_TIJ, w_TI, keys_SJ, visible_T, scores, best, wide, tokens, entries, *strides,
        HEADS=heads, J=width, QUERIES=queries, KEYS=_KEYS, BLOCK=block, FAN=_FAN,
        DTYPE=_FLOATS[q_TIJ.dtype], STAGES=1 if narrow else 3, num_warps=4,
    )  # fmt: skip
    return found


def _splits(groups: int, entries: int) -> int:
    """Programs that share the keys of a group of queries: those that are done first.

    A multiprocessor runs one program at a time; getting started costs as much as some keys.
    """
    chunk = hopper.CHUNK.value
    chunks = triton.cdiv(entries, chunk)

    def cost(splits: int) -> int:
        rounds = triton.cdiv(groups * splits, _PROCESSORS)
        return rounds * (triton.cdiv(chunks, splits) * chunk + _START)

    fillings = (_PROCESSORS * rounds // groups for rounds in range(1, 5))
    return min((max(1, min(n, chunks)) for n in fillings), key=cost)


def _fits_hopper(q_TIJ: Tensor, keys_SJ: Tensor, block: int) -> bool:
    """Whether the hand-written kernel takes these inputs: its one shape."""
    shape = q_TIJ.dtype is torch.bfloat16 and q_TIJ.shape[1:] == (32, 128)
    if not shape or block not in (0, 8) or hopper is None or not q_TIJ.is_cuda:
        return False
    if any(x.stride(0) % 8 or x.data_ptr() % 16 for x in (q_TIJ, keys_SJ)):
        return False
    return is_hopper(q_TIJ.device)
