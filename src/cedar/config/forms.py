"""The two published forms of the configuration: nested ``config.json`` and flat ``inference/``.

A *path* is the tuple of keys that leads to a value in the nested form. Everything here is data
plus two directions of one translation; nothing is judged but the form itself.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from cedar.config.fields import FIELDS
from cedar.config.validate import Problem

Path = tuple[str, ...]

# Flat fields that only the nested form, or only Cedar, writes. The flat form accepts them too
# and states them where they differ from their default.
EXTRA_FIELDS = (
    "gate_temp",
    "norm_topk_prob",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "hc_single_pass",
)
# Settings of one run of the authors' reference, not of the model; ignored by name.
RUNTIME_KEYS = frozenset({"max_batch_size", "max_seq_len", "temperature"})


class Fixed:
    """A nested key that has one possible value in this architecture."""

    def __init__(self, value: object) -> None:
        self.value = value


_QUANTIZATION = "quantization_config"
_TEXT: tuple[tuple[str, str | Fixed], ...] = (
    ("model_type", Fixed("deepseek_v41_text")),
    ("vocab_size", "vocab_size"),
    ("hidden_size", "dim"),
    ("moe_intermediate_size", "moe_inter_dim"),
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("num_key_value_heads", Fixed(1)),
    ("head_dim", "head_dim"),
    ("qk_rope_head_dim", "rope_head_dim"),
    ("q_lora_rank", "q_lora_rank"),
    ("o_lora_rank", "o_lora_rank"),
    ("o_groups", "o_groups"),
    ("hidden_act", Fixed("silu")),
    ("swiglu_limit", "swiglu_limit"),
    ("rms_norm_eps", "norm_eps"),
    ("attention_bias", Fixed(False)),
    ("attention_dropout", Fixed(0.0)),
    ("initializer_range", Fixed(0.02)),
    ("use_cache", Fixed(True)),
    ("tie_word_embeddings", Fixed(False)),
    ("max_position_embeddings", "max_position_embeddings"),
    ("rope_theta", "rope_theta"),
    ("rope_scaling.rope_type", Fixed("yarn")),
    ("rope_scaling.factor", "rope_factor"),
    ("rope_scaling.beta_fast", "beta_fast"),
    ("rope_scaling.beta_slow", "beta_slow"),
    ("rope_scaling.original_max_position_embeddings", "original_seq_len"),
    ("n_routed_experts", "n_routed_experts"),
    ("n_shared_experts", "n_shared_experts"),
    ("num_experts_per_tok", "n_activated_experts"),
    ("scoring_func", "score_func"),
    ("topk_method", Fixed("noaux_tc")),
    ("norm_topk_prob", "norm_topk_prob"),
    ("routed_scaling_factor", "route_scale"),
    ("sliding_window", "window_size"),
    ("compress_ratios", "compress_ratios"),
    ("compress_rope_theta", "compress_rope_theta"),
    ("kv_source_layer_ids", "kv_source_layers"),
    ("index_source_layer_ids", "index_source_layers"),
    ("index_n_heads", "index_n_heads"),
    ("index_head_dim", "index_head_dim"),
    ("index_topk", "index_topk"),
    ("candidate_source_layer_id", "candidate_source_layer"),
    ("candidate_topk_blocks", "candidate_topk_blocks"),
    ("candidate_block_size", "candidate_block_size"),
    ("hc_mult", "hc_mult"),
    ("hc_sinkhorn_iters", "hc_sinkhorn_iters"),
    ("hc_eps", "hc_eps"),
    ("engram_layer_ids", "engram_layer_ids"),
    ("engram_num_embeddings", "engram_num_embeddings"),
    ("engram_max_ngram_size", "engram_max_ngram_size"),
    ("engram_vocab_size", "engram_vocab_size"),
    ("engram_n_heads", "engram_n_heads"),
    ("engram_head_dim", "engram_head_dim"),
    ("engram_pad_token_id", "engram_pad_id"),
    ("engram_compressed_vocab_size", "engram_compressed_vocab_size"),
    ("num_nextn_predict_layers", "n_mtp_layers"),
    ("dspark_block_size", "dspark_block_size"),
    ("dspark_noise_token_id", "dspark_noise_token_id"),
    ("dspark_target_layer_ids", "dspark_target_layer_ids"),
    ("dspark_markov_rank", "dspark_markov_rank"),
    ("dspark_n_routed_experts", "dspark_n_routed_experts"),
    ("dspark_num_experts_per_tok", "dspark_n_activated_experts"),
    ("gate_temp", "gate_temp"),
    ("hc_single_pass", "hc_single_pass"),
)
_VISION: tuple[tuple[str, str | Fixed], ...] = (
    ("model_type", Fixed("deepseek_v41_vision")),
    ("num_hidden_layers", "vision_n_layers"),
    ("hidden_size", "vision_dim"),
    ("num_attention_heads", "vision_n_heads"),
    ("intermediate_size", "vision_inter_dim"),
    ("patch_size", "vision_patch_size"),
    ("rope_theta", "vision_rope_theta"),
    ("downsample_ratio", "vision_downsample_ratio"),
    ("max_image_tokens", "vision_max_n_token"),
    ("min_pixels", "vision_min_pixels"),
    ("max_wh_ratio", "vision_max_wh_ratio"),
)
_TOP: tuple[tuple[str, str | Fixed], ...] = (
    ("architectures", Fixed(["DeepseekV41ForCausalLM"])),
    ("model_type", Fixed("deepseek_v41")),
    ("dtype", Fixed("bfloat16")),
    ("transformers_version", Fixed("5.6.0")),
    ("bos_token_id", "bos_token_id"),
    ("eos_token_id", "eos_token_id"),
    ("pad_token_id", "pad_token_id"),
    ("image_token_id", "image_token_id"),
    (f"{_QUANTIZATION}.quant_method", Fixed("fp8")),
    (f"{_QUANTIZATION}.activation_scheme", Fixed("dynamic")),
    (f"{_QUANTIZATION}.weight_block_size", Fixed([32, 32])),
    (f"{_QUANTIZATION}.scale_fmt", Fixed("ue8m0")),
    (f"{_QUANTIZATION}.expert_dtype", "expert_dtype"),
)
# In the order of the published file.
NESTED: tuple[tuple[Path, str | Fixed], ...] = (
    *((tuple(key.split(".")), target) for key, target in _TOP),
    *((("text_config", *key.split(".")), target) for key, target in _TEXT),
    *((("vision_config", key), target) for key, target in _VISION),
)
# Written by transformers, without a meaning for this architecture.
_METADATA = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def in_nested_names(problem: Problem) -> Problem:
    """The same problem in the words of the nested form."""
    paths = {name: ".".join(path) for path, name in NESTED if isinstance(name, str)}
    paths["dtype"] = _QUANTIZATION

    def translate(text: str) -> str:
        return re.sub(r"[a-z]\w*", lambda word: paths.get(word[0], word[0]), text)

    return Problem(
        path=translate(problem.path),
        found=problem.found,
        expected=translate(problem.expected),
        remedy=translate(problem.remedy),
    )


def read_flat(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Field values of a flat configuration, and the keys that are not part of it."""
    values = {key: value for key, value in raw.items() if key in FIELDS}
    unknown = (key for key in raw if key not in FIELDS and key not in RUNTIME_KEYS)
    return values, [_unknown(key, FIELDS) for key in unknown]


def read_nested(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Field values of a nested configuration, and everything that is wrong with its form."""
    known = dict(NESTED)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    sections = {path[:depth] for path in known for depth in range(1, len(path))}

    def visit(node: Mapping[str, Any], prefix: Path) -> None:
        for key, value in node.items():
            path = (*prefix, key)
            if path in sections:
                if isinstance(value, Mapping):
                    visit(value, path)
                elif value is not None:
                    problems.append(_not_object(path, value))
            elif path not in known:
                if key not in _METADATA:
                    problems.append(_unknown(".".join(path), map(".".join, known)))
            else:
                target = known[path]
                if isinstance(target, str):
                    values[target] = value
                elif key not in _METADATA and not _same(value, target.value):
                    problems.append(_not_fixed(path, value, target.value))

    visit(raw, ())
    quantised = raw.get(_QUANTIZATION) is not None
    values["dtype"] = "fp8" if quantised else "bf16"
    if not quantised:
        values["expert_dtype"] = None
    text = raw.get("text_config")
    if isinstance(text, Mapping) and text.get("rope_scaling", 0) is None:
        values |= {"original_seq_len": 0, "rope_factor": 1, "beta_fast": 32, "beta_slow": 1}
    return values, problems


def write_flat(values: Mapping[str, Any], omit: frozenset[str]) -> dict[str, Any]:
    """The flat form in the published key order, without the fields named in ``omit``."""
    return {name: _plain(values[name]) for name in FIELDS if name not in omit}


def write_nested(values: Mapping[str, Any], omit: frozenset[str]) -> dict[str, Any]:
    """The nested form in the published key order, without the fields named in ``omit``."""
    skipped = set()
    if values["dtype"] != "fp8":
        skipped.add(_QUANTIZATION)
    if "vision_n_layers" in omit:
        skipped.add("vision_config")
    root: dict[str, Any] = {}
    for path, target in NESTED:
        if path[0] in skipped or (isinstance(target, str) and target in omit):
            continue
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = _plain(values[target] if isinstance(target, str) else target.value)
    return root


def nested_text(nested: Mapping[str, Any]) -> str:
    """JSON text as the published ``config.json``: two spaces, one newline at the end."""
    return json.dumps(nested, indent=2, ensure_ascii=False) + "\n"


def flat_text(flat: Mapping[str, Any]) -> str:
    """JSON text as the published ``inference/config.json``: one key per line, lists inline."""
    lines = (f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in flat.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple | list) else value


def _same(value: object, expected: object) -> bool:
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def _unknown(path: str, known: Iterable[str]) -> Problem:
    section, _, key = path.rpartition(".")
    # Later entries win: a key of the same section is a better guess than one of another.
    ranked = sorted(known, key=lambda name: name.rpartition(".")[0] == section)
    last = {name.rpartition(".")[2]: name for name in ranked}
    close = difflib.get_close_matches(key, last, n=1)
    remedy = f"Did you mean {last[close[0]]}?" if close else "Remove it."
    return Problem(path=path, found="an unknown key", expected="no such key", remedy=remedy)


def _not_object(path: Path, value: object) -> Problem:
    found = type(value).__name__
    return Problem(
        path=".".join(path), found=found, expected="an object", remedy="See the published file."
    )


def _not_fixed(path: Path, value: object, expected: object) -> Problem:
    return Problem(
        path=".".join(path),
        found=json.dumps(value, default=str)[:80],
        expected=json.dumps(expected),
        remedy="This architecture has no other form.",
    )
