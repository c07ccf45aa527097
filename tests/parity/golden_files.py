"""Making golden sets for tests: parts of the real ones, and sets of other configurations."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cedar.analysis.parity.exact import ExactProducts
from cedar.cache import DenseKV
from cedar.checkpoint import Checkpoint, fill, save_checkpoint
from cedar.config.model import ModelConfig
from cedar.model import Batch, Model, WeightStorage

GOLDEN = Path(__file__).parents[1] / "golden"


def put(directory: Path, name: str, tensors: Mapping[str, Tensor], sidecar: object) -> None:
    """Write one golden file and its sidecar."""
    save_file(
        {key: value.contiguous() for key, value in tensors.items()},
        directory / f"{name}.safetensors",
    )
    (directory / f"{name}.json").write_text(json.dumps(sidecar))


def take_part(
    directory: Path, name: str, keep: Callable[[str], bool], *, under: str | None = None
) -> None:
    """Copy the tensors of a real set whose keys are kept."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    sidecar = json.loads((GOLDEN / f"{name}.json").read_text())
    put(directory, under or name, {k: v for k, v in tensors.items() if keep(k)}, sidecar)


def take_whole(directory: Path, name: str, *, under: str | None = None) -> None:
    """Copy a real file and its sidecar, perhaps under another name."""
    for ending in ("safetensors", "json"):
        source = GOLDEN / f"{name}.{ending}"
        if source.is_file():
            shutil.copy(source, directory / f"{under or name}.{ending}")


class _Everything:
    """A probe that keeps all values of a forward pass."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        return True

    def record(self, name: str, value: Tensor) -> None:
        self.values[name] = value


def write_weights(directory: Path, base: str, config: ModelConfig, seed: int) -> None:
    """Random weights of a configuration as ``<base>.weights``, in its own storage form."""
    generator = torch.Generator().manual_seed(seed)
    model = Model(config, trainable=True).init(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The plain residual that training starts from would hide the mixing.
            if ".hc_" in name or "attn_sink" in name or "bias" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    scratch = directory / f"{base}-saved"
    save_checkpoint(scratch, config, dict(model.named_parameters()), config.storage)
    (shard,) = scratch.glob("*.safetensors")
    shard.rename(directory / f"{base}.weights.safetensors")
    shutil.rmtree(scratch)
    sidecar = {"config": config.to_flat()}
    (directory / f"{base}.weights.json").write_text(json.dumps(sidecar))


def write_expectation(
    directory: Path,
    base: str,
    config: ModelConfig,
    *,
    prompt: int,
    steps: int,
    edges: tuple[int, ...],
) -> None:
    """What this implementation computes for ``<base>.weights``, in the golden layout.

    Batch of two, every layer's values. It checks the comparing, not the model.
    """
    sequences = 2
    generator = torch.Generator().manual_seed(prompt)
    ids = torch.randint(3, config.vocab_size, (sequences, prompt + steps), generator=generator)
    token_map = torch.arange(config.vocab_size) // 2
    with Checkpoint.open(directory / f"{base}.weights.safetensors") as checkpoint:
        plain = checkpoint.storage == "bf16"
        storage = WeightStorage.PLAIN if plain else WeightStorage.PACKED
        model = Model(config, storage=storage, token_map=token_map)
        fill(dict(model.named_parameters()), checkpoint, config)
    expected = {"input_ids": ids, "engram_token_map": token_map}
    with torch.no_grad(), ExactProducts():
        store = DenseKV(config, sequences)
        expected |= {
            f"prefill.{name}": value
            for name, value in _prefill(model, store, ids[:, :prompt]).items()
        }
        expected |= _caches(config, store, prompt)
        expected |= _decode(model, store, ids[:, prompt:], "decode")
        for length in edges:
            store = DenseKV(config, sequences)
            values = _prefill(model, store, ids[:, :length])
            expected[f"edge.{length}.prefill.logits_full"] = values["logits_full"][:, -2:]
            expected |= {
                f"edge.{length}.{key}": value
                for key, value in _decode(
                    model, store, ids[:, length : length + 3], "decode"
                ).items()
            }
    sidecar = {"config": config.to_flat(), "prefill_len": prompt, "decode_steps": steps}
    put(directory, f"{base}.expect_fp32", expected, sidecar)


def _prefill(model: Model, store: DenseKV, ids: Tensor) -> dict[str, Tensor]:
    probe = _Everything()
    model(Batch.pack(ids.tolist()), store, probe=probe)
    count, values = len(ids), {}
    for name, value in probe.values.items():
        if name.endswith((".in", ".in_mix")) or name == "main_hidden":
            continue
        if ".gate." in name:
            values[name] = value
        elif name.endswith(("attn.out", "ffn.out", "engram.out")) or name.count(".") == 2:
            values[name] = value.unflatten(0, (count, -1))[:1]
        elif name.endswith("candidates"):
            shape = (len(value), -(-ids.shape[1] // model.config.candidate_block_size))
            mask = torch.zeros(shape, dtype=torch.bool)
            for row, blocks in enumerate(value.tolist()):
                mask[row, [block for block in blocks if block >= 0]] = True
            wide = mask.repeat_interleave(model.config.candidate_block_size, 1)
            values[name] = wide[:, : ids.shape[1]].unflatten(0, (count, -1))
        elif name.endswith("topk_idxs"):
            values[name] = value.to(torch.int32).unflatten(0, (count, -1))
        else:
            golden_name = "logits_full" if name == "logits" else name
            values[golden_name] = value.unflatten(0, (count, -1))
    return values


def _caches(config: ModelConfig, store: DenseKV, length: int) -> dict[str, Tensor]:
    values = {}
    for layer in range(config.n_layers):
        prefix = f"after_prefill.layers.{layer}.attn"
        ring = torch.zeros(2, config.window_size, config.head_dim)
        for slot in range(2):
            rows = store.window(layer, slot)
            for back in range(len(rows)):
                ring[slot, (length - 1 - back) % config.window_size] = rows[-1 - back]
        values[f"{prefix}.window_kv_cache"] = ring
        if layer not in config.kv_source_layers:
            continue
        both = [store.entries(layer, slot) for slot in range(2)]
        values[f"{prefix}.compress_kv_cache"] = torch.stack([rows for rows, _ in both])
        values[f"{prefix}.indexer.k_cache"] = torch.stack([keys for _, keys in both])
        ratio = config.compress_ratios[layer]
        if ratio > 1:
            for number, name in enumerate(("kv_state", "score_state")):
                # What an earlier group left in the buffer means nothing.
                state = torch.full((2, ratio, config.head_dim), 7.0)
                for slot in range(2):
                    rest = store.residue(layer, slot)[number]
                    state[slot, : len(rest)] = rest
                values[f"{prefix}.compressor.{name}"] = state
    return values


def _decode(model: Model, store: DenseKV, ids: Tensor, prefix: str) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for step in range(ids.shape[1]):
        probe = _Everything()
        model(Batch.pack(ids[:, step : step + 1].tolist()), store, probe=probe)
        for name, value in probe.values.items():
            if name == "logits" or name.endswith("topk_idxs"):
                parts.setdefault(f"{prefix}.{name}", []).append(value)
    return {name: torch.stack(values, dim=1) for name, values in parts.items()}
