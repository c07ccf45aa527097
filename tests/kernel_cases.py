"""Inputs for kernel tests, the same for the interpreter and for a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from cedar.ops.index_score import PagedKeys
from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.sparse_attention import PackedRows, Rows, Source
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW, BlockFormat, fake_quantize, quantize

__all__ = ["IndexCase", "attention_case", "filled_slots", "index_case", "mhc_case", "pack"]


def pack(values: Tensor, fmt: BlockFormat) -> Tensor:
    """Rows as the packed cache holds them."""
    q = quantize(values, fmt)
    return torch.cat((q.codes.view(torch.uint8), q.scale.view(torch.uint8)), dim=-1)


def filled_slots(
    queries: int, width: int, rows: int, g: torch.Generator, *, empty: float = 0.2
) -> Tensor:
    """Random row numbers ``[T, K]`` with a share of empty slots; query 0 sees nothing at all."""
    slots = torch.randint(0, max(rows, 1), (queries, width), generator=g)
    slots[torch.rand(queries, width, generator=g) < empty] = -1
    if queries > 1:
        slots[0] = -1
    return slots


def attention_case(
    *,
    seed: int,
    queries: int,
    heads: int,
    width: int,
    kinds: tuple[str, ...],
    slots: tuple[int, ...],
    rows: int = 50,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    pitch: int = 0,
    size: float = 1.0,
) -> tuple[Tensor, tuple[Source, ...], Tensor, float]:
    """q, sources, sink and scale. kinds: "main", "window" (packed) or "values", for each source.

    pitch: bytes (or values) between the rows of a storage beyond their own, filled with poison.
    """
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(queries, heads, width, generator=g) * size).to(dtype)
    sources: list[Source] = []
    for kind, count in zip(kinds, slots, strict=True):
        spread = torch.exp2(torch.randint(-4, 1, (rows, 1), generator=g).float())
        values = torch.randn(rows, width, generator=g) * spread
        chosen = filled_slots(queries, count, rows, g)
        if kind == "values":
            held = torch.full((rows, width + pitch), torch.nan, dtype=dtype)
            held[:, :width] = values.to(dtype)
            sources.append(Rows(held[:, :width].to(device), chosen.to(device)))
            continue
        fmt = FP4_MAIN if kind == "main" else FP8_ROW
        raw = pack(values, fmt)
        held = torch.full((rows, raw.shape[1] + pitch), 0xFF, dtype=torch.uint8)
        held[:, : raw.shape[1]] = raw
        held = held.to(device)[:, : raw.shape[1]]
        sources.append(PackedRows(held, chosen.to(device, torch.int32), fmt))
    sink = torch.randn(heads, generator=g)
    return q.to(device), tuple(sources), sink.to(device), width**-0.5


class IndexCase(NamedTuple):
    """Inputs of the index-score operations; ``capacity`` columns hold every sequence."""

    q_TIJ: Tensor
    w_TI: Tensor
    keys: PagedKeys
    sequence_T: Tensor
    visible_T: Tensor
    capacity: int


def index_case(
    *,
    seed: int,
    visible: tuple[tuple[int, ...], ...],
    heads: int,
    width: int,
    page: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    scales: int = 3,
) -> IndexCase:
    """``visible``: for each sequence what each of its tokens sees, ascending.

    Pages lie in random order among others full of poison; scales of keys differ by 2^±scales.
    """
    g = torch.Generator().manual_seed(seed)
    tokens = [len(one) for one in visible]
    q = torch.randn(sum(tokens), heads, width, generator=g)
    q = fake_quantize(q, FP4_ROW).to(dtype)
    w = torch.randn(sum(tokens), heads, generator=g).to(dtype)
    most = max((max(one, default=0) for one in visible), default=0)
    per_sequence = max(-(-most // page), 1)
    pages = per_sequence * len(visible) + 3
    spread = torch.exp2(torch.randint(-scales, scales + 1, (pages, page, width // 32), generator=g))
    spread = spread.repeat_interleave(32, dim=2)
    raw = pack(torch.randn(pages, page, width, generator=g) * spread, FP4_ROW)
    order = torch.randperm(pages, generator=g)[: per_sequence * len(visible)]
    poison = torch.ones(pages, dtype=torch.bool)
    poison[order] = False
    raw[poison] = 0xFF
    first = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
    keys = PagedKeys(
        raw.to(device), order.view(len(visible), -1).to(device, torch.int32), first.to(device)
    )
    sequence = torch.repeat_interleave(torch.tensor(tokens))
    seen = torch.tensor([n for one in visible for n in one], dtype=torch.int64)
    return IndexCase(
        q.to(device), w.to(device), keys, sequence.to(device), seen.to(device),
        most + 5,
    )  # fmt: skip


def mhc_case(
    *,
    seed: int,
    count: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, tuple[Tensor, MhcMix], Tensor, MhcParameters, Tensor]:
    """Streams, update, input mix, parameters and norm weight of `cedar.ops.mhc.MhcStep`."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    x, y = normal(count, 4, width).to(dtype), normal(count, width).to(dtype)
    mix = MhcMix(normal(count, 4), normal(count, 4), normal(count, 4, 4))
    parameters = MhcParameters(
        normal(24, 4 * width) * (4 * width) ** -0.5, normal(24), 1 + 0.1 * normal(3)
    )
    return x, (y, mix), normal(count, 4), parameters, (1 + 0.1 * normal(width)).to(dtype)
