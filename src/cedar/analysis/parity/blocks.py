"""bfloat16, block by block: every block is fed the golden input, so that nothing piles up.

The input of a block is the golden output of the one before (the first has fresh embeddings; an
Engram write is compared and then replaced by the golden one). Main KV, index keys, selection and
candidate pool of earlier layers are golden as well, and so is the selection that a block's own
attention uses: bfloat16 scores have exact ties, and which of them wins is nobody's error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cedar.analysis.parity.caches import compare_caches
from cedar.analysis.parity.cases import Recorder, ascending, in_golden_form
from cedar.analysis.parity.judge import BLOCK_RMS, FP4_RMS, Judge
from cedar.analysis.parity.report import Kind
from cedar.cache import DenseKV
from cedar.config.plan import LayerPlan
from cedar.model import Batch, Model
from cedar.model.context import Candidates, Selection, Shared, Streams
from cedar.model.forward import ForwardContext
from cedar.model.indexer import Indexer, IndexQuery
from cedar.model.layer import Layer
from cedar.model.linear import Linear, Norm
from cedar.ops.main_kv import FlatMain, MainKV, PackedMain

__all__ = ["compare_blocks"]


class _FixedSelection(nn.Module):
    """An indexer whose choice is replaced; its own choice is kept to look at."""

    def __init__(self, inner: Indexer, entries: Tensor | None, pool: Candidates | None) -> None:
        super().__init__()
        self.inner = inner
        self.entries = entries
        self.pool = pool
        self.own: Selection | None = None
        self.own_pool: Candidates | None = None

    @property
    def wk(self) -> Linear:
        return self.inner.wk

    @property
    def k_norm(self) -> Norm:
        return self.inner.k_norm

    def queries(
        self, x_TD: Tensor, c_q_TR: Tensor, q_norm: Norm, ctx: ForwardContext
    ) -> IndexQuery:
        return self.inner.queries(x_TD, c_q_TR, q_norm, ctx)

    def dense_scores(
        self, query: IndexQuery, main: MainKV, shared: Shared, ctx: ForwardContext
    ) -> Tensor:
        return self.inner.dense_scores(query, main, shared, ctx)

    def select(
        self, query: IndexQuery, main: MainKV, shared: Shared, ctx: ForwardContext
    ) -> tuple[Selection, Candidates | None]:
        self.own, self.own_pool = self.inner.select(query, main, shared, ctx)
        selection = self.own
        if self.entries is not None:
            assert not isinstance(main, PackedMain)  # golden blocks run on a store of numbers
            selection = Selection(self.own.layer, self.entries, main.select(self.entries))
        return selection, self.own_pool if self.pool is None else self.pool


class _Blocks:
    """The golden values of a prefill that blocks are fed and compared with."""

    def __init__(self, judge: Judge, model: Model, tokens_BT: Tensor, prompt: int) -> None:
        self.judge, self.model = judge, model
        self.tensors = judge.golden.tensors
        output = self.tensors.get("prefill.layers.0.out")
        self.count = tokens_BT.shape[0] if output is None else output.shape[0]
        batch = Batch.pack(tokens_BT[: self.count, :prompt].tolist())
        self.store = DenseKV(model.config, self.count, dtype=model.compute_dtype)
        self.recorder = Recorder(
            {key.removeprefix("prefill.") for key in self.tensors if key.startswith("prefill.")}
        )
        self.ctx = model.context(batch, self.store, probe=self.recorder)
        self.fresh = model.embed_batch(batch)

    def packed(self, name: str) -> Tensor | None:
        """A golden prefill value of our sequences, packed."""
        value = self.tensors.get(f"prefill.{name}")
        if value is None or value.shape[0] < self.count:
            return None
        return value[: self.count].flatten(0, 1)

    def streams(self, layer: int) -> Streams | None:
        """The golden input of a layer."""
        if layer == 0:
            return self.fresh
        x, mix = self.packed(f"layers.{layer - 1}.out"), self.packed(f"layers.{layer - 1}.pre_mix")
        return None if x is None or mix is None else Streams(x.to(self.fresh.x_TCD.dtype), mix)

    def main(self, layer: int) -> FlatMain | None:
        """Golden entries and index keys of a KV source."""
        prefix = f"after_prefill.layers.{layer}.attn"
        rows = self.tensors.get(f"{prefix}.compress_kv_cache")
        keys = self.tensors.get(f"{prefix}.indexer.k_cache")
        if rows is None or keys is None:
            return None
        size = rows.shape[1]
        return FlatMain.of(
            layer,
            rows[: self.count].flatten(0, 1),
            keys[: self.count].flatten(0, 1),
            [(size * n, size) for n in range(self.count)],
            self.ctx.sequence_T,
        )

    def entries(self, layer: int) -> Tensor | None:
        """The golden selection of an index source."""
        chosen = self.packed(f"layers.{layer}.attn.indexer.topk_idxs")
        return None if chosen is None else ascending(chosen, self.model.config.index_topk)

    def pool(self, layer: int) -> Candidates | None:
        """The golden candidate pool as block numbers."""
        mask = self.packed(f"layers.{layer}.attn.indexer.candidates")
        if mask is None:
            return None
        config = self.model.config
        size, kept = config.candidate_block_size, config.candidate_topk_blocks
        padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % size))
        inside = padded.unflatten(1, (-1, size)).any(2)
        numbers = torch.where(inside, torch.arange(inside.shape[1]), -1)
        return Candidates(layer, ascending(numbers, kept)[:, :kept], size)

    def shared(self, plan: LayerPlan, carried: Shared) -> Shared:
        """What a layer is handed: golden where there is something golden."""
        main, selection, pool = carried.main, carried.selection, carried.candidates
        if plan.kv_source is not None and plan.kv_source != plan.index:
            main = self.main(plan.kv_source) or main
        if plan.topk_source is not None and plan.topk_source != plan.index:
            entries = self.entries(plan.topk_source)
            if entries is not None and isinstance(main, FlatMain):
                selection = Selection(plan.topk_source, entries, main.select(entries))
        if plan.candidate_source is not None:
            pool = self.pool(plan.candidate_source) or pool
        return Shared(main, selection, pool)


def compare_blocks(judge: Judge, model: Model, tokens_BT: Tensor, prompt: int) -> None:
    """Compare every block whose golden input the file has. Other keys stay open."""
    blocks = _Blocks(judge, model, tokens_BT, prompt)
    carried = Shared()
    compared = []
    for layer in model.backbone():
        streams = blocks.streams(layer.plan.index)
        if streams is None:
            break  # without a golden output no later block has a golden input either
        if layer.plan.engram:
            streams = _engram(blocks, layer, streams)
        shared = blocks.shared(layer.plan, carried)
        with _fixed_selection(blocks, layer):
            _, carried, _ = layer(streams, shared, blocks.ctx)
        _compare_block(blocks, layer.plan.index)
        compared.append(f"after_prefill.layers.{layer.plan.index}.")
    wanted = {
        key: key.removeprefix("after_prefill.")
        for key in blocks.tensors
        if key in judge.open and key.startswith(tuple(compared))
    }
    compare_caches(judge, model.config, blocks.store, wanted, length=prompt, how=Kind.BFLOAT16)


def _engram(blocks: _Blocks, layer: Layer, streams: Streams) -> Streams:
    """Compare the Engram write, and go on from the golden one."""
    name = f"layers.{layer.plan.index}.engram.out"
    ours = layer.enter(streams, blocks.ctx)
    golden = blocks.packed(name)
    if golden is None:
        return ours
    _compare(blocks, name, BLOCK_RMS)
    return Streams(golden, ours.mix_TC)


def _compare_block(blocks: _Blocks, index: int) -> None:
    prefix = f"layers.{index}"
    for part in ("attn.out", "ffn.out", "out", "pre_mix", "attn.compressor.latent_pre_rope"):
        _compare(blocks, f"{prefix}.{part}", BLOCK_RMS)
    _compare(blocks, f"{prefix}.attn.indexer.scores", FP4_RMS)
    # Near ties may go either way; a wrong expert would show in ffn.out.
    _compare(blocks, f"{prefix}.ffn.gate.indices", None)


def _compare(blocks: _Blocks, name: str, limit: float | None) -> None:
    """Compare what a block recorded, if the file has it."""
    key = f"prefill.{name}"
    golden = blocks.tensors.get(key)
    if golden is None or name not in blocks.recorder.values:
        return
    value = blocks.recorder.values[name]
    golden = golden[: len(value) if ".gate." in name else blocks.count]
    if limit is None:
        blocks.judge.shown(key, value.sort(-1).values, golden=golden.sort(-1).values)
        return
    ours = in_golden_form(name, value, golden, blocks.model.config, blocks.count)
    blocks.judge.relative_rms(key, ours, golden=golden, limit=limit)


@contextmanager
def _fixed_selection(blocks: _Blocks, layer: Layer) -> Iterator[None]:
    """Let the attention of an index source use the golden selection and hand on that pool.

    The layer's own choice is compared by what it is worth: the golden scores of the chosen
    entries in descending order. Ties cannot matter there, and near ties little.
    """
    plan, attention = layer.plan, layer.attn
    if not plan.has_indexer:
        yield
        return
    name = f"layers.{plan.index}.attn.indexer"
    entries = blocks.entries(plan.index)
    pool = blocks.pool(plan.index) if plan.builds_candidates else None
    inner = attention.indexer
    fixed = _FixedSelection(inner, entries, pool)
    attention.register_module("indexer", fixed)
    try:
        yield
    finally:
        attention.register_module("indexer", inner)
    scores = blocks.packed(f"{name}.scores")
    if scores is None:
        return
    if entries is not None and fixed.own is not None:
        _compare_worth(blocks, f"{name}.topk_idxs", scores, fixed.own.entries_TK, entries)
    if pool is not None and fixed.own_pool is not None:
        width = -scores.shape[1] % pool.block_size
        padded = torch.nn.functional.pad(scores, (0, width), value=-torch.inf)
        best = padded.unflatten(1, (-1, pool.block_size)).amax(2)
        _compare_worth(blocks, f"{name}.candidates", best, fixed.own_pool.blocks_TB, pool.blocks_TB)


def _compare_worth(
    blocks: _Blocks, name: str, scores: Tensor, ours: Tensor, golden: Tensor
) -> None:
    """Compare two choices ``[T, K]`` (−1 for none) by the scores ``[T, S]`` of what they chose."""

    def worth(chosen: Tensor) -> Tensor:
        picked = scores.gather(1, chosen.clamp_min(0)).masked_fill(chosen < 0, 0.0)
        ordered: Tensor = picked.sort(dim=1, descending=True).values
        worths: Tensor = ordered.unflatten(0, (blocks.count, -1))
        return worths

    width = max(ours.shape[1], golden.shape[1])
    blocks.judge.relative_rms(
        f"prefill.{name}",
        worth(ascending(ours, width)),
        golden=worth(ascending(golden, width)),
        limit=FP4_RMS,
    )
