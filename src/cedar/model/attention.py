"""Attention of a backbone layer, in all four roles (sections 3 to 6)."""

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import LayerPlan
from cedar.model.compressor import Compressor
from cedar.model.context import ForwardContext, Rotary, Shared
from cedar.model.indexer import Indexer
from cedar.model.linear import BuildSpec, Linear, Norm, Weight, new_parameter
from cedar.model.teacher import index_loss
from cedar.ops.linear.rows import pad_rows
from cedar.ops.main_kv import FlatMain, MainKV
from cedar.ops.sparse_attention import Rows
from cedar.quant import FP4_MAIN, FP8_BLOCK, FP8_ROW, QuantTensor

__all__ = ["Attention"]


class Attention(nn.Module):
    """Queries, window KV and output of a layer; compressor and indexer where it owns them."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, spec: BuildSpec) -> None:
        super().__init__()
        self.ops = spec.ops
        self.plan = plan
        self.num_heads, self.head_dim = config.n_heads, config.head_dim
        self.groups = config.o_groups
        self.scale = config.head_dim**-0.5
        all_heads = config.n_heads * config.head_dim
        self.wq_a = Linear(config.dim, config.q_lora_rank, FP8_BLOCK, spec)
        self.q_norm = Norm(config.q_lora_rank, config.norm_eps, spec)
        self.wq_b = Linear(config.q_lora_rank, all_heads, FP8_BLOCK, spec)
        self.wkv = Linear(config.dim, config.head_dim, FP8_BLOCK, spec)
        self.kv_norm = Norm(config.head_dim, config.norm_eps, spec)
        self.attn_sink = new_parameter((config.n_heads,), torch.float32, spec.device)
        # FP8 in the release, but used in bf16 on an input that is not quantised.
        self.wo_a = Weight(
            (config.o_groups * config.o_lora_rank, all_heads // config.o_groups), FP8_BLOCK, spec
        )
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, config.dim, FP8_BLOCK, spec)
        if plan.has_compressor:
            self.compressor = Compressor(config, plan, spec)
        if plan.has_indexer:
            self.indexer = Indexer(config, plan, spec)

    def latent_query(self, x_TD: Tensor) -> Tensor:
        """``c_q [T, R]``, which the main and the index queries share."""
        return self.q_norm(self.wq_a(x_TD))

    def query(self, c_q_TR: Tensor, rotary: Rotary) -> Tensor:
        """Rotated queries ``[T, N, H]``."""
        q = self.wq_b(c_q_TR).view(-1, self.num_heads, self.head_dim)
        return self.ops.rotate(q, *rotary)

    def window_kv(self, x_TD: Tensor, rotary: Rotary) -> Tensor:
        """Window entries ``[T, H]``: rotated, then through FP8 as a whole."""
        return self.ops.cast(self.ops.rotate(self.kv_norm(self.wkv(x_TD)), *rotary), FP8_ROW)

    def output(self, o_TNH: Tensor, rotary: Rotary) -> Tensor:
        """Rotate back (keys are values, so values were rotated) and project, group by group."""
        o = self.ops.rotate(o_TNH, *rotary, inverse=True)
        weight = self.wo_a.value()
        dense = (
            weight.dequantize(o.dtype) if isinstance(weight, QuantTensor) else weight.to(o.dtype)
        )
        grouped = torch.einsum(
            "tgk,grk->tgr",
            pad_rows(o.reshape(len(o), self.groups, -1)),
            dense.view(self.groups, -1, dense.shape[1]),
        )
        return self.wo_b(grouped[: len(o)].flatten(1))

    def project_main(self, x_TD: Tensor, ctx: ForwardContext) -> MainKV:
        """Full layers: main KV and index keys of the groups that this batch finishes.

        With a store they are appended to it and everything it holds is returned.
        """
        latent = self.compressor(x_TD, ctx)
        layer = self.plan.index
        ctx.record(f"layers.{layer}.attn.compressor.latent_pre_rope", latent)
        # The index key comes from the latent before its rotation and its FP4 round trip.
        keys = self.indexer.keys(latent, ctx)
        rotary = ctx.groups[self.plan.compress_ratio].rotary
        rows = self.ops.rotate(latent, *rotary)
        ranges = self.compressor.finished(ctx)
        if ctx.store is not None:
            for (start, stop), slot in zip(ranges, ctx.slots, strict=True):
                ctx.store.extend_main(layer, slot, rows[start:stop], keys[start:stop])
            return ctx.store.main(layer, ctx.slots, ctx.sequence_T)
        held = [(start, stop - start) for start, stop in ranges]
        return FlatMain.of(layer, self.ops.cast(rows, FP4_MAIN), keys, held, ctx.sequence_T)

    def forward(
        self, x_TD: Tensor, shared: Shared, ctx: ForwardContext
    ) -> tuple[Tensor, Shared, Tensor | None]:
        """``x`` is the normalised sublayer input; returns the output, the state, the index loss."""
        plan = self.plan
        rotary = ctx.rotary(plan)
        c_q = self.latent_query(x_TD)
        q = self.query(c_q, rotary)
        window = ctx.window(plan.index, self.window_kv(x_TD, rotary))
        sources: tuple[Rows, ...] = (window,)
        loss = None
        if plan.kv_source is not None:
            if plan.has_compressor and (shared.main is None or shared.main.layer != plan.index):
                shared = Shared(self.project_main(x_TD, ctx), shared.selection, shared.candidates)
            main = shared.main_for(plan)
            if plan.has_indexer:
                index_query = self.indexer.queries(x_TD, c_q, ctx)
                name = f"layers.{plan.index}.attn.indexer"
                if ctx.probe is not None and ctx.probe.wants(f"{name}.scores"):
                    ctx.record(
                        f"{name}.scores", self.indexer.dense_scores(index_query, main, shared, ctx)
                    )
                selection, candidates = self.indexer.select(index_query, main, shared, ctx)
                shared = Shared(main, selection, candidates)
                ctx.record(f"{name}.topk_idxs", selection.entries_TK)
                if plan.builds_candidates and candidates is not None:
                    ctx.record(f"{name}.candidates", candidates.blocks_TB)
                if ctx.signals is not None and ctx.signals.index_loss:
                    loss = index_loss(
                        self.ops, index_query, q, window, main, self.attn_sink, self.scale,
                        shared, plan, ctx,
                    )  # fmt: skip
            sources = (window, shared.selection_for(plan).rows)
        o = self.ops.sparse_attention(q, sources, self.attn_sink, self.scale)
        return self.output(o, rotary), shared, loss
