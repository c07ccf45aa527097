"""The compressor of full layers: groups of tokens become latents (section 4)."""

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import LayerPlan
from cedar.model.context import ForwardContext
from cedar.model.layout import sequence_ranges
from cedar.model.linear import BuildSpec, Linear, Norm
from cedar.ops import widen

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
        wide = widen(x_TD)
        kv = self.ops.linear(wide, self.wkv.weight)
        gate = self.ops.linear(wide, self.wgate.weight)
        rows_GR = ctx.groups[self.ratio].rows_GR
        if ctx.store is not None:
            kv, gate = self._with_residues(kv, gate, ctx)
        pooled = self.ops.compress(kv[rows_GR], gate[rows_GR])
        return self.norm(pooled.to(x_TD.dtype))

    def _with_residues(
        self, kv: Tensor, gate: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Put every sequence's unfinished group before its new rows, and store those."""
        store = ctx.store
        assert store is not None
        kvs, gates = [], []
        for (start, stop), slot in zip(ctx.bounds, ctx.slots, strict=True):
            old_kv, old_gate = store.residue(self.layer, slot)
            kvs.append(torch.cat((old_kv, kv[start:stop])))
            gates.append(torch.cat((old_gate, gate[start:stop])))
            store.extend_residue(self.layer, slot, kv[start:stop], gate[start:stop])
        return torch.cat(kvs), torch.cat(gates)

    def finished(self, ctx: ForwardContext) -> tuple[tuple[int, int], ...]:
        """Rows of `forward`'s result that belong to each sequence."""
        return sequence_ranges(ctx.groups[self.ratio].counts)
