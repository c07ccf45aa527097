"""Every tensor of a checkpoint: official name, type and shape, and our name for it.

One list of `Weight` follows from the configuration; the names in files, the names of model
parameters, the inventory and the parameter counts are all derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from cedar.config import LayerPlan, Mode, ModelConfig, plan_layers
from cedar.errors import CheckpointError
from cedar.quant import FP4_ROW, FP8_BLOCK, FP8_ROW, BlockFormat, Element

Storage = Literal["fp8fp4", "bf16"]

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of one element, by the type names that safetensors headers use."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type (as written in a safetensors header) and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


class Kind(StrEnum):
    """How a weight is stored.

    ``DENSE``: FP8 in 32x32 blocks, or BF16. ``EXPERT``: FP4 per row of 32, or BF16. ``TABLE``:
    FP8 per row of 32 in both storage forms. ``BF16`` and ``F32``: that type, always.
    """

    DENSE = "dense"
    EXPERT = "expert"
    TABLE = "table"
    BF16 = "bf16"
    F32 = "f32"

    def block_format(self, storage: Storage) -> BlockFormat | None:
        """The block format of the stored weight, ``None`` if it is stored plainly."""
        if self is Kind.TABLE:
            return FP8_ROW
        if storage == "bf16":
            return None
        return {Kind.DENSE: FP8_BLOCK, Kind.EXPERT: FP4_ROW}.get(self)


class Part(StrEnum):
    """What a weight belongs to, for counting."""

    BACKBONE = "backbone"
    ENGRAM = "engram"
    DRAFT = "draft"
    VISION = "vision"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One model parameter.

    ``name`` is ours, equal to the official one but for routed experts, which we stack: there
    ``shape`` starts with the number of experts and the files hold one tensor per expert.
    ``layer`` counts backbone layers, then draft blocks; ``None`` outside of them.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    part: Part
    layer: int | None = None

    @property
    def numel(self) -> int:
        """Number of parameters; a packed FP4 byte holds two."""
        return math.prod(self.shape)

    @property
    def scale_name(self) -> str:
        """Our name of the scales, for a weight that has a block format in some storage form."""
        return self.name.removesuffix("weight") + "scale"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one official tensor, before packing."""
        return self.shape[1:] if self.kind is Kind.EXPERT else self.shape

    def official_names(self, name: str) -> tuple[str, ...]:
        """The names in the files behind ``name`` (our weight or scale name)."""
        if self.kind is not Kind.EXPERT:
            return (name,)
        head, _, tail = name.partition(".experts.")
        return tuple(f"{head}.experts.{expert}.{tail}" for expert in range(self.shape[0]))

    def specs(self, storage: Storage) -> tuple[TensorSpec, TensorSpec | None]:
        """What the files hold: the weight and, if it is quantised, its scales."""
        shape, fmt = self.stored_shape, self.kind.block_format(storage)
        if fmt is None:
            return TensorSpec("F32" if self.kind is Kind.F32 else "BF16", shape), None
        rows, cols = shape
        scale = TensorSpec("F8_E8M0", (-(-rows // fmt.rows), -(-cols // fmt.cols)))
        if fmt.element is Element.E2M1:
            return TensorSpec("I8", (rows, cols // 2)), scale
        return TensorSpec("F8_E4M3", shape), scale


@dataclass(frozen=True, slots=True)
class Entry:
    """One model tensor and the official tensors that make it up, stacked on dimension 0."""

    module_name: str
    official_names: tuple[str, ...]


def as_storage(storage: str) -> Storage:
    """Check the name of a storage form."""
    for known in get_args(Storage):
        if storage == known:
            form: Storage = known
            return form
    raise CheckpointError(f'storage is "{storage}"; expected "fp8fp4" or "bf16"')


def storage_of(names: Iterable[str]) -> Storage:
    """The storage form that a set of official names belongs to.

    Anything but an Engram table has scales only in ``"fp8fp4"``.
    """
    scales = (name for name in names if name.endswith(".scale"))
    quantised = any(not name.endswith(".engram.embed.scale") for name in scales)
    return "fp8fp4" if quantised else "bf16"


def expected_tensors(config: ModelConfig, storage: str) -> dict[str, TensorSpec]:
    """Official name, type and shape of every tensor of a checkpoint, in file order."""
    form = as_storage(storage)
    expected: dict[str, TensorSpec] = {}
    for weight in weights(config):
        spec, scale = weight.specs(form)
        expected.update(dict.fromkeys(weight.official_names(weight.name), spec))
        if scale is not None:
            expected.update(dict.fromkeys(weight.official_names(weight.scale_name), scale))
    return expected


def parameter_map(config: ModelConfig, storage: str) -> tuple[Entry, ...]:
    """Our names and the official names behind them; every official name occurs once."""
    form = as_storage(storage)
    entries = []
    for weight in weights(config):
        entries.append(Entry(weight.name, weight.official_names(weight.name)))
        if weight.kind.block_format(form) is not None:
            entries.append(Entry(weight.scale_name, weight.official_names(weight.scale_name)))
    return tuple(entries)


def accepted_shapes(config: ModelConfig, name: str, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The shapes that a file may give a tensor whose expected shape is ``shape``.

    The patch embedding occurs as a matrix and as a convolution kernel, with the same bytes.
    """
    if name == "vision.patch_embed.proj.weight":
        patch = config.vision_patch_size
        return {shape, (config.vision_dim, 3, patch, patch)}
    return {shape}


def optional_tensors(config: ModelConfig) -> frozenset[str]:
    """Official names that a file may lack, because nothing can read them.

    Without an image tower no token is inside an image, so the routing bias for image tokens
    has no effect.
    """
    if config.has_vision:
        return frozenset()
    return frozenset(w.name for w in weights(config) if w.name.endswith(".bias_vl"))


def weights(config: ModelConfig) -> Iterator[Weight]:
    """Every parameter of the model, in the order of the published files."""
    if config.has_vision:
        yield from _vision(config)
    backbone, bf16 = Part.BACKBONE, Kind.BF16
    table = (config.vocab_size, config.dim)
    yield Weight(name="embed.weight", shape=table, kind=bf16, part=backbone)
    plan = plan_layers(config)
    for layer in plan[: config.n_layers]:
        prefix = f"layers.{layer.index}"
        yield from _block(config, prefix, layer.index, backbone, config.n_routed_experts)
        yield from _compressed(config, layer)
    yield Weight(name="norm.weight", shape=(config.dim,), kind=bf16, part=backbone)
    yield Weight(name="head.weight", shape=table, kind=bf16, part=backbone)
    for stage, layer in enumerate(plan[config.n_layers :]):
        prefix = f"mtp.{stage}"
        yield from _block(config, prefix, layer.index, Part.DRAFT, config.dspark_n_routed_experts)
        yield from _draft_ends(config, stage, layer.index)
    for position, index in enumerate(config.engram_layer_ids):
        yield from _engram(config, index, config.engram_num_embeddings[position])


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the weights of one layer with a common prefix."""

    prefix: str
    part: Part
    layer: int | None

    def __call__(self, name: str, kind: Kind, *shape: int) -> Weight:
        full = f"{self.prefix}.{name}"
        return Weight(name=full, shape=shape, kind=kind, part=self.part, layer=self.layer)


def _block(
    config: ModelConfig, prefix: str, index: int, part: Part, experts: int
) -> Iterator[Weight]:
    make = _Maker(prefix, part, index)
    dim, width, heads = config.dim, config.moe_inter_dim, config.n_heads * config.head_dim
    low_rank = config.o_groups * config.o_lora_rank
    dense, bf16, f32, expert = Kind.DENSE, Kind.BF16, Kind.F32, Kind.EXPERT
    yield make("attn_norm.weight", bf16, dim)
    yield make("attn.wq_a.weight", dense, config.q_lora_rank, dim)
    yield make("attn.q_norm.weight", bf16, config.q_lora_rank)
    yield make("attn.wq_b.weight", dense, heads, config.q_lora_rank)
    yield make("attn.wkv.weight", dense, config.head_dim, dim)
    yield make("attn.kv_norm.weight", bf16, config.head_dim)
    yield make("attn.attn_sink", f32, config.n_heads)
    yield make("attn.wo_a.weight", dense, low_rank, heads // config.o_groups)
    yield make("attn.wo_b.weight", dense, dim, low_rank)
    mixes = (2 + config.hc_mult) * config.hc_mult
    for sublayer in ("attn", "ffn"):
        yield make(f"hc_{sublayer}_fn", f32, mixes, config.hc_mult * dim)
        yield make(f"hc_{sublayer}_base", f32, mixes)
        yield make(f"hc_{sublayer}_scale", f32, 3)
    yield make("ffn_norm.weight", bf16, dim)
    yield make("ffn.gate.weight", bf16, experts, dim)
    yield make("ffn.gate.bias", f32, experts)
    yield make("ffn.gate.bias_vl", f32, experts)
    for matrix, shape in (("w1", (width, dim)), ("w2", (dim, width)), ("w3", (width, dim))):
        yield make(f"ffn.experts.{matrix}.weight", expert, experts, *shape)
        yield make(f"ffn.shared_experts.{matrix}.weight", dense, *shape)


def _compressed(config: ModelConfig, layer: LayerPlan) -> Iterator[Weight]:
    make = _Maker(f"layers.{layer.index}.attn", Part.BACKBONE, layer.index)
    if layer.mode is Mode.FULL:
        yield make("compressor.wkv.weight", Kind.BF16, config.head_dim, config.dim)
        yield make("compressor.norm.weight", Kind.BF16, config.head_dim)
        if layer.compress_ratio > 1:  # a group of one needs no gate
            yield make("compressor.wgate.weight", Kind.BF16, config.head_dim, config.dim)
        yield make("indexer.wk.weight", Kind.BF16, config.index_head_dim, config.head_dim)
        yield make("indexer.k_norm.weight", Kind.BF16, config.index_head_dim)
    if layer.has_indexer:
        queries = config.index_n_heads * config.index_head_dim
        yield make("indexer.wq_b.weight", Kind.DENSE, queries, config.q_lora_rank)
        yield make("indexer.weights_proj.weight", Kind.BF16, config.index_n_heads, config.dim)


def _engram(config: ModelConfig, index: int, rows: int) -> Iterator[Weight]:
    make = _Maker(f"layers.{index}.engram", Part.ENGRAM, index)
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
    yield make("embed.weight", Kind.TABLE, rows, config.engram_head_dim)
    yield make("wkv.weight", Kind.DENSE, (config.hc_mult + 1) * config.dim, columns)
    yield make("q_weight", Kind.BF16, config.hc_mult, config.dim)
    yield make("k_weight", Kind.BF16, config.hc_mult, config.dim)


def _draft_ends(config: ModelConfig, stage: int, index: int) -> Iterator[Weight]:
    make = _Maker(f"mtp.{stage}", Part.DRAFT, index)
    dim, rank = config.dim, config.dspark_markov_rank
    if stage == 0:
        taps = len(config.dspark_target_layer_ids)
        yield make("main_proj.weight", Kind.DENSE, dim, taps * dim)
        yield make("main_norm.weight", Kind.BF16, dim)
    if stage == config.n_mtp_layers - 1:
        yield make("norm.weight", Kind.BF16, dim)
        yield make("markov_head.embed.weight", Kind.BF16, config.vocab_size, rank)
        yield make("markov_head.head.weight", Kind.BF16, config.vocab_size, rank)
        yield make("confidence_head.proj.weight", Kind.BF16, 1, dim + rank)


def _vision(config: ModelConfig) -> Iterator[Weight]:
    width, inner, bf16 = config.vision_dim, config.vision_inter_dim, Kind.BF16
    make = _Maker("vision", Part.VISION, None)
    yield make("patch_embed.proj.weight", bf16, width, 3 * config.vision_patch_size**2)
    yield make("patch_embed.proj.bias", bf16, width)
    for block in range(config.vision_n_layers):
        part = _Maker(f"vision.blocks.{block}", Part.VISION, None)
        yield part("norm1.weight", bf16, width)
        yield part("attn.wqkv.weight", bf16, 3 * width, width)
        yield part("attn.wqkv.bias", bf16, 3 * width)
        yield part("attn.wo.weight", bf16, width, width)
        yield part("attn.wo.bias", bf16, width)
        yield part("norm2.weight", bf16, width)
        yield part("mlp.w1.weight", bf16, 2 * inner, width)
        yield part("mlp.w2.weight", bf16, width, inner)
    yield make("norm.weight", bf16, width)
    aligner = _Maker("aligner", Part.VISION, None)
    dim = config.dim
    yield aligner("w1.weight", bf16, dim, width * config.vision_downsample_ratio**2)
    yield aligner("w1.bias", bf16, dim)
    yield aligner("w2.weight", bf16, dim, dim)
    yield aligner("w2.bias", bf16, dim)
    for delimiter in ("image_start", "image_end", "image_newline"):
        yield Weight(name=delimiter, shape=(dim,), kind=bf16, part=Part.VISION)
