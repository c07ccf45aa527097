"""DeepSeek V4's TileLang kernels, as the wheel ``tile-kernels`` keeps them; compiled on first use.

mHC in V4's order (`benchmarks.ops.peers.v4`): update, product in TF32, coefficients with collapse,
torch's norm. Its product does not split its long sum. Backward: product, statistics, coefficients,
Sinkhorn, collapse and update each have a kernel of their own, which add to one gradient of the
streams. The Engram gate is the same function as ours, with the product of its weights made before.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.ops.measure import relative_error
from benchmarks.ops.peers import Built, Columns, backward_of, column
from benchmarks.ops.peers.v4 import Boundary, boundary_error, boundary_gradients
from torch import Tensor

from cedar.ops.engram_gate import reference as plain_gate
from cedar.ops.mhc import MhcMix, MhcParameters

__all__ = ["engram_gate", "mhc", "mhc_backward"]

Gate = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
FEW = 256  # tokens whose gradients are compared with float64


def mhc(cases: Sequence[Boundary], settings: dict[str, Any]) -> Columns:
    """Column ``tile_kernels``: a sublayer boundary."""
    return column("tile_kernels", partial(_mhc, cases, settings))


def mhc_backward(
    cases: Sequence[tuple[Sequence[Tensor], tuple[Tensor, Tensor]]], settings: dict[str, Any]
) -> Columns:
    """Column ``tile_kernels``: cases of (x, y, fn, base, scale, weight) and gradients of the new
    streams and of the normalised input."""
    return column("tile_kernels", partial(_mhc_backward, cases, settings))


def engram_gate(cases: Sequence[Gate], eps: float) -> Columns:
    """Column ``tile_kernels``: cases of (streams, keys, value, weights of both norms)."""
    return column("tile_kernels", partial(_engram_gate, cases, eps))


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    hc_eps = settings["hc_eps"]
    return {
        "norm_eps": settings["norm_eps"], "pre_eps": hc_eps, "sinkhorn_eps": hc_eps,
        "post_mult_value": 2.0, "sinkhorn_repeat": settings["sinkhorn_iters"],
    }  # fmt: skip


def _mhc(cases: Sequence[Boundary], settings: dict[str, Any]) -> Built:
    module: Any = importlib.import_module("tile_kernels.modeling.mhc.functional")
    options = _options(settings)

    def call(
        x: Tensor, update: tuple[Tensor, MhcMix], _: Tensor, p: MhcParameters, weight: Tensor
    ) -> tuple[Tensor, MhcMix, Tensor]:
        y, mix = update
        x = module.mhc_post(y[None], x[None], mix.post_TC[None, ..., None], mix.comb_TCC[None])
        h, (post, comb) = module.mhc_pre(x, p.fn, p.scale, p.base, **options)
        h = F.rms_norm(h[0], h.shape[2:], weight, settings["norm_eps"])
        return x[0], MhcMix(post[0], post[0], comb[0]), h

    with torch.no_grad():
        calls = [partial(call, *case) for case in cases]
        x, (y, _), _, p, _ = cases[0]
        # Streams are read by update, product and collapse, and written once; fn is rounded first.
        moved = 4 * x.nbytes + 4 * y.nbytes + 3 * p.fn.nbytes
        return Built(calls, boundary_error(cases[0], calls[0](), settings), moved)


def _mhc_backward(
    cases: Sequence[tuple[Sequence[Tensor], tuple[Tensor, Tensor]]], settings: dict[str, Any]
) -> Built:
    module: Any = importlib.import_module("tile_kernels.modeling.mhc.functional")
    options = _options(settings)

    def outputs(
        x: Tensor, y: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        h, (post, comb) = module.mhc_pre(x[None], fn, scale, base, **options)
        h = F.rms_norm(h[0], h.shape[2:], weight, settings["norm_eps"])
        # Last, so that its gradient of the streams is there when the others add to it.
        return module.mhc_post(y[None], x[None], post, comb)[0], h

    values, grads = cases[0]
    few = tuple(v[:FEW] if n < 2 else v for n, v in enumerate(values))
    few_grads = grads[0][:FEW], grads[1][:FEW]
    found = backward_of(outputs, few, few_grads)()
    wanted = boundary_gradients(few, few_grads, settings)
    error = max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))
    _, y, fn = values[:3]
    # In widths of a token: update 14, collapse 21, product 20, norm 3; fn is read and written.
    return Built(
        [backward_of(outputs, *case) for case in cases], error, 58 * y.nbytes + 2 * fn.nbytes
    )


def _engram_gate(cases: Sequence[Gate], eps: float) -> Built:
    module: Any = importlib.import_module("tile_kernels.engram")
    weight = module.fused_weight(*cases[0][3:])
    calls = [
        partial(module.engram_gate_fwd, *case[:3], weight, eps, 1e-6, save_for_backward=False)
        for case in cases
    ]
    want = plain_gate.engram_gate(*(v.double() for v in cases[0]), eps, None)
    moved = 2 * cases[0][0].nbytes + cases[0][1].nbytes + cases[0][2].nbytes + weight.nbytes
    return Built(calls, relative_error(calls[0]()[0], want), moved)
