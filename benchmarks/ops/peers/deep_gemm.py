"""DeepGEMM's Hopper kernels, as the wheel ``sgl-deep-gemm`` keeps them; compiled on first use.

Index scores: keys of 132 bytes (128 E4M3 codes and a float32 scale) where ours have 68; all
logits are written in float32. Experts: grouped FP8 products with a scale for 128 x 128 weights,
twice our bytes. mHC: the product with the coefficient weights alone.
"""

import importlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from benchmarks.ops.measure import relative_error
from benchmarks.ops.peers import Built, Columns, column
from torch import Tensor

from cedar.ops.index_score import PagedKeys
from cedar.ops.packed import unpack_rows
from cedar.quant import FP4_ROW

__all__ = ["built_scan", "cast_rows", "experts", "index_scan", "pack_keys", "prenorm"]

Scan = tuple[Tensor, Tensor, PagedKeys, Tensor]
Scaled = tuple[Tensor, Tensor]
FEW = 2048  # keys that are compared with float64


def pack_keys(values_PEJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pages ``uint8 [P, E, 1, J + 4]`` of keys ``[P, E, J]``, and their codes and scales.

    A page holds E x J codes, then E float32 scales.
    """
    scale = values_PEJ.float().abs().amax(2, keepdim=True).clamp_min(1e-4) / 448
    codes = (values_PEJ.float() / scale).to(torch.float8_e4m3fn)
    parts = (codes.flatten(1).view(torch.uint8), scale.flatten(1).view(torch.uint8))
    pages = torch.cat(parts, 1).unflatten(1, (values_PEJ.shape[1], 1, -1))
    return pages, codes, scale.squeeze(2)


def cast_rows(x: Tensor, block: int = 128) -> Scaled:
    """E4M3 codes of ``[..., K]`` and a float32 scale for ``block`` of them."""
    tiles = x.float().unflatten(-1, (-1, block))
    scale = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    return (tiles / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def index_scan(calls: Sequence[Scan], entries: int) -> Columns:
    """Column ``deep_gemm``: every query of a sequence against all its ``entries`` keys.

    Its schedule is made before. Scores of all keys are written, blocks and selection are not.
    """
    return column("deep_gemm", partial(built_scan, calls, entries))


def prenorm(x_TK: Tensor, fn_CK: Tensor) -> Scaled:
    """Products ``[splits, T, C]`` in TF32 and sums of squares ``[splits, T]``, partial sums.

    So many pieces of the long sum that few tokens fill the device, too.
    """
    module = importlib.import_module("deep_gemm")
    splits = next(s for s in (16, 8, 4, 2, 1) if s == 1 or s * len(x_TK) <= 132 * 64)
    d = x_TK.new_empty(splits, len(x_TK), len(fn_CK), dtype=torch.float32)
    s = x_TK.new_empty(splits, len(x_TK), dtype=torch.float32)
    module.tf32_hc_prenorm_gemm(x_TK, fn_CK, d, s, num_splits=splits)
    return d, s


def experts(cases: Sequence[Tensor], num_experts: int, dim: int, inner: int) -> Columns:
    """Column ``deep_gemm_fp8``: cases of chosen experts ``[T, A]``.

    The two grouped products alone, on rows that are sorted, padded and quantised before: neither
    routing nor SwiGLU nor the second quantisation nor the sum over experts is in its time.
    """
    return column("deep_gemm_fp8", partial(_experts, cases, num_experts, dim, inner))


def built_scan(calls: Sequence[Scan], entries: int) -> Built:
    """Its calls give float32 scores ``[T, entries]``."""
    module = importlib.import_module("deep_gemm")
    raw = calls[0][2].raw
    pages, codes, scale = pack_keys(unpack_rows(raw, FP4_ROW, torch.bfloat16))
    sequences = len(calls[0][2].table)
    tokens = len(calls[0][0]) // sequences
    device = raw.device

    def paged(q: Tensor, w: Tensor, table: Tensor) -> Any:
        return module.fp8_paged_mqa_logits(
            q, pages, w, lengths, table, schedule, entries, clean_logits=False
        )

    # It takes one or two queries of a sequence: further ones count as sequences of their own.
    some = 2 if tokens % 2 == 0 else 1
    rows = sequences * tokens // some
    lengths = torch.full((rows, some), entries, dtype=torch.int32, device=device)
    schedule = module.get_paged_mqa_logits_metadata(lengths, 64, module.get_num_sms())
    run = []
    for q, w, keys, _ in calls:
        table = keys.table.repeat_interleave(tokens // some, 0).contiguous()
        codes_q = q.to(torch.float8_e4m3fn).unflatten(0, (rows, some))
        run.append(partial(paged, codes_q, w.float(), table))

    q, w, keys, _ = calls[0]
    place = keys.table[0, : FEW // raw.shape[1]].long()
    values = (codes[place].double() * scale[place].double().unsqueeze(2)).flatten(0, 1)
    dot = torch.matmul(q[:tokens].double(), values.T).relu()
    want = (dot * w[:tokens].double().unsqueeze(2)).sum(1)
    found = run[0]()
    moved = sequences * entries * (132 + 4 * tokens) + q.numel() + 4 * w.numel()
    return Built(run, relative_error(found[:tokens, : len(values)], want), moved)


@cache
def _weights(num_experts: int, rows: int, columns: int) -> Scaled:
    """Codes and a scale for 128 x 128 of them."""
    g = torch.Generator(device="cuda").manual_seed(rows)
    shape = (num_experts, rows, columns)
    codes = torch.randint(0, 256, shape, generator=g, device="cuda", dtype=torch.uint8)
    codes.bitwise_and_(0xBF)  # below 2, and never NaN
    shape = (num_experts, rows // 128, columns // 128)
    scale = torch.rand(shape, generator=g, device="cuda") * 2**-10
    return codes.view(torch.float8_e4m3fn), scale


def _experts(cases: Sequence[Tensor], num_experts: int, dim: int, inner: int) -> Built:
    module = importlib.import_module("deep_gemm")
    layout = importlib.import_module("deep_gemm.utils.layout")
    both = _weights(num_experts, 2 * inner, dim), _weights(num_experts, dim, inner)
    mean = cases[0].numel() / num_experts
    masked = mean < 64  # rows of an expert: a padded block each, or a block of so many

    def rows(count: torch.Size | tuple[int, ...], width: int) -> Scaled:
        codes, scale = cast_rows(torch.randn(*count, width, device="cuda"))
        return codes, layout.get_mn_major_tma_aligned_tensor(scale)

    def call(first: Scaled, second: Scaled, where: Tensor, most: int) -> tuple[Tensor, Tensor]:
        outs = []
        for a, b in zip((first, second), both, strict=True):
            d = torch.empty(*a[0].shape[:-1], b[0].shape[1], device="cuda", dtype=torch.bfloat16)
            if masked:
                module.fp8_m_grouped_gemm_nt_masked(a, b, d, where, most, disable_ue8m0_cast=True)
            else:
                module.m_grouped_fp8_gemm_nt_contiguous(a, b, d, where, disable_ue8m0_cast=True)
            outs.append(d)
        return outs[0], outs[1]

    calls, visited = [], 0.0
    for chosen in cases:
        count = torch.bincount(chosen.flatten(), minlength=num_experts)
        visited += float((count > 0).sum()) / len(cases)
        if masked:
            shape: tuple[int, ...] = (num_experts, -(-int(count.max()) // 64) * 64)
            where = count.int()
        else:
            where = torch.arange(num_experts, device="cuda", dtype=torch.int32)
            where = where.repeat_interleave((count + 127) // 128 * 128)
            shape = (len(where),)
        most = max(1, round(mean))
        calls.append(partial(call, rows(shape, dim), rows(shape, inner), where, most))

    (codes, scale), _, where, _ = calls[0].args
    out = calls[0]()[0]
    expert = int(where.argmax()) if masked else int(where[0])
    codes, scale, out = (v[expert] if masked else v for v in (codes, scale, out))
    left = _wide(codes[:1], scale[:1].repeat_interleave(128, 1))
    tile = both[0][1][expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = left @ _wide(both[0][0][expert], tile).T
    moved = visited * sum(codes.nbytes // num_experts for codes, _ in both)
    return Built(calls, relative_error(out[:1], want), moved)


def _wide(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.double() * scale.double()
