"""Losses that belong to training and not to the model, and the router-bias rule.

The indexer's KL loss and the balance loss are computed inside the layers, where attention and
routing are at hand; here they are only weighed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cedar.train.config import DraftConfig
from cedar.train.data import IGNORED

__all__ = [
    "DraftLosses",
    "Loads",
    "add_loads",
    "correct_predictions",
    "draft_losses",
    "language_loss",
    "mean_stat",
    "update_router_biases",
]


def language_loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Next-token cross-entropy in nats, summed over the targets that count.

    Targets that are IGNORED (at the end of each sequence) do not. A sum, so that the passes of a
    step or of a text can be added up.
    """
    return F.cross_entropy(logits_TV.float(), targets_T, ignore_index=IGNORED, reduction="sum")


def correct_predictions(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """How many targets are the most likely token; IGNORED is negative and never is."""
    return (logits_TV.argmax(-1) == targets_T).sum()


class DraftLosses(NamedTuple):
    """Means over anchors and (weighted) positions.

    accept_K: mean probability that a proposal at position k is accepted, 1 - TV / 2, no gradient.
    """

    ce: Tensor
    tv: Tensor
    confidence: Tensor
    accept_K: Tensor

    def total(self, config: DraftConfig) -> Tensor:
        return config.ce * self.ce + config.tv * self.tv + config.confidence * self.confidence


def draft_losses(
    logits_NKV: Tensor,
    confidence_NK: Tensor,
    teacher_NKV: Tensor,
    targets_NK: Tensor,
    position_decay: float,
) -> DraftLosses:
    """The draft head's three losses at N anchors and K positions after each.

    Args:
        logits_NKV: the draft's logits, Markov bias included.
        confidence_NK: raw confidence, no sigmoid.
        teacher_NKV: the backbone's logits for the same tokens; no gradient flows into them.
        targets_NK: the true tokens.
        position_decay: position k (from 1) weighs exp(-(k - 1) / position_decay).

    Returns:
        cross-entropy against the true token; total variation ‖p_d - p_t‖₁; binary cross-entropy
        of the confidence with target 1 - ½‖p_d - p_t‖₁.
    """
    log_draft = F.log_softmax(logits_NKV.float(), dim=-1)
    teacher = teacher_NKV.detach().float().softmax(dim=-1)
    ce_NK = -log_draft.gather(-1, targets_NK.unsqueeze(-1)).squeeze(-1)
    tv_NK = (log_draft.exp() - teacher).abs().sum(-1)
    accept_NK = 1 - tv_NK.detach() / 2
    confidence = F.binary_cross_entropy_with_logits(
        confidence_NK.float(), accept_NK, reduction="none"
    )
    steps = torch.arange(targets_NK.shape[1], device=targets_NK.device)
    weight_K = torch.exp(-steps / position_decay)
    weight_K = weight_K / weight_K.sum()

    def mean(value_NK: Tensor) -> Tensor:
        return (value_NK.mean(0) * weight_K).sum()

    return DraftLosses(mean(ce_NK), mean(tv_NK), mean(confidence), accept_NK.mean(0))


class Loads(NamedTuple):
    """Tokens per expert of one router, by modality."""

    text_E: Tensor
    image_E: Tensor


def add_loads(total: dict[str, Loads], more: Mapping[str, Loads]) -> None:
    """Add the loads of one more forward pass of the same step."""
    for name, loads in more.items():
        old = total.get(name)
        total[name] = (
            loads if old is None else Loads(old.text_E + loads.text_E, old.image_E + loads.image_E)
        )


@torch.no_grad()
def update_router_biases(
    parameters: Mapping[str, nn.Parameter], loads: Mapping[str, Loads], speed: float
) -> None:
    """`bias_e += speed · sign(mean load - load_e)`, text and image loads apart.

    Args:
        parameters: module name to parameter.
        loads: per router its module prefix, such as `layers.3.ffn.gate`.
        speed: `u`. A modality that did not occur has equal loads, so its bias stays.
    """
    for prefix, load in loads.items():
        for leaf, load_E in (("bias", load.text_E), ("bias_vl", load.image_E)):
            bias = parameters.get(f"{prefix}.{leaf}")
            if bias is not None:
                load_E = load_E.to(bias.dtype)
                bias.add_(torch.sign(load_E.mean() - load_E), alpha=speed)


def mean_stat(values: Iterable[Tensor | None]) -> Tensor | None:
    """The mean over the layers that report a value; None when none does."""
    present = [value for value in values if value is not None]
    return torch.stack(present).mean() if present else None
