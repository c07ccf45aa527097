"""One block: attention and experts around the residual streams (section 1)."""

from typing import Any

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import LayerPlan
from cedar.model.attention import Attention
from cedar.model.context import LayerStats, Shared, Streams
from cedar.model.engram import Engram, EngramTable
from cedar.model.forward import ForwardContext
from cedar.model.linear import BuildSpec, Norm, new_parameter
from cedar.model.moe import MoE, balance_loss
from cedar.ops.mhc import MhcMix, MhcParameters

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

    def open(self, streams: Streams, part: str) -> tuple[Streams, MhcMix, Tensor]:
        """Begin a sublayer: streams with nothing left to write, its mix, its input ``[T, D]``.

        Single-pass: the input mix is the one that the sublayer before computed. Two-pass, as in
        the model before this one: it is computed from the very streams it is applied to.
        """
        norm: Norm = getattr(self, f"{part}_norm")
        settings: dict[str, Any] = {
            "norm_eps": self.norm_eps,
            "hc_eps": self.hc_eps,
            "sinkhorn_iters": self.sinkhorn_iters,
        }
        own = MhcParameters(*(getattr(self, f"hc_{part}_{k}") for k in MhcParameters._fields))
        if self.single_pass:
            x, mix, h = self.ops.mhc_step(
                streams.x_TCD, streams.update, streams.mix_TC, own, norm.weight, **settings
            )
            return Streams(x, streams.mix_TC), mix, h
        streams = streams.written(self.ops)
        mix = self.ops.mhc_coefficients(streams.x_TCD, *own, **settings)
        return streams, mix, norm(self.ops.mhc_collapse(streams.x_TCD, mix.pre_TC))

    def close(self, streams: Streams, y_TD: Tensor, mix: MhcMix) -> Streams:
        """End a sublayer: its output is to be written; the mix it computed goes along."""
        return Streams(streams.x_TCD, mix.pre_TC, (y_TD, mix))


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
        return self.engram(streams.written(self.ops), ctx)

    def project_main(self, streams: Streams, ctx: ForwardContext, shared: Shared) -> Shared:
        """Only the main KV and index keys of this layer: all that a prompt token owes it."""
        _, _, x_TD = self.open(streams, "attn")
        main = self.attn.project_main(x_TD, ctx)
        return Shared(main, shared.selection, shared.candidates)

    def forward(
        self, streams: Streams, shared: Shared, ctx: ForwardContext
    ) -> tuple[Streams, Shared, LayerStats]:
        name = f"layers.{self.plan.index}"
        streams, mix, x_TD = self.open(streams, "attn")
        ctx.record(f"{name}.in", streams.x_TCD)
        ctx.record(f"{name}.in_mix", streams.mix_TC)
        y_TD, shared, index_loss = self.attn(x_TD, shared, ctx)
        ctx.record(f"{name}.attn.out", y_TD)
        streams, mix, x_TD = self.open(self.close(streams, y_TD, mix), "ffn")
        y_TD, routing = self.ffn(x_TD, ctx.open_T, ctx.real_T)
        ctx.record(f"{name}.ffn.gate.indices", routing.experts_TA)
        ctx.record(f"{name}.ffn.gate.weights", routing.weights_TA)
        ctx.record(f"{name}.ffn.out", y_TD)
        streams = self.close(streams, y_TD, mix)
        if ctx.probe is not None:
            streams = streams.written(self.ops)
            ctx.record(f"{name}.out", streams.x_TCD)
            ctx.record(f"{name}.pre_mix", streams.mix_TC)
        stats = LayerStats(
            self.plan.index, routing.experts_TA, self.ffn.num_experts, ctx.open_T, index_loss
        )
        if ctx.signals is not None and ctx.signals.balance_loss:
            stats = stats._replace(balance_loss=balance_loss(routing, ctx))
        return streams, shared, stats
