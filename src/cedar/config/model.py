"""The configuration of a model, under the official names of ``inference/config.json``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cedar.config.fields import FIELDS, active_groups
from cedar.config.forms import (
    EXTRA_FIELDS,
    flat_text,
    in_nested_names,
    nested_text,
    read_flat,
    read_nested,
    write_flat,
    write_nested,
)
from cedar.config.validate import ConfigProblems, find_problems
from cedar.errors import ConfigError

_MAX_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One model. Creating an inconsistent one raises `ConfigError` with every problem.

    Fields keep their official names and units; ``rope_theta`` and the like may be whole numbers,
    as in the published files. A mechanism that is absent has ``n_mtp_layers`` 0,
    ``vision_n_layers`` 0, empty ``engram_layer_ids`` or ``candidate_source_layer`` -1; its other
    fields then mean nothing. ``original_seq_len`` 0 means compressed layers without YaRN.
    ``hc_single_pass`` is Cedar's own: False selects the two-pass form of the residual streams.
    """

    vocab_size: int
    dim: int
    moe_inter_dim: int
    n_layers: int
    n_mtp_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = -1
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_n_activated_experts: int = 0
    n_heads: int
    n_routed_experts: int
    n_shared_experts: int = 1
    n_activated_experts: int
    score_func: str
    route_scale: float
    swiglu_limit: float
    q_lora_rank: int
    head_dim: int
    rope_head_dim: int
    norm_eps: float
    o_groups: int
    o_lora_rank: int
    window_size: int
    kv_source_layers: tuple[int, ...] = ()
    index_source_layers: tuple[int, ...] = ()
    original_seq_len: int = 0
    rope_theta: float
    rope_factor: float = 1
    beta_fast: float = 32
    beta_slow: float = 1
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    candidate_source_layer: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...] = ()
    engram_vocab_size: int = 0
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_pad_id: int = -1
    engram_compressed_vocab_size: int = 0
    dtype: str = "bf16"
    expert_dtype: str | None = None
    compress_rope_theta: float = 0
    compress_ratios: tuple[int, ...]
    vision_n_layers: int = 0
    vision_dim: int = 0
    vision_n_heads: int = 0
    vision_inter_dim: int = 0
    vision_patch_size: int = 0
    vision_downsample_ratio: int = 0
    vision_max_n_token: int = 0
    vision_min_pixels: int = 0
    vision_max_wh_ratio: float | None = None
    image_token_id: int = -1
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    vision_rope_theta: float = 0
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    max_position_embeddings: int = 1048576
    hc_single_pass: bool = True

    def __post_init__(self) -> None:
        """Refuse an inconsistent configuration, naming all of its problems."""
        problems = find_problems(self._values())
        if problems:
            raise ConfigProblems("ModelConfig", problems)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the nested form (it has ``text_config``) or the flat form.

        Raises `ConfigError` that lists every unknown key, wrong type and broken rule; ``where``
        names the source in the message.
        """
        nested = "text_config" in raw
        given, problems = read_nested(raw) if nested else read_flat(raw)
        values: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in given.items()
        }
        defaults = _defaults()
        missing = {n for n in FIELDS if n not in values and _is_required(n, values, defaults)}
        values = {n: values.get(n, defaults.get(n)) for n in FIELDS}
        found = find_problems(values, missing)
        problems += map(in_nested_names, found) if nested else found
        if problems:
            raise ConfigProblems(where, problems)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read ``path``: a JSON file in either form, or a directory with a ``config.json``.

        A sidecar that keeps a flat configuration under ``"config"`` next to ``"tensors"`` is
        read as well.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        raw = _read_json(file)
        inner = raw.get("config")
        if isinstance(inner, dict) and "vocab_size" not in raw and "text_config" not in raw:
            raw = inner
        return cls.from_dict(raw, where=str(file))

    def to_flat(self) -> dict[str, Any]:
        """The flat form; absent mechanisms and default extras are left out."""
        return write_flat(self._values(), self._omitted(frozenset(EXTRA_FIELDS)))

    def to_nested(self) -> dict[str, Any]:
        """The nested form; absent mechanisms and Cedar's default extras are left out."""
        own = frozenset({"gate_temp", "hc_single_pass"})
        return write_nested(self._values(), self._omitted(own))

    def flat_json(self) -> str:
        """`to_flat` as text; byte for byte the published ``inference/config.json``."""
        return flat_text(self.to_flat())

    def nested_json(self) -> str:
        """`to_nested` as text; byte for byte the published ``config.json``."""
        return nested_text(self.to_nested())

    @property
    def storage(self) -> str:
        """How a checkpoint of this model stores its weights: ``"fp8fp4"`` or ``"bf16"``."""
        return "fp8fp4" if self.dtype == "fp8" else "bf16"

    def with_storage(self, storage: str) -> ModelConfig:
        """The same model with the weights of its checkpoints stored in another form."""
        forms: dict[str, tuple[str, str | None]] = {
            "fp8fp4": ("fp8", "fp4"),
            "bf16": ("bf16", None),
        }
        if storage not in forms:
            raise ConfigError(f'storage is "{storage}"; expected "fp8fp4" or "bf16"')
        dtype, expert_dtype = forms[storage]
        return dataclasses.replace(self, dtype=dtype, expert_dtype=expert_dtype)

    @property
    def has_vision(self) -> bool:
        """Whether the model has an image tower."""
        return self.vision_n_layers > 0

    @property
    def has_draft(self) -> bool:
        """Whether the model has a draft head."""
        return self.n_mtp_layers > 0

    @property
    def has_yarn(self) -> bool:
        """Whether compressed layers scale their rotary frequencies."""
        return self.original_seq_len > 0

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}

    def _omitted(self, extras: frozenset[str]) -> frozenset[str]:
        values, defaults = self._values(), _defaults()
        active = active_groups(values)
        switches = {"vision_n_layers", "n_mtp_layers", "engram_layer_ids"}
        return frozenset(
            name
            for name, field in FIELDS.items()
            if name in defaults
            and values[name] == defaults[name]
            and (name in extras or name in switches or field.group not in active)
        )


def _defaults() -> dict[str, Any]:
    fields = dataclasses.fields(ModelConfig)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _is_required(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether a field without a value is a problem: it has no default that means something."""
    if name not in defaults:
        return True
    # An absent maximum ratio is no limit; everything else of a present mechanism is needed.
    group = FIELDS[name].group
    return name != "vision_max_wh_ratio" and group != "core" and group in active_groups(values)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{file}: larger than {_MAX_FILE_BYTES} bytes; expected a config.json"
            )
        raw = json.loads(file.read_text("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{file}: cannot be read ({reason}). Check the path.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error}). Replace the file.") from None
    if not isinstance(raw, dict):
        found = type(raw).__name__
        raise ConfigError(f"{file}: found a JSON {found}; expected an object with the fields")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"the keys {', '.join(twice)} occur more than once")
    return result
