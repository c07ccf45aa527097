"""``cedar plan``: the layer table, the parameters and the cache of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cedar.analysis.cost import (
    CacheBytes,
    Inventory,
    ParameterCounts,
    cache_bytes,
    count_inventory,
    count_parameters,
)
from cedar.cache.layout import KVLayout
from cedar.checkpoint.locate import bundled_checkpoints
from cedar.config import Half, LayerPlan, ModelConfig, plan_layers, released, tiny


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR|FILE|released|tiny",
            help="A checkpoint directory or bundled name, a config.json, or a preset.",
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """Show what every layer does, how many parameters there are, and what a token costs.

    Works from the configuration alone; no weight is read.
    """
    config = load_config(model)
    if as_json:
        typer.echo(json.dumps(document(config)))
        return
    console = Console()
    plan = plan_layers(config)
    console.print(_layer_table(config, plan))
    console.print(_parameter_table(count_parameters(config)))
    console.print(_cache_table(config, cache_bytes(config)))
    console.print(_layout_table(KVLayout.from_config(config)))
    console.print(_inventory_table(config, count_inventory(config)))


def load_config(model: str) -> ModelConfig:
    """The configuration of a preset, a bundled checkpoint, a directory or a file."""
    presets = {"released": released, "tiny": tiny}
    if model in presets:
        return presets[model]()
    return ModelConfig.from_file(bundled_checkpoints().get(model, Path(model)))


def document(config: ModelConfig) -> dict[str, Any]:
    """Everything that the tables show, as plain data."""
    counts = count_parameters(config)
    return {
        "kv_bytes_per_token": cache_bytes(config).to_dict(),
        "params": {
            "backbone": counts.backbone,
            "engram": counts.engram,
            "draft": counts.draft,
            "vision": counts.vision,
            "active_prefill": counts.active_prefill,
            "active_decode": counts.active_decode,
        },
        "inventory": count_inventory(config).to_dict(),
        "layers": [_layer_document(layer) for layer in plan_layers(config)],
        "cache_layout": _layout_document(KVLayout.from_config(config)),
    }


def _layout_document(layout: KVLayout) -> dict[str, Any]:
    return {
        "page_tokens": layout.page_tokens,
        "page_bytes": layout.page_bytes,
        "entry_bytes": layout.entry_bytes,
        "key_bytes": layout.key_bytes,
        "window_row_bytes": layout.window_row_bytes,
        "slot_bytes": layout.slot_bytes,
        "ring_bytes": layout.ring_bytes,
        "residue_bytes": layout.residue_bytes,
        "history_bytes": layout.history_bytes,
        "slack_rows": layout.slack,
    }


def _layer_document(layer: LayerPlan) -> dict[str, Any]:
    return {
        "index": layer.index,
        "half": str(layer.half),
        "mode": str(layer.mode),
        "compress_ratio": layer.compress_ratio,
        "kv_source": layer.kv_source,
        "topk_source": layer.topk_source,
        "candidate_source": layer.candidate_source,
        "engram": layer.engram,
    }


def _layer_table(config: ModelConfig, plan: tuple[LayerPlan, ...]) -> Table:
    table = Table(title="Layers", title_justify="left")
    for name in ("layer", "half", "mode", "ratio", "main KV", "selection", "pool", "besides"):
        table.add_column(name, justify="right" if name in ("layer", "ratio") else "left")
    styles = {Half.ENCODER: "", Half.DECODER: "cyan", Half.DRAFT: "magenta"}
    for layer in plan:
        notes = []
        if layer.engram:
            notes.append("Engram")
        if layer.builds_candidates:
            notes.append("builds pool")
        if layer.index in config.dspark_target_layer_ids and config.has_draft:
            notes.append("draft input")
        table.add_row(
            str(layer.index),
            layer.half,
            layer.mode,
            str(layer.compress_ratio or "-"),
            _source(layer.kv_source, layer.index, "writes"),
            _source(layer.topk_source, layer.index, "own"),
            "-" if layer.candidate_source is None else f"of {layer.candidate_source}",
            ", ".join(notes),
            style=styles[layer.half],
        )
    return table


def _source(source: int | None, layer: int, own: str) -> str:
    if source is None:
        return "-"
    return own if source == layer else f"of {source}"


def _parameter_table(counts: ParameterCounts) -> Table:
    table = Table(title="Parameters", title_justify="left")
    table.add_column("part")
    table.add_column("number", justify="right")
    table.add_column("", justify="right")
    table.add_column("counted")
    layers = counts.prefill_layers
    rows = (
        ("backbone", counts.backbone, "with embedding and head, without Engram"),
        ("Engram", counts.engram, "tables"),
        ("Engram projections", counts.engram_projections, "keys, values and gates"),
        ("draft", counts.draft, "draft head"),
        ("vision", counts.vision, "image tower and aligner"),
        ("active, prefill", counts.active_prefill, f"layers before {layers}, KV of {layers}"),
        ("active, decode", counts.active_decode, "all layers and the head"),
    )
    for name, number, what in rows:
        table.add_row(name, f"{number:,}", _short(number), what)
    return table


def _cache_table(config: ModelConfig, cache: CacheBytes) -> Table:
    table = Table(title="Cache bytes per token", title_justify="left")
    for name in ("layer", "half", "ratio", "main KV", "index keys", "together"):
        table.add_column(name, justify="left" if name == "half" else "right")
    for source in cache.sources:
        table.add_row(
            str(source.layer),
            source.half,
            str(source.compress_ratio),
            f"{source.main_entry} / {source.compress_ratio} = {_amount(source.main)}",
            f"{source.index_entry} / {source.compress_ratio} = {_amount(source.index)}",
            _amount(source.main + source.index),
        )
    table.add_section()
    for half in (Half.ENCODER, Half.DECODER):
        table.add_row("", half, "", "", "", _amount(cache.of_half(half)))
    main, index, total = map(_amount, (cache.main, cache.index, cache.total))
    table.add_row("all", "", "", main, index, total, style="bold")
    head, key = config.head_dim, config.index_head_dim
    if cache.sources:
        table.caption = (
            f"main KV entry: {head} / 2 (FP4) + {head} / 16 (E4M3 scales); "
            f"index key: {key} / 2 (FP4) + {key} / 32 (E8M0 scales)"
        )
    return table


def _layout_table(layout: KVLayout) -> Table:
    table = Table(title="Cache layout", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("holds")
    both = layout.entry_bytes + layout.key_bytes
    for source in layout.sources:
        held = f"{source.entries_per_page} x ({layout.entry_bytes} + {layout.key_bytes})"
        size = source.entries_per_page * both
        table.add_row(f"layer {source.layer}", f"{size:,}", f"{held}: entries and index keys")
    page = f"one page: {layout.page_tokens} tokens of all sources"
    table.add_row("page", f"{layout.page_bytes:,}", page, style="bold", end_section=True)
    rows = f"({layout.window_rows} + {layout.slack}) rows"
    rings = f"{layout.window_layers} layers and draft blocks x {rows} x {layout.window_row_bytes}"
    table.add_row("rings", f"{layout.ring_bytes:,}", rings)
    table.add_row("residues", f"{layout.residue_bytes:,}", "unfinished groups in float32")
    history = f"{layout.history_tokens} + {layout.slack} compressed token ids"
    table.add_row("history", f"{layout.history_bytes:,}", history)
    table.add_row("slot", f"{layout.slot_bytes:,}", "one running request", style="bold")
    table.caption = f"+ {layout.slack}: rows by which a verified draft block is taken back"
    return table


def _inventory_table(config: ModelConfig, inventory: Inventory) -> Table:
    table = Table(title=f"Checkpoint ({config.storage})", title_justify="left")
    table.add_column("type")
    table.add_column("tensors", justify="right")
    table.add_column("bytes", justify="right")
    for dtype, part in inventory.by_dtype.items():
        table.add_row(dtype, f"{part.tensors:,}", f"{part.bytes:,}")
    table.add_section()
    table.add_row("all", f"{inventory.tensors:,}", f"{inventory.bytes:,}", style="bold")
    return table


def _amount(value: Any) -> str:
    return f"{float(value):,.6g}"


def _short(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
