"""The mixture of experts (section 7)."""

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.model.forward import ForwardContext
from cedar.model.linear import BuildSpec, Linear, Weight, new_parameter
from cedar.ops.route import Gating, Routing
from cedar.quant import FP4_ROW, FP8_BLOCK

__all__ = ["MoE", "balance_loss"]


class _Gate(nn.Module):
    """Router weights; the biases select, one for text and one for image-span tokens."""

    def __init__(self, dim: int, num_experts: int, spec: BuildSpec) -> None:
        super().__init__()
        self.weight = new_parameter((num_experts, dim), spec.dtype, spec.device)
        self.bias = new_parameter((num_experts,), torch.float32, spec.device)
        self.bias_vl = new_parameter((num_experts,), torch.float32, spec.device)
        # Moved by the balancing rule, never by a gradient.
        self.bias.requires_grad_(False)
        self.bias_vl.requires_grad_(False)


class _RoutedExperts(nn.Module):
    """The routed experts' weights, stacked ``[E, out, in]``."""

    def __init__(self, dim: int, inner: int, num_experts: int, spec: BuildSpec) -> None:
        super().__init__()
        self.w1 = Weight((num_experts, inner, dim), FP4_ROW, spec)
        self.w2 = Weight((num_experts, dim, inner), FP4_ROW, spec)
        self.w3 = Weight((num_experts, inner, dim), FP4_ROW, spec)


class _SharedExpert(nn.Module):
    """Weights of the expert that every token visits; several shared experts are one wider one."""

    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        inner = config.moe_inter_dim * config.n_shared_experts
        self.w1 = Linear(config.dim, inner, FP8_BLOCK, spec)
        self.w2 = Linear(inner, config.dim, FP8_BLOCK, spec)
        self.w3 = Linear(config.dim, inner, FP8_BLOCK, spec)


class MoE(nn.Module):
    """Router, routed experts and the shared expert of one block."""

    def __init__(
        self, config: ModelConfig, num_experts: int, active: int, layer: int, spec: BuildSpec
    ) -> None:
        super().__init__()
        self.ops = spec.ops
        self.layer = layer
        self.num_experts, self.active = num_experts, active
        self.score_func = config.score_func
        self.normalize = config.norm_topk_prob
        self.route_scale = config.route_scale
        self.gate_temp = config.gate_temp
        self.limit = config.swiglu_limit
        self.gate = _Gate(config.dim, num_experts, spec)
        self.experts = _RoutedExperts(config.dim, config.moe_inter_dim, num_experts, spec)
        self.shared_experts = _SharedExpert(config, spec)

    def gating(self, open_T: Tensor | None) -> Gating:
        """How experts are chosen; ``open_T`` is False on image-span tokens (None: text only)."""
        bias: Tensor = self.gate.bias
        if open_T is not None:
            bias = torch.where(open_T.unsqueeze(1), self.gate.bias, self.gate.bias_vl)
        return Gating(
            self.gate.weight,
            bias,
            self.active,
            self.gate_temp,
            self.score_func,
            self.normalize,
            self.route_scale,
        )

    def forward(
        self, x_TD: Tensor, open_T: Tensor | None, real_T: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """real_T: False on rows whose result nobody reads; they visit no expert of their own."""
        own, shared = self.experts, self.shared_experts
        return self.ops.mixture(
            x_TD,
            self.gating(open_T),
            own.w1.value(),
            own.w2.value(),
            own.w3.value(),
            limit=self.limit,
            input_format=own.w1.input_format,
            shared=(shared.w1.value(), shared.w2.value(), shared.w3.value()),
            real_T=real_T,
        )


def balance_loss(routing: Routing, ctx: ForwardContext) -> Tensor:
    """Per sequence ``E/A · Σ_e mean(chosen_e) · mean(score share_e)``, mean over sequences."""
    scores_TE = routing.scores_TE
    num_experts, active = scores_TE.shape[1], routing.experts_TA.shape[1]
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, routing.experts_TA, 1.0)
    share_TE = scores_TE / scores_TE.sum(1, keepdim=True)
    lengths = [stop - start for start, stop in ctx.bounds]
    count = torch.tensor(lengths, device=share_TE.device).unsqueeze(1)
    zeros = share_TE.new_zeros((len(lengths), num_experts))
    load = zeros.index_add(0, ctx.sequence_T, chosen_TE) / count
    share = zeros.index_add(0, ctx.sequence_T, share_TE) / count
    return (load * share).sum(1).mean() * num_experts / active
