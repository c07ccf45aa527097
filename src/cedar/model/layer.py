"""One block: attention and experts around the residual streams (section 1)."""

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import LayerPlan
from cedar.model.attention import Attention
from cedar.model.context import ForwardContext, LayerStats, Shared, Streams
from cedar.model.engram import Engram, EngramTable
from cedar.model.linear import BuildSpec, Norm, new_parameter
from cedar.model.moe import MoE, balance_loss, router_stats
from cedar.ops.mhc import MhcMix

__all__ = ["Block", "Layer"]


class Block(nn.Module):
    """What backbone layers and draft blocks have in common: parameters and stream mixing."""

    def __init__(
        self, config: ModelConfig, plan: LayerPlan, num_experts: int, active: int, spec: BuildSpec
    ) -> None:
        super().__init__()
        self.ops = spec.ops
        self.plan = plan
        self.norm_eps, self.hc_eps = config.norm_eps, config.hc_eps
        self.sinkhorn_iters = config.hc_sinkhorn_iters
        self.single_pass = config.hc_single_pass
        self.attn_norm = Norm(config.dim, config.norm_eps, spec)
        self.ffn_norm = Norm(config.dim, config.norm_eps, spec)
        self.attn = Attention(config, plan, spec)
        self.ffn = MoE(config, num_experts, active, plan.index, spec)
        m = config.hc_mult
        for part in ("attn", "ffn"):
            for name, shape in (
                ("fn", ((2 + m) * m, m * config.dim)),
                ("base", ((2 + m) * m,)),
                ("scale", (3,)),
            ):
                parameter = new_parameter(shape, torch.float32, spec.device)
                self.register_parameter(f"hc_{part}_{name}", parameter)

    def mix(self, streams: Streams, part: str) -> tuple[MhcMix, Tensor]:
        """A sublayer's coefficients, and its collapsed input ``[T, D]`` before the norm.

        Single-pass: the input mix is the one that the sublayer before computed. Two-pass, as in
        the model before this one: it is computed from the very streams it is applied to.
        """
        mix = self.ops.mhc_coefficients(
            streams.x_TCD,
            getattr(self, f"hc_{part}_fn"),
            getattr(self, f"hc_{part}_base"),
            getattr(self, f"hc_{part}_scale"),
            norm_eps=self.norm_eps,
            hc_eps=self.hc_eps,
            sinkhorn_iters=self.sinkhorn_iters,
        )
        pre = streams.mix_TC if self.single_pass else mix.pre_TC
        return mix, self.ops.mhc_collapse(streams.x_TCD, pre)

    def write(self, streams: Streams, y_TD: Tensor, mix: MhcMix) -> Streams:
        """Write a sublayer's output; the mix it computed goes along to the next."""
        return Streams(self.ops.mhc_expand(streams.x_TCD, y_TD, mix), mix.pre_TC)


class Layer(Block):
    """A backbone layer, built from one `LayerPlan`."""

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        spec: BuildSpec,
        table: EngramTable | None = None,
    ) -> None:
        super().__init__(config, plan, config.n_routed_experts, config.n_activated_experts, spec)
        self.engram = Engram(config, plan.index, spec, table) if plan.engram else None

    def enter(self, streams: Streams, ctx: ForwardContext) -> Streams:
        """What happens before the block proper: the Engram write."""
        if self.engram is None or self.plan.index not in ctx.engram_ids:
            return streams
        return self.engram(streams, ctx)

    def project_main(self, streams: Streams, ctx: ForwardContext, shared: Shared) -> Shared:
        """Only the main KV and index keys of this layer: all that a prompt token owes it."""
        _, x = self.mix(streams, "attn")
        main = self.attn.project_main(self.attn_norm(x), ctx)
        return Shared(main, shared.selection, shared.candidates)

    def forward(
        self, streams: Streams, shared: Shared, ctx: ForwardContext
    ) -> tuple[Streams, Shared, LayerStats]:
        name = f"layers.{self.plan.index}"
        ctx.record(f"{name}.in", streams.x_TCD)
        ctx.record(f"{name}.in_mix", streams.mix_TC)
        mix, x = self.mix(streams, "attn")
        y, shared, index_loss = self.attn(self.attn_norm(x), shared, ctx)
        ctx.record(f"{name}.attn.out", y)
        streams = self.write(streams, y, mix)
        mix, x = self.mix(streams, "ffn")
        y, routing = self.ffn(self.ffn_norm(x), ctx.open_T)
        ctx.record(f"{name}.ffn.gate.indices", routing.experts_TA)
        ctx.record(f"{name}.ffn.gate.weights", routing.weights_TA)
        ctx.record(f"{name}.ffn.out", y)
        streams = self.write(streams, y, mix)
        ctx.record(f"{name}.out", streams.x_TCD)
        ctx.record(f"{name}.pre_mix", streams.mix_TC)
        stats = router_stats(self.plan.index, routing, ctx.open_T)._replace(index_loss=index_loss)
        if ctx.signals is not None and ctx.signals.balance_loss:
            stats = stats._replace(balance_loss=balance_loss(routing, ctx))
        return streams, shared, stats
