"""Decoding: against recomputing, against dense masks, against the context's length."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cedar.analysis.bench.masked import masked_model
from cedar.analysis.bench.rig import Rig
from cedar.cache import DenseKV
from cedar.config import ModelConfig, released
from cedar.config.plan import Half
from cedar.engine.build import LoadedModel
from cedar.engine.runner import Replay
from cedar.model import Batch, Model

__all__ = ["against_dense_masks", "against_recompute", "released_attention"]

_CONTEXTS = (16384, 65536)


def against_recompute(rig: Rig) -> Iterator[tuple[str, float]]:
    """A step on 8K cached tokens against running all of them again."""
    length = 8192
    runner = rig.runner(length + 64, replay=Replay.OFF)
    whole = rig.once_or_median(lambda: rig.prefill(runner, length))
    yield "decode_8k_speedup_over_recompute", whole / rig.step_time(rig.filled(length), length)


def against_dense_masks(rig: Rig, suffix: str = "") -> Iterator[tuple[str, float]]:
    """A step against the same model on a floating-point cache that masks what is not selected."""
    reindex = {}
    for context in _CONTEXTS:
        step = rig.step_time(rig.filled(context), context)
        name = f"decode_{context // 1024}k"
        yield f"{name}_speedup_over_dense_mask{suffix}", _dense_step_time(rig, context) / step
        yield f"decode_tokens_per_second_{context // 1024}k{suffix}", 1 / step
        reindex[context] = _reindex_time(rig, context)
    yield f"reindex_cost_64k_over_16k{suffix}", reindex[_CONTEXTS[1]] / reindex[_CONTEXTS[0]]


def released_attention(loaded: LoadedModel) -> LoadedModel:
    """Random weights around attention and index at their released shapes, on ``loaded``'s device.

    64 heads of width 512, window 128, 512 selected entries, 32 index heads of width 128, a pool
    of 2048 blocks of 8. Everything else is small: 8 layers of width 1024, low ranks, few experts.
    """
    model = Model(_released_attention(), device=loaded.device, dtype=loaded.model.compute_dtype)
    model.init(0)
    return dataclasses.replace(loaded, model=model.eval().requires_grad_(False))


def _released_attention() -> ModelConfig:
    return dataclasses.replace(
        released(),
        vocab_size=4096,
        dim=1024,
        moe_inter_dim=256,
        n_layers=8,
        n_mtp_layers=0,
        dspark_target_layer_ids=(),
        dspark_noise_token_id=3,
        n_routed_experts=8,
        n_activated_experts=2,
        q_lora_rank=256,
        o_lora_rank=128,
        kv_source_layers=(1, 4),
        index_source_layers=(1, 4, 6),
        candidate_source_layer=4,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
        vision_n_layers=0,
        image_token_id=4095,
    )


def _dense_step_time(rig: Rig, context: int) -> float:
    model = masked_model(rig.loaded.model, context)
    config, device = model.config, rig.loaded.device
    store = DenseKV(config, device=device, dtype=model.compute_dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=model.compute_dtype)

    for plan in model.plan:
        store.extend_window(plan.index, 0, random(config.window_size, config.head_dim))
        if plan.has_compressor:
            entries = context // plan.compress_ratio
            store.extend_main(
                plan.index,
                0,
                random(entries, config.head_dim),
                random(entries, config.index_head_dim),
            )
    for half in Half:
        store.advance(0, half, context)
    mark, batch = store.mark(), Batch.pack([[5]], device=device)
    with torch.inference_mode():
        return rig.median(lambda: model(batch, store, logits="last"), lambda: store.rollback(mark))


def _reindex_time(rig: Rig, context: int) -> float:
    """Seconds of the selections of reindex layers alone, within ordinary steps."""
    runner = rig.filled(context)
    spent = [0.0]
    indexers = [
        layer.attn.indexer
        for layer in runner.model.backbone()
        if layer.plan.has_indexer and not layer.plan.has_compressor
    ]
    for indexer in indexers:
        original = indexer.select

        def timed(*arguments: Any, inner: Any = original) -> Any:
            start = time.perf_counter()
            result = inner(*arguments)
            spent[0] += time.perf_counter() - start
            return result

        indexer.select = timed  # type: ignore[method-assign, assignment]
    times = []
    try:
        for _ in range(8):
            spent[0] = 0.0
            if runner.store.length(0) > context:
                runner.rollback(0, context)
            runner.execute([rig.work([5], context, context, context + 64)])
            times.append(spent[0])
    finally:
        for indexer in indexers:
            del indexer.select
    return statistics.median(times[1:])
