"""``python3 -m benchmarks.ops.peers [name ...] [compile]``: every peer once, on small inputs.

One JSON line a column: microseconds and error, or why there is no number.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.ops.measure import need_gpu
from benchmarks.ops.peers import (
    Columns,
    compiled,
    deep_gemm,
    fla,
    flash_mla,
    flashinfer,
    liger,
    tile_kernels,
    versions,
)
from torch import Tensor

from cedar.ops.index_score import PagedKeys
from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc import reference as plain_mhc
from cedar.ops.sparse_attention import PackedRows, Rows
from cedar.quant import FP4_MAIN, FP8_ROW

MHC: dict[str, Any] = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def raw(*shape: int) -> Tensor:
    """Bytes without E4M3's NaN codes."""
    return torch.randint(0, 127, shape, device="cuda", dtype=torch.uint8)


def slots(queries: int, count: int, rows: int) -> Tensor:
    return torch.randint(0, rows, (queries, count), device="cuda").int()


def decode() -> Columns:
    near = torch.cat((raw(4096, 512), raw(4096, 16) % 3 + 116), 1)
    far = torch.cat((raw(8192, 256), raw(8192, 32) % 16 + 40), 1)
    sources = (
        PackedRows(near, slots(32, 128, 4096), FP8_ROW),
        PackedRows(far, slots(32, 512, 8192), FP4_MAIN),
    )
    return flash_mla.decode([(normal(32, 64, 512).bfloat16(), sources, normal(64), 512**-0.5)])


def prefill() -> Columns:
    sources = tuple(
        Rows(normal(4096, 512).bfloat16(), slots(256, count, 4096)) for count in (128, 512)
    )
    return flash_mla.prefill((normal(256, 64, 512).bfloat16(), sources, normal(64), 512**-0.5))


def scan(tokens: int = 1) -> Columns:
    sequences, entries = 4, 8192
    pages = sequences * entries // 64
    keys = raw(pages, 64, 68)
    keys[..., 64:] = keys[..., 64:] % 3 + 125
    table = torch.randperm(pages, device="cuda").int().view(sequences, -1)
    first = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * tokens
    q = torch.randint(-4, 5, (sequences * tokens, 32, 128), device="cuda").bfloat16()
    seen = torch.full((sequences * tokens,), entries, device="cuda")
    call = (q, normal(len(q), 32).bfloat16(), PagedKeys(keys, table, first), seen)
    return deep_gemm.index_scan([call], entries)


def top_k() -> Columns:
    scores = [normal(32, 1 << 17).bfloat16()]
    return flashinfer.top_k(scores, 512) | compiled.float32_top_k(scores, 512)


def boundary(tokens: int) -> tuple[Tensor, tuple[Tensor, MhcMix], Tensor, MhcParameters, Tensor]:
    mix = MhcMix(normal(tokens, 4).sigmoid(), normal(tokens, 4), normal(tokens, 4, 4).softmax(-1))
    p = MhcParameters(normal(24, 20480) / 143, normal(24), torch.ones(3, device="cuda"))
    weight = torch.ones(5120, device="cuda", dtype=torch.bfloat16)
    x, y = normal(tokens, 4, 5120).bfloat16(), normal(tokens, 5120).bfloat16()
    return x, (y, mix), mix.pre_TC, p, weight


def mhc() -> Columns:
    return flashinfer.mhc([boundary(2048)], MHC)


def mhc_liger() -> Columns:
    return liger.mhc([boundary(2048)], MHC)


def mhc_tile() -> Columns:
    return tile_kernels.mhc([boundary(2048)], MHC)


def gradient_case(tokens: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    x, (y, _), _, p, weight = boundary(tokens)
    return (x, y, *p, weight), (normal(tokens, 4, 5120).bfloat16(), normal(tokens, 5120).bfloat16())


def mhc_tile_backward() -> Columns:
    return tile_kernels.mhc_backward([gradient_case(2048)], MHC)


def gate_tile() -> Columns:
    gate = normal(128, 4, 5120).bfloat16(), normal(128, 4, 5120).bfloat16()
    weights = normal(4, 5120).bfloat16(), normal(4, 5120).bfloat16()
    return tile_kernels.engram_gate([(*gate, normal(128, 5120).bfloat16(), *weights)], 1e-20)


def nsa(backward: bool = False) -> Columns:
    chosen = torch.arange(2048, device="cuda").view(-1, 1) // fla.BLOCK - torch.arange(
        7, -1, -1, device="cuda"
    )
    q, rows = normal(2048, 64, 128).bfloat16(), normal(2048, 128).bfloat16()
    return fla.blocks(q, rows, chosen.clamp_min(-1), torch.randn_like(q) if backward else None)


def mhc_compiled() -> Columns:
    case = boundary(2048)
    return compiled.compiled(lambda *c: plain_mhc.mhc_step(*c, **MHC), [case], 0)


def experts(tokens: int = 32) -> Columns:
    chosen = torch.rand(tokens, 384, device="cuda").topk(6, dim=1).indices
    return deep_gemm.experts([chosen], 384, 5120, 2304)


def experts_liger() -> Columns:
    chosen = torch.rand(32, 16, device="cuda").topk(2, dim=1)
    gate, down, up = (
        (normal(16, *shape) / 64).bfloat16() for shape in ((2304, 5120), (5120, 2304), (2304, 5120))
    )
    return liger.experts(
        [(normal(32, 5120).bfloat16(), chosen.indices, chosen.values)], gate, down, up
    )


CHECKS: dict[str, Callable[[], Columns]] = {
    "decode": decode,
    "prefill": prefill,
    "scan": scan,
    "scan_6": lambda: scan(6),
    "top_k": top_k,
    "mhc": mhc,
    "mhc_liger": mhc_liger,
    "mhc_tile": mhc_tile,
    "mhc_tile_backward": mhc_tile_backward,
    "gate_tile": gate_tile,
    "nsa": nsa,
    "nsa_backward": lambda: nsa(True),
    "mhc_compiled": mhc_compiled,
    "experts": experts,
    "experts_8192": lambda: experts(8192),
    "experts_liger": experts_liger,
}


def main() -> None:
    need_gpu()
    print(json.dumps({"versions": versions()}), flush=True)
    for name in [name for name in sys.argv[1:] if name != "compile"] or CHECKS:
        began = time.monotonic()
        found = CHECKS[name]()
        for peer, measure in found.others.items():
            try:
                said = measure if isinstance(measure, str) else [round(v, 2) for v in measure()]
            except Exception as problem:
                said = f"cannot be timed: {type(problem).__name__}: {problem}"[:240]
            seconds = round(time.monotonic() - began, 1)
            line = {"check": name, "peer": peer, "us": said, **found.more, "seconds": seconds}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
