"""The compressor of full layers: groups of tokens become latents (section 4)."""

from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import LayerPlan
from cedar.model.forward import ForwardContext
from cedar.model.linear import BuildSpec, Linear, Norm

__all__ = ["Compressor"]


class Compressor(nn.Module):
    """Pools every ρ tokens of a sequence into one latent; ρ = 1 only projects."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, spec: BuildSpec) -> None:
        super().__init__()
        self.ops = spec.ops
        self.layer = plan.index
        self.ratio = plan.compress_ratio
        self.wkv = Linear(config.dim, config.head_dim, None, spec)
        if self.ratio > 1:
            self.wgate = Linear(config.dim, config.head_dim, None, spec)
        self.norm = Norm(config.head_dim, config.norm_eps, spec)

    def forward(self, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
        """Normalised latents ``[S, H]`` of the groups that this batch finishes, by sequence."""
        if self.ratio == 1:
            return self.norm(self.wkv(x_TD))
        # float32 from the stored weights; the pooled value returns to the model's type.
        kv = self.ops.wide_linear(x_TD, self.wkv.weight)
        gate = self.ops.wide_linear(x_TD, self.wgate.weight)
        return ctx.compress(self.layer, self.ratio, kv, gate, self.norm, x_TD.dtype)
