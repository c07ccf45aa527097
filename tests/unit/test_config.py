"""Configuration: both official forms to the byte, and every problem reported at once."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cedar.config import (
    ConfigProblems,
    ModelConfig,
    engram_primes,
    engram_rows,
    plan_layers,
    released,
    tiny,
)
from cedar.config.fields import FIELDS
from cedar.config.primes import is_prime
from cedar.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
NESTED_SHA = "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879"
FLAT_SHA = "2e84f45cf1dac8c7fcbb200e96667d4b913275690668ed496f24c7747207a809"


def problems_of(raw: dict[str, Any]) -> dict[str, str]:
    """Path -> whole message of every problem of a configuration."""
    with pytest.raises(ConfigProblems) as caught:
        ModelConfig.from_dict(raw)
    return {problem.path: str(problem) for problem in caught.value.problems}


def changed(**changes: Any) -> dict[str, Any]:
    return tiny().to_flat() | changes


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class TestForms:
    def test_released_forms_have_the_published_bytes(self) -> None:
        assert sha(released().nested_json()) == NESTED_SHA
        assert sha(released().flat_json()) == FLAT_SHA

    def test_another_value_gives_other_bytes(self) -> None:
        other = dataclasses.replace(released(), norm_eps=1e-6)
        assert sha(other.nested_json()) != NESTED_SHA
        assert sha(other.flat_json()) != FLAT_SHA

    @pytest.mark.parametrize("make", [released, tiny])
    def test_round_trip_through_both_forms(self, make: Callable[[], ModelConfig]) -> None:
        config = make()
        assert ModelConfig.from_dict(json.loads(config.nested_json())) == config
        assert ModelConfig.from_dict(json.loads(config.flat_json())) == config

    def test_own_extensions_survive_the_round_trip(self) -> None:
        config = dataclasses.replace(tiny(), hc_single_pass=False, gate_temp=0.5, eos_token_id=7)
        assert ModelConfig.from_dict(config.to_nested()) == config
        assert ModelConfig.from_dict(config.to_flat()) == config

    @pytest.mark.parametrize("file", sorted(GOLDEN.glob("mini_*.json")), ids=lambda f: f.name)
    def test_golden_sidecars_are_read(self, file: Path) -> None:
        config = ModelConfig.from_file(file)
        raw = json.loads(file.read_text())["config"]
        for key in ("max_batch_size", "max_seq_len", "temperature"):
            del raw[key]
        got = {name: getattr(config, name) for name in raw}
        assert {k: list(v) if isinstance(v, tuple) else v for k, v in got.items()} == raw
        assert config.storage == ("bf16" if raw["dtype"] == "bf16" else "fp8fp4")

    def test_absent_mechanisms_may_be_left_out(self) -> None:
        raw = tiny().to_flat()
        gone = ("vision", "image", "dspark", "engram", "n_mtp", "candidate")
        raw = {k: v for k, v in raw.items() if not k.startswith(gone)}
        config = ModelConfig.from_dict(raw | {"compress_ratios": raw["compress_ratios"][:12]})
        assert not config.has_vision
        assert not config.has_draft
        assert config.engram_layer_ids == ()
        assert config.candidate_source_layer == -1
        assert ModelConfig.from_dict(config.to_nested()) == config
        assert ModelConfig.from_dict(config.to_flat()) == config
        assert "vision_config" not in config.to_nested()

    def test_window_layers_alone_need_no_index(self) -> None:
        raw = tiny().to_flat()
        raw = {k: v for k, v in raw.items() if not k.startswith(("index", "kv_", "candidate"))}
        config = ModelConfig.from_dict(raw | {"compress_ratios": [0] * 14})
        assert {layer.mode for layer in plan_layers(config)} == {"window"}

    def test_no_rope_scaling_means_no_yarn(self) -> None:
        raw = tiny().to_nested()
        raw["text_config"]["rope_scaling"] = None
        assert not ModelConfig.from_dict(raw).has_yarn
        assert tiny().has_yarn

    def test_directory_and_file_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(tiny().nested_json())
        assert ModelConfig.from_file(tmp_path) == tiny()
        assert ModelConfig.from_file(tmp_path / "config.json") == tiny()

    def test_transformers_metadata_is_harmless(self) -> None:
        raw = tiny().to_nested()
        raw |= {"_name_or_path": "x", "torch_dtype": "bfloat16", "transformers_version": "9.9"}
        raw["text_config"] |= {"initializer_range": 0.5, "use_cache": False}
        assert ModelConfig.from_dict(raw) == tiny()

    def test_field_table_matches_the_class(self) -> None:
        assert [f.name for f in dataclasses.fields(ModelConfig)] == list(FIELDS)

    def test_it_is_frozen_and_hashable(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            tiny().dim = 3  # type: ignore[misc]
        assert len({tiny(), tiny(), released()}) == 2

    def test_with_storage(self) -> None:
        assert tiny().with_storage("bf16").storage == "bf16"
        assert tiny().with_storage("bf16").with_storage("fp8fp4") == tiny()
        with pytest.raises(ConfigError, match="int4"):
            tiny().with_storage("int4")


class TestUnreadable:
    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nowhere\.json.*cannot be read"):
            ModelConfig.from_file(tmp_path / "nowhere.json")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not valid JSON"),
            ("[1]", "JSON list"),
            ('{"dim": 1, "dim": 2}', "dim occur more than once"),
            ("[" * 100_000, "not valid JSON"),
        ],
    )
    def test_broken_json(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "config.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            ModelConfig.from_file(file)

    def test_binary(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_bytes(b"\x80\x04\x95\xff")
        with pytest.raises(ConfigError, match="not valid JSON"):
            ModelConfig.from_file(file)


class TestProblems:
    def test_all_at_once_with_path_found_expected_remedy(self) -> None:
        raw = changed(dim="wide", n_heads=0, head_dim=48, o_groups=3, vocab_sise=5)
        del raw["hc_mult"]
        found = problems_of(raw)
        assert set(found) == {"dim", "n_heads", "vocab_sise", "hc_mult"}
        assert found["dim"] == ("dim: found 'wide'; expected a 64-bit integer. Correct this value.")
        assert "Did you mean vocab_size?" in found["vocab_sise"]
        assert "found nothing" in found["hc_mult"]
        # With n_heads sound again, the rules that read it speak up as well.
        assert set(problems_of(raw | {"n_heads": 4})) == {
            "dim",
            "vocab_sise",
            "hc_mult",
            "head_dim",
            "o_groups",
        }

    def test_message_names_the_file_and_counts(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(changed(dim=-1, n_heads=-1)))
        with pytest.raises(ConfigError, match=r"config\.json: 2 problems"):
            ModelConfig.from_file(file)

    def test_construction_validates_too(self) -> None:
        with pytest.raises(ConfigError, match="o_groups"):
            dataclasses.replace(tiny(), o_groups=3)

    @pytest.mark.parametrize(
        ("changes", "path", "words"),
        [
            ({"dim": True}, "dim", "integer"),
            ({"dim": 64.0}, "dim", "integer"),
            ({"dim": 2**70}, "dim", "64-bit"),
            ({"norm_eps": float("nan")}, "norm_eps", "finite"),
            ({"norm_eps": -1e-6}, "norm_eps", "at least 0"),
            ({"swiglu_limit": 0}, "swiglu_limit", "more than 0"),
            ({"score_func": "relu"}, "score_func", "sqrtsoftplus"),
            ({"compress_ratios": [0, "2"]}, "compress_ratios", "list of integers"),
            ({"dtype": "fp4"}, "dtype", "fp8"),
            ({"expert_dtype": None}, "expert_dtype", "storage forms"),
            ({"n_shared_experts": 2}, "n_shared_experts", "1 to 1"),
            ({"head_dim": 80}, "head_dim", "multiple of 32"),
            ({"rope_head_dim": 15}, "rope_head_dim", "multiple of 2"),
            ({"rope_head_dim": 96}, "rope_head_dim", "at most head_dim"),
            ({"index_head_dim": 48}, "index_head_dim", "multiple of 32"),
            ({"rope_head_dim": 64}, "index_head_dim", "at least rope_head_dim"),
            ({"o_groups": 3}, "o_groups", "divisor of n_heads"),
            ({"dim": 72}, "dim", "multiple of 32"),
            ({"q_lora_rank": 40}, "q_lora_rank", "multiple of 32"),
            ({"moe_inter_dim": 40}, "moe_inter_dim", "multiple of 32"),
            ({"o_lora_rank": 24}, "o_groups * o_lora_rank", "multiple of 32"),
            ({"n_activated_experts": 9}, "n_activated_experts", "at most n_routed_experts"),
            ({"beta_fast": 0.5}, "beta_fast", "at least beta_slow"),
            ({"kv_source_layers": [4, 2, 6]}, "kv_source_layers", "ascending"),
            ({"kv_source_layers": [2, 2, 4, 6]}, "kv_source_layers", "without repetition"),
            ({"index_source_layers": [2, 4, 6, 12]}, "index_source_layers[3]", "0 to 11"),
            ({"kv_source_layers": [2, 3, 4, 6]}, "kv_source_layers[1]", "index_source_layers"),
            ({"kv_source_layers": [4, 6]}, "compress_ratios[2]", "no kv source precedes"),
            ({"kv_source_layers": [2, 4]}, "compress_ratios[6]", "2, the ratio of its kv source"),
            ({"compress_ratios": [0] * 12}, "compress_ratios", "14 entries"),
            (
                {"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 1]},
                "compress_ratios[13]",
                "window only",
            ),
            (
                {"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 0, 1, 1, 1, 0, 0]},
                "index_source_layers[3]",
                "window layer",
            ),
            ({"candidate_source_layer": 7}, "candidate_source_layer", "index_source_layers"),
            ({"candidate_source_layer": -2}, "candidate_source_layer", "at least -1"),
            ({"candidate_source_layer": 4}, "index_source_layers[2]", "a layer of ratio 2"),
            ({"candidate_topk_blocks": 0}, "candidate_topk_blocks", "1 to"),
            ({"engram_layer_ids": [1, 12]}, "engram_layer_ids[1]", "0 to 11"),
            ({"engram_head_dim": 16}, "engram_head_dim", "multiple of 32"),
            ({"engram_num_embeddings": [630]}, "engram_num_embeddings", "2 numbers"),
            ({"engram_num_embeddings": [630, 833]}, "engram_num_embeddings", "[630, 834]"),
            ({"engram_pad_id": 512}, "engram_pad_id", "0 to 511"),
            ({"engram_max_ngram_size": 1}, "engram_max_ngram_size", "2 to"),
            ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids", "at least one layer"),
            ({"dspark_target_layer_ids": [12]}, "dspark_target_layer_ids[0]", "0 to 11"),
            ({"dspark_noise_token_id": 512}, "dspark_noise_token_id", "0 to 511"),
            ({"dspark_n_activated_experts": 5}, "dspark_n_activated_experts", "at most"),
            ({"vision_dim": 36}, "vision_dim", "multiple of 4 * vision_n_heads"),
            ({"image_token_id": 512}, "image_token_id", "0 to 511"),
            ({"vision_max_n_token": 3}, "vision_max_n_token", "4 to"),
            ({"eos_token_id": 512}, "eos_token_id", "0 to 511"),
            ({"vision_n_layers": 10**12}, "vision_n_layers", "0 to 4096"),
        ],
    )
    def test_each_rule(self, changes: dict[str, Any], path: str, words: str) -> None:
        found = problems_of(changed(**changes))
        assert path in found
        assert words in found[path]

    def test_required_only_where_the_mechanism_is_present(self) -> None:
        raw = tiny().to_flat()
        for name in ("dspark_block_size", "vision_dim", "engram_n_heads", "index_topk"):
            del raw[name]
        found = problems_of(raw)
        assert set(found) == {"dspark_block_size", "vision_dim", "engram_n_heads", "index_topk"}
        assert "or set n_mtp_layers to 0" in found["dspark_block_size"]

    def test_nested_problems_use_nested_names(self) -> None:
        raw = tiny().to_nested()
        text = raw["text_config"]
        text |= {"hidden_sise": 1, "head_dim": 48, "tie_word_embeddings": True}
        text["rope_scaling"]["beta_fast"] = 0
        del text["num_attention_heads"]
        raw["vision_config"]["hidden_size"] = 1
        raw["vision_config"]["depth"] = 1
        found = problems_of(raw)
        assert set(found) == {
            "text_config.hidden_sise",
            "text_config.tie_word_embeddings",
            "text_config.rope_scaling.beta_fast",
            "text_config.num_attention_heads",
            "vision_config.hidden_size",
            "vision_config.depth",
        }
        assert "Did you mean text_config.hidden_size?" in found["text_config.hidden_sise"]

    def test_nested_section_of_a_wrong_type(self) -> None:
        found = problems_of({"text_config": 3})
        assert "text_config" in found
        assert "text_config.vocab_size" in found

    def test_other_architectures_are_refused(self) -> None:
        raw = tiny().to_nested()
        raw["model_type"] = "deepseek_v4"
        raw["text_config"]["num_hash_layers"] = 3
        raw["quantization_config"]["weight_block_size"] = [128, 128]
        assert set(problems_of(raw)) == {
            "model_type",
            "text_config.num_hash_layers",
            "quantization_config.weight_block_size",
        }


class TestNotOverConstrained:
    """Configurations unlike the released one that the architecture defines all the same."""

    @pytest.mark.parametrize(
        "changes",
        [
            {"hc_mult": 2, "hc_sinkhorn_iters": 1},
            {"o_groups": 1},
            {"o_groups": 4, "o_lora_rank": 8},
            {"window_size": 1},
            {"index_topk": 1, "candidate_topk_blocks": 1, "candidate_block_size": 1},
            {"candidate_source_layer": -1},
            {"candidate_source_layer": 8},
            {"kv_source_layers": [2, 4, 6, 8]},
            {"score_func": "softmax"},
            {"score_func": "sigmoid", "norm_topk_prob": False},
            {"compress_ratios": [0, 0, 3, 3, 5, 5, 7, 7, 7, 7, 7, 7, 0, 0]},
            {"compress_ratios": [0, 0, 2, 0, 2, 2, 1, 0, 1, 1, 0, 1, 0, 0]},
            {"rope_head_dim": 2},
            {"rope_theta": 500.5, "rope_factor": 2.5},
            {"dim": 96},
            {"dspark_target_layer_ids": [0]},
            {"engram_layer_ids": [0, 11]},
            {"vision_max_wh_ratio": 4},
            {"norm_eps": 0, "hc_eps": 0},
        ],
    )
    def test_accepted(self, changes: dict[str, Any]) -> None:
        config = ModelConfig.from_dict(changed(**changes))
        assert len(plan_layers(config)) == 14
        assert ModelConfig.from_dict(config.to_nested()) == config

    def test_bf16_needs_no_blocks_of_32(self) -> None:
        raw = changed(dtype="bf16", expert_dtype=None, dim=72, q_lora_rank=40, moe_inter_dim=10)
        assert ModelConfig.from_dict(raw).dim == 72
        with pytest.raises(ConfigError, match="multiple of 32"):
            ModelConfig.from_dict(raw).with_storage("fp8fp4")

    def test_odd_number_of_layers_and_one_source(self) -> None:
        raw = changed(
            n_layers=5,
            compress_ratios=[0, 4, 4, 4, 4, 0, 0],
            kv_source_layers=[1],
            index_source_layers=[1, 3],
            candidate_source_layer=1,
            dspark_target_layer_ids=[4],
            engram_layer_ids=[],
            engram_num_embeddings=[],
        )
        assert len(plan_layers(ModelConfig.from_dict(raw))) == 7


class TestPrimes:
    def test_released_rows(self) -> None:
        assert engram_rows(16_000_000, 2, 4, 8) == (384_006_168, 384_016_682)
        primes = engram_primes(16_000_000, 2, 4, 8)
        assert primes[0][0][:3] == (16_000_057, 16_000_079, 16_000_081)
        assert primes[1][0][0] == 16_000_477

    def test_no_prime_is_used_twice(self) -> None:
        flat = [p for layer in engram_primes(97, 3, 4, 2) for order in layer for p in order]
        assert len(set(flat)) == len(flat) == 18
        assert min(flat) == 97

    def test_against_trial_division(self) -> None:
        by_trial = [n for n in range(2, 2000) if all(n % d for d in range(2, int(n**0.5) + 1))]
        assert [n for n in range(2000) if is_prime(n)] == by_trial
        assert not is_prime(3_215_031_751)  # fools the witnesses 2, 3, 5 and 7
