"""Gradients of single-pass mHC at 4 streams x 5120: from dX', the mix's and dh to all inputs'.

Columns: floor (10 D values read and 5 D written a token, fn read and dfn written once), ours, the
kernels of tile-kernels (a boundary of DeepSeek V4) and Liger if they can be imported, a plain copy
of the same bytes, plain PyTorch (autograd of the reference, eager), and with the argument
``compile`` torch.compile of the reference with few Sinkhorn steps (20 compile too long). Numbers as
arguments choose sizes.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.ops.measure import Report, floor_us, need_gpu, relative_error, sets_for, timed
from benchmarks.ops.peers import Columns, backward_of, liger, tile_kernels
from torch import Tensor

from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc import reference as plain
from cedar.ops.mhc.backward_triton import MhcStepTraining, backward

WIDTH = 5120
SETTINGS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "sinkhorn_iters": 20}
Values = tuple[Tensor, ...]


def inputs(seed: int, count: int, shared: Values) -> tuple[Values, Values]:
    """x, y, post, comb, pre, fn, base, scale, norm weight; and gradients of the outputs."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    mix = normal(count, 4), normal(count, 4, 4).softmax(-1), normal(count, 4).sigmoid()
    values = (normal(count, 4, WIDTH).bfloat16(), normal(count, WIDTH).bfloat16(), *mix, *shared)
    grads = (
        normal(count, 4, WIDTH).bfloat16(), normal(count, 4), normal(count, 4),
        normal(count, 4, 4), normal(count, WIDTH).bfloat16(),
    )  # fmt: skip
    return values, grads


def outputs(values: Values, settings: dict[str, Any]) -> Values:
    x, y, post, comb, pre, fn, base, scale, weight = values
    update = (y, MhcMix(pre, post, comb))
    x, mix, h = plain.mhc_step(x, update, pre, MhcParameters(fn, base, scale), weight, **settings)
    return x, *mix, h


def exact(values: Values, grads: Values) -> Values:
    wide = tuple(v.double().requires_grad_() for v in values)
    return torch.autograd.grad(outputs(wide, SETTINGS), wide, [g.double() for g in grads])


def eager(values: Values, grads: Values, step: Callable[..., Any]) -> Callable[[], Any]:
    """The backward pass alone; the graph is kept for every call."""
    return backward_of(lambda *learned: step(learned), values, grads)


def peers_of(cases: list[Any], count: int) -> Columns:
    """Of some sizes: they compile again for each, and their activations take room."""
    found = Columns()
    if count in (2048, 8192):
        few = [((*v[:2], *v[5:]), (g[0], g[4])) for v, _, g in cases[:2]]
        found |= tile_kernels.mhc_backward(few, SETTINGS)
    if count == 8192:
        found |= liger.mhc_backward([(v, g) for v, _, g in cases[:2]], SETTINGS, exact)
    return found


def main() -> None:
    need_gpu()
    report = Report("mhc_backward")
    g = torch.Generator(device="cuda").manual_seed(0)
    fn = torch.randn(24, 4 * WIDTH, generator=g, device="cuda") * (4 * WIDTH) ** -0.5
    shared = (
        fn, torch.randn(24, generator=g, device="cuda"), torch.ones(3, device="cuda"),
        torch.ones(WIDTH, device="cuda").bfloat16(),
    )  # fmt: skip
    step = MhcStepTraining()
    chosen = [int(name) for name in sys.argv[1:] if name.isdigit()]
    for count in chosen or (128, 2048, 4096, 8192):
        moved = count * 15 * WIDTH * 2 + 2 * fn.nbytes
        sets = sets_for(count * 10 * WIDTH * 2, least=2, most=16)
        cases = []
        for seed in range(sets):
            values, grads = inputs(seed, count, shared)
            _, _, *saved = step.forward(SETTINGS, values)
            cases.append((values, tuple(saved), grads))
        few, few_grads = inputs(99, 256, shared)
        _, _, *saved = step.forward(SETTINGS, few)
        found = backward(few, tuple(saved), few_grads, SETTINGS)
        want = exact(few, few_grads)
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        peers = peers_of(cases, count)
        others: dict[str, Any] = {
            **peers.others,
            "copy": lambda a=target, b=source: timed([lambda: a.copy_(b)]),
            "pytorch": lambda c=cases[0]: timed(
                [eager(c[0], c[2], lambda v: outputs(v, SETTINGS))], replays=5
            ),
        }
        if "compile" in sys.argv[1:]:
            fast = torch.compile(lambda v: outputs(v, SETTINGS | {"sinkhorn_iters": 3}))
            others["compiled_3_steps"] = lambda c=cases[0], f=fast: timed(
                [eager(c[0], c[2], f)], replays=5
            )
        report.line(
            {"tokens": count, "width": WIDTH},
            floor=floor_us(moved, count * 4 * WIDTH * 24 * 4),
            error=max(relative_error(a, b) for a, b in zip(found, want, strict=True)),
            bound=1e-2,
            ours=lambda cases=cases: timed([lambda c=c: backward(*c, SETTINGS) for c in cases]),
            others=others,
            bytes=moved,
            **peers.more,
        )


if __name__ == "__main__":
    main()
