"""What goes down into a forward pass, the same for every layer of a half.

Positions, layouts, and how the tokens of the batch meet the cache: layers hand over what they
computed, and get back what their queries may read.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cedar.config.plan import Half, LayerPlan
from cedar.model.context import GroupLayout, KVStore, Probe, Rotary, TrainSignals
from cedar.model.linear import Norm
from cedar.ops import Ops
from cedar.ops.main_kv import FlatMain, MainKV
from cedar.ops.sparse_attention import Rows, Source
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW

__all__ = ["ForwardContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """Everything about a batch that layers need and that does not change between them.

    positions_T, sequence_T: place of each packed token in its sequence, and which sequence.
    bounds, starts: packed rows of each sequence; tokens it has stored before these.
    window_past: window rows that the store contributes, per sequence.
    window_slots_TW: window of each query, as rows of "per sequence: past rows, then new rows".
    open_T: False on image-span tokens (None: text only).
    real_T: False on rows that stand for no token (None: all do).
    classes_T: Engram classes, which become the store's history when the encoder is done;
    engram_ids: table rows by layer.
    """

    ops: Ops
    positions_T: Tensor
    sequence_T: Tensor
    bounds: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    slots: tuple[int, ...]
    window_past: tuple[int, ...]
    window_slots_TW: Tensor
    rotary_window: Rotary
    rotary_compressed: Rotary
    groups: dict[int, GroupLayout]
    open_T: Tensor | None = None
    real_T: Tensor | None = None
    classes_T: Tensor | None = None
    engram_ids: dict[int, Tensor] = field(default_factory=dict)
    store: KVStore | None = None
    probe: Probe | None = None
    signals: TrainSignals | None = None

    def rotary(self, plan: LayerPlan) -> Rotary:
        """The rotary table of a layer's tokens: one for window layers, one for the others."""
        return self.rotary_compressed if plan.compress_ratio else self.rotary_window

    def visible_T(self, ratio: int) -> Tensor:
        """Finished groups that each query sees: entry j iff ``(j + 1)·ρ ≤ t + 1``."""
        return (self.positions_T + 1).div(ratio, rounding_mode="floor")

    def record(self, name: str, value: Tensor) -> None:
        """Show a value to the probe, if there is one."""
        if self.probe is not None:
            self.probe.record(name, value)

    # --- how the batch meets the cache ----------------------------------------------------

    def window(self, layer: int, latent_TH: Tensor, norm: Norm, rotary: Rotary) -> Source:
        """What the queries see of a layer's window; stores the new rows.

        latent: of the new tokens, before norm, rotation and FP8 round trip.
        """
        kv_TH = self.ops.latent(latent_TH, norm.weight, norm.eps, rotary, FP8_ROW)
        store = self.store
        if store is None:
            return Rows(kv_TH, self.window_slots_TW)
        parts = []
        for (start, stop), slot, past in zip(
            self.bounds, self.slots, self.window_past, strict=True
        ):
            if past:
                parts.append(store.window(layer, slot)[-past:])
            parts.append(kv_TH[start:stop])
            store.extend_window(layer, slot, kv_TH[start:stop])
        return Rows(torch.cat(parts), self.window_slots_TW)

    def write_window(self, layer: int, latent_TH: Tensor, norm: Norm, rotary: Rotary) -> None:
        """Store the window rows of new tokens that nobody reads in this pass."""
        assert self.store is not None
        kv_TH = self.ops.latent(latent_TH, norm.weight, norm.eps, rotary, FP8_ROW)
        for (start, stop), slot in zip(self.bounds, self.slots, strict=True):
            self.store.extend_window(layer, slot, kv_TH[start:stop])

    def compress(
        self, layer: int, ratio: int, kv_TH: Tensor, gate_TH: Tensor, norm: Norm, dtype: torch.dtype
    ) -> Tensor:
        """Pooled and normalised latents ``[S, H]`` of the groups that the batch finishes.

        kv, gate: of the new tokens. Those of unfinished groups are stored. dtype: of the latents.
        """
        if self.store is not None:
            kvs, gates = [], []
            for (start, stop), slot in zip(self.bounds, self.slots, strict=True):
                kv, gate = kv_TH[start:stop], gate_TH[start:stop]
                old_kv, old_gate = self.store.residue(layer, slot)
                kvs.append(torch.cat((old_kv, kv)))
                gates.append(torch.cat((old_gate, gate)))
                self.store.extend_residue(layer, slot, kv, gate)
            kv_TH, gate_TH = torch.cat(kvs), torch.cat(gates)
        rows_GR = self.groups[ratio].rows_GR
        return norm(self.ops.compress(kv_TH[rows_GR], gate_TH[rows_GR]).to(dtype))

    def extend_main(
        self, layer: int, ratio: int, latent_SH: Tensor, key_SJ: Tensor, norm: Norm
    ) -> MainKV:
        """Main KV of a source with the entries that the batch finishes, which it stores.

        latent: neither rotated nor quantised yet; key: of index keys, before norm, rotation and
        FP4 round trip.
        """
        rotary = self.groups[ratio].rotary
        rows = self.ops.rotate(latent_SH, *rotary)
        keys = self.ops.latent(key_SJ, norm.weight, norm.eps, rotary, FP4_ROW)
        held, stop = [], 0
        for n, count in enumerate(self.groups[ratio].counts):
            start, stop = stop, stop + count
            held.append((start, count))
            if self.store is not None:
                self.store.extend_main(layer, self.slots[n], rows[start:stop], keys[start:stop])
        if self.store is not None:
            return self.store.main(layer, self.slots, self.sequence_T)
        return FlatMain.of(layer, self.ops.cast(rows, FP4_MAIN), keys, held, self.sequence_T)

    def advance(self, half: Half) -> None:
        """Tell the store that a half is done with the batch."""
        if self.store is None:
            return
        for (start, stop), slot in zip(self.bounds, self.slots, strict=True):
            if half is Half.ENCODER and self.classes_T is not None:
                # Not before: a batch that is refused must leave the history as it was.
                self.store.extend_history(slot, self.classes_T[start:stop])
            self.store.advance(slot, half, stop - start)
