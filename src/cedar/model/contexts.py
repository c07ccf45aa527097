"""The part of a model that knows where the tokens of a batch stand and what they continue."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import Half, LayerPlan
from cedar.errors import CapacityError, RequestError
from cedar.model.batch import Batch
from cedar.model.context import GroupLayout, KVStore, Probe, Rotary, TrainSignals
from cedar.model.engram import Engram
from cedar.model.forward import ForwardContext
from cedar.model.layer import Layer
from cedar.model.layout import group_layout, lookback, positions, rotary, window_slots
from cedar.model.step import StepContext, StepInput
from cedar.ops import Ops
from cedar.ops.engram_hash import History
from cedar.ops.main_kv import KVArrays

__all__ = ["Contexts"]


class Contexts(nn.Module):
    """Builds the `ForwardContext` of both halves. `cedar.model.Model` sets the attributes."""

    config: ModelConfig
    ops: Ops
    plan: tuple[LayerPlan, ...]
    layers: nn.ModuleList
    frequencies_window: Tensor
    frequencies_compressed: Tensor
    token_map: Tensor | None
    pad_class: int
    frequencies_step: Tensor
    engram_multipliers: Tensor
    engram_primes: Tensor
    engram_offsets: Tensor

    def backbone(self) -> list[Layer]:
        """The backbone layers, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    def engrams(self) -> list[Engram]:
        """The Engram modules, in the order of their layers."""
        return [layer.engram for layer in self.backbone() if layer.engram is not None]

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios of the KV sources, ascending."""
        return tuple(sorted({plan.compress_ratio for plan in self.plan if plan.has_compressor}))

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
                for ratio in self.ratios
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
        order = self.config.engram_max_ngram_size
        known = lookback(classes_T, batch, store, order, self.pad_class)
        ids = {engram.layer: engram.hash(known) for engram in self.engrams()}
        for engram in self.engrams():
            engram.prefetch(ids[engram.layer])
        if probe is not None:
            probe.record("engram_hash_ids", torch.stack([ids[k] for k in sorted(ids)], dim=1))
        return ids

    def step_context(
        self, step: StepInput, arrays: KVArrays, *, most_queries: int, most_tokens: int
    ) -> StepContext:
        """A context for tokens whose places only the device knows; text only.

        most_queries, most_tokens: of one sequence, new ones and all of them.
        """
        place, ratios = step.positions_T, self.ratios

        def windows(half: Half) -> Tensor:
            start_T = step.starts[tuple(Half).index(half)]
            return self.window_places(step.slots_T, place, start_T, arrays)

        # Of every token and, for groups, of the first token of the one that would end here.
        back = (0, 0, *(ratio - 1 for ratio in ratios))
        cos, sin = self.ops.rotary_tables(place, self.frequencies_step, back)
        near, far, *ends = map(Rotary, cos, sin)
        visible = {ratio: (place + 1).div(ratio, rounding_mode="floor") for ratio in ratios}
        return StepContext(
            ops=self.ops,
            positions_T=place,
            sequence_T=step.sequence_T,
            most_queries=most_queries,
            bounds=(),
            starts=(),
            slots=(),
            window_past=(),
            window_slots_TW=windows(Half.ENCODER),
            decoder_slots_TW=windows(Half.DECODER),
            rotary_window=near,
            rotary_compressed=far,
            groups={
                ratio: GroupLayout(place[:0].view(0, ratio), (), at)
                for ratio, at in zip(ratios, ends, strict=True)
            },
            # The first row is a token always.
            real_T=place >= 0 if len(place) > 1 else None,
            visible=visible,
            entries={
                ratio: torch.where((place + 1) % ratio == 0, seen - 1, -1)
                for ratio, seen in visible.items()
            },
            engram_ids=self._step_engram_ids(step, arrays.history),
            arrays=arrays,
            input=step,
            table=arrays.table[step.sequence_slot],
            most_tokens=most_tokens,
        )

    def window_places(
        self, slots_T: Tensor, positions_T: Tensor, starts_T: Tensor, arrays: KVArrays
    ) -> Tensor:
        """Rows of the rings that queries see ``[T, W]``, −1 for none.

        Oldest first, as in every other context, so that sums are the same.
        """
        ring = next(iter(arrays.rings.values())).shape[1]
        places = self.ops.window_places(
            slots_T, positions_T, starts_T, self.config.window_size, ring
        )
        return places.flip(1)

    def _step_engram_ids(self, step: StepInput, history: Tensor) -> dict[int, Tensor]:
        engrams = self.engrams()
        if not engrams or self.token_map is None:
            return {}
        ids = self.ops.engram_ids(
            History(self.token_map[step.tokens_T], history, step.slots_T, step.positions_T),
            self.engram_multipliers,
            self.engram_primes,
            self.engram_offsets,
            self.pad_class,
        )
        found = {engram.layer: own for engram, own in zip(engrams, ids, strict=True)}
        for engram in engrams:
            engram.prefetch(found[engram.layer])
        return found

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
