"""The assembly point of training: device, model, token map, frozen parameters, export."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.checkpoint import Checkpoint, fill, save_checkpoint
from cedar.errors import TrainingError
from cedar.inputs.ngrams import token_map
from cedar.model import Model, WeightStorage
from cedar.ops import Ops, select_ops
from cedar.train.config import DraftMode, ExportFormat, Precision, TrainConfig

__all__ = ["build_model", "choose_device", "export_model", "load_export"]

SHARD_BYTES = 4 << 30


def choose_device(name: str) -> torch.device:
    """The device that a configuration names; "auto" is the first GPU, or the CPU without one.

    Raises:
        TrainingError: no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TrainingError(f'device is {name!r}; expected "auto", "cpu" or "cuda:0".') from None
    if device.type not in ("cpu", "cuda"):
        raise TrainingError(f'device is {name!r}; expected "auto", "cpu" or "cuda:0".')
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise TrainingError(f"device is {name!r}, but this machine has {count} CUDA devices.")
    return device


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of activations on `device`."""
    if config.precision is Precision.AUTO:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.precision is Precision.BFLOAT16 else torch.float32


def build_model(config: TrainConfig, device: torch.device) -> Model:
    """A model with float32 masters: random from the seed, or from `init_from`.

    Raises:
        TrainingError: tokenizer and configuration disagree about Engram's token classes, or
            `compile` or `freeze` names nothing that is there.
        CheckpointError: `init_from` does not hold this model.
    """
    model = Model(
        config.model,
        ops=_ops(config, device),
        storage=WeightStorage.QAT if config.qat else WeightStorage.PLAIN,
        dtype=torch.float32,
        compute_dtype=compute_dtype(config, device),
        device=device,
        token_map=_token_map(config),
        trainable=True,
    )
    model.init(config.seed)
    if config.init_from:
        with Checkpoint.open(Path(config.init_from)) as checkpoint:
            fill(dict(model.named_parameters()), checkpoint, config.model)
    for prefix in config.freeze:
        if not any(name.startswith(prefix) for name, _ in model.named_parameters()):
            raise TrainingError(f"freeze names {prefix!r}, but no parameter's name begins so.")
    for name, parameter in model.named_parameters():
        frozen = config.draft.mode is DraftMode.STAGE and not name.startswith("mtp.")
        if frozen or name.startswith(config.freeze):
            parameter.requires_grad_(False)
    return model


def export_model(model: Model, config: TrainConfig, directory: Path) -> None:
    """Write the model in the configured release format, its tokenizer beside it."""
    storage = "bf16" if config.export is ExportFormat.BF16 else "fp8fp4"
    save_checkpoint(
        directory,
        config.model.with_storage(storage),
        {name: parameter.detach().cpu() for name, parameter in model.named_parameters()},
        storage,
        max_shard_bytes=SHARD_BYTES,
    )
    tokenizer = Path(config.data.tokenizer)
    for source in (tokenizer, tokenizer.with_name("tokenizer_config.json")):
        if source.exists():
            shutil.copyfile(source, directory / source.name)


def load_export(config: TrainConfig, directory: Path, device: torch.device) -> Model:
    """Read back what `export_model` wrote, as anyone who uses it will."""
    with Checkpoint.open(directory) as checkpoint:
        packed = checkpoint.storage == "fp8fp4"
        model = Model(
            config.model.with_storage(checkpoint.storage),
            storage=WeightStorage.PACKED if packed else WeightStorage.PLAIN,
            dtype=torch.float32,
            compute_dtype=compute_dtype(config, device),
            device=device,
            token_map=_token_map(config),
        )
        fill(dict(model.named_parameters()), checkpoint, model.config)
    return model


def _ops(config: TrainConfig, device: torch.device) -> Ops:
    """The operations for `device`, those named in `compile` fused."""
    ops = select_ops(device)
    known = {choice.op for choice in ops.choices}
    if unknown := sorted(set(config.compile) - known):
        raise TrainingError(
            f"compile names {', '.join(unknown)}; the operations are {', '.join(sorted(known))}."
        )
    # The number of tokens differs from step to step.
    compiled: dict[str, Any] = {
        name: torch.compile(getattr(ops, name), dynamic=True) for name in config.compile
    }
    return replace(ops, **compiled)


def _token_map(config: TrainConfig) -> Tensor | None:
    if not config.model.engram_layer_ids:
        return None
    found = token_map(config.data.tokenizer, config.model.vocab_size)
    if found.num_classes != config.model.engram_compressed_vocab_size:
        raise TrainingError(
            f"model.engram_compressed_vocab_size is {config.model.engram_compressed_vocab_size}, "
            f"but {config.data.tokenizer} has {found.num_classes} token classes; set it to that."
        )
    # A copy: the map itself is read-only.
    return torch.from_numpy(found.classes.copy())
