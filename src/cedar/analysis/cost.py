"""What a model weighs and what a token costs, from its configuration and plan alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cedar.checkpoint import Kind, Part, Weight, expected_tensors, weights
from cedar.config import Half, LayerPlan, Mode, ModelConfig, plan_layers
from cedar.quant import FP4_MAIN, FP4_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Numbers of parameters; scales are not counted and a packed FP4 byte counts as two.

    ``backbone`` has embedding and head but nothing of Engram; ``engram`` is the tables, and
    ``engram_projections`` their key/value projections and gates. The ``active_`` counts are
    what one token is multiplied with, draft head and image tower aside: table look-ups
    (embedding, Engram rows) are not multiplications. A decoded token passes all layers and the
    head; a prompt token passes the layers up to the last one that writes main KV, and of that
    one only the main KV and index-key projections.
    """

    backbone: int
    engram: int
    engram_projections: int
    draft: int
    vision: int
    active_prefill: int
    active_decode: int
    prefill_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceBytes:
    """Cache bytes per token that one main KV source writes."""

    layer: int
    half: Half
    compress_ratio: int
    main_entry: int
    index_entry: int

    @property
    def main(self) -> Fraction:
        """Main KV bytes per token: one entry per ``compress_ratio`` tokens."""
        return Fraction(self.main_entry, self.compress_ratio)

    @property
    def index(self) -> Fraction:
        """Index-key bytes per token."""
        return Fraction(self.index_entry, self.compress_ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheBytes:
    """Cache bytes that every further token of a context takes, by the layer that writes them."""

    sources: tuple[SourceBytes, ...]

    @property
    def main(self) -> Fraction:
        """Main KV bytes per token."""
        return sum((s.main for s in self.sources), Fraction(0))

    @property
    def index(self) -> Fraction:
        """Index-key bytes per token."""
        return sum((s.index for s in self.sources), Fraction(0))

    @property
    def total(self) -> Fraction:
        """All bytes per token."""
        return self.main + self.index

    def of_half(self, half: Half) -> Fraction:
        """Bytes per token of the sources in one half."""
        mine = (s.main + s.index for s in self.sources if s.half is half)
        return sum(mine, Fraction(0))

    def to_dict(self) -> dict[str, int | float]:
        """Bytes per token; whole numbers where they are whole."""
        return {
            "total": _number(self.total),
            "main": _number(self.main),
            "index": _number(self.index),
            "encoder": _number(self.of_half(Half.ENCODER)),
            "decoder": _number(self.of_half(Half.DECODER)),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeTotal:
    """Tensors of one stored type and their bytes."""

    tensors: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What a checkpoint holds: number of tensors, payload bytes, and both per stored type."""

    tensors: int
    bytes: int
    by_dtype: dict[str, TypeTotal]

    def to_dict(self) -> dict[str, Any]:
        """The inventory as plain data."""
        by_dtype = {k: {"tensors": v.tensors, "bytes": v.bytes} for k, v in self.by_dtype.items()}
        return {"tensors": self.tensors, "bytes": self.bytes, "by_dtype": by_dtype}


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Parameter counts of a model, in all and active per token."""
    totals: dict[Part, int] = defaultdict(int)
    tables = active_decode = active_prefill = 0
    plan = plan_layers(config)
    stop = prefill_layers(config, plan)
    for weight in weights(config):
        totals[weight.part] += weight.numel
        if weight.kind is Kind.TABLE:
            tables += weight.numel
            continue
        if weight.part not in (Part.BACKBONE, Part.ENGRAM) or weight.name == "embed.weight":
            continue
        active = _active(weight, config)
        active_decode += active
        if weight.layer is not None and (
            weight.layer < stop or _is_kv_projection(weight, plan, stop)
        ):
            active_prefill += active
    return ParameterCounts(
        backbone=totals[Part.BACKBONE],
        engram=tables,
        engram_projections=totals[Part.ENGRAM] - tables,
        draft=totals[Part.DRAFT],
        vision=totals[Part.VISION],
        active_prefill=active_prefill,
        active_decode=active_decode,
        prefill_layers=stop,
    )


def prefill_layers(config: ModelConfig, plan: tuple[LayerPlan, ...]) -> int:
    """How many whole layers a prompt token passes that nobody decodes from.

    The encoder, or as far as the last layer that writes main KV, if that is in the decoder: of
    this one only the projections to main KV and index keys are needed.
    """
    writers = [layer.index for layer in plan if layer.mode is Mode.FULL]
    return max(config.n_layers // 2, *writers) if writers else config.n_layers // 2


def cache_bytes(config: ModelConfig) -> CacheBytes:
    """Cache bytes per token and the sources they come from."""
    main = FP4_MAIN.bytes_per_row(config.head_dim)
    return CacheBytes(
        sources=tuple(
            SourceBytes(
                layer=layer.index,
                half=layer.half,
                compress_ratio=layer.compress_ratio,
                main_entry=main,
                index_entry=FP4_ROW.bytes_per_row(config.index_head_dim),
            )
            for layer in plan_layers(config)
            if layer.mode is Mode.FULL
        )
    )


def count_inventory(config: ModelConfig, storage: str | None = None) -> Inventory:
    """The tensors that a checkpoint of ``config`` holds, in its own storage form by default."""
    tensors: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for spec in expected_tensors(config, storage or config.storage).values():
        tensors[spec.dtype] += 1
        sizes[spec.dtype] += spec.nbytes
    return Inventory(
        tensors=sum(tensors.values()),
        bytes=sum(sizes.values()),
        by_dtype={k: TypeTotal(tensors=tensors[k], bytes=sizes[k]) for k in sorted(tensors)},
    )


def _active(weight: Weight, config: ModelConfig) -> int:
    """Parameters of a weight that one token is multiplied with."""
    if weight.kind is Kind.EXPERT:
        return weight.numel // weight.shape[0] * config.n_activated_experts
    return weight.numel


def _is_kv_projection(weight: Weight, plan: tuple[LayerPlan, ...], stop: int) -> bool:
    if weight.layer != stop or plan[stop].mode is not Mode.FULL:
        return False
    names = ("attn_norm.weight", ".compressor.", ".indexer.wk.", ".indexer.k_norm.")
    return any(name in weight.name for name in names)


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)
