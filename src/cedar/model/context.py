"""What goes along from layer to layer, and what a model asks of a cache, a probe, a trainer.

`Shared` is handed from layer to layer and returned: main KV, the selection, the candidate pool,
each tagged with the layer that made it. Nothing is published through a global. What is the same
for every layer is in `forward.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cedar.config.plan import Half, LayerPlan
from cedar.ops import Ops, widen
from cedar.ops.main_kv import FloatMain, MainKV
from cedar.ops.mhc import MhcMix
from cedar.ops.sparse_attention import Source

__all__ = [
    "Candidates",
    "GroupLayout",
    "KVStore",
    "LayerStats",
    "Probe",
    "Rotary",
    "Selection",
    "Shared",
    "Streams",
    "TrainSignals",
]


class KVStore(Protocol):
    """What a model needs from a cache; slots are sequences, layers count draft blocks too."""

    def length(self, slot: int, half: Half = Half.ENCODER) -> int:
        """Tokens of the sequence that went through a half."""

    def advance(self, slot: int, half: Half, tokens: int) -> None:
        """Count ``tokens`` more; called once for each half, when all its layers have stored."""

    def window_length(self, slot: int, half: Half) -> int:
        """Rows that the windows of a half hold."""

    def window(self, layer: int, slot: int) -> Tensor:
        """The newest window KV ``[≤ window, H]``, oldest first."""

    def extend_window(self, layer: int, slot: int, rows_TH: Tensor) -> None:
        """Append window KV."""

    def residue(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Compressor values and gates ``[g, H]`` of the unfinished group, float32."""

    def extend_residue(self, layer: int, slot: int, kv_TH: Tensor, gate_TH: Tensor) -> None:
        """Append values and gates of new tokens; finished groups are forgotten."""

    def extend_main(self, layer: int, slot: int, rows_SH: Tensor, keys_SJ: Tensor) -> None:
        """Append finished entries, rotated but not yet quantised, and their index keys."""

    def main(self, layer: int, slots: tuple[int, ...], sequence_T: Tensor) -> FloatMain:
        """What a KV source has stored, for the sequences of a batch."""

    def history(self, slot: int) -> Tensor:
        """Engram classes of the newest tokens, int64 ``[max_ngram − 1]``, −1 for none."""

    def extend_history(self, slot: int, classes_T: Tensor) -> None:
        """Append the classes of new tokens."""


class Probe(Protocol):
    """An observer of intermediate values, by name (see `docs/probes.md`)."""

    def wants(self, name: str) -> bool:
        """Whether ``name`` is worth computing when it is not needed otherwise."""

    def record(self, name: str, value: Tensor) -> None:
        """Take a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSignals:
    """What training wants beside the logits.

    index_loss: the indexer's KL loss; index_dense: over all visible entries, as in a warm-up.
    balance_loss: the sequence-wise balance loss of the router.
    checkpoint: recompute every layer in the backward pass instead of keeping activations.
    """

    index_loss: bool = False
    index_dense: bool = False
    balance_loss: bool = False
    checkpoint: bool = False


class LayerStats(NamedTuple):
    """What a layer reports to the trainer.

    experts_TA: the chosen of ``num_experts`` experts; open_T: False on image-span tokens.
    """

    layer: int
    experts_TA: Tensor
    num_experts: int
    open_T: Tensor | None = None
    index_loss: Tensor | None = None
    balance_loss: Tensor | None = None

    def loads(self) -> tuple[Tensor, Tensor]:
        """How many text and how many image-span tokens each expert got, float32 ``[E]``."""
        shape = (len(self.experts_TA), self.num_experts)
        chosen_TE = torch.zeros(shape, device=self.experts_TA.device)
        chosen_TE.scatter_(1, self.experts_TA, 1.0)
        total = chosen_TE.sum(0)
        if self.open_T is None:
            return total, torch.zeros_like(total)
        text = chosen_TE[self.open_T].sum(0)
        return text, total - text


class Rotary(NamedTuple):
    """Cosines and sines ``[T, r/2]`` of the rows' positions."""

    cos: Tensor
    sin: Tensor

    def rows(self, index: Tensor) -> "Rotary":
        """Those of some rows."""
        return Rotary(self.cos[index], self.sin[index])


class GroupLayout(NamedTuple):
    """How the tokens of a batch form compression groups of one ratio.

    rows_GR: for each finished group its tokens, as rows of "every sequence's residue, then its
    new tokens"; counts: finished groups per sequence; rotary: of the groups' first positions.
    """

    rows_GR: Tensor
    counts: tuple[int, ...]
    rotary: Rotary


class Selection(NamedTuple):
    """Entries that each query attends to: ascending numbers ``[T, K]``, −1 padded.

    rows: the same as attention reads them. Where they have to be fetched or dequantised first, the
    index source does it once, for all layers that reuse its selection.
    """

    layer: int
    entries_TK: Tensor
    rows: Source


class Candidates(NamedTuple):
    """Blocks that later index sources search: ascending numbers ``[T, blocks]``, −1 padded."""

    layer: int
    blocks_TB: Tensor
    block_size: int

    @property
    def capacity(self) -> int:
        """Entries of a full pool."""
        return self.blocks_TB.shape[1] * self.block_size

    def entries(self, visible_T: Tensor) -> Tensor:
        """The pool's visible entries ``[T, capacity]``, −1 where absent."""
        offsets = torch.arange(self.block_size, device=self.blocks_TB.device)
        entries = (self.blocks_TB.unsqueeze(2) * self.block_size + offsets).flatten(1)
        known = self.blocks_TB.repeat_interleave(self.block_size, dim=1) >= 0
        return torch.where(known & (entries < visible_T.unsqueeze(1)), entries, -1)

    def entry_of(self, columns_TK: Tensor) -> Tensor:
        """The entries that columns of `entries` stand for; −1 stays."""
        column = columns_TK.clamp_min(0)
        block = self.blocks_TB.gather(1, column // self.block_size)
        entries = block * self.block_size + column % self.block_size
        return torch.where(columns_TK >= 0, entries, -1)


@dataclass(frozen=True, slots=True)
class Shared:
    """Cross-layer state, handed along. Readers ask by the number their plan names."""

    main: MainKV | None = None
    selection: Selection | None = None
    candidates: Candidates | None = None

    def main_for(self, plan: LayerPlan) -> MainKV:
        if self.main is None or self.main.layer != plan.kv_source:
            raise _wrong_source(plan, "main KV", plan.kv_source, self.main)
        return self.main

    def selection_for(self, plan: LayerPlan) -> Selection:
        if self.selection is None or self.selection.layer != plan.topk_source:
            raise _wrong_source(plan, "selection", plan.topk_source, self.selection)
        return self.selection

    def candidates_for(self, plan: LayerPlan) -> Candidates | None:
        if plan.candidate_source is None:
            return None
        if self.candidates is None or self.candidates.layer != plan.candidate_source:
            raise _wrong_source(plan, "candidates", plan.candidate_source, self.candidates)
        return self.candidates


def _wrong_source(
    plan: LayerPlan,
    what: str,
    wanted: int | None,
    found: MainKV | Selection | Candidates | None,
) -> RuntimeError:
    got = "nothing" if found is None else f"those of layer {found.layer}"
    return RuntimeError(
        f"layer {plan.index} reads the {what} of layer {wanted}, but was handed {got}"
    )


@dataclass(frozen=True, slots=True)
class Streams:
    """Residual streams ``[T, C, D]`` and the pending input mix ``[T, C]`` (float32).

    update: a sublayer's output ``[T, D]`` and mix that are not written into the streams yet; the
    next sublayer does it in one operation with what it computes from them (`Ops.mhc_step`).
    """

    x_TCD: Tensor
    mix_TC: Tensor
    update: tuple[Tensor, MhcMix] | None = None

    @classmethod
    def fresh(cls, x_TD: Tensor, count: int) -> "Streams":
        """Every stream a copy of the embedding; the first input mix reads stream 0 alone."""
        mix = torch.zeros((len(x_TD), count), dtype=widen(x_TD).dtype, device=x_TD.device)
        mix[:, 0] = 1.0
        return cls(x_TD.unsqueeze(1).expand(-1, count, -1), mix)

    def written(self, ops: Ops) -> "Streams":
        """The same with nothing left to write."""
        if self.update is None:
            return self
        return Streams(ops.mhc_expand(self.x_TCD, *self.update), self.mix_TC)

    def collapse(self, ops: Ops) -> Tensor:
        """The next sublayer's input before its norm: ``Σ_j mix_j x_j``."""
        return ops.mhc_collapse(self.written(ops).x_TCD, self.mix_TC)

    def rows(self, index: Tensor) -> "Streams":
        """The streams of some tokens."""
        update = self.update
        if update is not None:
            y, mix = update
            update = (y[index], MhcMix(*(part[index] for part in mix)))
        return Streams(self.x_TCD[index], self.mix_TC[index], update)
