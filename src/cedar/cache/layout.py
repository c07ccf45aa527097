"""What the packed cache takes: bytes of entries, pages and slots, from plan and formats alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from cedar.config import LayerPlan, ModelConfig, plan_layers
from cedar.errors import ConfigError
from cedar.quant import FP4_MAIN, FP4_ROW, FP8_ROW

__all__ = ["KVLayout", "SourceLayout"]

_LEAST_PAGE_TOKENS = 64
_FLOAT32_BYTES = 4
_CLASS_BYTES = 8  # a compressed token id is an int64


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLayout:
    """One writer of main KV and index keys: one entry per ``ratio`` tokens."""

    layer: int
    ratio: int
    entries_per_page: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """The layout of the packed cache.

    A *page* is the main KV and the index keys of ``page_tokens`` consecutive tokens, of all
    sources. A *slot* is what one running request has besides its pages: a window ring for every
    layer and draft block, the unfinished groups, and the n-gram history. All three are rings of
    ``slack`` rows more than anyone reads, so that a verified draft block can be taken back.
    Sizes are in bytes and do not count the allocator's own tables.

    Formats (architecture, section 8): an entry is ``H / 2`` bytes of FP4 and ``H / 16`` of E4M3
    scales; an index key ``J / 2`` of FP4 and ``J / 32`` of E8M0 scales; a window row ``H`` of
    FP8 and ``H / 32`` of E8M0 scales; a residue is two float32 rows of ``H`` (a store that
    computes in float64 keeps them so).
    """

    page_tokens: int
    sources: tuple[SourceLayout, ...]
    entry_bytes: int
    key_bytes: int
    window_row_bytes: int
    window_rows: int
    window_layers: int
    head_dim: int
    history_tokens: int
    slack: int

    @classmethod
    def from_config(cls, config: ModelConfig, page_tokens: int | None = None) -> "KVLayout":
        """The layout for a model.

        A page must hold whole groups of every source and whole candidate blocks, so that a
        prefix that ends with a page ends with a group. By default it is the smallest such number
        of tokens from 64 on. Raises `ConfigError` for one that is not a multiple.
        """
        plan = plan_layers(config)
        writers = [layer for layer in plan if layer.has_compressor]
        step = _page_step(config, plan, writers)
        if page_tokens is None:
            page_tokens = -(-_LEAST_PAGE_TOKENS // step) * step
        if page_tokens < 1 or page_tokens % step:
            raise ConfigError(
                f"page_tokens is {page_tokens}; expected a positive multiple of {step}, so that a "
                "page holds whole groups of every compression ratio and whole candidate blocks."
            )
        return cls(
            page_tokens=page_tokens,
            sources=tuple(
                SourceLayout(
                    layer=layer.index,
                    ratio=layer.compress_ratio,
                    entries_per_page=page_tokens // layer.compress_ratio,
                )
                for layer in writers
            ),
            entry_bytes=FP4_MAIN.bytes_per_row(config.head_dim),
            key_bytes=FP4_ROW.bytes_per_row(config.index_head_dim),
            window_row_bytes=FP8_ROW.bytes_per_row(config.head_dim),
            window_rows=config.window_size,
            window_layers=len(plan),
            head_dim=config.head_dim,
            history_tokens=max(config.engram_max_ngram_size - 1, 0),
            # The newest token and the drafts behind it are the most that is ever taken back.
            slack=config.dspark_block_size + 1,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all sources' entries and keys."""
        entries = sum(source.entries_per_page for source in self.sources)
        return entries * (self.entry_bytes + self.key_bytes)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that every further token of a context takes; exact, also where not whole."""
        return Fraction(self.page_bytes, self.page_tokens)

    @property
    def ring_rows(self) -> int:
        """Rows of one window ring: the window and the slack."""
        return self.window_rows + self.slack

    def residue_rows(self, source: SourceLayout) -> int:
        """Rows that hold a source's unfinished group and the slack; none where groups are of 1."""
        return source.ratio - 1 + self.slack if source.ratio > 1 else 0

    @property
    def history_rows(self) -> int:
        """Compressed token ids that a slot holds: those of an n-gram's past and the slack."""
        return self.history_tokens + self.slack

    @property
    def ring_bytes(self) -> int:
        """Bytes of the window rings of one slot, draft blocks included."""
        return self.window_layers * self.ring_rows * self.window_row_bytes

    @property
    def residue_bytes(self) -> int:
        """Bytes of the unfinished groups of one slot: values and gates."""
        rows = sum(self.residue_rows(source) for source in self.sources)
        return 2 * rows * self.head_dim * _FLOAT32_BYTES

    @property
    def history_bytes(self) -> int:
        """Bytes of the last compressed token ids of one slot."""
        return self.history_rows * _CLASS_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.ring_bytes + self.residue_bytes + self.history_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens of one sequence occupy."""
        return -(-tokens // self.page_tokens)

    def total_bytes(self, num_pages: int, num_slots: int) -> int:
        """Bytes of pool and slots together."""
        return num_pages * self.page_bytes + num_slots * self.slot_bytes


def _page_step(config: ModelConfig, plan: Sequence[LayerPlan], writers: Sequence[LayerPlan]) -> int:
    """Tokens after which all groups and candidate blocks end together."""
    steps = [layer.compress_ratio for layer in writers]
    steps += [
        config.candidate_block_size * layer.compress_ratio
        for layer in plan
        if layer.builds_candidates
    ]
    return math.lcm(*steps)
