"""FlashInfer's top-k and its mHC kernels of DeepSeek V4; compiled on first use."""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.ops.peers import Built, Columns, column
from benchmarks.ops.peers.deep_gemm import Scan, built_scan, prenorm
from benchmarks.ops.peers.v4 import Boundary, boundary_error
from torch import Tensor

from cedar.ops.mhc import MhcMix, MhcParameters

__all__ = ["mhc", "scan_top_k", "top_k"]


def top_k(scores: Sequence[Tensor], k: int) -> Columns:
    """Columns ``flashinfer`` and ``flashinfer_ties``: the latter, too, takes the lowest numbers
    of equal scores. Both leave the order of the result open; ours is ascending."""
    return column("flashinfer", partial(_top_k, scores, k, 0)) | column(
        "flashinfer_ties", partial(_top_k, scores, k, 1)
    )


def scan_top_k(calls: Sequence[Scan], entries: int, k: int) -> Columns:
    """Column ``deep_gemm_flashinfer``: DeepGEMM's scores of all keys, FlashInfer's best of them.

    Neither blocks nor physical rows; which of equal scores it takes is open.
    """

    def build() -> Built:
        module = importlib.import_module("flashinfer")
        scan = built_scan(calls, entries)
        run = [lambda score=score: module.top_k(score(), k) for score in scan.calls]
        scores, (values, _) = scan.calls[0](), run[0]()
        want = scores.topk(k, dim=1).values
        same = torch.equal(values.sort(1, descending=True).values, want)
        return Built(run, scan.error if same else 1.0, scan.bytes + 4 * scores.numel())

    return column("deep_gemm_flashinfer", build)


def mhc(cases: Sequence[Boundary], settings: dict[str, Any]) -> Columns:
    """Column ``flashinfer``: a sublayer boundary of DeepSeek V4, with DeepGEMM's product.

    Update of the streams, product with the coefficient weights, coefficients with collapse, norm:
    four launches. V4 collapses with the coefficients just computed, ours with those before; the
    work is the same, and its result is compared with float64 in V4's order.
    """
    return column("flashinfer", partial(_mhc, cases, settings))


def _top_k(scores: Sequence[Tensor], k: int, tie_break: int) -> Built:
    module = importlib.import_module("flashinfer")
    calls = [partial(module.top_k, x, k, tie_break=tie_break) for x in scores]
    values, chosen = calls[0]()
    want = scores[0].topk(k, dim=1).values
    same = torch.equal(values.sort(1, descending=True).values, want)
    named = torch.equal(scores[0].gather(1, chosen), values)
    x = scores[0]
    return Built(calls, 0.0 if same and named else 1.0, x.nbytes + len(x) * k * 8)


def _mhc(cases: Sequence[Boundary], settings: dict[str, Any]) -> Built:
    module = importlib.import_module("flashinfer.mhc")
    norm_eps, hc_eps = settings["norm_eps"], settings["hc_eps"]

    def call(
        x: Tensor, update: tuple[Tensor, MhcMix], _: Tensor, p: MhcParameters, weight: Tensor
    ) -> tuple[Tensor, MhcMix, Tensor]:
        y, mix = update
        x = module.mhc_post(y, x, mix.post_TC, mix.comb_TCC)
        d, s = prenorm(x.flatten(1), p[0])
        splits = len(d)
        if splits == 1:
            d, s = d[0], s[0]
        post, comb, h = module.mhc_pre_big_fuse(
            d, s, x, p[2], p[1], x[0].numel(), norm_eps, hc_eps, hc_eps, 2.0,
            settings["sinkhorn_iters"], splits,
        )  # fmt: skip
        return x, MhcMix(post, post, comb), F.rms_norm(h, h.shape[1:], weight, norm_eps)

    calls = [partial(call, *case) for case in cases]
    x, (y, _), _, p, _ = cases[0]
    # Streams are read by update, product and collapse, and written once.
    moved = 4 * x.nbytes + 2 * y.nbytes + p[0].nbytes
    return Built(calls, boundary_error(cases[0], calls[0](), settings), moved)
