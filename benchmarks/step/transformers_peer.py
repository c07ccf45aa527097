"""transformers' deepseek_v4 beside Cedar, end to end: the nearest architecture there, not V4.1.

Both get random weights at equal sizes: a prompt of 8192 tokens to its first token, then greedy
tokens one by one, batch 1. Cedar runs as it is served: packed weights, paged cache, its engine with
CUDA graphs, half the layers for most of the prompt (``full``: all of them). transformers runs in
bfloat16 with its own cache, eagerly, then with everything but attention compiled: its cache grows
at every step, and the whole model compiles to five graphs for minutes each.

V4 has no shared caches, candidates or Engram: every layer but the first compresses at one ratio,
here 2, with an indexer of its own. Engram, drafts and pictures are left out of Cedar, too.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from benchmarks.ops.measure import need_gpu
from benchmarks.step.long_context import generate
from torch import Tensor

from cedar.config import ModelConfig
from cedar.engine.assemble import EngineConfig, build_core
from cedar.engine.build import LoadedModel, load_model
from cedar.environment import describe_run
from cedar.model import Model, WeightStorage
from cedar.ops import select_ops
from cedar.train.recipes.tiny import model as cedar_tiny

LABEL = "nearest architecture, not V4.1"
NEW = 64
COMPILED = ("attn_hc", "ffn_hc", "input_layernorm", "post_attention_layernorm", "mlp")


def sizes() -> ModelConfig:
    """cedar-tiny's ten layers at a width of 1024: 16 heads of 128, 16 experts."""
    return replace(
        cedar_tiny(),
        dim=1024,
        moe_inter_dim=256,
        n_heads=16,
        n_routed_experts=16,
        q_lora_rank=256,
        head_dim=128,
        rope_head_dim=64,
        o_groups=4,
        o_lora_rank=128,
        window_size=128,
        index_n_heads=16,
        index_head_dim=64,
        index_topk=128,
        n_mtp_layers=0,
        dspark_target_layer_ids=(),
        engram_layer_ids=(),
        engram_num_embeddings=(),
        vision_n_layers=0,
        compress_ratios=cedar_tiny().compress_ratios[:10],
    )


def cedar_model(config: ModelConfig, device: str) -> LoadedModel:
    """Random packed weights; the bundled model's tokenizer has the same vocabulary."""
    model = Model(
        config,
        ops=select_ops(device),
        storage=WeightStorage.PACKED,
        dtype=torch.bfloat16,
        device=device,
    )
    model.init(0).eval().requires_grad_(False)
    return replace(load_model("cedar-tiny", device=device), model=model)


def cedar_times(loaded: LoadedModel, prompt: list[int], replay: str) -> tuple[float, float]:
    """Seconds to the first token, and of each further one."""
    config = EngineConfig(
        pool_tokens=2 * len(prompt), max_running=1, token_budget=len(prompt), prefix_cache=False,
        replay=replay,
    )  # fmt: skip
    core = build_core(loaded, config)
    generate(core, prompt)  # compiles kernels and records graphs
    found = [generate(core, prompt)[:2] for _ in range(3)]
    return min(first for first, _ in found), min(each for _, each in found)


def peer_model(config: ModelConfig, device: str) -> Any:
    """deepseek_v4 of these sizes, bfloat16 where its own loader would have it."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    layers = config.n_layers
    given = DeepseekV4Config(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        moe_intermediate_size=config.moe_inter_dim,
        num_hidden_layers=layers,
        num_attention_heads=config.n_heads,
        head_dim=config.head_dim,
        q_lora_rank=config.q_lora_rank,
        num_experts_per_tok=config.n_activated_experts,
        n_routed_experts=config.n_routed_experts,
        n_shared_experts=config.n_shared_experts,
        routed_scaling_factor=config.route_scale,
        layer_types=["sliding_attention", *["compressed_sparse_attention"] * (layers - 1)],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 128},
        mlp_layer_types=["moe"] * layers,
        hc_mult=config.hc_mult,
        hc_sinkhorn_iters=config.hc_sinkhorn_iters,
        sliding_window=config.window_size,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        index_topk=config.index_topk,
        partial_rotary_factor=config.rope_head_dim / config.head_dim,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return DeepseekV4ForCausalLM._from_config(given, dtype=torch.bfloat16).eval()


def peer_times(model: Any, prompt: list[int], new: int = NEW) -> tuple[float, float]:
    """The same two for transformers, its greedy choice left on the device."""
    from transformers import DynamicCache

    device = model.device

    def pass_of(tokens: Tensor, cache: Any) -> Tensor:
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen: Tensor = logits.logits[:, -1:].argmax(-1)
        return chosen

    def once() -> tuple[float, float]:
        cache = DynamicCache(config=model.config)
        tokens = torch.tensor([prompt], device=device)
        _wait(device)
        start = time.perf_counter()
        token = pass_of(tokens, cache)
        _wait(device)
        first = time.perf_counter() - start
        for _ in range(new - 1):
            token = pass_of(token, cache)
        _wait(device)
        return first, (time.perf_counter() - start - first) / (new - 1)

    once()
    found = [once() for _ in range(3)]
    return min(first for first, _ in found), min(each for _, each in found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compile_parts(model: Any) -> None:
    """All but attention, shared by the layers."""
    for layer in model.model.layers:
        for name in COMPILED:
            getattr(layer, name).compile(dynamic=True)


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tried(measure: Callable[[], tuple[float, float]]) -> tuple[Any, Any]:
    """Microseconds of prefill and of a step, or why there are none."""
    try:
        first, each = measure()
    except Exception as problem:  # a peer may lack anything
        reason = f"cannot run: {type(problem).__name__}: {problem}".replace("\n", " ")[:240]
        return reason, reason
    return round(1e6 * first, 1), round(1e6 * each, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=int, nargs="?", default=8192)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    need_gpu()
    with torch.inference_mode():
        run(arguments.tokens, "cuda", not arguments.no_compile)


def run(tokens: int, device: str, compiled: bool) -> None:
    """Print two lines; once more with the compiled column, which takes its time."""
    config = sizes()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 2500, (tokens,), generator=generator).tolist()
    loaded = cedar_model(config, device)
    columns: dict[str, tuple[Any, Any]] = {}
    columns["ours"] = tried(lambda: cedar_times(loaded, prompt, "decoder"))
    columns["full"] = tried(lambda: cedar_times(loaded, prompt, "off"))
    count = {"cedar": parameters(loaded.model)}
    try:
        model = peer_model(config, device)
    except Exception as problem:  # a peer may lack anything
        columns["transformers"] = (f"cannot run: {type(problem).__name__}: {problem}"[:240],) * 2
        show(columns, tokens, count)
        return
    count["transformers"] = parameters(model)
    columns["transformers"] = tried(lambda: peer_times(model, prompt))
    show(columns, tokens, count)
    if compiled:
        compile_parts(model)
        columns["transformers_compiled"] = tried(lambda: peer_times(model, prompt))
        show(columns, tokens, count)


def show(columns: dict[str, tuple[Any, Any]], tokens: int, count: dict[str, int]) -> None:
    about = describe_run()
    version = getattr(sys.modules.get("transformers"), "__version__", None)
    about["versions"] |= {"transformers": version}
    for place, name in enumerate(("prefill", "decode")):
        line: dict[str, Any] = {"op": "end_to_end", "pass": name, "tokens": tokens, "label": LABEL}
        for column, found in columns.items():
            value = found[place]
            line[column if isinstance(value, str) else f"{column}_us"] = value
        line["parameters"] = count
        print(json.dumps({**line, **about}), flush=True)


if __name__ == "__main__":
    main()
