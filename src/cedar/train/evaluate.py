"""Held-out evaluation: loss per token and per byte, accuracy, with and without Engram."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from cedar.engine import LoadedModel
from cedar.errors import DataError
from cedar.inputs.documents import read_records
from cedar.model import Model
from cedar.train.config import DraftConfig, DraftMode, TrainConfig
from cedar.train.data import DeviceBatch, HeldOut, hold_out, open_tokens, to_device
from cedar.train.losses import correct_predictions, language_loss
from cedar.train.step import draft_part

__all__ = ["evaluate", "evaluate_sources", "held_out_sources"]

_TOKENS_PER_PASS = 8192


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


def held_out_sources(path: Path, loaded: LoadedModel, seq_len: int) -> dict[str, HeldOut]:
    """The documents of a corpus file by their "source" (one group, "text", where they have none).

    Raises:
        DataError: the file cannot be read or holds no documents, or `seq_len` is too small.
    """
    if seq_len < 2:
        raise DataError(f"seq_len is {seq_len}; expected 2 or more, so that there is a next token.")
    labels = np.array([str(record.get("source", "text")) for record in read_records(path)])
    config = loaded.model.config
    with tempfile.TemporaryDirectory() as cache:
        file = open_tokens(path, loaded.directory / "tokenizer.json", config, Path(cache))
        capacity = max(_TOKENS_PER_PASS, seq_len)
        return {
            str(label): hold_out(
                file,
                np.flatnonzero(labels == label),
                seq_len,
                capacity,
                0,
                config.dspark_block_size,
                np.random.default_rng(0),
            )
            for label in np.unique(labels)
        }


def evaluate_sources(
    loaded: LoadedModel, sources: Iterable[tuple[str, HeldOut]]
) -> dict[str, dict[str, float]]:
    """`evaluate` for every source, and for all of them together under "all"."""
    config = TrainConfig(model=loaded.model.config, steps=1, draft=DraftConfig(mode=DraftMode.OFF))
    results = {
        source: evaluate(loaded.model, held_out, config, loaded.device)
        for source, held_out in sources
    }
    return {**results, "all": _together(list(results.values()))}


def _together(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means per token and per byte over parts of different size."""
    totals = {size: sum(part[size] for part in parts) for size in ("tokens", "bytes")}

    def mean(name: str) -> float:
        size = "bytes" if "per_byte" in name else "tokens"
        return sum(part[name] * part[size] for part in parts) / totals[size]

    return {name: totals[name] if name in totals else mean(name) for name in parts[0]}


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
