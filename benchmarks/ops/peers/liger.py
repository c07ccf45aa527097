"""Liger's mHC kernels (Triton), composed to one sublayer boundary.

Its own product with the coefficient weights unrolls the whole sum: at 20,480 terms it compiles
for many minutes. DeepGEMM's product takes its place.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.ops.measure import relative_error
from benchmarks.ops.peers import Built, Columns, column
from benchmarks.ops.peers.deep_gemm import prenorm
from torch import Tensor

from cedar.ops.mhc import MhcMix, MhcParameters
from cedar.ops.mhc import reference as plain

__all__ = ["mhc"]

Boundary = tuple[Tensor, tuple[Tensor, MhcMix], Tensor, MhcParameters, Tensor]
FEW = 64  # tokens that are compared with float64


def mhc(cases: Sequence[Boundary], settings: dict[str, Any]) -> Columns:
    """Column ``liger``: update, DeepGEMM's product, coefficients, collapse, norm."""
    return column("liger", partial(_mhc, cases, settings))


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
