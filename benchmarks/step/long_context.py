"""A context of a million tokens through the whole engine, on the bundled model.

Prefill (CED: half the layers for all but the last window), then greedy decoding on CUDA graphs;
beside it the same engine with a short prompt. First argument: tokens of the prompt.
"""

import argparse
import json
import time

import torch
from benchmarks.ops.measure import need_gpu

from cedar.engine.assemble import EngineConfig, build_core
from cedar.engine.build import load_model
from cedar.engine.core import EngineCore
from cedar.engine.params import SamplingParams
from cedar.environment import describe_run

SHORT, NEW = 8192, 64


def generate(core: EngineCore, prompt: list[int]) -> tuple[float, float, list[int]]:
    """Seconds to the first token, seconds of each further one, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    core.submit(core.request(prompt, params))
    first, tokens = 0.0, list[int]()
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            tokens += output.tokens
            first = first or time.perf_counter() - start
    total = time.perf_counter() - start
    return first, (total - first) / (len(tokens) - 1), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=int, nargs="?", default=1_048_000)
    parser.add_argument("--model", default="cedar-tiny")
    arguments = parser.parse_args()
    need_gpu()
    loaded = load_model(arguments.model, device="cuda")
    config = EngineConfig(
        pool_tokens=loaded.model.config.max_position_embeddings,
        max_running=1,
        token_budget=8192,
        prefix_cache=False,
        draft=False,
    )
    core = build_core(loaded, config)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 2500, (arguments.tokens,), generator=generator).tolist()
    generate(core, text[:SHORT])  # compiles kernels and records graphs
    short_first, short_each, _ = generate(core, text[:SHORT])
    first, each, tokens = generate(core, text)
    stats = core.stats()
    line = {
        "op": "long_context",
        "model": arguments.model,
        "tokens": arguments.tokens,
        "prefill_s": round(first, 2),
        "prefill_tokens_per_s": round(arguments.tokens / first),
        "decode_us": round(1e6 * each, 1),
        "decode_us_after_8K": round(1e6 * short_each, 1),
        "prefill_8K_s": round(short_first, 3),
        "kv_bytes_reserved": stats.bytes_reserved,
        "generated": len(tokens),
    }
    print(json.dumps({**line, **describe_run()}), flush=True)


if __name__ == "__main__":
    main()
