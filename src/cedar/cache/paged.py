"""The packed store: main KV in pages of bytes, everything else in a fixed slot per sequence.

A global entry and an index key are held exactly as the formats say (288 and 68 bytes at the
released sizes) and dequantised when they are read; there is no floating-point copy. Windows,
unfinished groups and n-gram history are rings over absolute positions with room for a few tokens
more than anyone reads, so that forgetting drafted tokens is forgetting a number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cedar.cache.layout import KVLayout
from cedar.cache.snapshots import RingCapture, RingSnapshot
from cedar.config.model import ModelConfig
from cedar.config.plan import Half, plan_layers
from cedar.errors import CapacityError
from cedar.ops.main_kv import KVArrays
from cedar.ops.packed import pack_rows, page_rows, unpack_rows
from cedar.ops.sparse_attention import PackedRows, Rows, Source
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW

__all__ = ["Mark", "PagedKV", "PagedMain"]


@dataclass(slots=True)
class _Slot:
    """One sequence: its pages, and how far each half and each source got.

    starts: the first position whose window rows a half has. protected: entries of positions below
    are shared with others and never written again. capture: snapshots that the pass takes.
    """

    pages: list[int]
    lengths: dict[Half, int] = field(default_factory=lambda: dict.fromkeys(Half, 0))
    starts: dict[Half, int] = field(default_factory=lambda: dict.fromkeys(Half, 0))
    stored: dict[int, int] = field(default_factory=dict)
    protected: int = 0
    capture: RingCapture | None = None

    def copy(self) -> "_Slot":
        """The same numbers, which later changes leave alone."""
        return replace(
            self,
            pages=list(self.pages),
            lengths=dict(self.lengths),
            starts=dict(self.starts),
            stored=dict(self.stored),
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """Some sequences before a pass, for `PagedKV.rollback`.

    rows: of ``slots``, what each ring held; empty where nothing that is read can be overwritten.
    """

    states: Mapping[int, _Slot]
    slots: Tensor
    rows: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class PagedMain:
    """Implements `cedar.ops.main_kv.FloatMain` over pages.

    in_place: entries are handed out packed, for operations that read them where they lie.
    """

    layer: int
    counts: tuple[int, ...]
    entries_PEB: Tensor
    keys_PEB: Tensor
    table_BP: Tensor  # pages of each sequence, in order
    sequence_T: Tensor
    dtype: torch.dtype
    in_place: bool

    def select(self, entries_TK: Tensor) -> Source:
        known = entries_TK >= 0
        place = self._places(entries_TK.clamp_min(0), self.sequence_T.unsqueeze(1))
        rows = self.entries_PEB.flatten(0, 1)
        if self.in_place:
            return PackedRows(rows, torch.where(known, place, -1), FP4_MAIN)
        # Each stored row is dequantised once, however many queries chose it.
        unique, where = torch.unique(place[known], return_inverse=True)
        slots = torch.full_like(entries_TK, -1)
        slots[known] = where
        return Rows(unpack_rows(rows[unique], FP4_MAIN, self.dtype), slots)

    def keys(self, sequence: int, stop: int) -> Tensor:
        per_page = self.keys_PEB.shape[1]
        pages = self.table_BP[sequence, : -(-stop // per_page)]
        return unpack_rows(self.keys_PEB[pages].flatten(0, 1)[:stop], FP4_ROW, self.dtype)

    def keys_at(self, sequence: int, entries_TM: Tensor) -> tuple[Tensor, Tensor]:
        place = self._places(entries_TM.clamp_min(0), sequence)
        unique, where = torch.unique(place, return_inverse=True)
        return unpack_rows(self.keys_PEB.flatten(0, 1)[unique], FP4_ROW, self.dtype), where

    def _places(self, entries: Tensor, sequence: Tensor | int) -> Tensor:
        """Rows of the storage."""
        return page_rows(self.table_BP, sequence, entries, self.entries_PEB.shape[1])


class PagedKV:
    """Implements `cedar.model.KVStore` for ``num_slots`` sequences over ``num_pages`` pages.

    Which page belongs to whom is decided elsewhere (`cedar.cache.pages`); a slot is told its pages.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        *,
        num_pages: int,
        num_slots: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        in_place: bool = False,
    ) -> None:
        """in_place: hand out main KV for operations that read packed rows where they lie."""
        self.config, self.layout = config, layout
        self._in_place = in_place
        self.num_pages, self.num_slots = num_pages, num_slots
        self.window_size = config.window_size
        self._dtype = dtype
        plans = plan_layers(config)
        self._half = {plan.index: plan.half for plan in plans}
        self._ratio = {plan.index: plan.compress_ratio for plan in plans if plan.has_compressor}
        self.slack = layout.slack

        def zeros(*shape: int, kind: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self._entries = {
            source.layer: zeros(num_pages, source.entries_per_page, layout.entry_bytes)
            for source in layout.sources
        }
        self._keys = {
            source.layer: zeros(num_pages, source.entries_per_page, layout.key_bytes)
            for source in layout.sources
        }
        ring = self.window_size + self.slack
        self._rings = {
            plan.index: zeros(num_slots, ring, layout.window_row_bytes) for plan in plans
        }
        wide = torch.promote_types(dtype, torch.float32)
        self._residues = {
            layer: zeros(num_slots, ratio - 1 + self.slack, 2, config.head_dim, kind=wide)
            for layer, ratio in self._ratio.items()
            if ratio > 1
        }
        self._back = max(config.engram_max_ngram_size - 1, 0)
        self._history = zeros(num_slots, self._back + self.slack, kind=torch.int64)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._table: Tensor | None = None  # of pages, made when somebody asks for `arrays`
        self._tabled: list[list[int]] = [[] for _ in range(num_slots)]  # what it says

    # --- slots and pages ------------------------------------------------------------------

    def open(self, slot: int, pages: Sequence[int] = ()) -> None:
        """Begin an empty sequence; ``pages`` may be added later."""
        self._slots[slot] = _Slot(list(pages), stored=dict.fromkeys(self._ratio, 0))
        self._history[slot] = -1

    def close(self, slot: int) -> None:
        """Forget a sequence. Its pages keep their bytes."""
        self._slots[slot] = None

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """The pages of a sequence, in order."""
        self._at(slot).pages = list(pages)

    def restore(self, slot: int, tokens: int, start: int, classes_T: Tensor) -> None:
        """Take over ``tokens`` tokens whose entries lie in the slot's pages already.

        Their windows do not: the next pass has to begin at ``start`` (at a group boundary) and run
        the tokens from there again, which rebuilds windows and writes nothing that is stored.
        classes: Engram classes of the tokens before ``start``, the newest last.
        """
        state = self._at(slot)
        state.lengths = dict.fromkeys(Half, start)
        state.starts = dict.fromkeys(Half, start)
        state.stored = {layer: tokens // ratio for layer, ratio in self._ratio.items()}
        state.protected = tokens
        if self._back:
            ring = self._history.shape[1]
            for k, value in enumerate(classes_T[-self._back :].flip(0).tolist(), start=1):
                self._history[slot, (start - k) % ring] = value

    def resume(self, slot: int, tokens: int, snapshot: RingSnapshot) -> None:
        """Take over ``tokens`` tokens whose entries lie in the slot's pages already.

        The next pass goes on behind the snapshot, with its windows and history. Up to ``tokens``
        it writes nothing that is stored. Nothing is known of the decoder.
        """
        at, count = snapshot.position, snapshot.rings_LRB.shape[1]
        if not 0 < at <= tokens:
            raise ValueError(f"a snapshot at {at} is none of the first {tokens} tokens")
        self.restore(slot, tokens, at, snapshot.classes_R)
        self._at(slot).starts[Half.ENCODER] = at - count
        layers = [layer for layer, half in self._half.items() if half is Half.ENCODER]
        for layer, rows_RB in zip(layers, snapshot.rings_LRB, strict=True):
            ring = self._rings[layer][slot]
            ring[torch.arange(at - count, at, device=ring.device) % len(ring)] = rows_RB

    def capture(self, slot: int, positions: Sequence[int]) -> None:
        """Let the next pass of a sequence take snapshots at positions that it goes through."""
        state = self._at(slot)
        if not positions or min(positions) <= state.lengths[Half.ENCODER]:
            raise ValueError(f"snapshots at {list(positions)} lie behind the sequence's tokens")
        state.capture = RingCapture(
            positions,
            # A token sees itself and one less than a window before it.
            rows=self.window_size - 1,
            back=self._back,
            oldest=state.starts[Half.ENCODER],
        )

    def captured(self, slot: int) -> dict[int, RingSnapshot]:
        """The snapshots that the pass took, by position; none if none were asked for."""
        state = self._at(slot)
        capture, state.capture = state.capture, None
        return {} if capture is None else capture.finish()

    def mark(self, sizes: Mapping[int, int]) -> Mark:
        """Remember sequences (by slot) before a pass that gives them so many tokens.

        Up to ``slack`` tokens overwrite no ring row that is read again, nor do those of a sequence
        that has none; of the others the rings are copied.
        """
        states = {slot: self._at(slot).copy() for slot in sizes}
        long = [
            slot
            for slot, size in sizes.items()
            if size > self.slack and states[slot].lengths[Half.ENCODER] > 0
        ]
        slots = torch.tensor(long, dtype=torch.int64, device=self._history.device)
        return Mark(
            states, slots, tuple(ring[slots] for ring in self._every_ring()) if long else ()
        )

    def rollback(self, mark: Mark) -> None:
        """Put the sequences back as they were, whatever became of the pass.

        Entries that it wrote lie behind what is stored, in pages of the sequence's own.
        """
        for slot, state in mark.states.items():
            self._slots[slot] = state.copy()
        for ring, rows in zip(self._every_ring(), mark.rows, strict=False):
            ring[mark.slots] = rows

    def skip(self, slot: int, half: Half, position: int) -> None:
        """A half goes on at ``position`` without any window rows before it (bounded replay)."""
        state = self._at(slot)
        state.lengths[half] = state.starts[half] = position

    def truncate(self, slot: int, tokens: int) -> None:
        """Forget everything after the first ``tokens`` tokens; at most ``slack`` tokens."""
        state = self._at(slot)
        taken = state.lengths[Half.ENCODER] - tokens
        if not 0 <= taken <= self.slack:
            raise ValueError(f"{taken} tokens cannot be taken back; 0 to {self.slack} can")
        for half in Half:
            state.lengths[half] = min(state.lengths[half], tokens)
        for layer, ratio in self._ratio.items():
            state.stored[layer] = min(state.stored[layer], tokens // ratio)

    def copy_slot(self, source: int, target: int) -> None:
        """Give ``target`` the rings, groups, history and lengths of ``source``; not its pages."""
        old, new = self._at(source), self._at(target)
        new.lengths, new.starts = dict(old.lengths), dict(old.starts)
        new.stored, new.protected = dict(old.stored), old.protected
        for ring in self._every_ring():
            ring[target] = ring[source]

    def copy_page(self, source: int, target: int) -> None:
        """Copy all bytes of a page."""
        for pool in (*self._entries.values(), *self._keys.values()):
            pool[target] = pool[source]

    def read_page(self, page: int) -> bytes:
        """A page as it is held: sources in order, entries before keys."""
        pools = (p for layer in self._entries for p in (self._entries[layer], self._keys[layer]))
        return b"".join(pool[page].cpu().numpy().tobytes() for pool in pools)

    def write_page(self, page: int, payload: bytes) -> None:
        """The inverse of `read_page`."""
        start = 0
        for layer in self._entries:
            for pool in (self._entries[layer], self._keys[layer]):
                size = pool[page].numel()
                part = torch.frombuffer(bytearray(payload[start : start + size]), dtype=torch.uint8)
                pool[page] = part.view(pool[page].shape).to(pool.device)
                start += size

    @property
    def global_nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(p.nbytes for p in (*self._entries.values(), *self._keys.values()))

    @property
    def slot_nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(ring.nbytes for ring in self._every_ring())

    def _every_ring(self) -> tuple[Tensor, ...]:
        return (*self._rings.values(), *self._residues.values(), self._history)

    # --- for passes whose places only the device knows -----------------------------------

    @property
    def arrays(self) -> KVArrays:
        """Everything as it lies on the device. `write_tables` brings page tables up to date."""
        if self._table is None:
            most = self.layout.pages_for(self.config.max_position_embeddings)
            shape = (self.num_slots, min(most, self.num_pages))
            self._table = torch.zeros(shape, dtype=torch.int32, device=self._history.device)
        return KVArrays(
            rings=self._rings,
            residues=self._residues,
            entries=self._entries,
            keys=self._keys,
            history=self._history,
            table=self._table,
        )

    def write_tables(self, slots: Sequence[int]) -> None:
        """Put the pages of some sequences into the device's table; most often nothing is new."""
        table = self.arrays.table
        for slot in slots:
            pages, known = self._at(slot).pages, self._tabled[slot]
            same = len(known)
            if pages[:same] != known:  # another sequence's
                both = zip(pages, known, strict=False)
                same = next((i for i, (new, old) in enumerate(both) if new != old), len(pages))
            if same < len(pages):
                fresh = torch.tensor(pages[same:], dtype=torch.int32)
                table[slot, same : len(pages)] = fresh.to(table.device, non_blocking=True)
            self._tabled[slot] = list(pages)

    def check_room(self, slot: int, tokens: int) -> None:
        """`CapacityError` unless a sequence has the pages for so many tokens."""
        pages, per_page = len(self._at(slot).pages), self.layout.page_tokens
        if tokens > pages * per_page:
            raise CapacityError(
                f"slot {slot} holds {pages} pages of {per_page} tokens; {tokens} tokens need more"
            )

    def count(self, slot: int, tokens: int, halves: Sequence[Half]) -> None:
        """Take note of tokens that such a pass has stored, all sources' entries included."""
        state = self._at(slot)
        for half in halves:
            state.lengths[half] += tokens
        stop = state.lengths[Half.ENCODER]
        for layer, ratio in self._ratio.items():
            state.stored[layer] = max(state.stored[layer], stop // ratio)

    def window_start(self, slot: int, half: Half) -> int:
        """The first position whose window rows a half has."""
        return self._at(slot).starts[half]

    def snapshot(self, slot: int, position: int) -> RingSnapshot:
        """Windows and history after ``position`` tokens, at most ``slack`` before the newest."""
        state = self._at(slot)
        first = max(position - self.window_size + 1, state.starts[Half.ENCODER])
        layers = [layer for layer, half in self._half.items() if half is Half.ENCODER]
        places = torch.arange(first, position, device=self._history.device)
        rings = [self._rings[layer][slot] for layer in layers]
        newest = torch.arange(max(position - self._back, 0), position, device=places.device)
        history = self._history[slot]
        return RingSnapshot(
            position=position,
            rings_LRB=torch.stack([ring[places % len(ring)] for ring in rings]),
            classes_R=history[newest % len(history)],
        )

    # --- what the model asks for ----------------------------------------------------------

    def _at(self, slot: int) -> _Slot:
        state = self._slots[slot] if 0 <= slot < self.num_slots else None
        if state is None:
            raise CapacityError(f"slot {slot} is not open (num_slots is {self.num_slots})")
        return state

    def length(self, slot: int, half: Half = Half.ENCODER) -> int:
        return self._at(slot).lengths[half]

    def advance(self, slot: int, half: Half, tokens: int) -> None:
        self._at(slot).lengths[half] += tokens

    def window_length(self, slot: int, half: Half) -> int:
        state = self._at(slot)
        return min(state.lengths[half] - state.starts[half], self.window_size)

    def window(self, layer: int, slot: int) -> Tensor:
        half = self._half[layer]
        stop = self.length(slot, half)
        ring = self._rings[layer][slot]
        places = torch.arange(stop - self.window_length(slot, half), stop, device=ring.device)
        return unpack_rows(ring[places % len(ring)], FP8_ROW, self._dtype)

    def extend_window(self, layer: int, slot: int, rows_TH: Tensor) -> None:
        half, ring = self._half[layer], self._rings[layer][slot]
        start, capture = self.length(slot, half), self._at(slot).capture
        if half is Half.ENCODER and capture is not None:
            capture.add_window(ring, start, rows_TH, _pack_fp8)
        _append(ring, start, rows_TH, _pack_fp8)

    def residue(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        stop = self.length(slot)
        ring = self._residues[layer][slot]
        places = torch.arange(stop - stop % self._ratio[layer], stop, device=ring.device)
        rows = ring[places % len(ring)]
        return rows[:, 0], rows[:, 1]

    def extend_residue(self, layer: int, slot: int, kv_TH: Tensor, gate_TH: Tensor) -> None:
        rows = torch.stack((kv_TH, gate_TH), dim=1)
        _append(self._residues[layer][slot], self.length(slot), rows, lambda x: x)

    def extend_main(self, layer: int, slot: int, rows_SH: Tensor, keys_SJ: Tensor) -> None:
        state = self._at(slot)
        ratio = self._ratio[layer]
        first = state.lengths[Half.ENCODER] // ratio
        stop = first + len(rows_SH)
        # Entries of a shared prefix exist already; a replay makes them again only for its windows.
        begin = min(max(first, state.protected // ratio), stop)
        per_page = self._entries[layer].shape[1]
        if stop > len(state.pages) * per_page:
            raise CapacityError(
                f"slot {slot} holds {len(state.pages)} pages of {per_page} entries; "
                f"layer {layer} needs {stop}"
            )
        pages = torch.tensor([state.pages], dtype=torch.int64)
        place = page_rows(pages, 0, torch.arange(begin, stop), per_page).to(rows_SH.device)
        self._entries[layer].flatten(0, 1)[place] = pack_rows(rows_SH[begin - first :], FP4_MAIN)
        self._keys[layer].flatten(0, 1)[place] = pack_rows(keys_SJ[begin - first :], FP4_ROW)
        state.stored[layer] = max(state.stored[layer], stop)

    def main(self, layer: int, slots: tuple[int, ...], sequence_T: Tensor) -> PagedMain:
        states = [self._at(slot) for slot in slots]
        longest = max([1, *(len(state.pages) for state in states)])
        table = [state.pages + [0] * (longest - len(state.pages)) for state in states]
        table_BP = torch.tensor(table, dtype=torch.int64).view(len(slots), longest)
        return PagedMain(
            layer=layer,
            counts=tuple(state.stored[layer] for state in states),
            entries_PEB=self._entries[layer],
            keys_PEB=self._keys[layer],
            table_BP=table_BP.to(sequence_T.device),
            sequence_T=sequence_T,
            dtype=self._dtype,
            in_place=self._in_place,
        )

    def history(self, slot: int) -> Tensor:
        stop = self.length(slot)
        ring = self._history[slot]
        places = torch.arange(stop - self._back, stop, device=ring.device)
        return torch.where(places >= 0, ring[places % len(ring)], -1)

    def extend_history(self, slot: int, classes_T: Tensor) -> None:
        ring, start, capture = self._history[slot], self.length(slot), self._at(slot).capture
        if capture is not None:
            capture.add_history(ring, start, classes_T)
        _append(ring, start, classes_T, lambda x: x)


def _pack_fp8(rows: Tensor) -> Tensor:
    return pack_rows(rows, FP8_ROW)


def _append(ring: Tensor, length: int, rows: Tensor, pack: Callable[[Tensor], Tensor]) -> None:
    """Write the rows of the next positions; of more rows than the ring holds only the last."""
    kept = rows[-len(ring) :].detach()
    first = length + len(rows) - len(kept)
    places = torch.arange(first, first + len(kept), device=ring.device) % len(ring)
    ring[places] = pack(kept)
