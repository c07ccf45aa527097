"""Sets of single operations: number formats, attention, hashing, norms, mixing, rotary tables."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cedar.analysis.parity.judge import Judge
from cedar.analysis.parity.sets import Golden
from cedar.config import presets
from cedar.config.primes import engram_primes, engram_rows
from cedar.model import Batch
from cedar.model.engram import hash_multipliers
from cedar.model.layout import lookback, rotary
from cedar.ops import Ops
from cedar.ops.mhc.reference import split_mixes
from cedar.ops.rope.reference import frequencies, yarn_frequencies
from cedar.ops.sparse_attention import Rows
from cedar.quant import (
    FP4_MAIN,
    FP4_ROW,
    FP8_BLOCK,
    FP8_ROW,
    BlockFormat,
    Element,
    QuantTensor,
    quantize,
)

__all__ = ["UNIT_SETS"]

_QUANTISERS = {"fp8": FP8_ROW, "fp4_e8m0": FP4_ROW, "fp4_e4m3": FP4_MAIN}
_WEIGHTS = {"fp8": FP8_BLOCK, "fp4": FP4_ROW}


def compare_quant(judge: Judge, golden: Golden, ops: Ops) -> None:
    """Codes, scales, dequantised values and round trips; two quantised products."""
    tensors = judge.golden.tensors
    judge.skip(*(key for key in tensors if re.match(r"in\.|gemm\.in$|weight\.f32$", key)))
    for tag, fmt in _QUANTISERS.items():
        for name in ("bf16", "f32"):
            prefix = f"{tag}.{name}"
            x = judge.golden.find(f"{prefix}.in", f"in.{name}")
            judge.skip(f"{prefix}.in")
            if x is None or not any(key.startswith(f"{prefix}.") for key in tensors):
                continue
            _compare_codes(judge, prefix, quantize(x, fmt))
            if f"{prefix}.roundtrip" in tensors:
                judge.bits(f"{prefix}.roundtrip", ops.cast(x, fmt))
    dense = tensors.get("weight.f32")
    if dense is None:
        return
    for tag, fmt in _WEIGHTS.items():
        weight = quantize(dense, fmt)
        _compare_codes(judge, f"weight.{tag}", weight)
        if "gemm.in" not in tensors:
            continue
        x = ops.cast(tensors["gemm.in"], FP8_ROW)
        # Sums of few exact products: their order cannot show beyond float32 rounding.
        wide = ops.linear(x.to(torch.float32), weight)
        if f"gemm.{tag}.out_f32" in tensors:
            judge.rounding(f"gemm.{tag}.out_f32", wide)
        if f"gemm.{tag}.out_bf16" in tensors:
            judge.bits(f"gemm.{tag}.out_bf16", ops.linear(x, weight))


def _compare_codes(judge: Judge, prefix: str, quantised: QuantTensor) -> None:
    code_key = f"{prefix}.{_code_name(quantised.format)}"
    ours: dict[str, Callable[[], Tensor]] = {
        code_key: lambda: quantised.codes,
        f"{prefix}.scales": lambda: quantised.scale.view(torch.uint8),
        f"{prefix}.dequant_f32": quantised.dequantize,
    }
    for key, value in ours.items():
        if key in judge.golden.tensors:
            judge.bits(key, value())


def _code_name(fmt: BlockFormat) -> str:
    return "codes" if fmt.element is Element.E4M3 else "packed"


def compare_sparse_attention(judge: Judge, golden: Golden, ops: Ops) -> None:
    """Gather attention: bit for bit in bfloat16, float32 and float64 to rounding."""
    tensors = judge.golden.tensors
    judge.skip("q", "kv", "topk_idxs", "attn_sink")
    q, kv, slots, sink = (tensors[name] for name in ("q", "kv", "topk_idxs", "attn_sink"))
    types = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
    for name, dtype in types.items():
        key = f"out_{name}"
        if key not in tensors:
            continue
        ours = torch.stack(
            [
                ops.sparse_attention(
                    one_q.to(dtype),
                    (Rows(one_kv.to(dtype), one_slots.to(torch.int64)),),
                    sink,
                    q.shape[-1] ** -0.5,
                )
                for one_q, one_kv, one_slots in zip(q, kv, slots, strict=True)
            ]
        )
        if dtype is torch.bfloat16:
            judge.bits(key, ours)
        else:
            judge.rounding(key, ours)


def compare_engram(judge: Judge, golden: Golden, ops: Ops) -> None:
    """Primes, offsets, multipliers and table rows, with and without dead tokens."""
    tensors, settings = judge.golden.tensors, judge.golden.sidecar["settings"]
    judge.skip("compressed_ids", "alive_mask")
    layers, order = tuple(settings["layer_ids"]), settings["max_ngram"]
    tables = (settings["vocab_size"], len(layers), order, settings["n_heads"])
    rows = engram_rows(*tables)
    config = replace(
        presets.released(),
        engram_layer_ids=layers,
        engram_vocab_size=settings["vocab_size"],
        engram_num_embeddings=rows,
        engram_max_ngram_size=order,
        engram_n_heads=settings["n_heads"],
        engram_compressed_vocab_size=settings["compressed_vocab_size"],
    )
    primes = torch.tensor(engram_primes(*tables))
    sizes = primes.flatten(1)
    offsets = sizes.cumsum(1) - sizes
    multipliers = torch.stack([hash_multipliers(config, layer) for layer in layers])
    if "num_embeddings" in settings:
        stated = torch.tensor(settings["num_embeddings"])
        judge.exact("settings.num_embeddings", torch.tensor(rows), golden=stated)
    own = {"primes": primes, "offsets": offsets, "multipliers": multipliers}
    for key, value in own.items():
        if key in tensors:
            judge.exact(key, value)
    ids, alive = tensors["compressed_ids"], tensors["alive_mask"]
    for key, open_BT in (
        ("hash_ids_unmasked", torch.ones_like(alive)),
        ("hash_ids_masked", alive),
    ):
        if key not in tensors:
            continue
        classes = torch.where(open_BT, ids, -1)
        batch = Batch.pack(classes.tolist())
        known = lookback(classes.flatten(), batch, None, order, settings["pad_compressed_id"])
        hashed = [
            ops.engram_hash(known, multipliers[n], primes[n], offsets[n])
            for n in range(len(layers))
        ]
        judge.exact(key, torch.stack(hashed, dim=1).unflatten(0, tuple(ids.shape)))


def compare_norm_eps(judge: Judge, golden: Golden, ops: Ops) -> None:
    """The three places of ``norm_eps``, on inputs so small that it decides."""
    tensors, sidecar = judge.golden.tensors, judge.golden.sidecar
    eps = float(sidecar["norm_eps"])
    judge.skip("rms.weight", *(key for key in tensors if re.fullmatch(r"rms\.\w+\.in", key)))
    for name in ("f32", "bf16"):
        if f"rms.{name}.out" in tensors:
            x = tensors[f"rms.{name}.in"]
            judge.bits(f"rms.{name}.out", ops.rms_norm(x, tensors["rms.weight"], eps))
    if "mhc.x" in tensors:
        _compare_mix(judge, ops, "mhc", "mhc", sidecar, eps)
    if "engram.out" in tensors:
        names = ("x", "key", "value", "q_weight", "k_weight")
        judge.skip(*(f"engram.{name}" for name in names))
        x, key, value, q_weight, k_weight = (tensors[f"engram.{name}"] for name in names)
        out = ops.engram_gate(
            x.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), q_weight, k_weight, eps, None
        )
        judge.rounding("engram.out", out.view(x.shape))


def compare_mhc(judge: Judge, golden: Golden, ops: Ops) -> None:
    """The coefficient split alone, and one whole step in float32 and bfloat16."""
    tensors, sidecar = judge.golden.tensors, judge.golden.sidecar
    for tag in sorted(key.removesuffix(".mixes") for key in tensors if key.endswith(".mixes")):
        judge.skip(f"{tag}.mixes", f"{tag}.base", f"{tag}.scale")
        counted = re.search(r"_it(\d+)$", tag)
        mix = split_mixes(
            tensors[f"{tag}.mixes"],
            tensors[f"{tag}.base"],
            tensors[f"{tag}.scale"],
            streams=tensors[f"{tag}.pre"].shape[-1],
            hc_eps=float(sidecar.get("hc_eps", 1e-6)),
            sinkhorn_iters=int(counted[1] if counted else sidecar.get("hc_sinkhorn_iters", 20)),
        )
        for name, ours in zip(("pre", "post", "comb"), mix, strict=True):
            judge.rounding(f"{tag}.{name}", ours)
    for name in ("f32", "bf16"):
        if f"step.{name}.x" in tensors:
            eps = float(sidecar.get("norm_eps", 1e-20))
            _compare_mix(judge, ops, "step", f"step.{name}", sidecar, eps)


def _compare_mix(
    judge: Judge, ops: Ops, weights: str, prefix: str, sidecar: Mapping[str, Any], eps: float
) -> None:
    """Coefficients of streams ``x``; where the file has it, the collapsed and expanded values."""
    tensors = judge.golden.tensors
    names = [f"{weights}.{name}" for name in ("fn", "base", "scale")]
    judge.skip(*names, f"{prefix}.x")
    x = tensors[f"{prefix}.x"]
    rows = x.flatten(0, 1)
    mix = ops.mhc_coefficients(
        rows,
        *(tensors[name] for name in names),
        norm_eps=eps,
        hc_eps=float(sidecar.get("hc_eps", 1e-6)),
        sinkhorn_iters=int(sidecar.get("hc_sinkhorn_iters", 20)),
    )
    collapsed = ops.mhc_collapse(rows, mix.pre_TC)
    values = dict(zip(("pre", "post", "comb"), mix, strict=True))
    values |= {"collapsed": collapsed, "expanded": ops.mhc_expand(rows, collapsed, mix)}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if key not in tensors:
            continue
        shaped = value.unflatten(0, tuple(x.shape[:2]))
        if shaped.dtype is torch.bfloat16:
            judge.bfloat16_step(key, shaped)
        else:
            judge.rounding(key, shaped)


# The set's description says these in words; the ``mini`` tables are of the mini configuration.
_RELEASED_YARN = {"original": 65536, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
_MINI_ORIGINAL = 64


def compare_yarn(judge: Judge, golden: Golden, ops: Ops) -> None:
    """Rotary tables, and one rotation there and back."""
    tensors = judge.golden.tensors
    judge.skip("positions", "rotate.in")
    dim = 2 * tensors["window.cos"].shape[-1]
    tables = {"window": frequencies(dim, 10000.0), "compressed": _yarn(dim, **_RELEASED_YARN)}
    for name, table in tables.items():
        _compare_table(judge, name, table, tensors["positions"])
        if f"{name}.angle_at_position_1" in tensors:
            judge.rounding(f"{name}.angle_at_position_1", table)
    for model in sorted(key.split("_window.")[0] for key in tensors if key.endswith("_window.cos")):
        cos = tensors[f"{model}_window.cos"]
        places = torch.arange(cos.shape[0])
        window, compressed = _model_tables(golden, model, 2 * cos.shape[1])
        _compare_table(judge, f"{model}_window", window, places)
        _compare_table(judge, f"{model}_compressed", compressed, places)
    if "rotate.in" in tensors:
        x = tensors["rotate.in"].transpose(0, 1)
        at = rotary(torch.arange(10, 10 + x.shape[0]), tables["compressed"])
        for key, inverse in (
            ("rotate.out_positions_10_to_14", False),
            ("rotate.inverse_out", True),
        ):
            judge.bits(key, ops.rotate(x, *at, inverse=inverse).transpose(0, 1))


def _model_tables(golden: Golden, model: str, dim: int) -> tuple[Tensor, Tensor]:
    """Frequencies of the model whose checkpoint lies in the same directory."""
    for path in sorted(golden.directory.glob(f"{model}_*.weights.json")):
        config = golden.config(path.stem)
        return frequencies(dim, config.rope_theta), yarn_frequencies(
            dim,
            config.compress_rope_theta,
            original=config.original_seq_len,
            factor=config.rope_factor,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
        )
    return frequencies(dim, 10000.0), _yarn(dim, **{**_RELEASED_YARN, "original": _MINI_ORIGINAL})


def _yarn(dim: int, **settings: Any) -> Tensor:
    return yarn_frequencies(dim, 160000.0, **settings)


def _compare_table(judge: Judge, name: str, table: Tensor, places: Tensor) -> None:
    cos, sin = rotary(places, table)
    judge.rounding(f"{name}.cos", cos)
    judge.rounding(f"{name}.sin", sin)


UNIT_SETS: Mapping[str, Callable[[Judge, Golden, Ops], None]] = {
    "quant": compare_quant,
    "sparse_attn": compare_sparse_attention,
    "engram": compare_engram,
    "norm_eps": compare_norm_eps,
    "mhc": compare_mhc,
    "yarn": compare_yarn,
}
