"""Everything that decides a training run, as frozen values.

A recipe is a function that returns a `TrainConfig`; the command line changes single fields of it
(`overrides.py`). Nothing here reads a file, the environment or a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from cedar.config import ModelConfig
from cedar.errors import TrainingError

__all__ = [
    "BalanceConfig",
    "CheckpointConfig",
    "DataConfig",
    "DraftConfig",
    "DraftMode",
    "EvalConfig",
    "ExportFormat",
    "IndexConfig",
    "OptimConfig",
    "Precision",
    "TrainConfig",
    "validate",
]


class Precision(StrEnum):
    """The dtype of activations and matrix products; parameters are float32 in every case."""

    AUTO = "auto"  # bfloat16 on a GPU, float32 on a CPU
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DraftMode(StrEnum):
    """How the draft head is trained."""

    OFF = "off"
    JOINT = "joint"  # together with the backbone, no gradient into it
    STAGE = "stage"  # alone, the backbone frozen


class ExportFormat(StrEnum):
    """What is written when a run is complete."""

    OFF = "off"
    FP8FP4 = "fp8fp4"  # the released format
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text, cut how.

    Attributes:
        train: documents, one JSON object with a "text" per line; `.jsonl` or `.jsonl.xz`.
        valid: held-out documents in the same form; empty: every `holdout_every`-th document of
            `train` is held out.
        tokenizer: a `tokenizer.json`.
        seq_len: longest sequence in tokens; longer documents are split.
        tokens_per_step: token budget of one optimiser step.
        accumulate: forward passes that one step is cut into.
        holdout_every: used when `valid` is empty.
        cache: directory of tokenised files; empty: `tokens/` in the run directory.
    """

    train: str = ""
    valid: str = ""
    tokenizer: str = ""
    seq_len: int = 1024
    tokens_per_step: int = 32768
    accumulate: int = 1
    holdout_every: int = 50
    cache: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its schedule: linear warm-up, constant, cosine to the floor.

    Attributes:
        lr: peak learning rate, reached after `warmup_steps`.
        floor_lr: learning rate of the last step.
        warmup_steps: length of the linear warm-up.
        decay_from: fraction of all steps at which the cosine begins, in [0, 1].
        beta1, beta2, eps, weight_decay: AdamW's.
        engram_lr_scale: the Engram tables' learning rate relative to `lr`.
        grad_clip: largest global L2 norm of the gradient; 0 turns clipping off.
    """

    lr: float = 1e-3
    floor_lr: float = 1e-4
    warmup_steps: int = 100
    decay_from: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-20
    weight_decay: float = 0.1
    engram_lr_scale: float = 5.0
    grad_clip: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexConfig:
    """The indexer's KL loss, the only thing that trains an indexer.

    Attributes:
        weight: 0 turns the loss off; the run then says so.
        dense_steps: first steps in which all visible entries are supervised, not the selected set.
    """

    weight: float = 1.0
    dense_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """Keeping the experts equally busy.

    Attributes:
        bias_speed: `u` of `bias += u * sign(mean load - load)`, after every step.
        weight: weight of the sequence-wise balance loss.
    """

    bias_speed: float = 1e-3
    weight: float = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """The draft head's losses at randomly drawn anchor positions.

    Attributes:
        mode: off, joint or stage.
        anchors: anchor positions per step, shared out over its forward passes.
        ce, tv, confidence: weights of cross-entropy, total variation and confidence loss.
        position_decay: position k (from 1) weighs exp(-(k - 1) / position_decay).
    """

    mode: DraftMode = DraftMode.JOINT
    anchors: int = 512
    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    position_decay: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out evaluation.

    Attributes:
        interval: steps between evaluations; 0: only at the end.
        tokens: about so many held-out tokens, whole documents.
        final_tokens: the same for the last evaluation; 0: all held-out documents.
    """

    interval: int = 200
    tokens: int = 131072
    final_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """A checkpoint every `interval` steps (0: only at the end); the newest `keep` stay."""

    interval: int = 200
    keep: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One training run.

    Attributes:
        model: the architecture.
        steps: optimiser steps in all; the schedule depends on it.
        qat: weights pass through their storage format (fp8, fp4) in every forward.
        precision: dtype of activations.
        activation_checkpointing: recompute activations in the backward pass.
        compile: operations of `cedar.ops` that torch.compile fuses, such as mhc_coefficients. It
            takes a minute, pays on a GPU and may round differently.
        freeze: parameters whose names begin with one of these stay as they are.
        init_from: a checkpoint directory to start from; empty: random weights from `seed`.
        seed: decides initial weights, order of documents and anchors.
        device: "auto", "cpu" or "cuda[:n]".
        threads: CPU threads; 0 leaves torch's choice. Other counts sum in another order.
        log_interval: steps between log lines; the only regular point of waiting for a GPU.
        curve: draw `curve.png` (needs matplotlib).
        export: format of the checkpoint directory written at the end.
    """

    model: ModelConfig
    steps: int
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    qat: bool = True
    precision: Precision = Precision.AUTO
    activation_checkpointing: bool = False
    compile: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    init_from: str = ""
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    log_interval: int = 10
    curve: bool = True
    export: ExportFormat = ExportFormat.FP8FP4


def validate(config: TrainConfig) -> None:
    """Check a configuration before anything is read or built.

    Raises:
        TrainingError: naming every field that is wrong, what it is and what it has to be.
    """
    problems: list[str] = []

    def need(ok: bool, name: str, found: object, expected: str) -> None:
        if not ok:
            problems.append(f"{name} is {found!r}; expected {expected}.")

    data, optim, draft = config.data, config.optim, config.draft
    need(config.steps >= 1, "steps", config.steps, "at least 1")
    need(bool(data.train), "data.train", data.train, "a .jsonl file (or pass --corpus)")
    need(bool(data.tokenizer), "data.tokenizer", data.tokenizer, "a tokenizer.json")
    need(data.seq_len >= 2, "data.seq_len", data.seq_len, "at least 2")
    need(data.accumulate >= 1, "data.accumulate", data.accumulate, "at least 1")
    need(data.holdout_every >= 2, "data.holdout_every", data.holdout_every, "at least 2")
    least = data.seq_len * max(data.accumulate, 1)
    need(
        data.tokens_per_step >= least,
        "data.tokens_per_step",
        data.tokens_per_step,
        f"at least data.seq_len * data.accumulate = {least}, so that a whole sequence fits",
    )
    need(0 < optim.lr < math.inf, "optim.lr", optim.lr, "a positive number")
    need(
        0 <= optim.floor_lr <= optim.lr,
        "optim.floor_lr",
        optim.floor_lr,
        f"between 0 and optim.lr = {optim.lr}",
    )
    need(optim.warmup_steps >= 0, "optim.warmup_steps", optim.warmup_steps, "0 or more")
    need(0 <= optim.decay_from <= 1, "optim.decay_from", optim.decay_from, "between 0 and 1")
    need(0 <= optim.beta1 < 1, "optim.beta1", optim.beta1, "in [0, 1)")
    need(0 <= optim.beta2 < 1, "optim.beta2", optim.beta2, "in [0, 1)")
    need(optim.eps > 0, "optim.eps", optim.eps, "a positive number")
    for name, value in (
        ("optim.weight_decay", optim.weight_decay),
        ("optim.engram_lr_scale", optim.engram_lr_scale),
        ("optim.grad_clip", optim.grad_clip),
        ("index.weight", config.index.weight),
        ("index.dense_steps", config.index.dense_steps),
        ("balance.bias_speed", config.balance.bias_speed),
        ("balance.weight", config.balance.weight),
        ("draft.ce", draft.ce),
        ("draft.tv", draft.tv),
        ("draft.confidence", draft.confidence),
        ("eval.interval", config.eval.interval),
        ("eval.final_tokens", config.eval.final_tokens),
        ("checkpoint.interval", config.checkpoint.interval),
        ("threads", config.threads),
        ("seed", config.seed),
    ):
        need(0 <= value < math.inf, name, value, "0 or more")
    need(draft.position_decay > 0, "draft.position_decay", draft.position_decay, "above 0")
    if draft.mode is not DraftMode.OFF:
        need(
            config.model.n_mtp_layers > 0,
            "draft.mode",
            draft.mode.value,
            '"off", since model.n_mtp_layers is 0',
        )
        need(
            draft.anchors >= data.accumulate,
            "draft.anchors",
            draft.anchors,
            f"at least data.accumulate = {data.accumulate}",
        )
    if draft.mode is DraftMode.STAGE:
        need(
            bool(config.init_from), "init_from", config.init_from, "a trained checkpoint directory"
        )
    need(config.eval.tokens >= 1, "eval.tokens", config.eval.tokens, "at least 1")
    need(config.checkpoint.keep >= 1, "checkpoint.keep", config.checkpoint.keep, "at least 1")
    need(config.log_interval >= 1, "log_interval", config.log_interval, "at least 1")
    if problems:
        raise TrainingError("The training configuration is wrong:\n  " + "\n  ".join(problems))
