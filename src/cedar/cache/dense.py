"""The simple store: plain tensors, one row per sequence, everything in floating point.

For stepping in tests and notebooks, and for single-user generation. Values are what attention
reads (already through their FP8 or FP4 round trip), so memory is not what a packed cache needs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.config.plan import Half, LayerPlan, plan_layers
from cedar.errors import CapacityError
from cedar.ops.main_kv import FlatMain
from cedar.quant import FP4_MAIN, fake_quantize

__all__ = ["DenseKV", "Mark"]


@dataclass(slots=True)
class _Sequence:
    """All state of one sequence but its main KV, which is append-only. Tensors are never
    written in place, so a copy of the references is a snapshot."""

    lengths: dict[Half, int]
    entries: dict[int, int]  # finished groups per KV source
    windows: dict[int, Tensor]
    residues: dict[int, tuple[Tensor, Tensor]]
    history: Tensor

    def copy(self) -> "_Sequence":
        return _Sequence(
            dict(self.lengths),
            dict(self.entries),
            dict(self.windows),
            dict(self.residues),
            self.history,
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """A state to return to. Going back twice is fine; going forward again is not."""

    sequences: tuple[_Sequence, ...]


class DenseKV:
    """Implements `cedar.model.KVStore` for ``num_sequences`` slots that start empty."""

    def __init__(
        self,
        config: ModelConfig,
        num_sequences: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.window_size = config.window_size
        self.num_sequences = num_sequences
        self._place = {"device": device, "dtype": dtype}
        wide = torch.promote_types(dtype, torch.float32)
        self._sources: dict[int, LayerPlan] = {
            plan.index: plan for plan in plan_layers(config) if plan.has_compressor
        }
        width = config.head_dim
        self._widths = (width, config.index_head_dim)
        nothing = torch.empty(0, width, **self._place)  # type: ignore[arg-type]
        unfinished = torch.empty(0, width, device=device, dtype=wide)
        back = max(config.engram_max_ngram_size - 1, 0)
        blank = torch.full((back,), -1, dtype=torch.int64, device=device)
        layers = range(config.n_layers + config.n_mtp_layers)
        self._blank = _Sequence(
            dict.fromkeys(Half, 0),
            dict.fromkeys(self._sources, 0),
            dict.fromkeys(layers, nothing),
            dict.fromkeys(self._sources, (unfinished, unfinished)),
            blank,
        )
        self._state = [self._blank.copy() for _ in range(num_sequences)]
        self._capacity = dict.fromkeys(self._sources, 0)
        self._rows = dict.fromkeys(self._sources, nothing)
        self._keys = {
            k: torch.empty(0, config.index_head_dim, **self._place)  # type: ignore[arg-type]
            for k in self._sources
        }

    # --- what the model asks for ----------------------------------------------------------

    def length(self, slot: int, half: Half = Half.ENCODER) -> int:
        if not 0 <= slot < self.num_sequences:
            raise CapacityError(
                f"slot {slot} is not in this store; expected 0 to {self.num_sequences - 1} "
                "(num_sequences)."
            )
        return self._state[slot].lengths[half]

    def advance(self, slot: int, half: Half, tokens: int) -> None:
        self._state[slot].lengths[half] += tokens

    def window_length(self, slot: int, half: Half) -> int:
        return min(self._state[slot].lengths[half], self.window_size)

    def window(self, layer: int, slot: int) -> Tensor:
        return self._state[slot].windows[layer]

    def extend_window(self, layer: int, slot: int, rows_TH: Tensor) -> None:
        windows = self._state[slot].windows
        windows[layer] = torch.cat((windows[layer], rows_TH.detach()))[-self.window_size :]

    def residue(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        return self._state[slot].residues[layer]

    def extend_residue(self, layer: int, slot: int, kv_TH: Tensor, gate_TH: Tensor) -> None:
        residues = self._state[slot].residues
        ratio = self._sources[layer].compress_ratio
        kv, gate = (
            torch.cat((old, new.detach()))
            for old, new in zip(residues[layer], (kv_TH, gate_TH), strict=True)
        )
        finished = len(kv) // ratio * ratio
        residues[layer] = (kv[finished:], gate[finished:])

    def extend_main(self, layer: int, slot: int, rows_SH: Tensor, keys_SJ: Tensor) -> None:
        state = self._state[slot]
        start = state.entries[layer]
        stop = start + len(rows_SH)
        self._reserve(layer, stop)
        first = slot * self._capacity[layer]
        rows = fake_quantize(rows_SH.detach(), FP4_MAIN)
        self._rows[layer][first + start : first + stop] = rows
        self._keys[layer][first + start : first + stop] = keys_SJ.detach()
        state.entries[layer] = stop

    def main(self, layer: int, slots: tuple[int, ...], sequence_T: Tensor) -> FlatMain:
        ranges = [self._range(layer, slot) for slot in slots]
        return FlatMain.of(layer, self._rows[layer], self._keys[layer], ranges, sequence_T)

    def _range(self, layer: int, slot: int) -> tuple[int, int]:
        return slot * self._capacity[layer], self._state[slot].entries[layer]

    def history(self, slot: int) -> Tensor:
        return self._state[slot].history

    def extend_history(self, slot: int, classes_T: Tensor) -> None:
        state = self._state[slot]
        seen = torch.cat((state.history, classes_T))
        state.history = seen[len(seen) - len(state.history) :]

    def _reserve(self, layer: int, entries: int) -> None:
        """Room for ``entries`` in every slot; grows by doubling."""
        old = self._capacity[layer]
        if entries <= old:
            return
        new = max(entries, 2 * old, 16)
        for table in (self._rows, self._keys):
            before = table[layer]
            after = before.new_zeros((self.num_sequences, new, before.shape[1]))
            after[:, :old] = before.view(self.num_sequences, old, before.shape[1])
            table[layer] = after.flatten(0, 1)
        self._capacity[layer] = new

    # --- for whoever drives it ------------------------------------------------------------

    def mark(self) -> Mark:
        """Remember everything as it is now."""
        return Mark(tuple(state.copy() for state in self._state))

    def rollback(self, mark: Mark) -> None:
        """Forget everything since ``mark``: windows, groups, entries, keys, n-gram history.

        Entries are append-only, so forgetting them is forgetting their number.
        """
        self._state = [state.copy() for state in mark.sequences]

    def reset(self, slot: int) -> None:
        """Empty one slot."""
        self._state[slot] = self._blank.copy()

    def entries(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Main KV ``[S, H]`` and index keys ``[S, J]`` of one sequence."""
        first, count = self._range(layer, slot)
        here = slice(first, first + count)
        return self._rows[layer][here], self._keys[layer][here]
