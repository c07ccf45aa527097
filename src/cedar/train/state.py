"""Checkpoints of a run: everything that the next step depends on, written atomically.

    DIR/checkpoints/step-00000200/model.safetensors       parameters and buffers
                                  optimizer.safetensors   AdamW moments, by parameter name
                                  state.json              step, corpus, configuration, generators

A checkpoint is written under a hidden name, flushed to disk and renamed: a directory called
`step-…` is complete. Older ones are removed only after that. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cedar.errors import TrainingError
from cedar.train.config import TrainConfig
from cedar.train.overrides import flatten

__all__ = ["Saved", "check_resumable", "find_checkpoints", "restore", "save"]

FORMAT = 1

# Fields that do not change what is computed from here on, or only where and how it is shown.
# Paths may move; the corpus itself is compared by digest.
FREE_FIELDS = frozenset(
    {
        "checkpoint.interval",
        "checkpoint.keep",
        "compile",
        "curve",
        "data.cache",
        "data.tokenizer",
        "data.train",
        "data.valid",
        "device",
        "eval.final_tokens",
        "eval.interval",
        "eval.tokens",
        "export",
        "init_from",
        "log_interval",
        "threads",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What `restore` found beside the tensors it copied.

    step: steps done; the next one has this number.
    tokens: training tokens seen so far.
    """

    step: int
    tokens: int


def find_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [
        (int(match[1]), path)
        for path in (run / "checkpoints").glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def save(
    run: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    corpus_digest: str,
    step: int,
    tokens: int,
) -> Path:
    """Write the checkpoint of `step` and drop all but the newest `config.checkpoint.keep`.

    Raises:
        TrainingError: a parameter is not finite (the checkpoint is then not written, the older
            ones stay), or the disk refuses.
    """
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    broken = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if broken:
        kept = find_checkpoints(run)
        raise TrainingError(
            f"Step {step}: {len(broken)} parameters are not finite, the first is {broken[0]}. "
            "This state was not saved. Lower optim.lr or optim.grad_clip and start again"
            + (f", or look at {kept[-1]}." if kept else ".")
        )
    final = run / "checkpoints" / f"step-{step:08d}"
    work = final.with_name(f".{final.name}.unfinished")
    details: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "tokens": tokens,
        "corpus": corpus_digest,
        "config": flatten(config),
        "torch": torch.__version__,
    }
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        save_file(tensors, work / "model.safetensors")
        save_file(
            _optimizer_tensors(model, optimizer) | _generators(), work / "optimizer.safetensors"
        )
        (work / "state.json").write_text(json.dumps(details, indent=1) + "\n", encoding="utf-8")
        for file in (*work.iterdir(), work):
            _flush(file)
        replaced = final.with_name(f".{final.name}.replaced")
        if final.exists():
            os.replace(final, replaced)
        os.replace(work, final)
        _flush(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"The checkpoint {final} cannot be written: {error}.") from None
    for old in find_checkpoints(run)[: -config.checkpoint.keep]:
        shutil.rmtree(old)
    return final


def restore(
    checkpoint: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    corpus_digest: str,
) -> Saved:
    """Copy a checkpoint into model, optimizer and random generators.

    Raises:
        TrainingError: the checkpoint is damaged, or belongs to another configuration or corpus;
            the message names the field.
    """
    details = _details(checkpoint)
    refuse_other_config(details["config"], config, checkpoint)
    if details["corpus"] != corpus_digest:
        raise TrainingError(
            f"{checkpoint} was trained on another corpus or with another tokenizer: digest "
            f"{details['corpus']}, now {corpus_digest}. Restore data.train, data.valid and "
            "data.tokenizer, or start a new run directory."
        )
    try:
        tensors = load_file(checkpoint / "model.safetensors")
        moments = load_file(checkpoint / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise _damaged(checkpoint, error) from None
    expected = model.state_dict()
    wrong = sorted(set(expected) ^ set(tensors)) or [
        name for name, t in tensors.items() if t.shape != expected[name].shape
    ]
    if wrong:
        raise TrainingError(
            f"The checkpoint {checkpoint} does not fit the model: {len(wrong)} tensors differ, "
            f"the first is {wrong[0]}."
        )
    with torch.no_grad():
        for name, target in expected.items():
            target.copy_(tensors[name])
    _restore_optimizer(model, optimizer, moments)
    _restore_generators(moments)
    return Saved(step=int(details["step"]), tokens=int(details["tokens"]))


def check_resumable(checkpoint: Path, config: TrainConfig) -> None:
    """Refuse early, before anything is built; `restore` checks again and more.

    Raises:
        TrainingError: the checkpoint is unreadable or has another configuration.
    """
    refuse_other_config(_details(checkpoint)["config"], config, checkpoint)


def refuse_other_config(old: Mapping[str, Any], config: TrainConfig, where: Path) -> None:
    """Raise a TrainingError that names every field in which a resumed run would differ."""
    new = flatten(config)
    differing = [
        f"{name}: {old.get(name, 'absent')!r} then, {new.get(name, 'absent')!r} now"
        for name in sorted(old.keys() | new.keys())
        if name not in FREE_FIELDS and old.get(name, "absent") != new.get(name, "absent")
    ]
    if differing:
        raise TrainingError(
            f"{where} cannot be resumed with another configuration:\n  "
            + "\n  ".join(differing)
            + "\nRestore these fields or start a new run directory."
        )


def _details(checkpoint: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint, with all keys present."""
    try:
        details: dict[str, Any] = json.loads((checkpoint / "state.json").read_text("utf-8"))
        missing = {"format", "step", "tokens", "corpus", "config"} - details.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(checkpoint, error) from None
    if missing:
        raise _damaged(checkpoint, f"state.json lacks {', '.join(sorted(missing))}")
    if details["format"] != FORMAT:
        raise TrainingError(
            f"{checkpoint} has format {details['format']!r}; this version reads {FORMAT}."
        )
    return details


def _damaged(checkpoint: Path, reason: object) -> TrainingError:
    return TrainingError(
        f"The checkpoint {checkpoint} is damaged ({reason}); delete it to resume from the one "
        "before."
    )


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state as `NAME:exp_avg` and so on; parameters without a gradient so far have none."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}:{key}"] = value.detach().cpu().contiguous()
    return tensors


def _restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        state: dict[str, Tensor] = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if (value := tensors.get(f"{name}:{key}")) is not None:
                # The fused optimiser keeps even its step counts on the device.
                state[key] = value.to(parameter.device)
        if state:
            optimizer.state[parameter] = state


def _generators() -> dict[str, Tensor]:
    """torch's random generators; the data order needs none."""
    states = {":cpu_rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[":cuda_rng"] = torch.cuda.get_rng_state()
    return states


def _restore_generators(tensors: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(tensors[":cpu_rng"])
    if ":cuda_rng" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[":cuda_rng"])


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
