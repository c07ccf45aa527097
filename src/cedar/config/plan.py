"""The layer plan: the only place where the role of a layer is decided.

Modules, caches, expected tensor names, cost formulas and figures read the table made here; no
other code compares a layer number with the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cedar.config.model import ModelConfig


class Half(StrEnum):
    """Which part of the causal encoder-decoder a block belongs to."""

    ENCODER = "encoder"
    DECODER = "decoder"
    DRAFT = "draft"


class Mode(StrEnum):
    """What a block attends to besides its own sliding window.

    ``WINDOW``: nothing. ``FULL``: writes main KV and index keys, selects among all entries.
    ``REINDEX``: reads the main KV of an earlier layer, selects with its own index queries.
    ``REUSE``: reads the main KV and the selection of earlier layers.
    """

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """The role of one block.

    ``index`` counts backbone layers from 0 and goes on over the draft blocks. ``kv_source`` is
    the layer whose main KV and index keys are read, ``topk_source`` the layer whose selection
    is used (a source names itself), ``candidate_source`` the layer whose candidate pool limits
    this block's own search. All three are ``None`` where they do not apply.
    """

    index: int
    half: Half
    mode: Mode
    compress_ratio: int
    kv_source: int | None
    topk_source: int | None
    candidate_source: int | None
    engram: bool
    builds_candidates: bool

    @property
    def has_compressor(self) -> bool:
        """Whether the block writes main KV and index keys."""
        return self.mode is Mode.FULL

    @property
    def has_indexer(self) -> bool:
        """Whether the block makes a selection of its own."""
        return self.mode in (Mode.FULL, Mode.REINDEX)


def latest_source(sources: Sequence[int], layer: int) -> int | None:
    """The largest of ``sources`` that is not above ``layer``; ``None`` if there is none."""
    return max((source for source in sources if source <= layer), default=None)


def plan_layers(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """One entry per backbone layer, then one per draft block."""
    backbone = tuple(_backbone_layer(config, index) for index in range(config.n_layers))
    draft = tuple(
        LayerPlan(
            index=config.n_layers + stage,
            half=Half.DRAFT,
            mode=Mode.WINDOW,
            compress_ratio=0,
            kv_source=None,
            topk_source=None,
            candidate_source=None,
            engram=False,
            builds_candidates=False,
        )
        for stage in range(config.n_mtp_layers)
    )
    return backbone + draft


def _backbone_layer(config: ModelConfig, index: int) -> LayerPlan:
    ratio = config.compress_ratios[index]
    selects = ratio > 0 and index in config.index_source_layers
    if ratio == 0:
        mode = Mode.WINDOW
    elif index in config.kv_source_layers:
        mode = Mode.FULL
    elif selects:
        mode = Mode.REINDEX
    else:
        mode = Mode.REUSE
    limited = selects and 0 <= config.candidate_source_layer < index
    return LayerPlan(
        index=index,
        half=Half.ENCODER if index < config.n_layers // 2 else Half.DECODER,
        mode=mode,
        compress_ratio=ratio,
        kv_source=latest_source(config.kv_source_layers, index) if ratio else None,
        topk_source=latest_source(config.index_source_layers, index) if ratio else None,
        candidate_source=config.candidate_source_layer if limited else None,
        engram=index in config.engram_layer_ids,
        builds_candidates=index == config.candidate_source_layer,
    )
