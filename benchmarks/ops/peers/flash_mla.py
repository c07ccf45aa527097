"""FlashMLA's Hopper kernels, as the wheel ``sgl-flash-mla`` keeps them.

Decode reads rows of 584 bytes (DeepSeek V4: 448 E4M3 codes with a scale for 64 channels, 64
values in bfloat16), a window cache and an extra cache; ours reads 528 and 288. Prefill reads
bfloat16 rows of one storage.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.ops.measure import relative_error
from benchmarks.ops.peers import Built, Columns, column
from torch import Tensor

from cedar.ops.packed import unpack_rows
from cedar.ops.sparse_attention import PackedRows, Rows
from cedar.ops.sparse_attention import reference as plain

__all__ = ["decode", "pack", "prefill"]

PAGE, CODES, WIDE, TILE, ROW = 64, 448, 64, 64, 584
FEW = 4  # queries that are compared with float64


def pack(values_RH: Tensor) -> tuple[Tensor, Tensor]:
    """Pages ``uint8 [R / 64, 64, 1, 584]`` of rows ``[R, 512]``, and what they then hold.

    A page is 64 x (448 E4M3 codes, 64 bfloat16 values), then 64 x 8 bytes of scales (E8M0, the
    last of the eight unused); pages lie a multiple of 576 bytes apart.
    """
    pages = len(values_RH) // PAGE
    raw = torch.zeros(pages, -(-PAGE * ROW // 576) * 576, dtype=torch.uint8).to(values_RH.device)
    data = raw[:, : PAGE * 576].unflatten(1, (PAGE, 576))
    scales = raw[:, PAGE * 576 : PAGE * ROW].unflatten(1, (PAGE, 8))
    tiles = values_RH[:, :CODES].float().unflatten(1, (-1, TILE))
    exponent = (tiles.abs().amax(2, keepdim=True) / 448).clamp_min(1e-4).log2().ceil()
    codes = (tiles * torch.exp2(-exponent)).to(torch.float8_e4m3fn)
    wide = values_RH[:, CODES:].bfloat16().contiguous()
    data[..., :CODES] = codes.flatten(1).view(torch.uint8).unflatten(0, (pages, PAGE))
    data[..., CODES:] = wide.view(torch.uint8).unflatten(0, (pages, PAGE))
    scales[..., :7] = (exponent + 127).byte().flatten(1).unflatten(0, (pages, PAGE))
    held = (codes.float() * torch.exp2(exponent)).flatten(1)
    return raw[:, : PAGE * ROW].unflatten(1, (PAGE, 1, ROW)), torch.cat((held, wide.float()), 1)


def decode(cases: Sequence[tuple[Tensor, tuple[PackedRows, ...], Tensor, float]]) -> Columns:
    """Column ``flash_mla``: cases of (q, (window, main), sink, scale), 64 heads of 512."""
    return column("flash_mla", partial(_decode, cases))


def prefill(case: tuple[Tensor, tuple[Rows, ...], Tensor, float]) -> Columns:
    """Column ``flash_mla``: one case of (q, sources of bfloat16 rows, sink, scale)."""
    return column("flash_mla", partial(_prefill, case))


def _decode(cases: Sequence[tuple[Tensor, tuple[PackedRows, ...], Tensor, float]]) -> Built:
    module = importlib.import_module("flash_mla")
    # All cases share a shape, so they may share the split of their work.
    schedule, _ = module.get_mla_metadata()
    storages = [pack(unpack_rows(s.raw_RB, s.format, torch.bfloat16)) for s in cases[0][1]]
    (window, _), (main, _) = storages

    def call(q: Tensor, near: Tensor, far: Tensor, sink: Tensor, scale: float) -> Any:
        return module.flash_mla_with_kvcache(
            q, window, None, None, 512, schedule, softmax_scale=scale, is_fp8_kvcache=True,
            indices=near, attn_sink=sink, extra_k_cache=main, extra_indices_in_kvcache=far,
            use_legacy=True,
        )[0]  # fmt: skip

    calls = []
    for q, sources, sink, scale in cases:
        near, far = (_indices(s.slots_TK) for s in sources)
        calls.append(partial(call, q.unsqueeze(1), near, far, sink, scale))
    q, sources, sink, scale = cases[0]
    held = tuple(_few(rows, s.slots_TK) for (_, rows), s in zip(storages, sources, strict=True))
    want = plain.sparse_attention(q[:FEW].double(), held, sink.double(), scale)
    slots = sum(s.slots_TK.shape[1] for s in sources)
    moved = len(q) * slots * ROW + 2 * q.nbytes
    return Built(calls, relative_error(calls[0]()[:FEW, 0], want), moved)


def _prefill(case: tuple[Tensor, tuple[Rows, ...], Tensor, float]) -> Built:
    q, sources, sink, scale = case
    if q.shape[1] != 64 or q.shape[2] != 512:
        raise ValueError("it takes 64 or 128 heads of 512")
    module: Any = importlib.import_module("flash_mla")
    rows = torch.cat([s.rows_RH for s in sources])
    slots, first = [], 0
    for s in sources:
        slots.append(torch.where(s.slots_TK >= 0, s.slots_TK + first, -1))
        first += len(s.rows_RH)
    indices = _indices(torch.cat(slots, 1))
    call = partial(
        module.flash_mla_sparse_fwd, q, rows.unsqueeze(1), indices, scale,
        d_v=512, attn_sink=sink, use_legacy=True, return_log2_lse=False,
    )  # fmt: skip
    held = (_few(rows, indices[:, 0]),)
    want = plain.sparse_attention(q[:FEW].double(), held, sink.double(), scale)
    moved = rows.nbytes + 2 * q.nbytes + indices.nbytes
    return Built([call], relative_error(call()[0][:FEW], want), moved)


def _indices(slots_TK: Tensor) -> Tensor:
    return slots_TK.int().unsqueeze(1).contiguous()


def _few(rows_RH: Tensor, slots_TK: Tensor) -> Rows:
    """The rows of the first queries alone, in float64."""
    slots = slots_TK[:FEW].long()
    own = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
    return Rows(rows_RH[slots.clamp_min(0).flatten()].double(), own.where(slots >= 0, -1))
