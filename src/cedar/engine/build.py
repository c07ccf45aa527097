"""The assembly point of inference: checkpoint, tokenizer, Engram tables and model."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from cedar.checkpoint import Checkpoint, fill
from cedar.checkpoint.locate import locate_checkpoint
from cedar.config import ModelConfig
from cedar.errors import CheckpointError, ConfigError
from cedar.inputs.ngrams import token_map
from cedar.inputs.tokenizer import Tokenizer
from cedar.memory import MappedTable, PinnedTable
from cedar.model import Model, WeightStorage
from cedar.model.engram import EngramTable
from cedar.ops import Ops, select_ops

__all__ = ["LoadedModel", "load_model"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run and the tokenizer that belongs to it."""

    model: Model
    tokenizer: Tokenizer
    directory: Path

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device


def load_model(
    name: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    packed: bool | None = None,
    engram: str = "model",
) -> LoadedModel:
    """Load a checkpoint directory, or a bundled checkpoint by name.

    dtype: of activations and unquantised weights; default float32 on a CPU, bfloat16 elsewhere.
    packed: keep quantised weights as codes (little memory) instead of dequantising them once; by
    default where kernels multiply by codes.
    engram: where the Engram tables stand: "model" with the other weights, "host" in page-locked
    host memory, from where a GPU reads rows over the bus while earlier layers run, "disk" in the
    checkpoint's files.
    Raises `CheckpointError`, `ConfigError` or `DataError` for what does not fit.
    """
    directory = locate_checkpoint(name)
    config = ModelConfig.from_file(directory)
    tokenizer = Tokenizer.from_file(directory)
    place = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    ops = select_ops(place)
    if place.type == "cuda" and not ops.has_kernels:
        _LOG.warning("%s runs on plain PyTorch: %s", place, ops.describe()[0].reason)
    if packed is None:
        packed = ops.has_kernels and dtype is torch.bfloat16
    checkpoint = Checkpoint.open(directory)
    storage = WeightStorage.PLAIN
    if checkpoint.storage == "fp8fp4":
        storage = WeightStorage.PACKED if packed else WeightStorage.DEQUANTIZED
    tables = _tables(engram, checkpoint, config, ops, place)
    model = Model(
        config,
        ops=ops,
        storage=storage,
        dtype=dtype,
        device=place,
        token_map=_token_map(config, tokenizer, directory),
        engram_tables=tables,
    )
    skip = {f"layers.{layer}.engram.embed.weight" for layer in tables}
    fill(dict(model.named_parameters()), checkpoint, config, skip=skip)
    if engram != "disk":
        checkpoint.close()
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, directory)


def _tables(
    where: str, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, device: torch.device
) -> dict[int, EngramTable]:
    """The Engram tables that stand outside the model, by layer."""
    if where not in ("model", "host", "disk"):
        raise ConfigError(f"engram is {where!r}; expected one of model, host, disk.")
    tables: dict[int, EngramTable] = {}
    if where == "model":
        return tables
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        stem = f"layers.{layer}.engram.embed"
        names = f"{stem}.weight", f"{stem}.scale"
        if where == "disk":
            tables[layer] = MappedTable(checkpoint, *names)
        else:
            shape = rows, config.engram_head_dim
            tables[layer] = PinnedTable.load(checkpoint, *names, shape, ops.engram_rows, device)
    return tables


def _token_map(config: ModelConfig, tokenizer: Tokenizer, directory: Path) -> torch.Tensor | None:
    if not config.engram_layer_ids:
        return None
    found = token_map(tokenizer, config.vocab_size)
    if found.num_classes != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {found.num_classes} Engram classes, but config.json "
            f"says engram_compressed_vocab_size = {config.engram_compressed_vocab_size}. Every "
            "row of the tables would be wrong; use the tokenizer.json that was released with "
            "the weights."
        )
    return torch.from_numpy(found.classes.copy())
