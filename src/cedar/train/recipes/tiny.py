"""cedar-tiny: the bundled model, every mechanism of the architecture in under 8 MB."""

from __future__ import annotations

from importlib.resources import files

from cedar.config import ModelConfig, engram_rows
from cedar.train.config import (
    BalanceConfig,
    CheckpointConfig,
    DataConfig,
    DraftConfig,
    EvalConfig,
    IndexConfig,
    OptimConfig,
    TrainConfig,
)

__all__ = ["pretrain"]


def pretrain() -> TrainConfig:
    """Language model, indexers and draft head together, from scratch, in one stage.

    Minutes on a large GPU. On a CPU shrink it, for example
    `steps=200 data.seq_len=128 data.tokens_per_step=512 draft.anchors=16`.
    """
    return TrainConfig(
        model=model(),
        steps=320,
        data=DataConfig(
            train="data/corpus/train.jsonl",
            valid="data/corpus/heldout.jsonl",
            tokenizer=str(files("cedar") / "bundled" / "cedar-tiny" / "tokenizer.json"),
            seq_len=2048,
            tokens_per_step=131072,
        ),
        optim=OptimConfig(lr=3e-3, floor_lr=1e-4, warmup_steps=30, decay_from=0.3),
        index=IndexConfig(weight=1.0, dense_steps=15),
        balance=BalanceConfig(),
        draft=DraftConfig(anchors=2048),
        eval=EvalConfig(interval=80, tokens=65536),
        checkpoint=CheckpointConfig(interval=0, keep=1),
        log_interval=10,
    )


def model() -> ModelConfig:
    """Ten layers in the released order of roles, two draft blocks, an untrained image tower.

    A window of 32 tokens, 32 selected entries and a pool of 16 blocks of 8 are so small that
    ordinary documents exceed them all.
    """
    tables, orders, heads, buckets = 2, 4, 2, 2300
    return ModelConfig(
        vocab_size=2560,
        dim=128,
        moe_inter_dim=96,
        n_layers=10,
        n_mtp_layers=2,
        dspark_block_size=5,
        dspark_noise_token_id=2538,
        dspark_target_layer_ids=(7, 8, 9),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_n_activated_experts=2,
        n_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        n_activated_experts=2,
        score_func="sqrtsoftplus",
        route_scale=1.5,
        swiglu_limit=10.0,
        q_lora_rank=96,
        head_dim=64,
        rope_head_dim=32,
        norm_eps=1e-20,
        o_groups=2,
        o_lora_rank=64,
        window_size=32,
        kv_source_layers=(1, 3, 5),
        index_source_layers=(1, 3, 5, 7, 9),
        original_seq_len=2048,
        rope_theta=10000,
        rope_factor=16,
        beta_fast=32,
        beta_slow=1,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=32,
        candidate_source_layer=5,
        candidate_topk_blocks=16,
        candidate_block_size=8,
        hc_mult=4,
        hc_sinkhorn_iters=5,
        hc_eps=1e-6,
        engram_layer_ids=(1, 3),
        engram_vocab_size=buckets,
        engram_num_embeddings=engram_rows(buckets, tables, orders, heads),
        engram_max_ngram_size=orders,
        engram_pad_id=2,
        engram_compressed_vocab_size=2097,
        dtype="fp8",
        expert_dtype="fp4",
        compress_rope_theta=160000,
        compress_ratios=(0,) + (2,) * 4 + (1,) * 5 + (0,) * 2,
        vision_n_layers=2,
        vision_dim=32,
        vision_n_heads=2,
        vision_inter_dim=64,
        vision_patch_size=14,
        vision_downsample_ratio=3,
        vision_max_n_token=64,
        vision_min_pixels=7056,
        vision_max_wh_ratio=None,
        image_token_id=2551,
        engram_n_heads=heads,
        engram_head_dim=32,
        vision_rope_theta=10000,
    )
