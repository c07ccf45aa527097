"""Losses, router balancing, parameter groups, schedule, and what one step may change."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from train_setting import small_config

from cedar.model import Model
from cedar.train.build import build_model
from cedar.train.config import DraftMode, OptimConfig, TrainConfig
from cedar.train.data import IGNORED, DeviceBatch, HostBatch, TrainData, open_corpus, to_device
from cedar.train.losses import (
    Loads,
    add_loads,
    correct_predictions,
    draft_losses,
    language_loss,
    mean_stat,
    update_router_biases,
)
from cedar.train.optim import (
    Group,
    Part,
    clip_parts,
    group_of,
    learning_rate,
    make_optimizer,
    part_of,
    set_learning_rate,
)
from cedar.train.overrides import apply_overrides
from cedar.train.step import train_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_config(tmp_path_factory.mktemp("setting"))


@pytest.fixture(scope="module")
def batches(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> list[HostBatch]:
    data = TrainData(config, open_corpus(config, tmp_path_factory.mktemp("cache")))
    return [batch for step in range(2) for batch in data.step(step, anchors=8)]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def one_step(
    config: TrainConfig, batches: list[HostBatch], model: Model | None = None
) -> tuple[Model, dict[str, float]]:
    model = model or build_model(config, CPU)
    optimizer = make_optimizer(model.named_parameters(), config.optim)
    set_learning_rate(optimizer, config.optim.lr)
    moved: list[DeviceBatch] = [to_device(batch, CPU) for batch in batches]
    result = train_step(model, optimizer, moved, config, step=0)
    values = {name: float(value) for name, value in result.parts.items()}
    return model, values | {f"norm_{p.value}": float(n) for p, n in result.grad_norms.items()}


# --- losses -----------------------------------------------------------------------------------


def test_language_loss_is_the_shifted_cross_entropy_of_each_sequence() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 5)
    tokens = torch.tensor([1, 2, 3, 4, 0, 2, 2])
    targets = torch.tensor([2, 3, IGNORED, 0, 2, 2, IGNORED])  # sequences of 3 and 4 tokens
    expected = 0.0
    for start, stop in ((0, 3), (3, 7)):
        for t in range(start, stop - 1):
            expected -= math.log(float(logits[t].softmax(0)[tokens[t + 1]]))
    assert float(language_loss(logits, targets)) == pytest.approx(expected, rel=1e-5)
    rows = [t for t in range(7) if targets[t] != IGNORED]
    expected_correct = sum(int(logits[t].argmax() == targets[t]) for t in rows)
    assert int(correct_predictions(logits, targets)) == expected_correct
    # A loss across the boundary would be another number.
    crossed = targets.clone()
    crossed[2] = tokens[3]
    assert float(language_loss(logits, crossed)) != pytest.approx(expected, rel=1e-3)


def test_draft_losses_follow_their_formulas() -> None:
    torch.manual_seed(0)
    logits, teacher = torch.randn(3, 4, 6), torch.randn(3, 4, 6)
    confidence, targets = torch.randn(3, 4), torch.randint(6, (3, 4))
    found = draft_losses(logits, confidence, teacher, targets, position_decay=4.0)
    p_d, p_t = logits.softmax(-1), teacher.softmax(-1)
    weights = [math.exp(-(k - 1) / 4) for k in range(1, 5)]
    ce = tv = bce = 0.0
    accepted = [0.0] * 4
    for n in range(3):
        for k in range(4):
            distance = float((p_d[n, k] - p_t[n, k]).abs().sum())
            want, said = 1 - distance / 2, float(confidence[n, k].sigmoid())
            share = weights[k] / sum(weights) / 3
            ce -= share * math.log(float(p_d[n, k, targets[n, k]]))
            tv += share * distance
            bce -= share * (want * math.log(said) + (1 - want) * math.log(1 - said))
            accepted[k] += want / 3
    assert float(found.ce) == pytest.approx(ce, rel=1e-5)
    assert float(found.tv) == pytest.approx(tv, rel=1e-5)
    assert float(found.confidence) == pytest.approx(bce, rel=1e-5)
    assert found.accept_K.tolist() == pytest.approx(accepted, rel=1e-5)


def test_a_draft_equal_to_its_teacher_has_no_distance() -> None:
    torch.manual_seed(0)
    teacher = torch.randn(2, 3, 6, requires_grad=True)
    logits = teacher.detach().clone().requires_grad_()
    sure = torch.full((2, 3), 30.0)
    found = draft_losses(logits, sure, teacher, torch.zeros(2, 3, dtype=torch.long), 4.0)
    assert float(found.tv.detach()) == pytest.approx(0, abs=1e-6)
    assert float(found.confidence) == pytest.approx(0, abs=1e-6)
    (found.ce + found.tv).backward()
    assert logits.grad is not None
    assert teacher.grad is None


def test_only_values_that_are_there_are_averaged() -> None:
    assert mean_stat([None, None]) is None
    mean = mean_stat([None, torch.tensor(1.0), torch.tensor(3.0)])
    assert mean is not None
    assert float(mean) == 2


# --- router biases ----------------------------------------------------------------------------


def test_router_biases_move_towards_equal_loads() -> None:
    parameters = {
        f"layers.0.ffn.gate.{leaf}": nn.Parameter(torch.zeros(4), requires_grad=False)
        for leaf in ("bias", "bias_vl")
    }
    text, nothing = torch.tensor([6.0, 2.0, 4.0, 4.0]), torch.zeros(4)
    loads = {"layers.0.ffn.gate": Loads(text, nothing)}
    update_router_biases(parameters, loads, 0.001)
    update_router_biases(parameters, loads, 0.001)
    bias = parameters["layers.0.ffn.gate.bias"]
    assert bias.tolist() == pytest.approx([-0.002, 0.002, 0, 0])
    # No image token was seen: the image bias stays.
    assert parameters["layers.0.ffn.gate.bias_vl"].tolist() == [0, 0, 0, 0]
    update_router_biases(parameters, {"layers.0.ffn.gate": Loads(nothing, text)}, 0.001)
    assert bias.tolist() == pytest.approx([-0.002, 0.002, 0, 0])
    assert parameters["layers.0.ffn.gate.bias_vl"].tolist() == pytest.approx([-0.001, 0.001, 0, 0])


def test_loads_of_several_passes_add_up() -> None:
    total: dict[str, Loads] = {}
    add_loads(total, {"a": Loads(torch.tensor([1.0, 2.0]), torch.zeros(2))})
    add_loads(total, {"a": Loads(torch.tensor([3.0, 0.0]), torch.ones(2))})
    assert total["a"].text_E.tolist() == [4, 2]
    assert total["a"].image_E.tolist() == [1, 1]


# --- optimiser --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "group", "part"),
    [
        ("embed.weight", Group.NO_DECAY, Part.BACKBONE),
        ("head.weight", Group.NO_DECAY, Part.BACKBONE),
        ("norm.weight", Group.DECAY, Part.BACKBONE),
        ("image_start", Group.NO_DECAY, Part.BACKBONE),
        ("layers.0.attn_norm.weight", Group.DECAY, Part.BACKBONE),
        ("layers.0.attn.wq_a.weight", Group.DECAY, Part.BACKBONE),
        ("layers.0.attn.attn_sink", Group.NO_DECAY, Part.BACKBONE),
        ("layers.0.hc_attn_fn", Group.NO_DECAY, Part.BACKBONE),
        ("layers.0.hc_ffn_base", Group.NO_DECAY, Part.BACKBONE),
        ("layers.0.hc_ffn_scale", Group.NO_DECAY, Part.BACKBONE),
        ("layers.0.ffn.gate.weight", Group.DECAY, Part.BACKBONE),
        ("layers.0.ffn.gate.bias", Group.ROUTER_BIAS, Part.BACKBONE),
        ("layers.0.ffn.gate.bias_vl", Group.ROUTER_BIAS, Part.BACKBONE),
        ("layers.0.ffn.experts.w1.weight", Group.DECAY, Part.BACKBONE),
        ("layers.1.attn.compressor.wkv.weight", Group.DECAY, Part.BACKBONE),
        ("layers.1.attn.indexer.wk.weight", Group.DECAY, Part.INDEXER),
        ("layers.1.attn.indexer.k_norm.weight", Group.DECAY, Part.INDEXER),
        ("layers.1.engram.embed.weight", Group.ENGRAM, Part.BACKBONE),
        ("layers.1.engram.wkv.weight", Group.DECAY, Part.BACKBONE),
        ("layers.1.engram.q_weight", Group.DECAY, Part.BACKBONE),
        ("vision.patch_embed.proj.bias", Group.NO_DECAY, Part.BACKBONE),
        ("mtp.0.attn.wq_a.weight", Group.DECAY, Part.DRAFT),
        ("mtp.0.ffn.gate.bias", Group.ROUTER_BIAS, Part.DRAFT),
        ("mtp.0.markov_head.embed.weight", Group.DECAY, Part.DRAFT),
    ],
)
def test_groups(name: str, group: Group, part: Part) -> None:
    assert group_of(name) is group
    assert part_of(name) is part


def test_every_parameter_is_in_one_group(config: TrainConfig) -> None:
    model = build_model(config, CPU)
    optimizer = make_optimizer(model.named_parameters(), config.optim)
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(members) == len({id(p) for p in members})
    left_out = {n for n, p in model.named_parameters() if id(p) not in {id(m) for m in members}}
    assert left_out == {n for n, _ in model.named_parameters() if n.split(".")[-1][:4] == "bias"}
    set_learning_rate(optimizer, 0.5)
    table = model.get_parameter("layers.1.engram.embed.weight")
    for group in optimizer.param_groups:
        is_table = any(p is table for p in group["params"])
        assert group["lr"] == (2.5 if is_table else 0.5)
        assert not (is_table and group["weight_decay"])


def test_learning_rate_warms_up_holds_and_falls_to_the_floor() -> None:
    optim = OptimConfig(lr=1.0, floor_lr=0.1, warmup_steps=4, decay_from=0.5)
    rates = [learning_rate(step, 20, optim) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:11] == [1.0] * 7
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.1)
    middle = learning_rate(10, 21, replace(optim, warmup_steps=0, decay_from=0))
    assert middle == pytest.approx(0.55)
    assert learning_rate(0, 1, replace(optim, warmup_steps=0)) == 1.0


def test_each_part_is_clipped_on_its_own() -> None:
    weights = {
        "layers.0.attn.wq_a.weight": nn.Parameter(torch.zeros(2)),
        "mtp.0.attn.wq_a.weight": nn.Parameter(torch.zeros(2)),
    }
    optimizer = make_optimizer(weights.items(), OptimConfig())
    backbone, draft = weights.values()
    backbone.grad, draft.grad = torch.tensor([0.3, 0.4]), torch.tensor([30.0, 40.0])
    norms = clip_parts(optimizer, 1.0)
    assert {part: float(n) for part, n in norms.items()} == pytest.approx(
        {Part.BACKBONE: 0.5, Part.DRAFT: 50.0}
    )
    assert backbone.grad.tolist() == pytest.approx([0.3, 0.4])
    assert draft.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-4)
    draft.grad = torch.tensor([30.0, 40.0])
    clip_parts(optimizer, 0.0)
    assert draft.grad.tolist() == [30, 40]


# --- one step ---------------------------------------------------------------------------------


def test_a_step_moves_every_parameter(config: TrainConfig, batches: list[HostBatch]) -> None:
    model = build_model(config, CPU)
    before = parameters_of(model)
    _, values = one_step(config, batches, model)
    still = {n for n, p in parameters_of(model).items() if torch.equal(p, before[n])}
    # Text alone: image biases stay. With hc_mult streams of a fresh model nothing else does.
    assert {name for name in still if not name.endswith(".bias_vl")} == set()
    parts = {"lm", "index", "balance", "draft_ce", "draft_tv", "draft_confidence"}
    assert parts <= values.keys()
    total = (
        values["lm"]
        + values["index"]
        + 1e-4 * values["balance"]
        + 0.1 * values["draft_ce"]
        + 0.9 * values["draft_tv"]
        + values["draft_confidence"]
    )
    assert values["loss"] == pytest.approx(total, rel=1e-5)


def test_without_the_index_loss_no_indexer_learns(
    config: TrainConfig, batches: list[HostBatch]
) -> None:
    off = apply_overrides(config, ["index.weight=0", "optim.weight_decay=0"])
    model = build_model(off, CPU)
    before = parameters_of(model)
    _, values = one_step(off, batches, model)
    assert "index" not in values
    moved = {n for n, p in parameters_of(model).items() if not torch.equal(p, before[n])}
    assert not [name for name in moved if ".indexer." in name]
    assert [name for name in moved if ".compressor." in name]


def test_the_draft_head_leaves_no_trace_in_the_backbone(
    config: TrainConfig, batches: list[HostBatch]
) -> None:
    joint, _ = one_step(config, batches)
    alone, _ = one_step(replace(config, draft=replace(config.draft, mode=DraftMode.OFF)), batches)
    with_draft, without = parameters_of(joint), parameters_of(alone)
    backbone = [name for name in without if not name.startswith("mtp.")]
    assert all(torch.equal(with_draft[name], without[name]) for name in backbone)
    assert not torch.equal(with_draft["mtp.0.attn.wq_a.weight"], without["mtp.0.attn.wq_a.weight"])


def test_in_its_own_stage_only_the_draft_head_moves(
    config: TrainConfig, batches: list[HostBatch]
) -> None:
    stage = replace(config, draft=replace(config.draft, mode=DraftMode.STAGE))
    model = build_model(stage, CPU)
    before = parameters_of(model)
    _, values = one_step(stage, batches, model)
    moved = {n for n, p in parameters_of(model).items() if not torch.equal(p, before[n])}
    assert moved
    assert all(name.startswith("mtp.") for name in moved)
    assert values["loss"] == pytest.approx(
        0.1 * values["draft_ce"] + 0.9 * values["draft_tv"] + values["draft_confidence"], rel=1e-5
    )


def test_two_passes_equal_one_of_both(config: TrainConfig, batches: list[HostBatch]) -> None:
    plain = apply_overrides(
        config, ["qat=false", "draft.mode=off", "index.weight=0", "balance.weight=0"]
    )
    first, second = batches
    joined = HostBatch(
        tokens_T=torch.cat([torch.from_numpy(b.tokens_T) for b in batches]).numpy(),
        targets_T=torch.cat([torch.from_numpy(b.targets_T) for b in batches]).numpy(),
        lengths=first.lengths + second.lengths,
        anchors_N=first.anchors_N[:0],
        num_targets=first.num_targets + second.num_targets,
    )
    _, two = one_step(plain, batches)
    _, one = one_step(plain, [joined])
    assert two["lm"] == pytest.approx(one["lm"], rel=1e-6)
    assert two["norm_backbone"] == pytest.approx(one["norm_backbone"], rel=1e-4)


def test_frozen_parameters_stay(config: TrainConfig, batches: list[HostBatch]) -> None:
    frozen = replace(config, freeze=("embed.", "layers.2."))
    model = build_model(frozen, CPU)
    before = parameters_of(model)
    one_step(frozen, batches, model)
    for name, value in parameters_of(model).items():
        if name.startswith(("embed.", "layers.2.")) and not name.endswith("gate.bias"):
            assert torch.equal(value, before[name]), name


def test_checkpointing_activations_changes_nothing(
    config: TrainConfig, batches: list[HostBatch]
) -> None:
    kept, _ = one_step(config, batches)
    recomputed, _ = one_step(replace(config, activation_checkpointing=True), batches)
    for name, value in parameters_of(kept).items():
        assert torch.equal(value, recomputed.get_parameter(name)), name


def test_dense_warm_up_supervises_more_entries(
    config: TrainConfig, batches: list[HostBatch]
) -> None:
    _, dense = one_step(config, batches)
    _, selected = one_step(replace(config, index=replace(config.index, dense_steps=0)), batches)
    assert dense["lm"] == selected["lm"]
    assert dense["index"] != selected["index"]


def test_bfloat16_activations_train(config: TrainConfig, batches: list[HostBatch]) -> None:
    _, wide = one_step(config, batches)
    model, values = one_step(apply_overrides(config, ["precision=bfloat16"]), batches)
    assert model.compute_dtype is torch.bfloat16
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert values["lm"] == pytest.approx(wide["lm"], rel=0.02)
    assert values["lm"] != wide["lm"]
