"""Single-pass mHC forward at 4 streams x 5120: update, coefficients, collapse, norm.

Columns: floor ((2m + 2) d values a token and the weights once), ours, the kernels of Liger,
FlashInfer and tile-kernels if they can be imported, a plain copy of the same bytes, plain PyTorch
(the reference composition, eager; with the argument ``compile`` also compiled). Numbers as
arguments choose sizes.
"""

import sys
from typing import Any

import torch
from benchmarks.ops.measure import (
    Report,
    floor_us,
    need_gpu,
    relative_error,
    sets_for,
    timed,
    timed_eager,
)
from benchmarks.ops.peers import Columns, compiled, flashinfer, liger, tile_kernels
from torch import Tensor

from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc import reference as plain
from cedar.ops.mhc.triton import MhcStepKernel

WIDTH, STREAMS = 5120, 4
SETTINGS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}


def inputs(seed: int, count: int, parameters: MhcParameters, weight: Tensor) -> tuple:
    g = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    x = normal(count, STREAMS, WIDTH).bfloat16()
    mix = MhcMix(normal(count, 4).sigmoid(), normal(count, 4), normal(count, 4, 4).softmax(-1))
    return x, (normal(count, WIDTH).bfloat16(), mix), mix.pre_TC, parameters, weight


def step(*case: Any) -> Any:
    return plain.mhc_step(*case, **SETTINGS)


def main() -> None:
    need_gpu()
    report = Report("mhc")
    g = torch.Generator(device="cuda").manual_seed(0)
    fn = torch.randn(24, STREAMS * WIDTH, generator=g, device="cuda") * (4 * WIDTH) ** -0.5
    parameters = MhcParameters(fn, torch.randn(24, device="cuda"), torch.ones(3, device="cuda"))
    weight = torch.ones(WIDTH, device="cuda").bfloat16()
    kernel = MhcStepKernel()
    chosen = [int(name) for name in sys.argv[1:] if name.isdigit()]
    for count in chosen or (1, 16, 32, 128, 512, 2048, 4096, 8192, 16384):
        moved = count * (2 * STREAMS + 2) * WIDTH * 2 + fn.nbytes
        sets = sets_for(count * 5 * WIDTH * 2, least=2, most=32)
        cases = [inputs(seed, count, parameters, weight) for seed in range(sets)]
        out = kernel(*cases[0], **SETTINGS)
        few = 64
        x, (y, mix), pre, *rest = cases[0]
        exact = plain.mhc_step(
            x[:few].double(), (y[:few].double(), MhcMix(*(v[:few].double() for v in mix))),
            pre[:few].double(), *rest, **SETTINGS,
        )  # fmt: skip
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        peers = Columns()  # they compile again for every size
        if count in (1, 128, 2048, 8192):
            peers |= flashinfer.mhc(cases, SETTINGS) | tile_kernels.mhc(cases, SETTINGS)
        if count == 8192:
            peers |= liger.mhc(cases, SETTINGS) | compiled.compiled(step, cases, moved)
        report.line(
            {"tokens": count, "width": WIDTH},
            floor=floor_us(moved, count * 4 * WIDTH * 24 * 2),
            error=max(
                relative_error(out[0][:few], exact[0]),
                relative_error(out[2][:few], exact[2]),
                *(relative_error(a[:few], b) for a, b in zip(out[1], exact[1], strict=True)),
            ),
            bound=1e-2,
            ours=lambda cases=cases: timed([lambda c=c: kernel(*c, **SETTINGS) for c in cases]),
            others={
                **peers.others,
                "copy": lambda a=target, b=source: timed([lambda: a.copy_(b)]),
                "pytorch": lambda cases=cases: timed_eager(
                    [lambda c=c: plain.mhc_step(*c, **SETTINGS) for c in cases[:2]]
                ),
            },
            bytes=moved,
            flop=count * 4 * WIDTH * 24 * 2,
            **peers.more,
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
