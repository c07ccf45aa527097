"""What each configuration field may hold on its own: kind, bounds, and when it matters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["int", "float", "bool", "str", "ints"]
Group = Literal["core", "compressed", "candidates", "vision", "draft", "engram"]

_MAX_INT = 2**53  # larger integers do not survive JSON readers that use doubles
_MAX_WIDTH = 2**24
_MAX_BLOCKS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Kind and bounds of one field.

    The bounds of a field outside the group ``core`` are checked only while its mechanism is
    present. ``above`` is an exclusive lower bound.
    """

    kind: Kind
    group: Group = "core"
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str | None, ...] | None = None
    optional: bool = False

    def type_text(self) -> str:
        """The expected type, for a message."""
        text = {
            "int": "a 64-bit integer",
            "float": "a finite number",
            "bool": "true or false",
            "str": "a string",
            "ints": "a list of integers",
        }[self.kind]
        return f"{text} or null" if self.optional else text

    def has_type(self, value: object) -> bool:
        """Whether ``value`` is of the right type (a list counts as a tuple)."""
        if value is None:
            return self.optional
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "str":
            return isinstance(value, str)
        if self.kind == "ints":
            return isinstance(value, tuple | list) and all(map(_is_int, value))
        if self.kind == "int":
            return _is_int(value)
        return _is_int(value) or (isinstance(value, float) and math.isfinite(value))

    def range_text(self, value: object) -> str | None:
        """What was expected if ``value`` is out of bounds, else ``None``."""
        if self.choices is not None:
            if value in self.choices:
                return None
            return "one of " + ", ".join("null" if c is None else f'"{c}"' for c in self.choices)
        if value is None or self.kind in ("bool", "str"):
            return None
        members = value if isinstance(value, tuple | list) else (value,)
        if all(self._within(member) for member in members):
            return None
        if self.above is not None:
            return f"more than {self.above:g}"
        if self.high is None:
            return f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:.15g}"

    def _within(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _count(group: Group = "core", high: int = _MAX_WIDTH, low: int = 1) -> Field:
    return Field(kind="int", group=group, low=low, high=high)


def _layers(group: Group = "core") -> Field:
    return Field(kind="ints", group=group, low=0)


# In the order of the published inference/config.json; Cedar's and the nested form's own after it.
FIELDS: Mapping[str, Field] = {
    "vocab_size": _count(),
    "dim": _count(),
    "moe_inter_dim": _count(),
    "n_layers": _count(high=_MAX_BLOCKS),
    "n_mtp_layers": _count(high=_MAX_BLOCKS, low=0),
    "dspark_block_size": _count("draft", high=1024),
    "dspark_noise_token_id": Field(kind="int", group="draft", low=0),
    "dspark_target_layer_ids": _layers("draft"),
    "dspark_markov_rank": _count("draft"),
    "dspark_n_routed_experts": _count("draft", high=65536),
    "dspark_n_activated_experts": _count("draft", high=65536),
    "n_heads": _count(high=65536),
    "n_routed_experts": _count(high=65536),
    "n_shared_experts": Field(kind="int", low=1, high=1),
    "n_activated_experts": _count(high=65536),
    "score_func": Field(kind="str", choices=("sqrtsoftplus", "softmax", "sigmoid")),
    "route_scale": Field(kind="float", above=0),
    "swiglu_limit": Field(kind="float", above=0),
    "q_lora_rank": _count(),
    "head_dim": _count(),
    "rope_head_dim": _count(low=2),
    "norm_eps": Field(kind="float", low=0),
    "o_groups": _count(high=65536),
    "o_lora_rank": _count(),
    "window_size": _count(),
    "kv_source_layers": _layers(),
    "index_source_layers": _layers(),
    "original_seq_len": Field(kind="int", group="compressed", low=0, high=_MAX_INT),
    "rope_theta": Field(kind="float", above=1),
    "rope_factor": Field(kind="float", group="compressed", above=0),
    "beta_fast": Field(kind="float", group="compressed", above=0),
    "beta_slow": Field(kind="float", group="compressed", above=0),
    "index_n_heads": _count("compressed", high=65536),
    "index_head_dim": _count("compressed"),
    "index_topk": _count("compressed"),
    "candidate_source_layer": Field(kind="int", low=-1),
    "candidate_topk_blocks": _count("candidates"),
    "candidate_block_size": _count("candidates"),
    "hc_mult": _count(high=1024),
    "hc_sinkhorn_iters": _count(high=10000),
    "hc_eps": Field(kind="float", low=0),
    "engram_layer_ids": _layers(),
    "engram_vocab_size": _count("engram", high=2**40, low=2),
    "engram_num_embeddings": Field(kind="ints", group="engram", low=1, high=_MAX_INT),
    "engram_max_ngram_size": _count("engram", high=64, low=2),
    "engram_pad_id": Field(kind="int", group="engram", low=0),
    "engram_compressed_vocab_size": _count("engram"),
    "dtype": Field(kind="str", choices=("fp8", "bf16")),
    "expert_dtype": Field(kind="str", choices=("fp4", None), optional=True),
    "compress_rope_theta": Field(kind="float", group="compressed", above=1),
    "compress_ratios": Field(kind="ints", low=0, high=2**20),
    "vision_n_layers": _count(high=_MAX_BLOCKS, low=0),
    "vision_dim": _count("vision"),
    "vision_n_heads": _count("vision", high=65536),
    "vision_inter_dim": _count("vision"),
    "vision_patch_size": _count("vision", high=4096),
    "vision_downsample_ratio": _count("vision", high=1024),
    "vision_max_n_token": _count("vision", low=4),
    "vision_min_pixels": _count("vision", high=_MAX_INT),
    "vision_max_wh_ratio": Field(kind="float", group="vision", above=0, optional=True),
    "image_token_id": Field(kind="int", group="vision", low=0),
    "engram_n_heads": _count("engram", high=1024),
    "engram_head_dim": _count("engram"),
    "vision_rope_theta": Field(kind="float", group="vision", above=0),
    "gate_temp": Field(kind="float", above=0),
    "norm_topk_prob": Field(kind="bool"),
    "bos_token_id": Field(kind="int", low=0),
    "eos_token_id": Field(kind="int", low=0),
    "pad_token_id": Field(kind="int", low=0),
    "max_position_embeddings": _count(high=_MAX_INT),
    "hc_single_pass": Field(kind="bool"),
}


def active_groups(values: Mapping[str, object]) -> frozenset[Group]:
    """The mechanisms that a set of field values switches on."""
    active: set[Group] = {"core"}
    if values.get("kv_source_layers") or _has_ratio(values.get("compress_ratios")):
        active.add("compressed")
    if _positive(values.get("candidate_source_layer", -1), low=0):
        active.add("candidates")
    if _positive(values.get("vision_n_layers", 0)):
        active.add("vision")
    if _positive(values.get("n_mtp_layers", 0)):
        active.add("draft")
    if values.get("engram_layer_ids"):
        active.add("engram")
    return frozenset(active)


def _has_ratio(value: object) -> bool:
    return isinstance(value, tuple | list) and any(map(_positive, value))


def _positive(value: object, low: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
