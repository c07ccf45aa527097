"""The whole model: embed, encode, decode, head.

Reading order: `config/plan.py`, `context.py`, `attention.py`, `layer.py`, this file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cedar.config.model import ModelConfig
from cedar.config.plan import Half, plan_layers
from cedar.errors import CapacityError, RequestError
from cedar.model.batch import Batch
from cedar.model.context import (
    ForwardContext,
    KVStore,
    LayerStats,
    Probe,
    Shared,
    Streams,
    TrainSignals,
)
from cedar.model.draft import DraftHead, DraftOutput, DraftProposal, MainStates
from cedar.model.engram import EngramTable
from cedar.model.init import initialise
from cedar.model.layer import Layer
from cedar.model.layout import group_layout, lookback, positions, rotary, window_slots
from cedar.model.linear import BuildSpec, Norm, Weight, WeightStorage, new_parameter
from cedar.model.vision import Aligner, VisionTower, place_images
from cedar.ops import Ops, select_ops, widen
from cedar.ops.rope.reference import frequencies, yarn_frequencies

__all__ = ["Model", "ModelOutput", "Pass"]


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row."""
    return logits.argmax(-1)


def _advance(ctx: ForwardContext, half: Half) -> None:
    """Tell the store that a half is done with the batch."""
    if ctx.store is not None:
        for (start, stop), slot in zip(ctx.bounds, ctx.slots, strict=True):
            if half is Half.ENCODER and ctx.classes_T is not None:
                # Not before: a batch that is refused must leave the history as it was.
                ctx.store.extend_history(slot, ctx.classes_T[start:stop])
            ctx.store.advance(slot, half, stop - start)


@dataclass(frozen=True, slots=True)
class Pass:
    """What goes from the encoder to the decoder: streams, state, and what was collected."""

    streams: Streams
    shared: Shared
    taps: tuple[Tensor, ...] = ()
    stats: tuple[LayerStats, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """logits: float32 ``[T, V]`` (``[B, V]`` for ``logits="last"``); hidden ``[T, D]`` is what
    the head sees; taps ``[T, targets · D]`` is the draft head's input, None without one."""

    logits: Tensor
    hidden_TD: Tensor
    taps_TX: Tensor | None
    stats: tuple[LayerStats, ...]


class Model(nn.Module):
    """A causal encoder-decoder built from a configuration.

    token_map: int64 ``[V]``, the Engram class of every token (`cedar.inputs.ngrams`); needed
    where the configuration has Engram layers. dtype is that of the parameters, compute_dtype
    that of activations (default: the same); see `WeightStorage` for the quantised weights.
    engram_tables: tables by layer that stand outside the model; the others are parameters.
    """

    frequencies_window: Tensor
    frequencies_compressed: Tensor
    token_map: Tensor | None

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
        for name, table in tables.items():
            self.register_buffer(name, None if table is None else table.to(real), persistent=False)

    @property
    def draft(self) -> DraftHead:
        """The DSpark draft head; `RequestError` where the configuration has none."""
        if self.mtp is None:
            raise RequestError(
                "this model has no draft head (n_mtp_layers is 0). Generate without drafting."
            )
        return self.mtp

    def backbone(self) -> list[Layer]:
        """The backbone layers, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    def init(self, seed: int) -> "Model":
        """Random weights for training from scratch; returns the model itself."""
        initialise(self, seed)
        return self

    # --- the pieces of a forward pass -----------------------------------------------------

    def context(
        self,
        batch: Batch,
        store: KVStore | None = None,
        *,
        probe: Probe | None = None,
        signals: TrainSignals | None = None,
        disable_engram: bool = False,
    ) -> ForwardContext:
        """Positions, layouts and Engram rows of a batch that continues what the store holds."""
        config = self.config
        starts = tuple(0 if store is None else store.length(slot) for slot in batch.slots)
        # Before anything is stored: a refused batch leaves no trace.
        longest = max(map(sum, zip(starts, batch.lengths, strict=True)))
        if longest > config.max_position_embeddings:
            raise CapacityError(
                f"a sequence would grow to {longest} tokens, but max_position_embeddings is "
                f"{config.max_position_embeddings}. Shorten the prompt or the output."
            )
        place, sequence_T = positions(batch, starts)
        past = self._window_past(store, batch.slots, Half.ENCODER)
        open_T = self._open(batch)
        classes_T = self._classes(batch, open_T)
        ratios = {plan.compress_ratio for plan in self.plan if plan.has_compressor}
        return ForwardContext(
            ops=self.ops,
            positions_T=place,
            sequence_T=sequence_T,
            bounds=batch.bounds,
            starts=starts,
            slots=batch.slots,
            window_past=past,
            window_slots_TW=window_slots(
                batch.lengths, past, config.window_size, batch.tokens_T.device
            ),
            rotary_window=rotary(place, self.frequencies_window),
            rotary_compressed=rotary(place, self.frequencies_compressed),
            groups={
                ratio: group_layout(batch, starts, ratio, self.frequencies_compressed)
                for ratio in ratios
            },
            open_T=open_T,
            classes_T=classes_T,
            engram_ids=self._engram_ids(batch, classes_T, store, probe, disable_engram),
            store=store,
            probe=probe,
            signals=signals,
        )

    def _open(self, batch: Batch) -> Tensor | None:
        """False on image-span tokens; None for a batch of text."""
        types = batch.image_types_T
        if types is None or not bool((types >= 0).any()):
            return None
        self._need_vision()
        return types < 0

    def _need_vision(self) -> None:
        if not self.config.vision_n_layers:
            raise RequestError(
                "the batch holds an image, but this model has no vision tower "
                "(vision_n_layers is 0). Send text only."
            )

    def _classes(self, batch: Batch, open_T: Tensor | None) -> Tensor | None:
        """Engram classes of the batch's tokens, −1 on image spans; None without Engram layers."""
        if not self.config.engram_layer_ids:
            return None
        if self.token_map is None:
            raise RequestError(
                f"layers {self.config.engram_layer_ids} hash n-grams, but the model was built "
                "without a token map. Pass token_map=cedar.inputs.ngrams.token_map(...) of its "
                "tokenizer."
            )
        classes_T = self.token_map[batch.tokens_T]
        return classes_T if open_T is None else torch.where(open_T, classes_T, -1)

    def _engram_ids(
        self,
        batch: Batch,
        classes_T: Tensor | None,
        store: KVStore | None,
        probe: Probe | None,
        disabled: bool,
    ) -> dict[int, Tensor]:
        """Table rows per Engram layer; they depend on token ids alone."""
        if classes_T is None or self.token_map is None or disabled:
            return {}
        pad = int(self.token_map[self.config.engram_pad_id])
        known = lookback(classes_T, batch, store, self.config.engram_max_ngram_size, pad)
        engrams = [layer.engram for layer in self.backbone() if layer.engram is not None]
        ids = {engram.layer: engram.hash(known) for engram in engrams}
        if probe is not None:
            probe.record("engram_hash_ids", torch.stack([ids[k] for k in sorted(ids)], dim=1))
        return ids

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

    def embed_tokens(self, tokens_T: Tensor) -> Tensor:
        """Table rows ``[T, D]`` in the compute type."""
        return F.embedding(tokens_T, self.embed.weight).to(self.compute_dtype)

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
        _advance(ctx, Half.ENCODER)
        return Pass(streams, shared, state.taps, state.stats)

    def decode(self, state: Pass, ctx: ForwardContext) -> Pass:
        """The decoder half on what `encode` returned, in a context of `decoder_context`."""
        state = self._run(state, self.decoder_start, len(self.layers), ctx)
        _advance(ctx, Half.DECODER)
        return state

    def decoder_context(self, ctx: ForwardContext) -> ForwardContext:
        """The same tokens as the decoder sees them: its windows may hold less than the encoder's.

        After a bounded replay they begin with the first replayed token.
        """
        past = self._window_past(ctx.store, ctx.slots, Half.DECODER)
        if past == ctx.window_past:
            return ctx
        lengths = tuple(stop - start for start, stop in ctx.bounds)
        device = ctx.positions_T.device
        slots = window_slots(lengths, past, self.config.window_size, device)
        return replace(ctx, window_past=past, window_slots_TW=slots)

    def sub_context(
        self,
        ctx: ForwardContext,
        index: Tensor,
        bounds: tuple[tuple[int, int], ...],
        slots: tuple[int, ...],
        starts: tuple[int, ...],
    ) -> ForwardContext:
        """The decoder's context for some packed rows of ``ctx``, sequences at ``bounds``."""
        past = self._window_past(ctx.store, slots, Half.DECODER)
        lengths = tuple(stop - start for start, stop in bounds)
        device = ctx.positions_T.device
        counts = torch.tensor(lengths, device=device)
        return replace(
            ctx,
            positions_T=ctx.positions_T[index],
            sequence_T=torch.repeat_interleave(counts, output_size=len(index)),
            bounds=bounds,
            starts=starts,
            slots=slots,
            window_past=past,
            window_slots_TW=window_slots(lengths, past, self.config.window_size, device),
            rotary_window=ctx.rotary_window.rows(index),
            rotary_compressed=ctx.rotary_compressed.rows(index),
            groups={},
            open_T=None if ctx.open_T is None else ctx.open_T[index],
            engram_ids={layer: ids[index] for layer, ids in ctx.engram_ids.items()},
        )

    def _window_past(
        self, store: KVStore | None, slots: tuple[int, ...], half: Half
    ) -> tuple[int, ...]:
        """Window rows before the batch's tokens; one less than a window is all a token can see."""
        if store is None:
            return (0,) * len(slots)
        most = self.config.window_size - 1
        return tuple(min(store.window_length(slot, half), most) for slot in slots)

    def _run(self, state: Pass, start: int, stop: int, ctx: ForwardContext) -> Pass:
        streams, shared, taps, stats = state.streams, state.shared, state.taps, state.stats
        recompute = ctx.signals is not None and ctx.signals.checkpoint
        for index, layer in enumerate(self.backbone()[start:stop], start):
            if (
                index != self.decoder_start
            ):  # `encode` has entered the decoder's first layer already
                streams = layer.enter(streams, ctx)
            if self.mtp is not None and index in self.config.dspark_target_layer_ids:
                taps = (*taps, streams.x_TCD.mean(1))
            if recompute:
                out = checkpoint(layer, streams, shared, ctx, use_reentrant=False)
            else:
                out = layer(streams, shared, ctx)
            streams, shared, report = out
            stats = (*stats, report)
        return Pass(streams, shared, taps, stats)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` in float32 (float64 for float64 input)."""
        wide = widen(hidden)
        return F.linear(wide, self.head.weight.to(wide.dtype))

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

    # --- drafting -------------------------------------------------------------------------

    def draft_write(self, taps_TX: Tensor, batch: Batch, store: KVStore) -> None:
        """Give the draft rings the main states of a batch that `forward` has just stored."""
        starts = tuple(store.length(slot, Half.DRAFT) for slot in batch.slots)
        place, _ = positions(batch, starts)
        at = rotary(place, self.frequencies_window)
        draft = self.draft
        draft.write(draft.main_states(taps_TX), at, batch.bounds, batch.slots, store)

    def draft_store(self, taps_TX: Tensor, ctx: ForwardContext) -> None:
        """The same for the tokens of a context that has just been decoded."""
        if ctx.store is None:
            raise ValueError("draft rings live in a store")
        draft = self.draft
        at = ctx.rotary_window
        draft.write(draft.main_states(taps_TX), at, ctx.bounds, ctx.slots, ctx.store)

    def draft_propose(
        self,
        first_N: Tensor,
        slots: tuple[int, ...],
        store: KVStore,
        choose: Callable[[Tensor], Tensor] = greedy,
    ) -> DraftProposal:
        """Draft a block after the committed tokens ``first``, one for each sequence."""
        draft = self.draft
        newest = torch.tensor([store.length(slot) - 1 for slot in slots], device=first_N.device)
        output = draft.run(
            draft.block_tokens(first_N),
            newest,
            draft.stored(slots, store),
            self.frequencies_window,
            self.embed_tokens,
            self.logits,
        )
        return draft.finish(output, first_N, choose)

    def draft_train(
        self, taps_TX: Tensor, batch: Batch, anchors_N: Tensor, first_N: Tensor
    ) -> DraftOutput:
        """Draft from many places of a batch at once, for training.

        anchors: packed rows of the newest main states; first: the tokens that follow them.
        """
        draft = self.draft
        starts = (0,) * len(batch.lengths)
        place, _ = positions(batch, starts)
        device = batch.tokens_T.device
        slots = window_slots(batch.lengths, starts, self.config.window_size, device)
        entries = draft.window_entries(
            draft.main_states(taps_TX), rotary(place, self.frequencies_window)
        )
        return draft.run(
            draft.block_tokens(first_N),
            place[anchors_N],
            MainStates(entries, slots[anchors_N]),
            self.frequencies_window,
            self.embed_tokens,
            self.logits,
        )
