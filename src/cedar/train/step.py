"""One optimiser step: forward passes, losses, gradient, update. Nothing here waits for a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cedar.model import Model, ModelOutput, TrainSignals
from cedar.train.config import DraftMode, TrainConfig
from cedar.train.data import DeviceBatch
from cedar.train.losses import (
    DraftLosses,
    Loads,
    add_loads,
    draft_losses,
    language_loss,
    mean_stat,
    update_router_biases,
)
from cedar.train.optim import Part, clip_parts

__all__ = ["StepResult", "draft_part", "train_step"]


class StepResult(NamedTuple):
    """What a step did, as tensors on the training device (reading one waits for the device).

    parts: "loss" is the sum that was differentiated; the others are its unweighted parts.
    grad_norms: L2 norm of each part's gradient before clipping.
    """

    parts: dict[str, Tensor]
    grad_norms: dict[Part, Tensor]


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[DeviceBatch],
    config: TrainConfig,
    step: int,
) -> StepResult:
    """Accumulate the gradient of all forward passes of a step and update once."""
    targets = sum(batch.num_targets for batch in batches)
    backbone = config.draft.mode is not DraftMode.STAGE
    signals = TrainSignals(
        index_loss=backbone and config.index.weight > 0,
        index_dense=step < config.index.dense_steps,
        balance_loss=backbone and config.balance.weight > 0,
        checkpoint=config.activation_checkpointing,
    )
    parts: dict[str, Tensor] = {}
    loads: dict[str, Loads] = {}
    for batch in batches:
        # The language loss of a forward pass weighs as its number of targets, the other means
        # likewise, so that accumulating equals one large pass up to rounding.
        share = batch.num_targets / targets
        loss, found, seen = _losses(model, batch, config, signals, backbone)
        if loss.requires_grad:
            (loss * share).backward()
        add_loads(loads, seen)
        for name, value in {"loss": loss.detach(), **found}.items():
            value = value * share
            parts[name] = parts[name] + value if name in parts else value

    norms = clip_parts(optimizer, config.optim.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    update_router_biases(dict(model.named_parameters()), loads, config.balance.bias_speed)
    return StepResult(parts, norms)


def _losses(
    model: Model, batch: DeviceBatch, config: TrainConfig, signals: TrainSignals, backbone: bool
) -> tuple[Tensor, dict[str, Tensor], dict[str, Loads]]:
    """The loss of one forward pass, its parts without gradient, and the router loads."""
    with torch.set_grad_enabled(backbone):  # the draft head alone: a frozen backbone
        output = model(batch.batch, signals=signals)
    language = language_loss(output.logits, batch.targets_T) / batch.num_targets
    parts = {"lm": language.detach()}
    loads: dict[str, Loads] = {}
    total = language if backbone else torch.zeros_like(language)
    if backbone:
        loads = {f"layers.{s.layer}.ffn.gate": Loads(*s.loads()) for s in output.stats}
        for name, weight, value in (
            ("index", config.index.weight, mean_stat(s.index_loss for s in output.stats)),
            ("balance", config.balance.weight, mean_stat(s.balance_loss for s in output.stats)),
        ):
            if value is not None and weight > 0:
                total = total + weight * value
                parts[name] = value.detach()
    if config.draft.mode is not DraftMode.OFF and len(batch.anchors_N):
        found, seen = draft_part(model, batch, output, config)
        loads |= seen
        total = total + found.total(config.draft)
        parts |= {
            "draft_ce": found.ce.detach(),
            "draft_tv": found.tv.detach(),
            "draft_confidence": found.confidence.detach(),
        }
    return total, parts, loads


def draft_part(
    model: Model, batch: DeviceBatch, output: ModelOutput, config: TrainConfig
) -> tuple[DraftLosses, dict[str, Loads]]:
    """The draft losses at a batch's anchors, and the loads of the draft's routers.

    With the newest main state in row p, draft position k = 1 … block stands at p + k and predicts
    the token of row p + k + 1. Its teacher is the backbone's distribution there, and the Markov
    head sees the true token of row p + k. No gradient flows into the backbone.
    """
    draft, tokens_T = model.draft, batch.batch.tokens_T
    assert output.taps_TX is not None  # every model with a draft head has taps
    block = model.config.dspark_block_size
    rows_NK = batch.anchors_N.unsqueeze(1) + torch.arange(1, block + 1, device=tokens_T.device)
    previous_NK = tokens_T[rows_NK]
    with _without_gradient(model.embed.weight, model.head.weight):
        drafted = model.draft_train(
            output.taps_TX.detach(), batch.batch, batch.anchors_N, previous_NK[:, 0]
        )
    found = draft_losses(
        drafted.logits_NBV + draft.markov_bias(previous_NK),
        draft.confidence(drafted.hidden_NBD, previous_NK),
        output.logits[rows_NK],
        tokens_T[rows_NK + 1],
        config.draft.position_decay,
    )
    first = model.config.n_layers
    return found, {f"mtp.{s.layer - first}.ffn.gate": Loads(*s.loads()) for s in drafted.stats}


@contextmanager
def _without_gradient(*parameters: nn.Parameter) -> Iterator[None]:
    """Inside, these count as constants; graphs recorded before keep their gradient."""
    before = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, wanted in zip(parameters, before, strict=True):
            parameter.requires_grad_(wanted)
