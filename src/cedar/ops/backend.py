"""The chosen implementation of every operation.

The choice is made once, when a model is built, and handed to it as a value: no environment
variable and no global decides anything while the model runs. `Ops.describe` says what was
chosen and why. A kernel that meets inputs it was not written for (another type, a gradient, a
shape beyond its limits) hands them to the plain implementation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from cedar.ops.cast import Cast
from cedar.ops.cast.reference import cast
from cedar.ops.compress import Compress, CompressRing
from cedar.ops.compress import reference as compress
from cedar.ops.engram_gate import EngramGate
from cedar.ops.engram_gate import reference as engram_gate
from cedar.ops.engram_hash import EngramHash, EngramIds
from cedar.ops.engram_hash import reference as engram_hash
from cedar.ops.engram_rows import EngramRows
from cedar.ops.engram_rows.reference import engram_rows
from cedar.ops.experts import Experts, Mixture
from cedar.ops.experts.reference import experts, mixture
from cedar.ops.index_score import (
    IndexPool,
    IndexPrefill,
    IndexScan,
    IndexScore,
    IndexScoreRows,
)
from cedar.ops.index_score import reference as index_score
from cedar.ops.latent import Latent, Latents
from cedar.ops.latent import reference as latent
from cedar.ops.linear import LinearOp, Project, ProjectGroups, ProjectOutput, WideLinear
from cedar.ops.linear import reference as linear
from cedar.ops.mhc import MhcCoefficients, MhcCollapse, MhcExpand, MhcStep
from cedar.ops.mhc import reference as mhc
from cedar.ops.norm import RmsNorm
from cedar.ops.norm import reference as norm
from cedar.ops.rope import RotaryTables, Rotate
from cedar.ops.rope import reference as rope
from cedar.ops.route import Router
from cedar.ops.route.reference import router
from cedar.ops.select import (
    SelectEntries,
    SelectPool,
    SelectScan,
)
from cedar.ops.select import reference as select
from cedar.ops.sparse_attention import AttentionMass, RotatedAttention, SparseAttention
from cedar.ops.sparse_attention import reference as sparse_attention
from cedar.ops.window import WindowPlaces
from cedar.ops.window.reference import window_places

__all__ = ["OpChoice", "Ops", "select_ops", "with_operations"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpChoice:
    """One line of the explanation: which implementation runs an operation, and why that one."""

    op: str
    implementation: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """One callable per operation; shapes and formulas are on their protocols."""

    cast: Cast
    linear: LinearOp
    project: Project
    project_groups: ProjectGroups
    project_output: ProjectOutput
    wide_linear: WideLinear
    rms_norm: RmsNorm
    rotate: Rotate
    rotary_tables: RotaryTables
    latent: Latent
    latents: Latents
    window_places: WindowPlaces
    mhc_coefficients: MhcCoefficients
    mhc_collapse: MhcCollapse
    mhc_expand: MhcExpand
    mhc_step: MhcStep
    compress: Compress
    compress_ring: CompressRing
    index_score: IndexScore
    index_score_rows: IndexScoreRows
    index_prefill: IndexPrefill
    index_scan: IndexScan
    index_pool: IndexPool
    select_entries: SelectEntries
    select_scan: SelectScan
    select_pool: SelectPool
    sparse_attention: SparseAttention
    rotated_attention: RotatedAttention
    attention_mass: AttentionMass
    engram_hash: EngramHash
    engram_ids: EngramIds
    engram_rows: EngramRows
    engram_gate: EngramGate
    router: Router
    experts: Experts
    mixture: Mixture
    choices: tuple[OpChoice, ...] = ()

    @property
    def has_kernels(self) -> bool:
        """Whether any operation has something faster than plain PyTorch."""
        return any(choice.implementation != "reference" for choice in self.choices)

    def describe(self) -> tuple[OpChoice, ...]:
        """What was chosen for every operation, and why not something faster."""
        return self.choices


_PLAIN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "cast": cast,
        "linear": linear.linear,
        "project_groups": linear.project_groups,
        "wide_linear": linear.wide_linear,
        "latents": latent.latents,
        "window_places": window_places,
        "rms_norm": norm.rms_norm,
        "rotate": rope.rotate,
        "rotary_tables": rope.rotary_tables,
        "mhc_coefficients": mhc.mhc_coefficients,
        "mhc_collapse": mhc.mhc_collapse,
        "mhc_expand": mhc.mhc_expand,
        "compress": compress.compress,
        "compress_ring": compress.compress_ring,
        "index_score": index_score.index_score,
        "index_score_rows": index_score.index_score_rows,
        "index_prefill": index_score.index_prefill,
        "index_scan": index_score.index_scan,
        "index_pool": index_score.index_pool,
        "select_entries": select.select_entries,
        "select_scan": select.select_scan,
        "select_pool": select.select_pool,
        "sparse_attention": sparse_attention.sparse_attention,
        "attention_mass": sparse_attention.attention_mass,
        "engram_hash": engram_hash.engram_hash,
        "engram_ids": engram_hash.engram_ids,
        "engram_rows": engram_rows,
        "engram_gate": engram_gate.engram_gate,
        "router": router,
        "experts": experts,
    }
)


# Made of other operations, so that a model with one of those exchanged still means what it says.
_COMPOSED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "latent": latent.latent,
        "project": linear.project,
        "project_output": linear.project_output,
        "rotated_attention": sparse_attention.rotated_attention,
        "mhc_step": mhc.mhc_step,
        "mixture": mixture,
    }
)


def with_operations(ops: Ops, **changes: Any) -> Ops:
    """The same with some operations exchanged, also inside those that are composed of them."""
    changed = replace(ops, **changes)
    again: dict[str, Any] = {
        name: partial(f, parts=changed) for name, f in _COMPOSED.items() if name not in changes
    }
    return replace(changed, **again)


def select_ops(device: torch.device | str = "cpu", *, kernels: bool = True) -> Ops:
    """The implementation of every operation for ``device``.

    Plain PyTorch runs on every device. Kernels take its place where they are written for the
    device, unless ``kernels`` is False.
    """
    place = torch.device(device)
    chosen: dict[str, Any] = dict(_PLAIN)
    found: Mapping[str, Any] = {}
    why_not = _obstacle(place)
    if why_not is None and not kernels:
        why_not = "plain PyTorch was asked for: select_ops(kernels=False)"
    if why_not is None:
        hopper = torch.cuda.get_device_capability(place) == (9, 0)
        found = import_module("cedar.ops.kernels").kernels(hopper=hopper)
        chosen |= {name: kernel.call for name, kernel in found.items()}
        why_not = (
            f"no kernel for it yet (Triton {import_module('triton').__version__} is installed); "
            "plain PyTorch runs on every device"
        )
    parts = SimpleNamespace(**chosen)
    chosen = {name: partial(f, parts=parts) for name, f in _COMPOSED.items()} | chosen
    choices = tuple(
        OpChoice(op=name, implementation="triton", reason=found[name].note)
        if name in found
        else OpChoice(op=name, implementation="reference", reason=why_not)
        for name in chosen
    )
    return Ops(**chosen, choices=choices)


def _obstacle(device: torch.device) -> str | None:
    """Why no kernel can run on a device; None if they can."""
    if device.type != "cuda":
        return f"no kernel for {device.type} yet; plain PyTorch runs on every device"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device here; plain PyTorch runs on every device"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return (
            f"the kernels read FP8, which needs compute capability 8.9; {device} has "
            f"{major}.{minor}"
        )
    if find_spec("triton") is None:
        return "the kernels need Triton, which is not installed (the extra cedar-lm[triton])"
    return None
