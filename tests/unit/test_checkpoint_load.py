"""Filling model tensors from golden files: raw codes, exact numbers, strict names."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_setting import GOLDEN, random_tensors, tiny_without_extras
from torch import Tensor

from cedar.checkpoint import Checkpoint, Kind, fill, parameter_map, save_checkpoint, weights
from cedar.checkpoint.names import Storage
from cedar.config import ModelConfig
from cedar.errors import CheckpointError
from cedar.quant import Element

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def golden(storage: str) -> tuple[ModelConfig, Path]:
    sidecar = GOLDEN / f"mini_{storage}.weights.json"
    return ModelConfig.from_file(sidecar), sidecar.with_suffix(".safetensors")


def float_targets(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {w.name: torch.full(w.shape, torch.nan, dtype=dtype) for w in weights(config)}


def packed_targets(config: ModelConfig, storage: Storage) -> dict[str, Tensor]:
    targets = {}
    for weight in weights(config):
        fmt = weight.kind.block_format(storage)
        spec, scale = weight.specs(storage)
        stack = weight.shape[: len(weight.shape) - len(weight.stored_shape)]
        if fmt is None or scale is None:
            targets[weight.name] = torch.full(weight.shape, torch.nan)
        else:
            kind = torch.float8_e4m3fn if fmt.element is Element.E4M3 else torch.uint8
            targets[weight.name] = torch.zeros((*stack, *spec.shape), dtype=kind)
            targets[weight.scale_name] = torch.zeros((*stack, *scale.shape), dtype=torch.uint8)
    return targets


def by_hand(codes: Tensor, scale: Tensor, kind: Kind) -> Tensor:
    """Dequantisation element by element, written without the library."""
    factors = torch.pow(2.0, scale.double() - 127)
    if kind is Kind.EXPERT:
        table = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)
        raw = codes.view(torch.uint8).long()
        values = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=torch.float64)
        values[:, 0::2], values[:, 1::2] = table[raw % 16], table[raw // 16]
    else:
        values = codes.double()
    rows, columns = torch.meshgrid(*map(torch.arange, values.shape), indexing="ij")
    return values * factors[rows // 32 if kind is Kind.DENSE else rows, columns // 32]


def test_numbers_from_quantised_files() -> None:
    config, path = golden("fp8fp4")
    targets = float_targets(config)
    with Checkpoint.open(path) as checkpoint:
        fill(targets, checkpoint, config)
        for weight in weights(config):
            names = weight.official_names(weight.name)
            for number, name in enumerate(names):
                got = targets[weight.name]
                got = got[number] if weight.kind is Kind.EXPERT else got
                expected = checkpoint.read(name).double()
                if weight.kind.block_format("fp8fp4") is not None:
                    scale = checkpoint.read(name.removesuffix("weight") + "scale")
                    expected = by_hand(checkpoint.read(name), scale, weight.kind)
                assert torch.equal(got.double(), expected), name


def test_codes_arrive_bit_for_bit() -> None:
    config, path = golden("fp8fp4")
    targets = packed_targets(config, "fp8fp4")
    with Checkpoint.open(path) as checkpoint:
        fill(targets, checkpoint, config)
        for entry in parameter_map(config, "fp8fp4"):
            got = targets[entry.module_name]
            stacked = ".ffn.experts." in entry.module_name
            for number, name in enumerate(entry.official_names):
                part = got[number] if stacked else got
                stored = checkpoint.read(name)
                if stored.dtype.itemsize == 1:
                    part, stored = part.view(torch.uint8), stored.view(torch.uint8)
                same = torch.equal(part, stored.to(part.dtype).reshape(part.shape))
                assert same, name


def test_bf16_files_with_their_fp8_tables() -> None:
    config, path = golden("bf16")
    plain = packed_targets(config, "bf16")
    assert plain["layers.1.engram.embed.weight"].dtype == torch.float8_e4m3fn
    numbers = float_targets(config, torch.bfloat16)
    with Checkpoint.open(path) as checkpoint:
        fill(plain, checkpoint, config)
        fill(numbers, checkpoint, config)
        table = checkpoint.read("layers.1.engram.embed.weight")
        scale = checkpoint.read("layers.1.engram.embed.scale")
        w1 = checkpoint.read("layers.3.ffn.experts.5.w1.weight")
    assert torch.equal(plain["layers.3.ffn.experts.w1.weight"][5], w1.float())
    expected = by_hand(table, scale, Kind.TABLE).to(torch.bfloat16)
    assert torch.equal(numbers["layers.1.engram.embed.weight"], expected)
    assert all(torch.isfinite(tensor).all() for tensor in numbers.values())


def test_parameters_that_require_gradients_are_filled() -> None:
    config, path = golden("bf16")
    targets = {k: torch.nn.Parameter(v) for k, v in float_targets(config).items()}
    with Checkpoint.open(path) as checkpoint:
        fill(targets, checkpoint, config)
    assert torch.isfinite(targets["head.weight"]).all()
    assert targets["head.weight"].requires_grad


def test_every_problem_of_the_targets_in_one_error() -> None:
    config, path = golden("fp8fp4")
    targets = packed_targets(config, "fp8fp4")
    del targets["norm.weight"]
    del targets["layers.0.attn.wkv.scale"]
    targets["nonsense"] = torch.zeros(1)
    targets["head.weight"] = torch.zeros(3, 3)
    targets["layers.0.attn.wq_a.weight"] = torch.zeros(64, 64, dtype=torch.uint8)
    targets["layers.0.attn.wq_b.scale"] = torch.zeros(1, 1, dtype=torch.uint8)
    targets["embed.weight"] = torch.empty(512, 64, device="meta")
    untouched = targets["layers.0.attn_norm.weight"].clone()
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError) as caught:
        fill(targets, checkpoint, config)
    lines = str(caught.value).splitlines()[1:]
    for name in (
        "norm.weight: in the files",
        "layers.0.attn.wkv.scale: the model has codes but no scales",
        "nonsense: the model has this tensor",
        "head.weight: found shape [3, 3]",
        "layers.0.attn.wq_a.weight: found type torch.uint8",
        "layers.0.attn.wq_b.scale: found torch.uint8 [1, 1]; expected uint8 [8, 2]",
        "embed.weight: the model's tensor has no memory",
    ):
        assert any(line.strip().startswith(name) for line in lines), name
    assert len(lines) == 7
    assert torch.equal(targets["layers.0.attn_norm.weight"].isnan(), untouched.isnan())


def test_a_scale_beside_numbers_is_refused() -> None:
    config, path = golden("fp8fp4")
    targets = float_targets(config)
    targets["layers.0.attn.wkv.scale"] = torch.zeros(2, 2, dtype=torch.uint8)
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.scale"),
    ):
        fill(targets, checkpoint, config)


def test_codes_cannot_come_from_plain_files() -> None:
    config, path = golden("bf16")
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(CheckpointError, match="cedar convert"),
    ):
        fill(packed_targets(config, "fp8fp4"), checkpoint, config)


def test_skip_names_and_prefixes() -> None:
    config, path = golden("fp8fp4")
    table = "layers.1.engram.embed.weight"
    targets = float_targets(config)
    left = {name: t for name, t in targets.items() if not name.startswith("mtp.") and name != table}
    with Checkpoint.open(path) as checkpoint:
        with pytest.raises(CheckpointError, match=r"mtp\.0"):
            fill(left, checkpoint, config)
        fill(left, checkpoint, config, skip={"mtp.", table})
        fill(targets, checkpoint, config, skip={"mtp.", table})
    assert targets[table].isnan().all()
    assert targets["mtp.0.attn.wkv.weight"].isnan().all()
    assert torch.isfinite(left["layers.4.engram.embed.weight"]).all()


def test_configuration_of_another_model() -> None:
    config, path = golden("fp8fp4")
    raw = config.to_flat() | {"dim": 96, "n_routed_experts": 7}
    other = ModelConfig.from_dict(raw)
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError) as caught:
        fill(float_targets(other), checkpoint, other)
    message = str(caught.value)
    assert "\n  unexpected: layers." in message
    assert "misshapen: embed.weight: found BF16 [512, 64]; expected BF16 [512, 96]" in message
    assert "misshapen: ... and" in message.splitlines()[-1]


def test_not_a_number_in_the_weights(tmp_path: Path) -> None:
    config, path = golden("bf16")
    whole = bytearray(path.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    at = json.loads(whole[8 : 8 + length])["norm.weight"]["data_offsets"][0] + 8 + length
    whole[at : at + 2] = b"\xff\x7f"
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(whole)
    with (
        Checkpoint.open(damaged) as checkpoint,
        pytest.raises(CheckpointError, match=r"damaged\.safetensors: tensor 'norm\.weight'.*NaN"),
    ):
        fill(float_targets(config), checkpoint, config)


def test_patch_embedding_as_a_kernel(tmp_path: Path) -> None:
    config, path = golden("bf16")
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["vision.patch_embed.proj.weight"]["shape"] = [32, 3, 14, 14]
    text = json.dumps(header).encode()
    other = tmp_path / "x.safetensors"
    other.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    first, second = float_targets(config), float_targets(config)
    for file, targets in ((path, first), (other, second)):
        with Checkpoint.open(file) as checkpoint:
            fill(targets, checkpoint, config)
    name = "vision.patch_embed.proj.weight"
    assert torch.equal(first[name], second[name])


def test_image_bias_is_optional_without_a_tower(tmp_path: Path) -> None:
    config = tiny_without_extras()
    save_checkpoint(tmp_path, config, random_tensors(config), "bf16")
    (file,) = tmp_path.glob("*.safetensors")
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    # The same bytes under a header without one bias, whose payload is cut out.
    gone = "layers.3.ffn.gate.bias_vl"
    start, stop = header.pop(gone)["data_offsets"]
    for value in header.values():
        if "data_offsets" in value and value["data_offsets"][0] >= stop:
            value["data_offsets"] = [at - (stop - start) for at in value["data_offsets"]]
    text = json.dumps(header).encode()
    payload = whole[8 + length :]
    other = tmp_path / "less.safetensors"
    other.write_bytes(len(text).to_bytes(8, "little") + text + payload[:start] + payload[stop:])
    targets = float_targets(config)
    with Checkpoint.open(other) as checkpoint:
        fill(targets, checkpoint, config)
    assert not targets[gone].any()
    assert targets["layers.2.ffn.gate.bias_vl"].any()
