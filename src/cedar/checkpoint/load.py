"""Copying the tensors of a checkpoint into the tensors of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from cedar.checkpoint.check import CheckReport, compare
from cedar.checkpoint.names import Storage, Weight, weights
from cedar.checkpoint.read import Checkpoint
from cedar.checkpoint.rows import as_numbers, file_rows, is_float, row_blocks
from cedar.config import ModelConfig
from cedar.errors import CheckpointError
from cedar.quant import Element, QuantTensor


def fill(
    targets: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    skip: Collection[str] = frozenset(),
) -> None:
    """Copy every weight of ``checkpoint`` into ``targets``, which has our names as keys.

    A floating-point target receives numbers (code times scale in float32, rounded once to its
    type); a target of codes receives the stored bytes, and its ``.scale`` target the scales.
    ``skip`` names targets to leave alone; an entry that ends in a dot skips everything below
    it (``"mtp."``). Nothing is copied unless names, types and shapes all fit: otherwise one
    `CheckpointError` lists every difference.
    """
    skipped = _skipper(skip)
    storage = checkpoint.storage
    report = compare(checkpoint.path, checkpoint.specs, config, storage)
    _without_skipped(report, config, storage, skipped).raise_if_bad()
    wanted = [weight for weight in weights(config) if not skipped(weight.name)]
    problems = _target_problems(targets, wanted, storage, skipped)
    if problems:
        shown = problems[:50] + [f"... and {len(problems) - 50} more"] * (len(problems) > 50)
        head = f"{checkpoint.path}: the model's tensors do not fit the {storage} files."
        raise CheckpointError("\n  ".join([head, *shown]))
    with torch.no_grad():
        for weight in wanted:
            if weight.official_names(weight.name)[0] in checkpoint.specs:
                _fill_one(targets, checkpoint, weight, storage)
            else:  # an optional tensor that the files lack
                targets[weight.name].zero_()


def _skipper(skip: Collection[str]) -> Callable[[str], bool]:
    exact = frozenset(skip)
    prefixes = tuple(entry for entry in skip if entry.endswith("."))
    return lambda name: name in exact or name.startswith(prefixes)


def _without_skipped(
    report: CheckReport, config: ModelConfig, storage: Storage, skipped: Callable[[str], bool]
) -> CheckReport:
    ignored: set[str] = set()
    for weight in weights(config):
        if skipped(weight.name):
            ignored.update(weight.official_names(weight.name))
            ignored.update(weight.official_names(weight.scale_name))
    if not ignored:
        return report
    return CheckReport(
        path=report.path,
        storage=storage,
        tensors=report.tensors,
        nbytes=report.nbytes,
        missing=tuple(name for name in report.missing if name not in ignored),
        unexpected=tuple(name for name in report.unexpected if not skipped(name)),
        misshapen=tuple(m for m in report.misshapen if m.name not in ignored),
        damaged=report.damaged,
    )


def _target_problems(
    targets: Mapping[str, Tensor],
    wanted: list[Weight],
    storage: Storage,
    skipped: Callable[[str], bool],
) -> list[str]:
    problems = []
    known: set[str] = set()
    for weight in wanted:
        known.add(weight.name)
        target = targets.get(weight.name)
        if target is None:
            problems.append(f"{weight.name}: in the files, but the model has no such tensor")
        elif target.is_meta:
            problems.append(f"{weight.name}: the model's tensor has no memory (meta device)")
        elif is_float(target):
            if tuple(target.shape) != weight.shape:
                problems.append(_shape(weight.name, target, weight.shape))
        else:
            known.add(weight.scale_name)
            problems += _code_problems(targets, weight, target, storage)
    problems += [
        f"{name}: the model has this tensor, the configuration does not"
        for name in targets
        if name not in known and not skipped(name)
    ]
    return problems


def _code_problems(
    targets: Mapping[str, Tensor], weight: Weight, target: Tensor, storage: Storage
) -> list[str]:
    fmt = weight.kind.block_format(storage)
    spec, scale_spec = weight.specs(storage)
    if fmt is None or scale_spec is None:
        return [
            f"{weight.name}: the model holds codes ({target.dtype}), the files numbers "
            f"({spec.dtype}); convert the checkpoint first (cedar convert)"
        ]
    stack = weight.shape[: len(weight.shape) - len(weight.stored_shape)]
    types = (torch.float8_e4m3fn,) if fmt.element is Element.E4M3 else (torch.uint8, torch.int8)
    problems = []
    if target.dtype not in types:
        problems.append(f"{weight.name}: found type {target.dtype}; expected {types[0]}")
    if tuple(target.shape) != (*stack, *spec.shape):
        problems.append(_shape(weight.name, target, (*stack, *spec.shape)))
    scale = targets.get(weight.scale_name)
    if scale is None:
        problems.append(f"{weight.scale_name}: the model has codes but no scales")
    elif scale.dtype is not torch.uint8 or tuple(scale.shape) != (*stack, *scale_spec.shape):
        expected = f"uint8 {[*stack, *scale_spec.shape]}"
        found = f"{scale.dtype} {list(scale.shape)}"
        problems.append(f"{weight.scale_name}: found {found}; expected {expected}")
    return problems


def _shape(name: str, target: Tensor, expected: tuple[int, ...]) -> str:
    return f"{name}: found shape {list(target.shape)} in the model; expected {list(expected)}"


def _fill_one(
    targets: Mapping[str, Tensor], checkpoint: Checkpoint, weight: Weight, storage: Storage
) -> None:
    target = targets[weight.name]
    scale = None if is_float(target) else targets[weight.scale_name]
    stacked = len(weight.shape) > len(weight.stored_shape)
    for number in range(weight.shape[0] if stacked else 1):
        rows = file_rows(checkpoint, weight, storage, number)
        into = target[number] if stacked else target
        scale_into = scale[number] if stacked and scale is not None else scale
        for start, stop in row_blocks(weight.stored_shape):
            block = rows(start, stop)
            part = into[start:stop]
            if scale_into is None:
                part.copy_(as_numbers(block, part.dtype).reshape(part.shape))
            elif isinstance(block, QuantTensor):
                part.view(torch.uint8).copy_(block.codes.view(torch.uint8))
                step = block.format.rows
                scale_into[start // step : -(-stop // step)].copy_(block.scale)
