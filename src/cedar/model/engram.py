"""Engram: n-gram memory written into the streams (section 7)."""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.primes import engram_primes
from cedar.model.context import Streams
from cedar.model.forward import ForwardContext
from cedar.model.linear import BuildSpec, Linear, Weight, WeightStorage, new_parameter
from cedar.quant import FP8_BLOCK, FP8_ROW

__all__ = ["Engram", "EngramTable", "hash_multipliers"]


class EngramTable(Protocol):
    """Row look-up: ``rows(ids int64 [...]) -> [..., head_dim]`` in bfloat16 or a master type.

    A table may also have ``prefetch(ids)``: it is told the ids at the start of a pass.
    """

    def rows(self, ids: Tensor) -> Tensor: ...


def hash_multipliers(config: ModelConfig, layer: int) -> Tensor:
    """Odd int64 multipliers ``[max_ngram]`` of a layer, drawn as the release draws them."""
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    rng = np.random.default_rng(10007 * layer)
    drawn = rng.integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
    return torch.from_numpy(drawn * 2 + 1)


class _DeviceTable(Weight):
    """A table that is part of the model. Its rows are FP8 with scales, in every checkpoint."""

    def __init__(self, rows: int, width: int, spec: BuildSpec) -> None:
        # Except as trainable masters, rows stay packed: a dequantised table would double.
        trained = spec.storage is WeightStorage.QAT or (
            spec.storage is WeightStorage.PLAIN and spec.trainable
        )
        storage = WeightStorage.QAT if trained else WeightStorage.PACKED
        super().__init__((rows, width), FP8_ROW, replace(spec, storage=storage))

    def rows(self, ids: Tensor) -> Tensor:
        assert self.format is not None
        if self.scale is not None:
            return self.ops.engram_rows(self.weight, self.scale, ids, torch.bfloat16)
        # A master row takes the round trip that its stored form will take.
        return self.ops.cast(nn.functional.embedding(ids, self.weight), self.format)


class Engram(nn.Module):
    """Hash, look up, project, gate, add."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(
        self, config: ModelConfig, layer: int, spec: BuildSpec, table: EngramTable | None = None
    ) -> None:
        """``table`` stands outside the model (host memory, a file); None makes it a parameter."""
        super().__init__()
        self.ops = spec.ops
        self.layer = layer
        self.streams, self.dim = config.hc_mult, config.dim
        self.eps = config.norm_eps
        which = config.engram_layer_ids.index(layer)
        orders = config.engram_max_ngram_size - 1
        width = orders * config.engram_n_heads * config.engram_head_dim
        self.table = table
        if table is None:
            rows = config.engram_num_embeddings[which]
            self.embed = _DeviceTable(rows, config.engram_head_dim, spec)
        self.wkv = Linear(width, (config.hc_mult + 1) * config.dim, FP8_BLOCK, spec)
        self.q_weight = new_parameter((config.hc_mult, config.dim), spec.dtype, spec.device)
        self.k_weight = new_parameter((config.hc_mult, config.dim), spec.dtype, spec.device)
        primes = engram_primes(
            config.engram_vocab_size,
            len(config.engram_layer_ids),
            config.engram_max_ngram_size,
            config.engram_n_heads,
        )[which]
        sizes = torch.tensor(primes, dtype=torch.int64)
        device = None if spec.device is None or spec.device.type == "meta" else spec.device
        offsets = sizes.flatten().cumsum(0) - sizes.flatten()
        self.register_buffer("primes", sizes.to(device), persistent=False)
        self.register_buffer("offsets", offsets.to(device), persistent=False)
        self.register_buffer(
            "multipliers", hash_multipliers(config, layer).to(device), persistent=False
        )

    def hash(self, lookback_TN: Tensor) -> Tensor:
        """Table rows ``[T, orders · heads]`` of every token."""
        return self.ops.engram_hash(lookback_TN, self.multipliers, self.primes, self.offsets)

    def prefetch(self, ids: Tensor) -> None:
        """Begin to fetch the rows that `forward` will look up, where the table can."""
        prefetch = getattr(self.table, "prefetch", None)
        if prefetch is not None:
            prefetch(ids)

    def forward(self, streams: Streams, ctx: ForwardContext) -> Streams:
        table = self.embed if self.table is None else self.table
        rows = table.rows(ctx.engram_ids[self.layer]).flatten(1)
        kv = self.wkv(rows.to(streams.x_TCD.dtype))
        keys, value = kv.split((self.streams * self.dim, self.dim), dim=1)
        x = self.ops.engram_gate(
            streams.x_TCD,
            keys.unflatten(1, (self.streams, self.dim)),
            value,
            self.q_weight,
            self.k_weight,
            self.eps,
            ctx.open_T,
        )
        ctx.record(f"layers.{self.layer}.engram.out", x)
        return Streams(x, streams.mix_TC)
