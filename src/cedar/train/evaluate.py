"""Held-out evaluation: loss per token and per byte, accuracy, with and without Engram."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cedar.model import Model
from cedar.train.config import DraftMode, TrainConfig
from cedar.train.data import DeviceBatch, HeldOut, to_device
from cedar.train.losses import correct_predictions, language_loss
from cedar.train.step import draft_part

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(
    model: Model,
    held_out: HeldOut,
    config: TrainConfig,
    device: torch.device,
) -> dict[str, float]:
    """Measure a model on held-out text.

    Returns:
        "loss_per_token" (nats per predicted token, end-of-text included), "loss_per_byte" (the
        same sum over the UTF-8 bytes of the text), "bits_per_byte", "accuracy" (most likely token
        is the next one), "tokens", "bytes"; "…_without_engram" with the Engram layers skipped,
        where the model has some; "draft_accept_k" = mean 1 - TV/2 at draft position k, where a
        draft head is trained.
    """
    moved = [to_device(host, device) for host in held_out.batches]
    num_bytes = held_out.num_bytes
    tokens = sum(batch.num_targets for batch in moved)
    result = _language(model, moved, tokens, num_bytes, disable_engram=False)
    result |= {"tokens": tokens, "bytes": num_bytes}
    if config.model.engram_layer_ids:
        without = _language(model, moved, tokens, num_bytes, disable_engram=True)
        result |= {f"{name}_without_engram": value for name, value in without.items()}
    if config.draft.mode is not DraftMode.OFF:
        result |= _acceptance(model, moved, config)
    return result


def _language(
    model: Model,
    batches: Sequence[DeviceBatch],
    tokens: int,
    num_bytes: int,
    *,
    disable_engram: bool,
) -> dict[str, float]:
    device = batches[0].targets_T.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        output = model(batch.batch, disable_engram=disable_engram)
        loss += language_loss(output.logits, batch.targets_T)
        correct += correct_predictions(output.logits, batch.targets_T)
    nats = float(loss)
    return {
        "loss_per_token": nats / tokens,
        "loss_per_byte": nats / num_bytes,
        "bits_per_byte": nats / num_bytes / math.log(2),
        "accuracy": int(correct) / tokens,
    }


def _acceptance(
    model: Model, batches: Sequence[DeviceBatch], config: TrainConfig
) -> dict[str, float]:
    rows = []
    for batch in batches:
        if len(batch.anchors_N):
            output = model(batch.batch)
            found, _ = draft_part(model, batch, output, config)
            rows.append(found.accept_K * len(batch.anchors_N))
    if not rows:
        return {}
    total = sum(len(batch.anchors_N) for batch in batches)
    mean = (torch.stack(rows).sum(0) / total).tolist()
    return {f"draft_accept_{k}": value for k, value in enumerate(mean, start=1)}
