"""The released model on the meta device has exactly the tensors of the published files."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor

from cedar.checkpoint.names import TensorSpec, expected_tensors, parameter_map
from cedar.config import ModelConfig, released
from cedar.model import Model, WeightStorage
from cedar.testing import tiny_config

# dtype as files call it: number of tensors, bytes (section 3 of the checkpoint description)
PUBLISHED = {
    "I8": (47_232, 278_585_671_680),
    "F8_E4M3": (357, 204_015_223_296),
    "F8_E8M0": (47_589, 23_563_015_184),
    "BF16": (520, 3_952_883_712),
    "F32": (387, 169_229_128),
}
TENSORS, BYTES = 96_085, 510_286_023_000


@cache
def parameters(config: ModelConfig, storage: WeightStorage) -> dict[str, Tensor]:
    model = Model(config, storage=storage, dtype=torch.bfloat16, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    return dict(model.named_parameters())


def file_dtype(name: str, parameter: Tensor) -> str:
    """The type name in the files of a packed parameter; bytes are FP4 codes or E8M0 scales."""
    if parameter.dtype == torch.uint8:
        return "F8_E8M0" if name.endswith(".scale") else "I8"
    return {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}[
        parameter.dtype
    ]


def stored(config: ModelConfig, form: str, held: dict[str, Tensor]) -> dict[str, TensorSpec]:
    """What the files would hold, from the parameters that the model really has."""
    specs: dict[str, TensorSpec] = {}
    entries = parameter_map(config, form)
    assert {entry.module_name for entry in entries} == set(held)
    for entry in entries:
        parameter = held[entry.module_name]
        shape = tuple(parameter.shape)
        if len(entry.official_names) > 1 or ".experts." in entry.module_name:
            assert shape[0] == len(entry.official_names), entry.module_name
            shape = shape[1:]
        for name in entry.official_names:
            assert name not in specs
            specs[name] = TensorSpec(file_dtype(entry.module_name, parameter), shape)
    return specs


def test_released_inventory() -> None:
    config = released()
    specs = stored(config, "fp8fp4", parameters(config, WeightStorage.PACKED))
    tensors = Counter(spec.dtype for spec in specs.values())
    nbytes: Counter[str] = Counter()
    for spec in specs.values():
        nbytes[spec.dtype] += spec.nbytes
    assert {dtype: (tensors[dtype], nbytes[dtype]) for dtype in tensors} == PUBLISHED
    assert len(specs) == TENSORS
    assert sum(nbytes.values()) == BYTES


def test_bytes_of_the_parameters_themselves() -> None:
    """The same sum without any name: what the model would occupy."""
    held = parameters(released(), WeightStorage.PACKED)
    assert sum(parameter.nbytes for parameter in held.values()) == BYTES


@pytest.mark.parametrize("make", [released, tiny_config])
def test_parameters_are_the_expected_tensors(make: object) -> None:
    """Name, type and shape, one by one, in both storage forms."""
    assert callable(make)
    config = make()
    packed = stored(config, "fp8fp4", parameters(config, WeightStorage.PACKED))
    assert packed == expected_tensors(config, "fp8fp4")
    plain = stored(config, "bf16", parameters(config, WeightStorage.PLAIN))
    assert plain == expected_tensors(config, "bf16")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_mtp_layers": 2, "compress_ratios": released().compress_ratios[:-1]},
        {"vision_n_layers": 31},
        {"n_routed_experts": 383},
        {"index_source_layers": (2, 8, 14, 20, 24, 28, 32)},
        {"dspark_markov_rank": 128},
    ],
)
def test_another_configuration_has_another_inventory(changes: dict[str, object]) -> None:
    """Negative control: every mechanism is counted."""
    from dataclasses import replace

    config = replace(released(), **changes)  # type: ignore[arg-type]
    specs = stored(config, "fp8fp4", parameters(config, WeightStorage.PACKED))
    assert sum(spec.nbytes for spec in specs.values()) != BYTES


def test_a_parameter_without_a_name_is_noticed() -> None:
    config = tiny_config()
    held = parameters(config, WeightStorage.PACKED)
    with pytest.raises(AssertionError):
        stored(config, "fp8fp4", held | {"layers.0.extra": held["embed.weight"]})
    with pytest.raises(AssertionError):
        stored(config, "fp8fp4", {n: p for n, p in held.items() if n != "layers.0.attn.attn_sink"})


@pytest.mark.parametrize("storage", [WeightStorage.QAT, WeightStorage.DEQUANTIZED])
def test_masters_have_the_same_names(storage: WeightStorage) -> None:
    """Floating-point masters: the weights alone, under the names of the packed ones."""
    config = tiny_config()
    packed = parameters(config, WeightStorage.PACKED)
    masters = parameters(config, storage)
    scales = {name for name in packed if name.endswith(".scale")}
    tables = {name for name in scales if ".engram.embed." in name}
    extra = tables if storage is WeightStorage.DEQUANTIZED else set()  # tables stay packed
    assert set(masters) == (set(packed) - scales) | extra
