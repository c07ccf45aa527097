"""The released model with random weights on one card, and a cache full of random rows.

Experts do not fit (297 GB), so layers share a few sets of them: the L2 cache is 60 MB, so memory
traffic is that of the whole model. Engram tables (101 GB each) are cut to so many rows, by which
look-ups are folded; a row is read wherever it lies.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from cedar.cache.layout import KVLayout
from cedar.cache.paged import PagedKV
from cedar.config import ModelConfig
from cedar.config.presets import released
from cedar.memory.pinned import PinnedTable
from cedar.model import Model, WeightStorage
from cedar.ops import Ops
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW

__all__ = ["EXPERT_SETS", "TABLE_ROWS", "FoldedTable", "full_cache", "synthetic_model"]

EXPERT_SETS = 4
TABLE_ROWS = 1 << 22
_CODE_SPREAD = 2.9  # of uniformly drawn E2M1 codes


class FoldedTable:
    """Implements `cedar.model.engram.EngramTable` by a smaller table in host memory."""

    def __init__(self, table: PinnedTable) -> None:
        self._table = table
        self._folded: Tensor | None = None

    def prefetch(self, ids: Tensor) -> None:
        self._folded = ids % TABLE_ROWS
        self._table.prefetch(self._folded)

    def rows(self, ids: Tensor) -> Tensor:
        folded = ids % TABLE_ROWS if self._folded is None else self._folded
        self._folded = None
        return self._table.rows(folded)


def step_config() -> ModelConfig:
    """The released configuration without draft blocks and vision tower."""
    return replace(
        released(),
        n_mtp_layers=0,
        dspark_target_layer_ids=(),
        vision_n_layers=0,
        compress_ratios=released().compress_ratios[:40],
    )


def synthetic_model(ops: Ops, seed: int = 0) -> Model:
    """On the device ``cuda``, packed weights."""
    config = step_config()
    torch.manual_seed(seed)
    tables = {layer: FoldedTable(_table(config, ops)) for layer in config.engram_layer_ids}
    classes = config.engram_compressed_vocab_size
    model = Model(
        config,
        ops=ops,
        storage=WeightStorage.PACKED,
        dtype=torch.bfloat16,
        device="meta",
        token_map=torch.arange(config.vocab_size) % classes,
        engram_tables=tables,
    )
    shared: dict[str, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        key = name
        if ".ffn.experts." in name:
            layer = int(name.split(".")[1])
            key = name.replace(f"layers.{layer}.", f"set.{layer % EXPERT_SETS}.")
        if key not in shared:
            shared[key] = nn.Parameter(_drawn(name, parameter), requires_grad=False)
        setattr(model.get_submodule(path), leaf, shared[key])
    for name, buffer in list(model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, buffer.to("cuda"))
    return model.eval()


def _drawn(name: str, like: Tensor) -> Tensor:
    shape, place = like.shape, "cuda"
    if name.endswith(".scale"):
        packed_fp4 = ".experts." in name
        width = shape[-1] * 32
        exponent = round(math.log2(width**-0.5 / (_CODE_SPREAD if packed_fp4 else 1.0)))
        return torch.randint(126 + exponent, 128 + exponent, shape, dtype=like.dtype, device=place)
    if like.dtype is torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=place)
    if like.dtype is torch.float8_e4m3fn:
        return torch.randn(shape, device=place, dtype=torch.bfloat16).to(like.dtype)
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape, dtype=like.dtype, device=place)
    if name.endswith((".bias", ".bias_vl", "attn_sink", "_base", "_scale")):
        return torch.randn(shape, dtype=like.dtype, device=place) * 0.1
    return torch.randn(shape, dtype=like.dtype, device=place) * shape[-1] ** -0.5


def _table(config: ModelConfig, ops: Ops) -> PinnedTable:
    width = config.engram_head_dim
    table = PinnedTable((TABLE_ROWS, width), ops.engram_rows, "cuda")
    codes = torch.randn(4096, width).to(torch.float8_e4m3fn)
    scale = torch.full((4096, width // 32), 120, dtype=torch.uint8)
    for start in range(0, TABLE_ROWS, len(codes)):
        table.fill(start, codes, scale)
    return table


def full_cache(model: Model, sequences: int, tokens: int) -> PagedKV:
    """A store whose sequences hold ``tokens`` random tokens each, in pages in random order."""
    layout = KVLayout.from_config(model.config)
    pages = layout.pages_for(tokens)
    store = PagedKV(
        model.config,
        layout,
        num_pages=sequences * pages,
        num_slots=sequences,
        device="cuda",
        dtype=torch.bfloat16,
        in_place=True,
    )
    arrays = store.arrays
    # Scales of latents of size one: E4M3 around 1 / 6, E8M0 around 2^-2 and 2^-7.
    for kinds, fmt, low, high in (
        (arrays.entries, FP4_MAIN, 0x20, 0x28),
        (arrays.keys, FP4_ROW, 124, 126),
        (arrays.rings, FP8_ROW, 119, 121),
    ):
        for raw in kinds.values():
            scales = raw.shape[-1] // (fmt.cols // (1 if fmt is FP8_ROW else 2) + 1)
            codes = raw[..., : raw.shape[-1] - scales]
            # Code 0x7f of E4M3 is no number.
            codes.random_(0, 0x7F if fmt is FP8_ROW else 256)
            raw[..., raw.shape[-1] - scales :].random_(low, high)
    for residue in arrays.residues.values():
        residue.normal_()
    arrays.history.random_(0, model.config.engram_compressed_vocab_size)
    order = torch.randperm(sequences * pages).view(sequences, pages)
    for slot in range(sequences):
        store.open(slot, order[slot].tolist())
    store.write_tables(range(sequences))
    return store
