"""Finding golden sets in a directory, and what belongs to them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.checkpoint import Checkpoint
from cedar.checkpoint.load import fill
from cedar.config.model import ModelConfig
from cedar.errors import DataError
from cedar.model import Model, WeightStorage
from cedar.ops import Ops

__all__ = ["Golden", "GoldenFile", "GoldenSet", "find_sets"]

WEIGHTS = ".weights"
EXPECTATIONS = (".expect_fp32", ".expect_bf16")
KINDS = ("dspark", "vision", "quant", "sparse_attn", "engram", "norm_eps", "mhc", "yarn")
GRIDS = "image_grids"


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenSet:
    """One set: its name (the stem of its file), what it is, and the stem it shares with others.

    kind: ``expect_fp32``, ``expect_bf16``, ``image_grids`` or one of the other known kinds.
    base: the name without the kind, e.g. ``mini_bf16`` or ``mini``; may be empty.
    """

    name: str
    kind: str
    base: str
    path: Path


def find_sets(directory: Path, prefix: str = "") -> tuple[tuple[GoldenSet, ...], tuple[str, ...]]:
    """All sets whose name starts with ``prefix``, and the names of files of no known kind.

    Raises `DataError` for a directory that cannot be read or holds no set at all.
    """
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise DataError(
            f"{directory}: cannot be read ({error.strerror}); expected a directory of golden sets."
        ) from None
    found, unknown = [], []
    for name in names:
        stem, _, ending = name.rpartition(".")
        if not stem.startswith(prefix) or ending not in ("safetensors", "json"):
            continue
        kind, base = _kind_of(stem)
        if ending == "json":
            if kind == GRIDS:
                found.append(GoldenSet(name=stem, kind=kind, base=base, path=directory / name))
        elif kind is None:
            if not stem.endswith(WEIGHTS):
                unknown.append(stem)
        elif kind != GRIDS:
            found.append(GoldenSet(name=stem, kind=kind, base=base, path=directory / name))
    if not found:
        which = f" whose name starts with {prefix!r}" if prefix else ""
        raise DataError(
            f"{directory}: found no golden set{which}; expected files like "
            "NAME.expect_fp32.safetensors with NAME.weights.safetensors, NAME_dspark.safetensors "
            "or quant.safetensors, each with a .json next to it."
        )
    return tuple(found), tuple(unknown)


def _kind_of(stem: str) -> tuple[str | None, str]:
    for ending in EXPECTATIONS:
        if stem.endswith(ending) and stem != ending:
            return ending.removeprefix("."), stem.removesuffix(ending)
    for kind in (*KINDS, GRIDS):
        if stem == kind:
            return kind, ""
        if stem.endswith(f"_{kind}"):
            return kind, stem.removesuffix(f"_{kind}")
    return None, stem


@dataclass(frozen=True, slots=True)
class GoldenFile:
    """The tensors of a file by key, and its sidecar."""

    name: str
    tensors: dict[str, Tensor]
    sidecar: dict[str, Any]

    def find(self, *names: str) -> Tensor | None:
        """The first of some tensors that the file has."""
        return next((self.tensors[name] for name in names if name in self.tensors), None)


@dataclass(slots=True)
class Golden:
    """A directory of golden files, with what was loaded of it so far.

    ops: what the models are built with, for ``device``, where the tensors are put.
    """

    directory: Path
    ops: Ops
    device: torch.device
    _files: dict[str, GoldenFile] = field(default_factory=dict)
    _models: dict[tuple[str, torch.dtype], Model] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether there is a file ``<name>.safetensors``."""
        return (self.directory / f"{name}.safetensors").is_file()

    def file(self, name: str) -> GoldenFile:
        """Tensors and sidecar of ``<name>.safetensors``; raises a `CedarError` if it is damaged."""
        if name not in self._files:
            with Checkpoint.open(self.directory / f"{name}.safetensors") as reader:
                tensors = {key: reader.read(key).to(self.device) for key in reader.specs}
            self._files[name] = GoldenFile(name, tensors, self.sidecar(name))
        return self._files[name]

    def sidecar(self, name: str) -> dict[str, Any]:
        """The object in ``<name>.json``; empty if there is none."""
        path = self.directory / f"{name}.json"
        if not path.is_file():
            return {}
        try:
            document = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as JSON ({error}).") from None
        if not isinstance(document, dict):
            raise DataError(f"{path}: found {type(document).__name__}; expected a JSON object.")
        return document

    def config(self, *names: str) -> ModelConfig:
        """The configuration in the first of some sidecars that has one."""
        for name in names:
            document = self.sidecar(name)
            if isinstance(document.get("config"), dict):
                where = str(self.directory / f"{name}.json")
                return ModelConfig.from_dict(document["config"], where=where)
        tried = " and ".join(f"{name}.json" for name in names)
        raise DataError(f'{self.directory}: no configuration; expected "config" in {tried}.')

    def inputs(self, base: str, own: GoldenFile, *keys: str) -> Tensor | None:
        """An input tensor of a set, or else of the expectations for the same checkpoint."""
        names = [name for ending in EXPECTATIONS if self.has(name := base + ending)]
        for file in (own, *(self.file(name) for name in names)):
            tensor = file.find(*keys)
            if tensor is not None:
                return tensor
        return None

    def model(self, base: str, own: GoldenFile, dtype: torch.dtype) -> Model:
        """The model of ``<base>.weights`` in one activation type.

        Raises `DataError` where the weights, the configuration or the token map are missing.
        """
        if (base, dtype) in self._models:
            return self._models[base, dtype]
        weights = base + WEIGHTS
        if not self.has(weights):
            raise DataError(
                f"{weights}.safetensors is missing: {own.name} was computed with these weights. "
                f"Put the file next to {own.name}.safetensors."
            )
        config = self.config(weights, own.name)
        token_map = self.inputs(base, own, "engram_token_map")
        if config.engram_layer_ids and token_map is None:
            raise DataError(
                f"{own.name}: layers {config.engram_layer_ids} hash n-grams, but neither this file "
                f"nor the expectations of {base} hold engram_token_map."
            )
        with Checkpoint.open(self.directory / f"{weights}.safetensors") as checkpoint:
            plain = checkpoint.storage == "bf16"
            model = Model(
                config,
                ops=self.ops,
                device=self.device,
                storage=WeightStorage.PLAIN if plain else WeightStorage.PACKED,
                dtype=dtype,
                token_map=token_map,
            )
            fill(dict(model.named_parameters()), checkpoint, config)
        self._models[base, dtype] = model.eval()
        return model
