"""Typical mistakes, injected one at a time: each makes parity fail, in the right place."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_files import take_part, take_whole
from torch import Tensor

from cedar.analysis.parity import run_parity
from cedar.model.attention import Attention
from cedar.model.context import Shared
from cedar.model.forward import ForwardContext
from cedar.model.layer import Block
from cedar.model.moe import MoE
from cedar.ops import Ops, select_ops, with_operations
from cedar.ops.index_score import Scan
from cedar.ops.main_kv import MainKV
from cedar.ops.mhc import MhcMix
from cedar.ops.rope.reference import frequencies
from cedar.ops.select import Chosen
from cedar.ops.select.reference import select_entries
from cedar.quant import FP4_ROW, FP8_ROW, BlockFormat

OPS = select_ops()


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """Prefills only, which are enough for a mistake in the logic and quick."""
    directory = tmp_path_factory.mktemp("golden")
    for base in ("mini_bf16", "mini_fp8fp4"):
        take_whole(directory, f"{base}.weights")
        take_part(
            directory,
            f"{base}.expect_fp32",
            lambda key: key.startswith(("prefill.", "after_prefill.", "input", "engram_token")),
        )
    take_part(directory, "mini_vision", lambda key: not key.startswith(("bf16.", "fp32.decode")))
    take_whole(directory, "norm_eps")
    return directory


def not_rounded(fmt: BlockFormat) -> Ops:
    def cast(x: Tensor, wanted: BlockFormat) -> Tensor:
        return x if wanted == fmt else OPS.cast(x, wanted)

    return with_operations(OPS, cast=cast)


def no_inverse_rotation() -> Ops:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
        return x if inverse else OPS.rotate(x, cos, sin)

    return with_operations(OPS, rotate=rotate)


def half_split_rotary() -> Ops:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
        half = cos.shape[-1]
        passed, turned = x[..., : -2 * half], x[..., -2 * half :]
        adjacent = turned.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
        out = OPS.rotate(adjacent, cos, sin, inverse)
        return torch.cat((passed, out.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)), -1)

    return with_operations(OPS, rotate=rotate)


def newest_block_not_pinned() -> Ops:
    def select_scan(scan: Scan, *args: Any, blocks: int = 0, **kwargs: Any) -> Chosen:
        chosen = OPS.select_scan(scan, *args, **kwargs)
        if not blocks:
            return chosen
        return chosen._replace(blocks_TM=select_entries(scan.best_TM, blocks))

    return with_operations(OPS, select_scan=select_scan)


def transposed_mixing() -> Ops:
    def coefficients(*args: Tensor, **kwargs: float) -> MhcMix:
        mix = OPS.mhc_coefficients(*args, **kwargs)
        return mix._replace(comb_TCC=mix.comb_TCC.transpose(-1, -2))

    return with_operations(OPS, mhc_coefficients=coefficients)


def no_clamp() -> Ops:
    def experts(*args: object, limit: float, **kwargs: object) -> Tensor:
        return OPS.experts(*args, limit=torch.inf, **kwargs)

    return with_operations(OPS, experts=experts)


def no_sink() -> Ops:
    def attention(q: Tensor, sources: tuple, sink: Tensor, scale: float) -> Tensor:
        return OPS.sparse_attention(q, sources, torch.full_like(sink, -torch.inf), scale)

    return with_operations(OPS, sparse_attention=attention)


def weight_after_w2() -> Ops:
    def experts(
        x: Tensor, numbers: Tensor, weights: Tensor, *args: object, shared: object, **kwargs: object
    ) -> Tensor:
        one = torch.ones_like(weights[:, :1])
        outputs = [
            OPS.experts(x, numbers[:, a : a + 1], one, *args, **kwargs) * weights[:, a : a + 1]
            for a in range(numbers.shape[1])
        ]
        every = OPS.experts(x, numbers, 0 * weights, *args, shared=shared, **kwargs)
        return torch.stack(outputs).sum(0) + every

    return with_operations(OPS, experts=experts)


def with_epsilon(op: str) -> Ops:
    """One of the three places takes 1e-6 whatever it is told."""
    original = getattr(OPS, op)
    if op == "mhc_coefficients":
        wrong = lambda *args, norm_eps, **kwargs: original(*args, norm_eps=1e-6, **kwargs)  # noqa: E731
    elif op == "rms_norm":
        wrong = lambda x, weight, eps: original(x, weight, 1e-6)  # noqa: E731
    else:
        wrong = lambda *args: original(*args[:5], 1e-6, args[6])  # noqa: E731
    return with_operations(OPS, **{op: wrong})


def own_sublayer_mix(patch: pytest.MonkeyPatch) -> None:
    original = Block.open

    def begin(self, streams, part):
        self.single_pass = False
        return original(self, streams, part)

    patch.setattr(Block, "open", begin)


def no_candidate_filter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shared, "candidates_for", lambda self, plan: None)


def plain_rotary_everywhere(patch: pytest.MonkeyPatch) -> None:
    table = lambda dim, base, **settings: frequencies(dim, 10000.0)  # noqa: E731
    patch.setattr("cedar.model.model.yarn_frequencies", table)


def index_key_after_rotation(patch: pytest.MonkeyPatch) -> None:
    original = Attention.project_main

    def project_main(self, x_TD: Tensor, ctx: ForwardContext) -> MainKV:
        at = ctx.groups[self.plan.compress_ratio].rotary
        self.indexer.wk.register_forward_pre_hook(
            lambda _, inputs: (self.ops.rotate(inputs[0], *at),)
        )
        return original(self, x_TD, ctx)

    patch.setattr(Attention, "project_main", project_main)


def text_bias_for_images(patch: pytest.MonkeyPatch) -> None:
    original = MoE.gating
    patch.setattr(MoE, "gating", lambda self, open_T: original(self, None))


@dataclass(frozen=True)
class Mistake:
    """seen_in: the set that is compared; first: the tensor that has to be among the failures."""

    name: str
    seen_in: str
    first: str
    ops: Callable[[], Ops] | None = None
    patch: Callable[[pytest.MonkeyPatch], None] | None = None


def entries_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store rounds entries when it takes them in."""
    monkeypatch.setattr("cedar.cache.dense.fake_quantize", lambda x, fmt: x)


BF16, FP4, IMAGES, EPS = "mini_bf16", "mini_fp8fp4", "mini_vision", "norm_eps"
CACHES = "after_prefill.layers"
MISTAKES = [
    Mistake("window keys not rounded to FP8", BF16, f"{CACHES}.0.attn.window_kv_cache",
            lambda: not_rounded(FP8_ROW)),
    Mistake("compressed KV not rounded to FP4", BF16, f"{CACHES}.2.attn.compress_kv_cache",
            patch=entries_not_rounded),
    Mistake("index queries and keys not rounded to FP4", BF16, f"{CACHES}.2.attn.indexer.k_cache",
            lambda: not_rounded(FP4_ROW)),
    Mistake("no inverse rotation", BF16, "prefill.layers.0.attn.out", no_inverse_rotation),
    Mistake("newest block not pinned", BF16, "prefill.layers.5.attn.indexer.candidates",
            newest_block_not_pinned),
    Mistake("no candidate filter", BF16, "prefill.layers.7.attn.indexer.topk_idxs",
            patch=no_candidate_filter),
    # The first attention sees equal streams, whose scale its norm takes away.
    Mistake("input mix of the own sublayer", BF16, "prefill.layers.0.ffn.out",
            patch=own_sublayer_mix),
    Mistake("transposed mixing matrix", BF16, "prefill.layers.0.out", transposed_mixing),
    Mistake("plain rotary table in compressed layers", BF16, f"{CACHES}.2.attn.window_kv_cache",
            patch=plain_rotary_everywhere),
    Mistake("no SwiGLU clamp", BF16, "prefill.layers.0.ffn.out", no_clamp),
    Mistake("half-split rotary", BF16, f"{CACHES}.0.attn.window_kv_cache", half_split_rotary),
    Mistake("dropped sink", BF16, "prefill.layers.0.attn.out", no_sink),
    Mistake("bias_vl unused", IMAGES, "fp32.prefill.layers.0.ffn.gate.indices",
            patch=text_bias_for_images),
    Mistake("index key after RoPE", BF16, f"{CACHES}.2.attn.indexer.k_cache",
            patch=index_key_after_rotation),
    Mistake("routing weight after W2", FP4, "prefill.layers.0.ffn.out", weight_after_w2),
    Mistake("norm_eps of norms", EPS, "rms.f32.out", lambda: with_epsilon("rms_norm")),
    Mistake("norm_eps of mixing", EPS, "mhc.pre", lambda: with_epsilon("mhc_coefficients")),
    Mistake("norm_eps of Engram gates", EPS, "engram.out", lambda: with_epsilon("engram_gate")),
]  # fmt: skip


@pytest.mark.parametrize("name", [BF16, FP4, IMAGES, EPS])
def test_parts_pass_without_a_mistake(parts, name):
    assert run_parity(parts, name).failures == ()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_makes_parity_fail(parts, monkeypatch, mistake):
    if mistake.patch is not None:
        mistake.patch(monkeypatch)
    report = run_parity(parts, mistake.seen_in, ops=mistake.ops() if mistake.ops else None)
    assert report.summary()["failed"] > 0
    failed = {line.tensor: line for line in report.failures}
    assert mistake.first in failed
    # It is the numbers that fail; nothing stops, nothing changes its shape.
    assert all(line.worst is not None for line in failed.values())
