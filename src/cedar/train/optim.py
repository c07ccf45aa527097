"""AdamW with the groups of the architecture, and the learning-rate schedule.

Groups (decided by parameter name alone):

- decay: matrices, and norm weights (`*norm.weight`, Engram's q_weight and k_weight);
- no decay: biases, mHC coefficients (`hc_*`), attention sinks, the learned image delimiters,
  token embedding and output head;
- engram: the Engram tables, no decay, their own learning-rate scale.

Router biases (`gate.bias`, `gate.bias_vl`) get no gradient: `losses.update_router_biases` moves
them.

The gradient is clipped per part (backbone, indexers, draft head), because no part's loss reaches
another: a draft head or an indexer that learns fast must not shrink the backbone's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import Parameter

from cedar.train.config import OptimConfig

__all__ = [
    "Group",
    "Part",
    "clip_parts",
    "group_of",
    "learning_rate",
    "make_optimizer",
    "part_of",
    "set_learning_rate",
]


class Group(StrEnum):
    """Which treatment a parameter gets."""

    DECAY = "decay"
    NO_DECAY = "no_decay"
    ENGRAM = "engram"
    ROUTER_BIAS = "router_bias"


class Part(StrEnum):
    """Parameters that one loss trains."""

    BACKBONE = "backbone"
    INDEXER = "indexer"
    DRAFT = "draft"


def part_of(name: str) -> Part:
    """Which part the parameter with this module name belongs to."""
    if name.startswith("mtp."):
        return Part.DRAFT
    return Part.INDEXER if ".indexer." in name else Part.BACKBONE


def group_of(name: str) -> Group:
    """The group of the parameter with this module name."""
    leaf = name.rpartition(".")[2]
    if leaf in ("bias", "bias_vl"):
        return Group.ROUTER_BIAS if name.endswith((".gate.bias", ".bias_vl")) else Group.NO_DECAY
    if name.endswith(".engram.embed.weight"):
        return Group.ENGRAM
    if leaf.startswith(("hc_", "image_")) or leaf == "attn_sink":
        return Group.NO_DECAY
    if name in ("embed.weight", "head.weight"):
        return Group.NO_DECAY
    return Group.DECAY


def make_optimizer(
    parameters: Iterable[tuple[str, Parameter]], config: OptimConfig
) -> torch.optim.AdamW:
    """AdamW (the fused implementation) over the named parameters that ask for a gradient.

    Args:
        parameters: as `model.named_parameters()` gives them.
        config: rates and moments.
    """
    members: dict[tuple[Group, Part], list[Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad and group_of(name) is not Group.ROUTER_BIAS:
            members.setdefault((group_of(name), part_of(name)), []).append(parameter)
    groups = [
        {
            "params": members[group, part],
            "part": part,
            "weight_decay": config.weight_decay if group is Group.DECAY else 0.0,
            "lr_scale": config.engram_lr_scale if group is Group.ENGRAM else 1.0,
        }
        for group, part in sorted(members)
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The rate of step `step` (from 0) of `steps`: warm-up, constant, cosine, floor at the end."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    start = max(config.warmup_steps, round(config.decay_from * steps))
    last = steps - 1
    if step <= start or last <= start:
        return config.lr
    progress = min(1.0, (step - start) / (last - start))
    return config.floor_lr + (config.lr - config.floor_lr) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group `rate` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def clip_parts(optimizer: torch.optim.Optimizer, limit: float) -> dict[Part, Tensor]:
    """Scale the gradient of each part to at most `limit` (0: leave it); return the norms before."""
    parts: dict[Part, list[Parameter]] = {}
    for group in optimizer.param_groups:
        parts.setdefault(group["part"], []).extend(group["params"])
    norms: dict[Part, Tensor] = {}
    for part, parameters in parts.items():
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            norms[part] = torch.nn.utils.get_total_norm(gradients)
            if limit > 0:
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norms[part])
    return norms
