"""Liger's mHC kernels (Triton), composed to one sublayer boundary, and its fused experts.

Its own product with the coefficient weights unrolls the whole sum: at 20,480 terms it compiles
for many minutes. DeepGEMM's product takes its place forward; backward its own runs. Its experts
take bfloat16 weights, four times our bytes, have no clamp, and read a size on the host.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.ops.measure import relative_error
from benchmarks.ops.peers import Built, Columns, backward_of, column
from benchmarks.ops.peers.deep_gemm import prenorm
from benchmarks.ops.peers.v4 import FEW, Boundary
from torch import Tensor

from cedar.ops.mhc import MhcMix
from cedar.ops.mhc import reference as plain

__all__ = ["experts", "fused_experts", "mhc", "mhc_backward"]

Case = tuple[Tensor, Tensor, Tensor]
Values = tuple[Tensor, ...]


def mhc(cases: Sequence[Boundary], settings: dict[str, Any]) -> Columns:
    """Column ``liger``: update, DeepGEMM's product, coefficients, collapse, norm."""
    return column("liger", partial(_mhc, cases, settings))


def mhc_backward(
    cases: Sequence[tuple[Values, Values]],
    settings: dict[str, Any],
    exact: Callable[[Values, Values], Values],
) -> Columns:
    """Column ``liger``: its backward functions of update, coefficients and collapse, torch's norm.

    A case holds x, y, post, comb, pre, fn, base, scale and norm weight, and the gradients of new
    streams, pre, post, comb and input; ``exact`` gives those of all the former in float64.
    """
    return column("liger", partial(_mhc_backward, cases, settings, exact))


def experts(cases: Sequence[Case], gate: Tensor, down: Tensor, up: Tensor) -> Columns:
    """Column ``liger_moe``: cases of (x, experts, weights), and bfloat16 weights."""
    return column("liger_moe", partial(_experts, cases, gate, down, up), graph=False)


def fused_experts() -> Callable[..., Tensor]:
    """Its function of x, gate and up weights in one, down weights, choices and routing weights.

    With one fixed set of tile sizes, its own way around a tuning that takes minutes.
    """
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    module: Any = importlib.import_module("liger_kernel.ops.fused_moe")
    apply: Callable[..., Tensor] = module.LigerFusedMoEFunction.apply
    return apply


def _mhc(cases: Sequence[Boundary], settings: dict[str, Any]) -> Built:
    module = importlib.import_module("liger_kernel.ops.mhc")
    norm_eps, hc_eps = settings["norm_eps"], settings["hc_eps"]

    def call(
        x: Tensor, y: Tensor, post: Tensor, comb: Tensor, pre: Tensor, fn: Tensor,
        base: Tensor, scale: tuple[Tensor, ...], weight: Tensor,
    ) -> tuple[Tensor, MhcMix, Tensor]:  # fmt: skip
        x = module.mhc_post_res_fwd(x, y, post, comb, out=torch.empty_like(x))
        z, square = prenorm(x.flatten(1), fn)
        z = z.sum(0) * torch.rsqrt(square.sum(0) / fn.shape[1] + norm_eps).unsqueeze(1)
        mix = module.mhc_split_sinkhorn_fwd(
            z, base, *scale, tmax=settings["sinkhorn_iters"], pre_eps=hc_eps,
            sinkhorn_eps=hc_eps, post_mult=2.0,
        )  # fmt: skip
        h = module.mhc_pre_fwd(x, pre, out=torch.empty_like(y))
        return x, MhcMix(*mix), F.rms_norm(h, h.shape[1:], weight, norm_eps)

    calls = []
    for x, (y, mix), pre, (fn, base, scale), weight in cases:
        # It mixes with [out, in] where ours is [in, out].
        comb = mix.comb_TCC.transpose(1, 2).contiguous()
        each = tuple(s.clone() for s in scale)
        calls.append(partial(call, x, y, mix.post_TC, comb, pre, fn, base, each, weight))

    x, (y, mix), pre, p, weight = cases[0]
    wide = MhcMix(*(v[:FEW].double() for v in mix))
    want = plain.mhc_step(
        x[:FEW].double(), (y[:FEW].double(), wide), pre[:FEW].double(), p, weight, **settings
    )
    found = calls[0]()
    error = max(
        relative_error(a[:FEW], b)
        for a, b in zip((found[0], *found[1], found[2]), (want[0], *want[1], want[2]), strict=True)
    )
    # Streams are read by update, product and collapse, and written once.
    return Built(calls, error, 4 * x.nbytes + 3 * y.nbytes + p[0].nbytes)


def _mhc_backward(
    cases: Sequence[tuple[Values, Values]],
    settings: dict[str, Any],
    exact: Callable[[Values, Values], Values],
) -> Built:
    calls = [_gradients(*each, settings) for each in cases]
    pairs = zip(calls[0](), exact(*cases[0]), strict=True)
    error = max(relative_error(a, b) for a, b in pairs)
    _, y, *_, fn, _, _, _ = cases[0][0]
    # In widths of a token: norm 3, collapse 19, product 12, two sums 24, update 14 and casts 50.
    return Built(calls, error, 122 * y.nbytes + 3 * fn.nbytes)


def _gradients(values: Values, grads: Values, settings: dict[str, Any]) -> Callable[[], Values]:
    """The backward pass, on what its forward functions keep for it."""
    module: Any = importlib.import_module("liger_kernel.ops.mhc")
    x, y, post, comb, pre, fn, base, scale, weight = values
    norm_eps, hc_eps = settings["norm_eps"], settings["hc_eps"]
    comb = comb.transpose(1, 2).contiguous()  # it mixes with [out, in]
    new = module.mhc_post_res_fwd(x, y, post, comb, out=torch.empty_like(x))
    z, square = prenorm(new.flatten(1), fn)
    rstd = torch.rsqrt(square.sum(0) / fn.shape[1] + norm_eps)
    z = z.sum(0) * rstd.unsqueeze(1)
    each = tuple(s.clone() for s in scale)
    *_, history = module.mhc_split_sinkhorn_fwd(
        z, base, *each, tmax=settings["sinkhorn_iters"], pre_eps=hc_eps, sinkhorn_eps=hc_eps,
        post_mult=2.0, return_hist=True,
    )  # fmt: skip
    update = SimpleNamespace(saved_tensors=(x, y, post, comb), x_shape=x.shape)
    coefficients = SimpleNamespace(
        saved_tensors=(new.flatten(1), fn.T.contiguous(), base, z, rstd, *each, history),
        meta=(x.shape, *x.shape[1:], settings["sinkhorn_iters"], hc_eps, 2.0, True),
    )
    collapse = SimpleNamespace(saved_tensors=(new, pre), x_shape=x.shape)
    h = module.mhc_pre_fwd(new, pre, out=torch.empty_like(y))
    norm = backward_of(lambda a, w: F.rms_norm(a, a.shape[1:], w, norm_eps), (h, weight), grads[4:])

    def call() -> Values:
        grad_h, grad_weight = norm()
        through_h, grad_pre = module.LigerMHCPreFunction.backward(collapse, grad_h)
        through_z, grad_fn, grad_base, *grad_scale = module.LigerMHCCoeffsFunction.backward(
            coefficients, *grads[1:4]
        )[:6]
        grad_new = grads[0] + through_h + through_z
        *found, grad_comb = module.LigerMHCPostResFunction.backward(update, grad_new)
        return (
            *found, grad_comb.transpose(1, 2), grad_pre, grad_fn.T, grad_base,
            torch.stack(grad_scale), grad_weight,
        )  # fmt: skip

    return call


def _experts(cases: Sequence[Case], gate: Tensor, down: Tensor, up: Tensor) -> Built:
    apply, both = fused_experts(), torch.cat((gate, up), dim=1)
    calls = [partial(apply, x, both, down, chosen.int(), weights) for x, chosen, weights in cases]
    x, chosen, weights = cases[0]
    want = []
    for token, experts, shares in zip(x[:2].double(), chosen.tolist(), weights, strict=False):
        hidden = [F.silu(gate[e].double() @ token) * (up[e].double() @ token) for e in experts]
        found = (down[e].double() @ v for e, v in zip(experts, hidden, strict=True))
        want.append(sum(w * v for w, v in zip(shares.double(), found, strict=True)))
    moved = len(chosen.unique()) * (both[0].nbytes + down[0].nbytes)
    return Built(calls, relative_error(calls[0]()[:2], torch.stack(want)), moved)
