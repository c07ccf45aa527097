"""Small random models that have every mechanism and run in milliseconds.

`cedar.config.tiny` is the small model that people train and look at; the ones here are smaller
still, and their weights are random everywhere: a sink of zero, a bias of zero or a mixing matrix
at the identity would hide a mechanism from a test.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cedar.config import ModelConfig, engram_rows, tiny
from cedar.model import Model, WeightStorage
from cedar.ops import Ops

__all__ = ["random_tokens", "randomise", "tiny_config", "tiny_model", "token_map"]

_ENGRAM_FIELDS = ("engram_vocab_size", "engram_layer_ids", "engram_max_ngram_size")


def tiny_config(**overrides: Any) -> ModelConfig:
    """Eight layers with every role; 40 tokens exceed window (6), top-k (4) and pool (6 entries).

    Layer 0 is a window layer with Engram; 1 and 3 are full at ratio 2, 2 reuses; 4 is full at
    ratio 1, opens the decoder, has Engram and builds the pool in which 5 and 7 search; 6 reuses.
    Two draft blocks read the entries of layers 4 and 7; the vision tower has one block.
    ``overrides`` replace fields; the table sizes of Engram follow unless they are given too.
    """
    config = replace(
        tiny(),
        vocab_size=64,
        dim=32,
        n_layers=8,
        n_mtp_layers=2,
        dspark_block_size=3,
        dspark_noise_token_id=60,
        dspark_target_layer_ids=(4, 7),
        dspark_markov_rank=8,
        dspark_n_routed_experts=3,
        dspark_n_activated_experts=1,
        n_heads=2,
        n_routed_experts=4,
        n_activated_experts=2,
        swiglu_limit=2.0,
        q_lora_rank=32,
        head_dim=32,
        rope_head_dim=8,
        o_lora_rank=16,
        window_size=6,
        kv_source_layers=(1, 3, 4),
        index_source_layers=(1, 3, 4, 5, 7),
        original_seq_len=16,
        index_n_heads=2,
        index_topk=4,
        candidate_source_layer=4,
        candidate_topk_blocks=2,
        candidate_block_size=3,
        hc_mult=3,
        engram_layer_ids=(0, 4),
        engram_vocab_size=31,
        engram_num_embeddings=engram_rows(31, 2, 3, 2),
        engram_max_ngram_size=3,
        engram_compressed_vocab_size=32,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 0, 0),
        vision_n_layers=1,
        vision_dim=16,
        vision_inter_dim=32,
        vision_patch_size=2,
        image_token_id=61,
    )
    if "engram_num_embeddings" not in overrides and not overrides.keys().isdisjoint(
        (*_ENGRAM_FIELDS, "engram_n_heads")
    ):
        size, layers, order = (overrides.get(k, getattr(config, k)) for k in _ENGRAM_FIELDS)
        heads = overrides.get("engram_n_heads", config.engram_n_heads)
        overrides["engram_num_embeddings"] = engram_rows(size, len(layers), order, heads)
    return replace(config, **overrides)


def token_map(config: ModelConfig) -> Tensor:
    """A stand-in for a tokenizer's Engram classes: two neighbouring ids share one. int64 ``[V]``"""
    return torch.arange(config.vocab_size) // 2


def tiny_model(
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    storage: WeightStorage = WeightStorage.PLAIN,
    ops: Ops | None = None,
    **overrides: Any,
) -> Model:
    """A model of `tiny_config` with random weights.

    In float64 by default: two valid orders of the same sums then differ by 1e-15, so that a
    quantiser or a top-k between them practically never falls to the other side.
    """
    config = tiny_config(**overrides)
    model = Model(
        config, ops=ops, storage=storage, dtype=dtype, trainable=True, token_map=token_map(config)
    )
    return randomise(model, seed)


def randomise(model: Model, seed: int) -> Model:
    """Random values for every parameter, also for those that training starts at a constant."""
    model.init(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = _spread(name.rsplit(".", 1)[-1], parameter.dim())
            if spread is not None:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(spread(noise).to(parameter))
    return model


def _spread(kind: str, dims: int) -> Callable[[Tensor], Tensor] | None:
    """How a parameter that starts at a constant follows from normal noise."""
    if kind.endswith("_scale"):
        return lambda noise: 0.7 + 0.1 * noise
    if kind.endswith("_base") or kind == "attn_sink":
        return lambda noise: noise
    if kind in ("bias", "bias_vl"):
        return lambda noise: 0.1 * noise
    if kind in ("q_weight", "k_weight") or (kind == "weight" and dims == 1):
        return lambda noise: 1.0 + 0.2 * noise
    return None


def random_tokens(config: ModelConfig, length: int, seed: int) -> list[int]:
    """Ordinary token ids (no special, noise or image token)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config.vocab_size - 4, (length,), generator=generator)
    return [int(token) for token in ids]
