"""The chosen implementation of every operation.

The choice is made once, when a model is built, and handed to it as a value: no environment
variable and no global decides anything while the model runs. `Ops.describe` says what was
chosen and why.
"""

from dataclasses import dataclass, fields

import torch

from cedar.ops.cast import Cast
from cedar.ops.cast.reference import cast
from cedar.ops.compress import Compress
from cedar.ops.compress import reference as compress
from cedar.ops.engram_gate import EngramGate
from cedar.ops.engram_gate import reference as engram_gate
from cedar.ops.engram_hash import EngramHash
from cedar.ops.engram_hash import reference as engram_hash
from cedar.ops.experts import Experts, Swiglu
from cedar.ops.experts import reference as experts
from cedar.ops.index_score import IndexScore, IndexScoreRows
from cedar.ops.index_score import reference as index_score
from cedar.ops.linear import LinearOp
from cedar.ops.linear import reference as linear
from cedar.ops.mhc import MhcCoefficients, MhcCollapse, MhcExpand
from cedar.ops.mhc import reference as mhc
from cedar.ops.norm import RmsNorm
from cedar.ops.norm import reference as norm
from cedar.ops.rope import Rotate
from cedar.ops.rope import reference as rope
from cedar.ops.route import Route
from cedar.ops.route import reference as route
from cedar.ops.select import SelectBlocks, SelectEntries
from cedar.ops.select import reference as select
from cedar.ops.sparse_attention import AttentionMass, SparseAttention
from cedar.ops.sparse_attention import reference as sparse_attention

__all__ = ["OpChoice", "Ops", "select_ops"]


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
    rms_norm: RmsNorm
    rotate: Rotate
    mhc_coefficients: MhcCoefficients
    mhc_collapse: MhcCollapse
    mhc_expand: MhcExpand
    compress: Compress
    index_score: IndexScore
    index_score_rows: IndexScoreRows
    select_entries: SelectEntries
    select_blocks: SelectBlocks
    sparse_attention: SparseAttention
    attention_mass: AttentionMass
    engram_hash: EngramHash
    engram_gate: EngramGate
    route: Route
    experts: Experts
    swiglu: Swiglu
    choices: tuple[OpChoice, ...] = ()

    def describe(self) -> tuple[OpChoice, ...]:
        """What was chosen for every operation, and why not something faster."""
        return self.choices


def select_ops(device: torch.device | str = "cpu") -> Ops:
    """The best implementation of every operation for ``device``.

    So far each operation has one: the plain PyTorch reference, which runs on every device.
    """
    kind = torch.device(device).type
    reason = f"no kernel for {kind} yet; plain PyTorch runs on every device"
    names = [field.name for field in fields(Ops) if field.name != "choices"]
    return Ops(
        cast=cast,
        linear=linear.linear,
        rms_norm=norm.rms_norm,
        rotate=rope.rotate,
        mhc_coefficients=mhc.mhc_coefficients,
        mhc_collapse=mhc.mhc_collapse,
        mhc_expand=mhc.mhc_expand,
        compress=compress.compress,
        index_score=index_score.index_score,
        index_score_rows=index_score.index_score_rows,
        select_entries=select.select_entries,
        select_blocks=select.select_blocks,
        sparse_attention=sparse_attention.sparse_attention,
        attention_mass=sparse_attention.attention_mass,
        engram_hash=engram_hash.engram_hash,
        engram_gate=engram_gate.engram_gate,
        route=route.route,
        experts=experts.experts,
        swiglu=experts.swiglu,
        choices=tuple(
            OpChoice(op=name, implementation="reference", reason=reason) for name in names
        ),
    )
