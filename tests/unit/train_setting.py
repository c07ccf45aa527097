"""A training run that fits a unit test: byte tokenizer, a few documents, six small layers."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cedar.config import ModelConfig, engram_rows
from cedar.inputs.ngrams import token_map
from cedar.train.config import (
    BalanceConfig,
    CheckpointConfig,
    DataConfig,
    DraftConfig,
    EvalConfig,
    ExportFormat,
    IndexConfig,
    OptimConfig,
    TrainConfig,
)

__all__ = ["small_config", "write_corpus", "write_tokenizer"]

WORDS = ("the", "cedar", "stands", "where", "water", "runs", "and", "roots", "hold", "stone")


def write_tokenizer(path: Path) -> Path:
    """Every byte one token (ids 3 to 258), and the three control tokens before them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    control = ["<bos>", "<eos>", "<pad>"]
    vocabulary = {token: number for number, token in enumerate([*control, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    # As in released files, control tokens are added tokens alone, not words of the base.
    content = json.loads(tokenizer.to_str())
    for token in control:
        del content["model"]["vocab"][token]
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_corpus(path: Path, documents: int = 12, first: int = 0) -> Path:
    """Documents of about 25 to 180 bytes; each is different."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(first, first + documents):
            words = [
                WORDS[(number * 7 + k * (1 + number % 3)) % 10] for k in range(5 + number % 26)
            ]
            file.write(json.dumps({"text": f"{number}: " + " ".join(words)}) + "\n")
    return path


def small_model(tokenizer: Path) -> ModelConfig:
    """Window, full and reuse layers, a candidate pool and a reindex layer, Engram, one draft."""
    return ModelConfig(
        vocab_size=264,
        dim=32,
        moe_inter_dim=32,
        n_layers=6,
        n_mtp_layers=1,
        dspark_block_size=3,
        dspark_noise_token_id=2,
        dspark_target_layer_ids=(4, 5),
        dspark_markov_rank=8,
        dspark_n_routed_experts=2,
        dspark_n_activated_experts=1,
        n_heads=2,
        n_routed_experts=4,
        n_activated_experts=2,
        score_func="sqrtsoftplus",
        route_scale=1.5,
        swiglu_limit=10.0,
        q_lora_rank=32,
        head_dim=32,
        rope_head_dim=16,
        norm_eps=1e-20,
        o_groups=2,
        o_lora_rank=32,
        window_size=8,
        kv_source_layers=(1, 3),
        index_source_layers=(1, 3, 4),
        original_seq_len=64,
        rope_theta=10000,
        rope_factor=16,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        candidate_source_layer=3,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        hc_eps=1e-6,
        engram_layer_ids=(1,),
        engram_vocab_size=50,
        engram_num_embeddings=engram_rows(50, 1, 3, 1),
        engram_max_ngram_size=3,
        engram_pad_id=2,
        engram_compressed_vocab_size=token_map(tokenizer, 264).num_classes,
        engram_n_heads=1,
        engram_head_dim=32,
        dtype="fp8",
        expert_dtype="fp4",
        compress_rope_theta=160000,
        compress_ratios=(0, 2, 2, 1, 1, 1, 0),
    )


def small_config(directory: Path, *, steps: int = 6) -> TrainConfig:
    """A run in `directory`, whose corpus and tokenizer it writes there."""
    tokenizer = write_tokenizer(directory / "tokenizer.json")
    return TrainConfig(
        model=small_model(tokenizer),
        steps=steps,
        data=DataConfig(
            train=str(write_corpus(directory / "train.jsonl")),
            valid=str(write_corpus(directory / "heldout.jsonl", documents=3, first=100)),
            tokenizer=str(tokenizer),
            seq_len=96,
            tokens_per_step=192,
        ),
        optim=OptimConfig(lr=2e-3, floor_lr=1e-4, warmup_steps=2),
        index=IndexConfig(dense_steps=2),
        balance=BalanceConfig(),
        draft=DraftConfig(anchors=8),
        eval=EvalConfig(interval=0, tokens=200),
        checkpoint=CheckpointConfig(interval=0, keep=2),
        log_interval=2,
        device="cpu",
        threads=1,
        curve=False,
        export=ExportFormat.OFF,
    )
