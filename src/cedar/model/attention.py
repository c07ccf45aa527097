"""Attention of a backbone layer, in all four roles (sections 3 to 6)."""

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import LayerPlan
from cedar.model.compressor import Compressor
from cedar.model.context import Rotary, Shared
from cedar.model.forward import ForwardContext
from cedar.model.indexer import Indexer
from cedar.model.linear import BuildSpec, Linear, Norm, Weight, new_parameter
from cedar.model.teacher import index_loss
from cedar.ops.main_kv import MainKV
from cedar.ops.sparse_attention import Source
from cedar.quant import FP8_BLOCK, FP8_ROW

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

    def latents(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Latent queries ``[T, R]`` and window latents ``[T, H]``, both before their norm."""
        weights = (self.wq_a.value(), self.wkv.value())
        c_q, latent = self.ops.project(x_TD, weights, input_format=self.wq_a.input_format)
        return c_q, latent

    def queries(self, c_q_TR: Tensor) -> Tensor:
        """Main queries ``[T, N, H]``, not rotated yet."""
        norm = (self.q_norm.weight, self.q_norm.eps)
        (q,) = self.ops.project(
            c_q_TR, (self.wq_b.value(),), input_format=self.wq_b.input_format, norm=norm
        )
        return q.view(-1, self.num_heads, self.head_dim)

    def window_kv(self, latent_TH: Tensor, rotary: Rotary) -> Tensor:
        """Window entries ``[T, H]``: normalised, rotated, then through FP8 as a whole."""
        norm = self.kv_norm
        return self.ops.latent(latent_TH, norm.weight, norm.eps, rotary, FP8_ROW)

    def attend(self, q_TNH: Tensor, sources: tuple[Source, ...], rotary: Rotary) -> Tensor:
        """Attention and output ``[T, D]``; keys are values, so outputs are rotated back.

        The heads of a group are projected together, then all groups.
        """
        o = self.ops.rotated_attention(q_TNH, sources, self.attn_sink, self.scale, rotary)
        return self.ops.project_output(
            o.view(len(o), self.groups, -1),
            self.wo_a.value(),
            self.wo_b.value(),
            input_format=self.wo_b.input_format,
        )

    def project_main(self, x_TD: Tensor, ctx: ForwardContext) -> MainKV:
        """Full layers: main KV with the entries that this batch finishes."""
        latent = self.compressor(x_TD, ctx)
        layer = self.plan.index
        ctx.record(f"layers.{layer}.attn.compressor.latent_pre_rope", latent)
        # The index key comes from the latent before its rotation and its FP4 round trip.
        key = self.indexer.wk(latent.detach())
        return ctx.extend_main(layer, self.plan.compress_ratio, latent, key, self.indexer.k_norm)

    def forward(
        self, x_TD: Tensor, shared: Shared, ctx: ForwardContext
    ) -> tuple[Tensor, Shared, Tensor | None]:
        """``x`` is the normalised sublayer input; returns the output, the state, the index loss."""
        plan = self.plan
        rotary = ctx.rotary(plan)
        c_q, latent = self.latents(x_TD)
        q = self.queries(c_q)
        window = ctx.window(plan.index, latent, self.kv_norm, rotary)
        sources: tuple[Source, ...] = (window,)
        loss = None
        if plan.kv_source is not None:
            if plan.has_compressor and (shared.main is None or shared.main.layer != plan.index):
                shared = Shared(self.project_main(x_TD, ctx), shared.selection, shared.candidates)
            main = shared.main_for(plan)
            if plan.has_indexer:
                index_query = self.indexer.queries(x_TD, c_q, self.q_norm, ctx)
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
                    rotated = self.ops.rotate(q.detach(), *rotary)
                    loss = index_loss(
                        self.ops, index_query, rotated, window, main, self.attn_sink, self.scale,
                        shared, plan, ctx,
                    )  # fmt: skip
            sources = (window, shared.selection_for(plan).rows)
        return self.attend(q, sources, rotary), shared, loss
