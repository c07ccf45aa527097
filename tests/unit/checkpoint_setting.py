"""Random weights and hand-made safetensors files for the checkpoint tests."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.checkpoint import Kind, weights
from cedar.config import ModelConfig, tiny

GOLDEN = Path(__file__).parents[1] / "golden"


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Float masters of every weight, under our names."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for weight in weights(config):
        tensor = torch.randn(weight.shape, generator=generator)
        made[weight.name] = tensor if weight.kind is Kind.F32 else tensor.to(torch.bfloat16)
    return made


def tiny_without_extras() -> ModelConfig:
    """`tiny` as plain data without tower and draft head: fewer tensors, faster tests."""
    raw = tiny().to_flat()
    raw = {k: v for k, v in raw.items() if not k.startswith(("vision", "dspark", "image"))}
    raw |= {"n_mtp_layers": 0, "compress_ratios": raw["compress_ratios"][:12]}
    return ModelConfig.from_dict(raw)


def raw_file(
    path: Path, header: dict[str, Any] | bytes, payload: bytes = b"", *, length: int | None = None
) -> Path:
    """Write a safetensors file from parts, correct or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little", signed=False) + text + payload)
    return path


def entry(dtype: str, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
