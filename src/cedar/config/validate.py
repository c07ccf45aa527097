"""All problems of a configuration at once, each with its path, what was found and the remedy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cedar.config.fields import FIELDS, active_groups
from cedar.config.plan import latest_source
from cedar.config.primes import engram_rows
from cedar.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong: where, what was found, what was expected, what to do."""

    path: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: found {self.found}; expected {self.expected}. {self.remedy}"


class ConfigProblems(ConfigError):
    """A configuration that cannot be used; ``problems`` holds every single reason."""

    def __init__(self, where: str, problems: Iterable[Problem]) -> None:
        self.where = where
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{where}: {count} problem{'s' if count != 1 else ''} in the model configuration"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


Values = Mapping[str, Any]
_Rule = Callable[[Values], Iterator[Problem]]


def find_problems(values: Values, missing: Iterable[str] = ()) -> list[Problem]:
    """Every problem of a set of flat field values.

    ``missing`` names fields that have no value; they are reported only if their mechanism is
    present. Rules between fields are checked where all fields they read are sound.
    """
    active = active_groups(values)
    absent = set(missing)
    unsound = set(absent)
    problems = []
    for name, field in FIELDS.items():
        if name in absent:
            if field.group in active:
                problems.append(_missing(name, field.type_text(), field.group))
            continue
        value = values[name]
        expected = None if field.has_type(value) else field.type_text()
        if expected is None and field.group in active:
            expected = field.range_text(value)
        if expected is not None:
            unsound.add(name)
            problems.append(
                Problem(
                    path=name, found=_show(value), expected=expected, remedy="Correct this value."
                )
            )
    for group, fields, rule in _RULES:
        if group in active and not unsound.intersection(fields):
            problems.extend(rule(values))
    return problems


def _missing(name: str, expected: str, group: str) -> Problem:
    switch = {
        "vision": " or set vision_n_layers to 0",
        "draft": " or set n_mtp_layers to 0",
        "engram": " or set engram_layer_ids to []",
        "candidates": " or set candidate_source_layer to -1",
    }.get(group, "")
    return Problem(path=name, found="nothing", expected=expected, remedy=f"Add {name}{switch}.")


def _show(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _problem(path: str, found: object, expected: str, remedy: str) -> Problem:
    return Problem(path=path, found=_show(found), expected=expected, remedy=remedy)


def _multiple(v: Values, name: str, of: int, why: str) -> Iterator[Problem]:
    if v[name] % of:
        yield _problem(name, v[name], f"a multiple of {of}", why)


def _ascending(v: Values, name: str) -> Iterator[Problem]:
    ids, layers = v[name], v["n_layers"]
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        yield _problem(name, ids, "ascending numbers without repetition", f"Sort {name}.")
    for index, layer in enumerate(ids):
        if layer >= layers:
            path = f"{name}[{index}]"
            yield _problem(path, layer, f"a layer 0 to {layers - 1}", "Name a backbone layer.")


def _attention(v: Values) -> Iterator[Problem]:
    if v["n_heads"] % v["o_groups"]:
        expected = f"a divisor of n_heads ({v['n_heads']})"
        yield _problem("o_groups", v["o_groups"], expected, "Heads are cut into equal groups.")
    yield from _multiple(v, "head_dim", 32, "The window KV is stored in FP8 blocks of 32.")
    yield from _multiple(v, "rope_head_dim", 2, "Rotary channels come in pairs.")
    if v["rope_head_dim"] > v["head_dim"]:
        expected = f"at most head_dim ({v['head_dim']})"
        yield _problem("rope_head_dim", v["rope_head_dim"], expected, "Rotate part of a head.")


def _index_width(v: Values) -> Iterator[Problem]:
    yield from _multiple(v, "index_head_dim", 32, "Index keys are stored in FP4 blocks of 32.")
    if v["rope_head_dim"] > v["index_head_dim"]:
        expected = f"at least rope_head_dim ({v['rope_head_dim']})"
        remedy = "The last rope_head_dim channels of an index key are rotated."
        yield _problem("index_head_dim", v["index_head_dim"], expected, remedy)


def _yarn(v: Values) -> Iterator[Problem]:
    if v["beta_fast"] < v["beta_slow"]:
        expected = f"at least beta_slow ({v['beta_slow']})"
        yield _problem("beta_fast", v["beta_fast"], expected, "Swap beta_fast and beta_slow.")


def _experts(v: Values) -> Iterator[Problem]:
    yield from _active_experts(v, "n_activated_experts", "n_routed_experts")


def _draft_experts(v: Values) -> Iterator[Problem]:
    yield from _active_experts(v, "dspark_n_activated_experts", "dspark_n_routed_experts")


def _active_experts(v: Values, active: str, routed: str) -> Iterator[Problem]:
    if v[active] > v[routed]:
        expected = f"at most {routed} ({v[routed]})"
        yield _problem(active, v[active], expected, "A token cannot use more experts than exist.")


def _storage(v: Values) -> Iterator[Problem]:
    if (v["dtype"], v["expert_dtype"]) not in (("fp8", "fp4"), ("bf16", None)):
        expected = 'dtype "fp8" with expert_dtype "fp4", or "bf16" with null'
        found = f"{v['dtype']} with {_show(v['expert_dtype'])}"
        remedy = "These are the two storage forms of a checkpoint."
        yield Problem(path="expert_dtype", found=found, expected=expected, remedy=remedy)


def _quantised_inputs(v: Values) -> Iterator[Problem]:
    if v["dtype"] != "fp8":
        return
    why = "In fp8/fp4 storage the inputs of this width are quantised in blocks of 32."
    for name in ("dim", "q_lora_rank", "moe_inter_dim"):
        yield from _multiple(v, name, 32, why)
    if v["o_groups"] * v["o_lora_rank"] % 32:
        found = v["o_groups"] * v["o_lora_rank"]
        yield _problem("o_groups * o_lora_rank", found, "a multiple of 32", why)


def _sources(v: Values) -> Iterator[Problem]:
    yield from _ascending(v, "kv_source_layers")
    yield from _ascending(v, "index_source_layers")
    for index, layer in enumerate(v["kv_source_layers"]):
        if layer not in v["index_source_layers"]:
            expected = f"a member of index_source_layers {_show(v['index_source_layers'])}"
            remedy = "A layer that writes main KV also makes its own selection."
            yield _problem(f"kv_source_layers[{index}]", layer, expected, remedy)


def _ratios(v: Values) -> Iterator[Problem]:
    ratios, layers, drafts = v["compress_ratios"], v["n_layers"], v["n_mtp_layers"]
    if len(ratios) != layers + drafts:
        expected = f"n_layers + n_mtp_layers = {layers + drafts} entries"
        remedy = "Give one ratio per backbone layer, then a 0 per draft block."
        yield _problem("compress_ratios", list(ratios), expected, remedy)
    for index in range(layers, min(len(ratios), layers + drafts)):
        if ratios[index]:
            remedy = "Draft blocks attend to their window only."
            yield _problem(f"compress_ratios[{index}]", ratios[index], "0", remedy)
    for name in ("kv_source_layers", "index_source_layers"):
        for index, layer in enumerate(v[name]):
            if layer < min(layers, len(ratios)) and ratios[layer] == 0:
                expected = "a layer whose compress_ratios entry is not 0"
                remedy = f"Layer {layer} is a window layer; it has no entries to offer."
                yield _problem(f"{name}[{index}]", layer, expected, remedy)
    yield from _readers(ratios[:layers], v["kv_source_layers"])


def _readers(ratios: tuple[int, ...], sources: tuple[int, ...]) -> Iterator[Problem]:
    for layer, ratio in enumerate(ratios):
        if ratio == 0:
            continue
        source = latest_source(sources, layer)
        path = f"compress_ratios[{layer}]"
        if source is None:
            expected = "0, as no kv source precedes this layer"
            yield _problem(path, ratio, expected, "Check kv_source_layers.")
        elif source < len(ratios) and ratios[source] not in (0, ratio):
            expected = f"{ratios[source]}, the ratio of its kv source (layer {source})"
            remedy = "A group must share one ratio. Check kv_source_layers."
            yield _problem(path, ratio, expected, remedy)


def _candidates(v: Values) -> Iterator[Problem]:
    source, sources, ratios = (
        v["candidate_source_layer"],
        v["index_source_layers"],
        v["compress_ratios"],
    )
    if source not in sources:
        expected = f"-1 or a member of index_source_layers {_show(sources)}"
        remedy = "Only a layer that scores entries can choose candidate blocks."
        yield _problem("candidate_source_layer", source, expected, remedy)
        return
    if source >= len(ratios):
        return
    for index, layer in enumerate(sources):
        if source < layer < len(ratios) and ratios[layer] not in (0, ratios[source]):
            expected = f"a layer of ratio {ratios[source]}, as layer {source} that builds the pool"
            remedy = "Candidate blocks count entries; entries of another ratio do not match them."
            yield _problem(f"index_source_layers[{index}]", layer, expected, remedy)


def _engram(v: Values) -> Iterator[Problem]:
    yield from _ascending(v, "engram_layer_ids")
    yield from _multiple(
        v, "engram_head_dim", 32, "Engram rows have one FP8 scale per 32 channels."
    )
    if v["engram_pad_id"] >= v["vocab_size"]:
        yield _token(v, "engram_pad_id")


def _engram_rows(v: Values) -> Iterator[Problem]:
    layers, found = v["engram_layer_ids"], v["engram_num_embeddings"]
    if len(found) != len(layers):
        expected = f"{len(layers)} numbers, one per engram_layer_ids entry"
        yield _problem(
            "engram_num_embeddings", found, expected, "Give the row count of each table."
        )
        return
    if len(layers) * v["engram_max_ngram_size"] * v["engram_n_heads"] > 100_000:
        return  # too many primes to search for a mere check; the tables themselves will tell
    rows = engram_rows(
        v["engram_vocab_size"], len(layers), v["engram_max_ngram_size"], v["engram_n_heads"]
    )
    if tuple(found) != rows:
        expected = f"{_show(rows)}, the sums of the hash primes"
        remedy = "Check engram_vocab_size, engram_max_ngram_size and engram_n_heads too."
        yield _problem("engram_num_embeddings", found, expected, remedy)


def _draft(v: Values) -> Iterator[Problem]:
    yield from _ascending(v, "dspark_target_layer_ids")
    if not v["dspark_target_layer_ids"]:
        remedy = "Name the layers whose inputs the draft head reads."
        yield _problem("dspark_target_layer_ids", (), "at least one layer", remedy)
    if v["dspark_noise_token_id"] >= v["vocab_size"]:
        yield _token(v, "dspark_noise_token_id")


def _vision(v: Values) -> Iterator[Problem]:
    heads, width = v["vision_n_heads"], v["vision_dim"]
    if width % (4 * heads):
        expected = f"a multiple of 4 * vision_n_heads ({4 * heads})"
        remedy = "A head holds rotary pairs for rows and for columns."
        yield _problem("vision_dim", width, expected, remedy)
    if v["image_token_id"] >= v["vocab_size"]:
        yield _token(v, "image_token_id")


def _special_tokens(v: Values) -> Iterator[Problem]:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if v[name] >= v["vocab_size"]:
            yield _token(v, name)


def _token(v: Values, name: str) -> Problem:
    expected = f"a token id 0 to {v['vocab_size'] - 1}"
    return _problem(name, v[name], expected, "Check it against vocab_size and the tokenizer.")


_RULES: tuple[tuple[str, tuple[str, ...], _Rule], ...] = (
    ("core", ("n_heads", "o_groups", "head_dim", "rope_head_dim"), _attention),
    ("core", ("n_routed_experts", "n_activated_experts"), _experts),
    ("core", ("dtype", "expert_dtype"), _storage),
    (
        "core",
        ("dtype", "dim", "q_lora_rank", "moe_inter_dim", "o_groups", "o_lora_rank"),
        _quantised_inputs,
    ),
    ("core", ("kv_source_layers", "index_source_layers", "n_layers"), _sources),
    (
        "core",
        ("compress_ratios", "n_layers", "n_mtp_layers", "kv_source_layers", "index_source_layers"),
        _ratios,
    ),
    ("core", ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"), _special_tokens),
    ("compressed", ("index_head_dim", "rope_head_dim"), _index_width),
    ("compressed", ("beta_fast", "beta_slow"), _yarn),
    (
        "candidates",
        ("candidate_source_layer", "index_source_layers", "compress_ratios"),
        _candidates,
    ),
    (
        "engram",
        (
            "engram_layer_ids",
            "engram_head_dim",
            "engram_pad_id",
            "vocab_size",
            "n_layers",
        ),
        _engram,
    ),
    (
        "engram",
        (
            "engram_layer_ids",
            "engram_num_embeddings",
            "engram_vocab_size",
            "engram_max_ngram_size",
            "engram_n_heads",
        ),
        _engram_rows,
    ),
    (
        "draft",
        ("dspark_target_layer_ids", "n_layers", "dspark_noise_token_id", "vocab_size"),
        _draft,
    ),
    ("draft", ("dspark_n_routed_experts", "dspark_n_activated_experts"), _draft_experts),
    ("vision", ("vision_n_heads", "vision_dim", "image_token_id", "vocab_size"), _vision),
)
