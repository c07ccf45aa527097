"""The indexer: which entries a query attends to (sections 5 and 6).

A selection carries no gradient. What trains the indexer is its own loss, so its inputs are
detached: the loss reaches index queries, keys and weights and nothing else.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import LayerPlan
from cedar.model.context import Candidates, Selection, Shared
from cedar.model.forward import ForwardContext
from cedar.model.linear import BuildSpec, Linear, Norm
from cedar.ops.main_kv import FloatMain, MainKV, PackedMain
from cedar.ops.select import Chosen, Place
from cedar.ops.sparse_attention import Source
from cedar.quant import FP4_ROW, FP8_BLOCK

__all__ = ["IndexQuery", "Indexer"]

_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
_GROUP = 8  # entries whose best score helps selecting, where there are no candidate blocks


class IndexQuery(NamedTuple):
    """Index queries and head weights of some tokens."""

    q_TIJ: Tensor
    w_TI: Tensor

    def rows(self, tokens: slice) -> "IndexQuery":
        """Those of fewer tokens."""
        return IndexQuery(self.q_TIJ[tokens], self.w_TI[tokens])


class Indexer(nn.Module):
    """Scores entries and selects among them; in full layers it makes the index keys too."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, spec: BuildSpec) -> None:
        super().__init__()
        self.ops = spec.ops
        self.plan = plan
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.pool_blocks, self.pool_block = (
            config.candidate_topk_blocks,
            config.candidate_block_size,
        )
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, FP8_BLOCK, spec)
        self.weights_proj = Linear(config.dim, self.heads, None, spec)
        if plan.has_compressor:
            self.wk = Linear(config.head_dim, self.width, None, spec)
            self.k_norm = Norm(self.width, config.norm_eps, spec)

    def queries(
        self, x_TD: Tensor, c_q_TR: Tensor, q_norm: Norm, ctx: ForwardContext
    ) -> IndexQuery:
        """Index queries and head weights; latent queries come before their norm."""
        norm = (q_norm.weight.detach(), q_norm.eps)
        (q,) = self.ops.project(
            c_q_TR.detach(), (self.wq_b.value(),), input_format=self.wq_b.input_format, norm=norm
        )
        q = q.view(-1, self.heads, self.width)
        q = self.ops.latent(q, None, 0.0, ctx.rotary(self.plan), FP4_ROW)
        w = self.weights_proj(x_TD.detach()) * (self.width**-0.5 * self.heads**-0.5)
        return IndexQuery(q, w)

    @torch.no_grad()
    def select(
        self, query: IndexQuery, main: MainKV, shared: Shared, ctx: ForwardContext
    ) -> tuple[Selection, Candidates | None]:
        """The selection of every query and, at the candidate source, the new pool."""
        pool = shared.candidates_for(self.plan)
        rows: Source
        if isinstance(main, PackedMain):
            chosen = self._select_packed(query, main, pool, ctx)
            assert chosen.rows_TK is not None
            entries, blocks, rows = chosen.entries_TK, chosen.blocks_TM, main.rows(chosen.rows_TK)
        else:
            entries, blocks = self._select_flat(query, main, pool, ctx)
            rows = main.select(entries)
        selection = Selection(self.plan.index, entries, rows)
        if blocks is None:
            return selection, shared.candidates
        return selection, Candidates(self.plan.index, blocks, self.pool_block)

    def _select_packed(
        self, query: IndexQuery, main: PackedMain, pool: Candidates | None, ctx: ForwardContext
    ) -> Chosen:
        """By kernels that read packed keys in place, for a few tokens of all sequences at once."""
        visible_T = ctx.visible_T(self.plan.compress_ratio)
        place = Place(main.keys.table, main.sequence_T, main.per_page)
        if pool is not None:
            found = self.ops.index_pool(
                *query, main.keys, main.sequence_T, visible_T, pool.blocks_TB, pool.block_size
            )
            return self.ops.select_pool(
                *found, pool.blocks_TB, pool.block_size, self.topk, place=place
            )
        scan = self.ops.index_scan(
            *query,
            main.keys,
            visible_T,
            capacity=main.capacity,
            queries=main.queries,
            block=self.pool_block or _GROUP,
        )
        blocks = self.pool_blocks if self.plan.builds_candidates else 0
        return self.ops.select_scan(scan, visible_T, self.topk, blocks=blocks, place=place)

    def _select_flat(
        self, query: IndexQuery, main: FloatMain, pool: Candidates | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """From keys in floating point, sequence by sequence.

        Queries are taken in chunks so that scores never exceed a fixed budget. A query whose
        context is larger than the pool scores the pool's keys only.
        """
        visible_T = ctx.visible_T(self.plan.compress_ratio)
        wanted = self.pool_blocks if self.plan.builds_candidates else 0
        entries, blocks = [], []
        for n, (start, stop) in enumerate(ctx.bounds):
            last = (ctx.starts[n] + stop - start) // self.plan.compress_ratio
            keys: Tensor | None = None  # read once for all chunks, if any of them scores all
            for chunk in self._chunks(start, stop, last, pool, query.q_TIJ.device):
                # The newest query of the chunk sees this many entries, older ones fewer.
                position = ctx.starts[n] + chunk.stop - start
                seen = position // self.plan.compress_ratio
                part = query.rows(chunk)
                if pool is not None and seen > pool.capacity:
                    inside = Candidates(pool.layer, pool.blocks_TB[chunk], pool.block_size)
                    entries.append(self._search_pool(part, main, n, inside, visible_T[chunk]))
                    continue
                keys = main.keys(n, last) if keys is None else keys
                scan = self.ops.index_prefill(
                    *part, keys[:seen], visible_T[chunk], block=self.pool_block or _GROUP
                )
                chosen = self.ops.select_scan(scan, visible_T[chunk], self.topk, blocks=wanted)
                entries.append(chosen.entries_TK)
                if chosen.blocks_TM is not None:
                    blocks.append(chosen.blocks_TM)
        return torch.cat(entries), torch.cat(blocks) if wanted else None

    def _chunks(
        self, start: int, stop: int, entries: int, pool: Candidates | None, device: torch.device
    ) -> list[slice]:
        width = entries
        if pool is not None:
            width = max(width, pool.capacity * (self.width + self.heads))
        size = max(1, _CHUNK_ELEMENTS.get(device.type, 2**23) // max(width, 1))
        return [slice(t, min(t + size, stop)) for t in range(start, stop, size)]

    def _scores(self, query: IndexQuery, keys_SJ: Tensor, visible_T: Tensor) -> Tensor:
        """Scores ``[T, S]`` of one sequence's first entries, −∞ where not visible."""
        scores = self.ops.index_score(query.q_TIJ, query.w_TI, keys_SJ)
        hidden = torch.arange(len(keys_SJ), device=scores.device) >= visible_T.unsqueeze(1)
        return scores.masked_fill(hidden, -torch.inf)

    def _search_pool(
        self, query: IndexQuery, main: FloatMain, sequence: int, pool: Candidates, visible_T: Tensor
    ) -> Tensor:
        """Select inside the pool, touching the pool's keys only."""
        entries = pool.entries(visible_T)
        keys, rows = main.keys_at(sequence, entries)
        scores = self.ops.index_score_rows(query.q_TIJ, query.w_TI, keys, rows)
        chosen = self.ops.select_entries(scores.masked_fill(entries < 0, -torch.inf), self.topk)
        return pool.entry_of(chosen)

    @torch.no_grad()
    def dense_scores(
        self, query: IndexQuery, main: MainKV, shared: Shared, ctx: ForwardContext
    ) -> Tensor:
        """All scores ``[T, S]`` as the selection sees them: −∞ where hidden or outside the pool.

        For probes only: the memory is quadratic.
        """
        if isinstance(main, PackedMain):
            raise TypeError("all scores need keys that can be read, not those of a store in place")
        visible_T = ctx.visible_T(self.plan.compress_ratio)
        out = query.q_TIJ.new_full((len(visible_T), max(main.counts, default=0)), -torch.inf)
        for n, (start, stop) in enumerate(ctx.bounds):
            part = query.rows(slice(start, stop))
            count = main.counts[n]
            keys = main.keys(n, count)
            out[start:stop, :count] = self._scores(part, keys, visible_T[start:stop])
        pool = shared.candidates_for(self.plan)
        if pool is not None:
            entries = pool.entries(visible_T)
            bin_column = out.shape[1]
            inside = torch.zeros((len(out), bin_column + 1), dtype=torch.bool, device=out.device)
            inside.scatter_(1, torch.where(entries >= 0, entries, bin_column), True)
            out = out.masked_fill(~inside[:, :bin_column], -torch.inf)
        return out
