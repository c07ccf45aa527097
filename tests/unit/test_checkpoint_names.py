"""The names table: bijective, complete, and equal to what real files hold."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from cedar.checkpoint import TensorSpec, expected_tensors, parameter_map
from cedar.checkpoint.names import ITEM_BYTES, accepted_shapes, optional_tensors
from cedar.checkpoint.read import _TORCH_TYPES
from cedar.config import ModelConfig, released, tiny
from cedar.errors import CheckpointError
from cedar.model import Model, WeightStorage

GOLDEN = Path(__file__).parents[1] / "golden"
SIDECAR_TYPES = {
    "bfloat16": "BF16",
    "float32": "F32",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
}


@pytest.mark.parametrize("storage", ["fp8fp4", "bf16"])
@pytest.mark.parametrize("config", [tiny(), released()], ids=["tiny", "released"])
def test_parameter_map_is_bijective(config: ModelConfig, storage: str) -> None:
    entries = parameter_map(config, storage)
    official = [name for entry in entries for name in entry.official_names]
    assert len(set(official)) == len(official)
    assert set(official) == set(expected_tensors(config, storage))
    assert len({entry.module_name for entry in entries}) == len(entries)


def test_only_routed_experts_are_renamed() -> None:
    for entry in parameter_map(tiny(), "fp8fp4"):
        if ".ffn.experts." in entry.module_name:
            first = entry.module_name.replace(".experts.", ".experts.0.")
            assert entry.official_names[0] == first
            assert len(entry.official_names) in (4, 8)
        else:
            assert entry.official_names == (entry.module_name,)


@pytest.mark.parametrize("storage", ["bf16", "fp8fp4"])
def test_golden_checkpoints_hold_exactly_these(storage: str) -> None:
    file = GOLDEN / f"mini_{storage}.weights.json"
    listed = json.loads(file.read_text())["tensors"]
    found = {n: TensorSpec(SIDECAR_TYPES[t], tuple(s)) for n, (t, s) in listed.items()}
    assert expected_tensors(ModelConfig.from_file(file), storage) == found


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wq_a.weight", "F8_E4M3", (1280, 5120)),
        ("layers.0.attn.wq_a.scale", "F8_E8M0", (40, 160)),
        ("layers.39.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.7.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.7.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.2.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.q_weight", "BF16", (4, 5120)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("image_newline", "BF16", (5120,)),
    ],
)
def test_released_rows_of_the_inventory(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert expected_tensors(released(), "fp8fp4")[name] == TensorSpec(dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # a group of one needs no gate
        "layers.24.attn.indexer.wk.weight",  # reads the keys of layer 20
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.attn.compressor.wkv.scale",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
        "layers.0.engram.embed.weight",
        "layers.40.attn_norm.weight",
    ],
)
def test_released_has_no(name: str) -> None:
    assert name not in expected_tensors(released(), "fp8fp4")


def test_group_totals_of_the_released_files() -> None:
    expected = expected_tensors(released(), "fp8fp4")
    groups = {
        "experts": [n for n in expected if n.startswith("layers.") and ".ffn.experts." in n],
        "engram": [n for n in expected if ".engram." in n],
        "draft": [n for n in expected if n.startswith("mtp.")],
        "vision": [n for n in expected if n.startswith(("vision.", "aligner.", "image_"))],
    }
    assert {k: len(v) for k, v in groups.items()} == {
        "experts": 92_160,
        "engram": 12,
        "draft": 2_401,
        "vision": 266,
    }
    sizes = {k: sum(expected[n].nbytes for n in v) for k, v in groups.items()}
    assert sizes["experts"] == 288_777_830_400
    assert sizes["engram"] == 203_073_076_240


def test_blocks_at_the_edge_have_a_scale() -> None:
    config = dataclasses.replace(tiny(), o_lora_rank=48, vocab_size=510, n_heads=2)
    expected = expected_tensors(config, "fp8fp4")
    assert expected["layers.0.attn.wo_a.weight"].shape == (96, 64)
    index = dataclasses.replace(config, index_n_heads=3, index_head_dim=32)
    assert expected_tensors(index, "fp8fp4")["layers.2.attn.indexer.wq_b.scale"].shape == (3, 2)
    engram = dataclasses.replace(config, hc_mult=1)
    assert expected_tensors(engram, "fp8fp4")["layers.1.engram.wkv.scale"].shape == (4, 6)


def test_both_forms_of_the_patch_embedding() -> None:
    shapes = accepted_shapes(released(), "vision.patch_embed.proj.weight", (1024, 588))
    assert shapes == {(1024, 588), (1024, 3, 14, 14)}
    assert accepted_shapes(released(), "vision.norm.weight", (1024,)) == {(1024,)}


def test_nothing_is_optional_with_a_tower() -> None:
    assert optional_tensors(released()) == frozenset()


@pytest.mark.parametrize("config", [tiny(), released()], ids=["tiny", "released"])
@pytest.mark.parametrize("storage", [WeightStorage.PACKED, WeightStorage.PLAIN], ids=str)
def test_a_built_model_has_exactly_these_tensors(
    config: ModelConfig, storage: WeightStorage
) -> None:
    """On the meta device: same names, and byte for byte the size of a checkpoint."""
    form = "fp8fp4" if storage is WeightStorage.PACKED else "bf16"
    model = Model(config, storage=storage, dtype=torch.bfloat16, device=torch.device("meta"))
    tensors = model.state_dict()
    entries = parameter_map(config, form)
    assert tensors.keys() == {entry.module_name for entry in entries}
    expected = expected_tensors(config, form)
    for entry in entries:
        stored = sum(expected[name].nbytes for name in entry.official_names)
        assert tensors[entry.module_name].nbytes == stored, entry.module_name


def test_type_tables_agree() -> None:
    assert _TORCH_TYPES.keys() == ITEM_BYTES.keys()
    assert all(_TORCH_TYPES[name].itemsize == size for name, size in ITEM_BYTES.items())


def test_unknown_storage() -> None:
    with pytest.raises(CheckpointError, match='"int4"; expected "fp8fp4" or "bf16"'):
        expected_tensors(tiny(), "int4")
