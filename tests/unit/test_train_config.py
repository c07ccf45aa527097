"""Configuration of training runs: validation, overrides, recipes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from train_setting import small_config

from cedar.checkpoint import expected_tensors
from cedar.errors import ConfigError, TrainingError
from cedar.train.config import DraftMode, Precision, TrainConfig, validate
from cedar.train.overrides import apply_overrides, flatten
from cedar.train.recipes import load_recipe, recipe_names


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return small_config(tmp_path_factory.mktemp("setting"))


def test_validate_accepts_the_setting_and_the_recipes(config: TrainConfig) -> None:
    validate(config)
    for name in recipe_names():
        validate(load_recipe(name))


def test_validate_names_every_problem_at_once(config: TrainConfig) -> None:
    wrong = apply_overrides(
        config,
        ["steps=0", "data.seq_len=1", "optim.beta2=1.5", "checkpoint.keep=0", "draft.mode=stage"],
    )
    with pytest.raises(TrainingError) as caught:
        validate(wrong)
    for field in ("steps", "data.seq_len", "optim.beta2", "checkpoint.keep", "init_from"):
        assert field in str(caught.value)
    assert "data.tokens_per_step" not in str(caught.value)


def test_a_step_has_to_hold_a_sequence(config: TrainConfig) -> None:
    with pytest.raises(TrainingError, match=r"tokens_per_step is 50; expected at least.* = 96"):
        validate(apply_overrides(config, ["data.tokens_per_step=50"]))


def test_a_model_without_draft_head_has_none_to_train(config: TrainConfig) -> None:
    model = replace(
        config.model, n_mtp_layers=0, dspark_target_layer_ids=(), compress_ratios=(0, 2, 2, 1, 1, 1)
    )
    with pytest.raises(TrainingError, match=r"draft\.mode is 'joint'"):
        validate(replace(config, model=model))


def test_overrides_reach_every_kind_of_field(config: TrainConfig) -> None:
    changed = apply_overrides(
        config,
        [
            "steps=1_000",
            "optim.lr=3e-4",
            "qat=false",
            "draft.mode=off",
            "precision=bfloat16",
            "freeze=vision,aligner",
            "data.cache=some dir",
            "model.vision_max_wh_ratio=none",
        ],
    )
    assert changed.steps == 1000
    assert changed.optim.lr == 3e-4
    assert changed.qat is False
    assert changed.draft.mode is DraftMode.OFF
    assert changed.precision is Precision.BFLOAT16
    assert changed.freeze == ("vision", "aligner")
    assert changed.data.cache == "some dir"
    assert changed.model.vision_max_wh_ratio is None
    # What was not named is what it was.
    assert replace(changed.optim, lr=config.optim.lr) == config.optim
    assert config.steps == 6


def test_fields_that_have_to_agree_change_together(config: TrainConfig) -> None:
    pair = ["model.kv_source_layers=[3]", "model.index_source_layers=[3,4]"]
    both = [*pair, "model.compress_ratios=[0,0,0,1,1,1,0]"]
    assert apply_overrides(config, both).model.kv_source_layers == (3,)
    with pytest.raises(ConfigError):
        apply_overrides(config, pair)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "not of the form name=value"),
        ("stepz=3", "did you mean 'steps'"),
        ("data.seqlen=3", "data has no 'seqlen'; did you mean 'seq_len'"),
        ("data=3", "sets a group: data consists of train, valid"),
        ("steps.more=3", "goes too deep: steps has no fields"),
        ("steps=1.5", "expected a whole number"),
        ("steps=1e3", "expected a whole number"),
        ("optim.lr=fast", "expected a finite number"),
        ("optim.lr=inf", "expected a finite number"),
        ("qat=1", "expected true or false"),
        ("draft.mode=maybe", "expected one of off, joint, stage"),
        ("model.engram_layer_ids=[1,x]", "expected a whole number"),
    ],
)
def test_an_override_is_checked_by_type(config: TrainConfig, override: str, message: str) -> None:
    with pytest.raises(TrainingError) as caught:
        apply_overrides(config, [override])
    assert message in str(caught.value)
    assert override in str(caught.value)


def test_all_bad_overrides_are_reported(config: TrainConfig) -> None:
    with pytest.raises(TrainingError, match=r"(?s)stepz.*optim\.lr"):
        apply_overrides(config, ["stepz=1", "optim.lr=x"])


def test_flat_form_holds_every_leaf_once(config: TrainConfig) -> None:
    flat = flatten(config)
    assert flat["draft.mode"] == "joint"
    assert flat["model.kv_source_layers"] == [1, 3]
    assert flat["optim.beta1"] == 0.9
    assert all(
        value is None or isinstance(value, bool | int | float | str | list)
        for value in flat.values()
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny", "expected module:function. Cedar brings: recipes.tiny:pretrain"),
        ("recipes.huge:pretrain", "module 'recipes.huge', which does not exist"),
        ("recipes.tiny:finetune", "has no function 'finetune'"),
        ("recipes.tiny:model", "returned a ModelConfig; expected a TrainConfig"),
    ],
)
def test_a_wrong_recipe_name_says_what_there_is(name: str, message: str) -> None:
    with pytest.raises(TrainingError) as caught:
        load_recipe(name)
    assert message in str(caught.value)


def test_a_recipe_may_be_your_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: TrainConfig
) -> None:
    (tmp_path / "my_recipe.py").write_text(
        "from cedar.train.recipes.tiny import pretrain\n\ndef mine():\n    return pretrain()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_recipe("my_recipe:mine") == load_recipe("recipes.tiny:pretrain")
    assert "my_recipe" in sys.modules


def test_the_bundled_model_fits_its_budget() -> None:
    model = load_recipe("recipes.tiny:pretrain").model
    sizes = expected_tensors(model, "fp8fp4")
    # 100 bytes per tensor are more than its header and index entries take.
    assert sum(spec.nbytes for spec in sizes.values()) + 200 * len(sizes) <= 8_000_000
