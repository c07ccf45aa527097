"""A pass over a few tokens a sequence, whose places only the device knows.

Decoding and the verification of drafts: the host says nothing but the shapes, so that one recorded
graph of kernels serves every step, whatever sequences and lengths it is about. Rows that stand for
nothing (padding) have position −1 and slot −1; they read nothing and write nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cedar.config.plan import Half
from cedar.model.context import Rotary
from cedar.model.forward import ForwardContext
from cedar.model.linear import Norm
from cedar.ops.compress import Residues
from cedar.ops.index_score import PagedKeys
from cedar.ops.kv_write import RowWrite
from cedar.ops.latent import Append
from cedar.ops.main_kv import KVArrays, PackedMain
from cedar.ops.sparse_attention import PackedRows
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW

__all__ = ["DraftInput", "StepContext", "StepInput"]


class StepInput(NamedTuple):
    """Packed tokens of at most ``B`` sequences, on the device; ``T`` and ``B`` are capacities.

    tokens, positions, slots: int64 ``[T]`` (−1: padding, behind all tokens); sequence: int64
    ``[T]``, which of the batch's sequences. first: int32 ``[B + 1]``, the first token of each
    sequence, then their count. sequence_slot: int64 ``[B]`` (of none: any slot). starts: int64
    ``[halves, T]``, the first position that the windows of a token's sequence hold, per half.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    sequence_T: Tensor
    first: Tensor
    sequence_slot: Tensor
    starts: Tensor


class DraftInput(NamedTuple):
    """Sequences to draft for, on the device: all int64 ``[N]``, padding with slot −1.

    first: the newest token, which is not stored yet. newest: the position of the newest main state.
    starts: the first position whose main state the draft rings hold.
    """

    first_N: Tensor
    slots_N: Tensor
    newest_N: Tensor
    starts_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext(ForwardContext):
    """A context whose batch meets the cache where it lies, with kernels that know the way.

    arrays: the cache. input: where the tokens stand. visible, entries: by ratio, the finished
    groups that each query sees, and the number of the one that its token finishes (−1: none).
    most_queries, most_tokens: of one sequence, new ones and all of them. decoder_slots: windows as
    the decoder sees them.
    """

    arrays: KVArrays
    input: StepInput
    table: Tensor  # int32 [B, pages] of the batch's sequences
    visible: dict[int, Tensor]
    entries: dict[int, Tensor]
    most_queries: int
    most_tokens: int
    decoder_slots_TW: Tensor

    def visible_T(self, ratio: int) -> Tensor:
        return self.visible[ratio]

    def window(self, layer: int, latent_TH: Tensor, norm: Norm, rotary: Rotary) -> PackedRows:
        self.write_window(layer, latent_TH, norm, rotary)
        return PackedRows(self.arrays.rings[layer].flatten(0, 1), self.window_slots_TW, FP8_ROW)

    def write_window(self, layer: int, latent_TH: Tensor, norm: Norm, rotary: Rotary) -> None:
        ring = self.arrays.rings[layer]
        at = self.input
        write = RowWrite(latent_TH, ring, FP8_ROW, None, at.slots_T, at.positions_T)
        self.ops.latents((Append(write, norm.weight, rotary),), norm.eps)

    def compress(
        self, layer: int, ratio: int, kv_TH: Tensor, gate_TH: Tensor, norm: Norm, dtype: torch.dtype
    ) -> Tensor:
        """One row a token: of a token that finishes no group, any."""
        at = self.input
        residues = Residues(kv_TH, gate_TH, self.arrays.residues[layer], at.slots_T, at.positions_T)
        return self.ops.compress_ring(residues, ratio, dtype, norm.weight, norm.eps)

    def extend_main(
        self, layer: int, ratio: int, latent_SH: Tensor, key_SJ: Tensor, norm: Norm
    ) -> PackedMain:
        rotary = self.groups[ratio].rotary
        entries, keys = self.arrays.entries[layer], self.arrays.keys[layer]
        where = (self.table, self.input.sequence_T, self.entries[ratio])
        self.ops.latents(
            (
                Append(RowWrite(latent_SH, entries, FP4_MAIN, *where), None, rotary),
                Append(RowWrite(key_SJ, keys, FP4_ROW, *where), norm.weight, rotary),
            ),
            norm.eps,
        )
        return PackedMain(
            layer=layer,
            entries_PEB=entries,
            keys=PagedKeys(keys, self.table, self.input.first),
            sequence_T=self.input.sequence_T,
            queries=self.most_queries,
            capacity=self.most_tokens // ratio,
        )

    def advance(self, half: Half) -> None:
        """Nothing: how far sequences are is the host's to count."""
