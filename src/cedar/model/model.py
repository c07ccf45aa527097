"""The whole model: embed, encode, decode, head.

Reading order: `config/plan.py`, `context.py`, `attention.py`, `layer.py`, this file. Where tokens
stand is worked out in `contexts.py`; how a model drafts is in `drafting.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cedar.config.model import ModelConfig
from cedar.config.plan import Half, plan_layers
from cedar.errors import RequestError
from cedar.model.batch import Batch
from cedar.model.context import (
    KVStore,
    LayerStats,
    Probe,
    Shared,
    Streams,
    TrainSignals,
)
from cedar.model.draft import DraftHead
from cedar.model.drafting import Drafting
from cedar.model.engram import EngramTable
from cedar.model.forward import ForwardContext
from cedar.model.init import initialise
from cedar.model.layer import Layer
from cedar.model.linear import BuildSpec, Norm, Weight, WeightStorage, new_parameter
from cedar.model.step import StepInput
from cedar.model.vision import Aligner, VisionTower, place_images
from cedar.ops import Ops, select_ops
from cedar.ops.main_kv import KVArrays
from cedar.ops.rope.reference import frequencies, yarn_frequencies

__all__ = ["Model", "ModelOutput", "Pass", "StepOutput"]


@dataclass(frozen=True, slots=True)
class Pass:
    """What goes from the encoder to the decoder: streams, state, and what was collected."""

    streams: Streams
    shared: Shared
    taps: tuple[Tensor, ...] = ()
    stats: tuple[LayerStats, ...] = ()


class StepOutput(NamedTuple):
    """logits: float32 ``[T, V]``; selected: entries of the last index source ``[T, K]``."""

    logits: Tensor
    selected_TK: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """logits: float32 ``[T, V]`` (``[B, V]`` for ``logits="last"``); hidden ``[T, D]`` is what
    the head sees; taps ``[T, targets · D]`` is the draft head's input, None without one."""

    logits: Tensor
    hidden_TD: Tensor
    taps_TX: Tensor | None
    stats: tuple[LayerStats, ...]


class Model(Drafting):
    """A causal encoder-decoder built from a configuration.

    token_map: int64 ``[V]``, the Engram class of every token (`cedar.inputs.ngrams`); needed
    where the configuration has Engram layers. dtype is that of the parameters, compute_dtype
    that of activations (default: the same); see `WeightStorage` for the quantised weights.
    engram_tables: tables by layer that stand outside the model; the others are parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        ops: Ops | None = None,
        storage: WeightStorage = WeightStorage.PLAIN,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        token_map: Tensor | None = None,
        trainable: bool = False,
        engram_tables: Mapping[int, EngramTable] | None = None,
    ) -> None:
        super().__init__()
        place = None if device is None else torch.device(device)
        spec = BuildSpec(
            ops=ops or select_ops(place or "cpu"),
            storage=storage,
            dtype=dtype,
            device=place,
            trainable=trainable,
        )
        self.config = config
        self.ops = spec.ops
        self.compute_dtype = compute_dtype or dtype
        self.plan = plan_layers(config)
        backbone = [plan for plan in self.plan if plan.half is not Half.DRAFT]
        self.decoder_start = sum(plan.half is Half.ENCODER for plan in backbone)
        self.embed = Weight((config.vocab_size, config.dim), None, spec)
        self.layers = nn.ModuleList(
            Layer(config, plan, spec, (engram_tables or {}).get(plan.index)) for plan in backbone
        )
        self.norm = Norm(config.dim, config.norm_eps, spec)
        self.head = Weight((config.vocab_size, config.dim), None, spec)
        self.mtp = DraftHead(config, self.plan, spec) if config.n_mtp_layers else None
        if config.vision_n_layers:
            self.vision = VisionTower(config, spec)
            self.aligner = Aligner(config, spec)
            self.image_start = new_parameter((config.dim,), dtype, place)
            self.image_newline = new_parameter((config.dim,), dtype, place)
            self.image_end = new_parameter((config.dim,), dtype, place)
        self._register_tables(token_map, place)

    def _register_tables(self, token_map: Tensor | None, place: torch.device | None) -> None:
        config = self.config
        dim = config.rope_head_dim
        plain = frequencies(dim, config.rope_theta)
        yarn = plain
        if any(plan.compress_ratio for plan in self.plan):
            yarn = frequencies(dim, config.compress_rope_theta)
            if config.original_seq_len:
                yarn = yarn_frequencies(
                    dim,
                    config.compress_rope_theta,
                    original=config.original_seq_len,
                    factor=config.rope_factor,
                    beta_fast=config.beta_fast,
                    beta_slow=config.beta_slow,
                )
        real = None if place is not None and place.type == "meta" else place
        tables = {
            "frequencies_window": plain,
            "frequencies_compressed": yarn,
            "token_map": token_map,
        }
        # Of a token, so one number; read here once, not from the device in every pass.
        self.pad_class = -1 if token_map is None else int(token_map[config.engram_pad_id])
        tables["frequencies_step"] = torch.stack([plain, *[yarn] * (1 + len(self.ratios))])
        for name, table in tables.items():
            self.register_buffer(name, None if table is None else table.to(real), persistent=False)
        for name in ("multipliers", "primes", "offsets"):
            own = [getattr(engram, name) for engram in self.engrams()]
            stacked = torch.stack(own) if own else torch.empty(0, dtype=torch.int64)
            self.register_buffer(f"engram_{name}", stacked, persistent=False)

    def init(self, seed: int) -> "Model":
        """Random weights for training from scratch; returns the model itself."""
        initialise(self, seed)
        return self

    # --- the pieces of a forward pass -----------------------------------------------------

    def vision_features(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Image tokens ``[n, D]`` in reading order of one image's patches ``[P, 3, p, p]``."""
        self._need_vision()
        if len(patches) != grid[0] * grid[1]:
            raise RequestError(
                f"an image has {len(patches)} patches, but its grid of {grid[0]} x {grid[1]} needs "
                f"{grid[0] * grid[1]}. Use cedar.inputs.images.preprocess for both."
            )
        features = self.vision(patches.to(self.compute_dtype), grid)
        return self.aligner(features, grid)

    def _features(self, batch: Batch, x_TD: Tensor) -> Tensor:
        if batch.features_ID is not None:
            return batch.features_ID
        features = [
            self.vision_features(patches, grid)
            for patches, grid in zip(batch.images, batch.image_grids, strict=True)
        ]
        return torch.cat(features) if features else x_TD[:0]

    def embed_batch(self, batch: Batch) -> Streams:
        """Embeddings (images in place of their spans) as fresh streams."""
        x_TD = self.embed_tokens(batch.tokens_T)
        if batch.image_types_T is not None and self.config.vision_n_layers:
            delimiters = (self.image_start, self.image_newline, self.image_end)
            features = self._features(batch, x_TD)
            x_TD = place_images(x_TD, batch.image_types_T, features, *delimiters)
        return Streams.fresh(x_TD, self.config.hc_mult)

    def encode(self, streams: Streams, ctx: ForwardContext) -> Pass:
        """The encoder half and the decoder source's KV projection.

        This is all that a prompt token needs of the model unless something is decoded from it.
        """
        state = self._run(Pass(streams, Shared()), 0, self.decoder_start, ctx)
        first = self.backbone()[self.decoder_start]
        streams = first.enter(state.streams, ctx)
        shared = state.shared
        if first.plan.has_compressor:
            shared = first.project_main(streams, ctx, shared)
        ctx.advance(Half.ENCODER)
        return Pass(streams, shared, state.taps, state.stats)

    def decode(self, state: Pass, ctx: ForwardContext) -> Pass:
        """The decoder half on what `encode` returned, in a context of `decoder_context`."""
        state = self._run(state, self.decoder_start, len(self.layers), ctx)
        ctx.advance(Half.DECODER)
        return state

    def _run(self, state: Pass, start: int, stop: int, ctx: ForwardContext) -> Pass:
        streams, shared, taps, stats = state.streams, state.shared, state.taps, state.stats
        recompute = ctx.signals is not None and ctx.signals.checkpoint
        for index, layer in enumerate(self.backbone()[start:stop], start):
            # `encode` has entered the decoder's first layer already.
            if index != self.decoder_start:
                streams = layer.enter(streams, ctx)
            if self.mtp is not None and index in self.config.dspark_target_layer_ids:
                streams = streams.written(self.ops)
                taps = (*taps, streams.x_TCD.mean(1))
            if recompute:
                out = checkpoint(layer, streams, shared, ctx, use_reentrant=False)
            else:
                out = layer(streams, shared, ctx)
            streams, shared, report = out
            stats = (*stats, report)
        return Pass(streams, shared, taps, stats)

    def step(
        self,
        step: StepInput,
        arrays: KVArrays,
        *,
        most_queries: int,
        most_tokens: int,
        drafts: bool = False,
    ) -> StepOutput:
        """A few new tokens a sequence through all layers, each at its place of the cache.

        Nothing here asks the device anything, so the pass can be recorded as a CUDA graph. drafts:
        store what the draft head needs of them.
        """
        ctx = self.step_context(step, arrays, most_queries=most_queries, most_tokens=most_tokens)
        state = self.encode(
            Streams.fresh(self.embed_tokens(step.tokens_T), self.config.hc_mult), ctx
        )
        state = self.decode(state, replace(ctx, window_slots_TW=ctx.decoder_slots_TW))
        if drafts:
            self.draft_store(torch.cat(state.taps, dim=1), ctx)
        hidden_TD = self.norm(state.streams.collapse(self.ops))
        selection = state.shared.selection
        return StepOutput(
            self.logits(hidden_TD), None if selection is None else selection.entries_TK
        )

    # --- the whole ------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        store: KVStore | None = None,
        *,
        probe: Probe | None = None,
        signals: TrainSignals | None = None,
        logits: Literal["all", "last"] = "all",
        disable_engram: bool = False,
    ) -> ModelOutput:
        """All tokens through all layers (exact, no replay).

        With a store the batch continues its sequences, and the store takes in everything new.
        """
        ctx = self.context(
            batch, store, probe=probe, signals=signals, disable_engram=disable_engram
        )
        state = self.encode(self.embed_batch(batch), ctx)
        state = self.decode(state, self.decoder_context(ctx))
        hidden_TD = self.norm(state.streams.collapse(self.ops))
        ends = [stop - 1 for _, stop in batch.bounds]
        wanted = hidden_TD[ends] if logits == "last" else hidden_TD
        scores = self.logits(wanted)
        ctx.record("logits", scores)
        taps_TX = torch.cat(state.taps, dim=1) if state.taps else None
        if taps_TX is not None:
            ctx.record("main_hidden", taps_TX)
        return ModelOutput(scores, hidden_TD, taps_TX, state.stats)
