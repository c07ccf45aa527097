"""The part of a model that drafts: hands the draft head main states, tokens and the store."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.config.plan import Half
from cedar.errors import RequestError
from cedar.model.batch import Batch
from cedar.model.context import KVStore
from cedar.model.contexts import Contexts
from cedar.model.draft import DraftHead, DraftOutput, DraftProposal
from cedar.model.forward import ForwardContext
from cedar.model.layout import positions, rotary, window_slots
from cedar.model.linear import Weight
from cedar.model.step import DraftInput
from cedar.ops.main_kv import KVArrays
from cedar.ops.sparse_attention import PackedRows, Rows
from cedar.quant import FP8_ROW

__all__ = ["Drafting", "greedy"]


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row."""
    return logits.argmax(-1)


class Drafting(Contexts):
    """Drafts with embedding and output head of the backbone. `Model` sets the attributes."""

    mtp: DraftHead | None
    embed: Weight
    head: Weight
    compute_dtype: torch.dtype

    @property
    def draft(self) -> DraftHead:
        """The DSpark draft head; `RequestError` where the configuration has none."""
        if self.mtp is None:
            raise RequestError(
                "this model has no draft head (n_mtp_layers is 0). Generate without drafting."
            )
        return self.mtp

    def embed_tokens(self, tokens_T: Tensor) -> Tensor:
        """Table rows ``[T, D]`` in the compute type."""
        return F.embedding(tokens_T, self.embed.weight).to(self.compute_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` in float32 (float64 for float64 input)."""
        return self.ops.wide_linear(hidden, self.head.weight)

    def draft_write(self, taps_TX: Tensor, batch: Batch, store: KVStore) -> None:
        """Give the draft rings the main states of a batch that `forward` has just stored."""
        starts = tuple(store.length(slot, Half.DRAFT) for slot in batch.slots)
        place, _ = positions(batch, starts)
        at = rotary(place, self.frequencies_window)
        draft = self.draft
        for layer, rows in draft.window_entries(draft.main_states(taps_TX), at).items():
            for (start, stop), slot in zip(batch.bounds, batch.slots, strict=True):
                store.extend_window(layer, slot, rows[start:stop])
        for (start, stop), slot in zip(batch.bounds, batch.slots, strict=True):
            store.advance(slot, Half.DRAFT, stop - start)

    def draft_store(self, taps_TX: Tensor, ctx: ForwardContext) -> None:
        """The same for the tokens of a context that has just been decoded."""
        main_TD = self.draft.main_states(taps_TX)
        for layer, attn in self.draft.attentions().items():
            ctx.write_window(layer, attn.wkv(main_TD), attn.kv_norm, ctx.rotary_window)
        ctx.advance(Half.DRAFT)

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

    def draft_step(self, step: DraftInput, arrays: KVArrays) -> DraftOutput:
        """What `DraftHead.finish` drafts from, of sequences whose places the device knows."""
        draft = self.draft
        rings = [arrays.rings[layer] for layer in draft.attentions()]
        places = self.window_places(step.slots_N, step.newest_N, step.starts_N, arrays)
        return draft.run(
            draft.block_tokens(step.first_N),
            step.newest_N,
            tuple(PackedRows(ring.flatten(0, 1), places, FP8_ROW) for ring in rings),
            self.frequencies_window,
            self.embed_tokens,
            self.logits,
        )

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
        at = slots[anchors_N]
        return draft.run(
            draft.block_tokens(first_N),
            place[anchors_N],
            tuple(Rows(rows, at) for rows in entries.values()),
            self.frequencies_window,
            self.embed_tokens,
            self.logits,
        )
