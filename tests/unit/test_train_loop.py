"""Whole runs: resuming, interrupting, refusing, logging, drawing, exporting."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_setting import small_config, write_corpus

from cedar.config import ModelConfig
from cedar.errors import BackendUnavailable, TrainingError
from cedar.train import state
from cedar.train.build import build_model, choose_device
from cedar.train.config import CheckpointConfig, EvalConfig, ExportFormat, TrainConfig
from cedar.train.curve import draw_curve
from cedar.train.loop import train
from cedar.train.overrides import apply_overrides
from cedar.train.report import LogFile, SilentReporter, read_log
from cedar.train.state import find_checkpoints


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Six steps; the tokens are cached once for all runs of this file."""
    directory = tmp_path_factory.mktemp("setting")
    made = small_config(directory)
    return replace(made, data=replace(made.data, cache=str(directory / "cache")))


@pytest.fixture(scope="module")
def halfway(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after three of its steps; copy it before going on."""
    run = tmp_path_factory.mktemp("halfway")
    assert not train(config, run, stop_after=3).finished
    return run


@pytest.fixture(scope="module")
def whole(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without a stop; only to be read."""
    run = tmp_path_factory.mktemp("whole")
    assert train(config, run).finished
    return run


@pytest.fixture
def stopped(halfway: Path, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for file in halfway.rglob("*"):
        if file.is_file():
            target = run / file.relative_to(halfway)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return run


def everything_saved(run: Path) -> dict[str, torch.Tensor]:
    newest = find_checkpoints(run)[-1]
    return load_file(newest / "model.safetensors") | load_file(newest / "optimizer.safetensors")


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


# --- resuming ---------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_uninterrupted_one(
    config: TrainConfig, stopped: Path, whole: Path
) -> None:
    assert len(find_checkpoints(stopped)) == 1
    assert train(config, stopped, resume=True).finished
    saved = everything_saved(stopped)
    assert len(saved) > 300
    assert differing(saved, everything_saved(whole)) == []
    # So do the last measurements, each in full precision.
    last = [read_log(run / "log.jsonl")[-1] for run in (stopped, whole)]
    assert last[0] == last[1]
    assert last[0]["kind"] == "final"


@pytest.mark.parametrize("spoiled", ["model", "optimizer"])
def test_resuming_reads_the_whole_state(
    config: TrainConfig, stopped: Path, whole: Path, spoiled: str
) -> None:
    file = find_checkpoints(stopped)[-1] / f"{spoiled}.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if "wq_a.weight" in n and not n.endswith(":step"))
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, file)
    train(config, stopped, resume=True)
    assert differing(everything_saved(stopped), everything_saved(whole))


def test_another_seed_is_another_run(config: TrainConfig, stopped: Path, tmp_path: Path) -> None:
    train(replace(config, seed=1), tmp_path / "other", stop_after=3)
    assert differing(everything_saved(stopped), everything_saved(tmp_path / "other"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=1e-4", "optim.lr: 0.002 then, 0.0001 now"),
        ("steps=7", "steps: 6 then, 7 now"),
        ("model.window_size=16", "model.window_size: 8 then, 16 now"),
        ("data.seq_len=48", "data.seq_len: 96 then, 48 now"),
        ("draft.mode=off", "draft.mode: 'joint' then, 'off' now"),
        ("seed=5", "seed: 0 then, 5 now"),
    ],
)
def test_another_configuration_is_refused_by_field(
    config: TrainConfig, halfway: Path, override: str, message: str
) -> None:
    with pytest.raises(TrainingError) as caught:
        train(apply_overrides(config, [override]), halfway, resume=True)
    assert message in str(caught.value)
    assert str(caught.value).count(" then, ") == 1


def test_what_changes_no_number_may_change(config: TrainConfig, stopped: Path) -> None:
    free = ["log_interval=1", "eval.interval=5", "checkpoint.keep=1", "checkpoint.interval=2"]
    assert train(apply_overrides(config, free), stopped, resume=True).finished
    assert [path.name for path in find_checkpoints(stopped)] == ["step-00000006"]


def test_another_corpus_is_refused(config: TrainConfig, halfway: Path, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other.jsonl", documents=11)
    changed = replace(config, data=replace(config.data, train=str(other)))
    with pytest.raises(TrainingError, match="another corpus"):
        train(changed, halfway, resume=True)
    # The same text elsewhere is the same corpus.
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(Path(config.data.train).read_bytes())
    same = replace(config, data=replace(config.data, train=str(moved)))
    assert train(same, halfway, resume=True, stop_after=3).step == 3


def test_a_run_directory_is_not_overwritten(
    config: TrainConfig, halfway: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"already holds a run .*step-00000003.*--resume"):
        train(config, halfway)
    with pytest.raises(TrainingError, match="no checkpoint to resume from"):
        train(config, tmp_path / "empty", resume=True)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named(config: TrainConfig, stopped: Path, name: str) -> None:
    file = find_checkpoints(stopped)[-1] / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(TrainingError, match=r"step-00000003 is damaged .*; delete it"):
        train(config, stopped, resume=True)


# --- saving -----------------------------------------------------------------------------------


def test_only_the_newest_checkpoints_stay(config: TrainConfig, tmp_path: Path) -> None:
    often = replace(config, steps=5, checkpoint=CheckpointConfig(interval=1, keep=2))
    train(often, tmp_path)
    assert [p.name for p in find_checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]


def test_a_failed_save_leaves_the_older_checkpoint(
    config: TrainConfig, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything_saved(stopped)
    calls = []

    def full_disk(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(state, "save_file", full_disk)
    with pytest.raises(TrainingError, match=r"step-00000006 cannot be written: .*No space"):
        train(config, stopped, resume=True)
    assert [p.name for p in find_checkpoints(stopped)] == ["step-00000003"]
    assert differing(everything_saved(stopped), before) == []
    monkeypatch.undo()
    assert train(config, stopped, resume=True).finished


def test_a_loss_that_is_not_finite_ends_the_run_unsaved(config: TrainConfig, stopped: Path) -> None:
    file = find_checkpoints(stopped)[-1] / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.2.attn.wq_a.weight"][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(TrainingError, match=r"Between steps 4 and 4 .*not a number: .*lm"):
        train(config, stopped, resume=True)
    assert [p.name for p in find_checkpoints(stopped)] == ["step-00000003"]


# --- interrupting -----------------------------------------------------------------------------


class InterruptAt(SilentReporter):
    """Sends the process a signal when a step is done."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        super().__init__()
        self.at, self.number = step, number

    def advance(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends(
    config: TrainConfig, tmp_path: Path, halfway: Path, number: signal.Signals
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    result = train(config, tmp_path, reporter=InterruptAt(3, number))
    assert (result.step, result.finished) == (3, False)
    assert [p.name for p in find_checkpoints(tmp_path)] == ["step-00000003"]
    assert differing(everything_saved(tmp_path), everything_saved(halfway)) == []
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


# --- reporting --------------------------------------------------------------------------------


def test_the_log_reads_as_if_never_interrupted(config: TrainConfig, tmp_path: Path) -> None:
    often = replace(config, eval=EvalConfig(interval=3, tokens=150), log_interval=1)
    train(often, tmp_path, stop_after=4)
    # As after a crash: steps were logged that the newest checkpoint does not have.
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "step": 5, "lm": 0}) + '\n{"kind": "tr')
    train(often, tmp_path, resume=True)
    records = [(r["kind"], r["step"]) for r in read_log(tmp_path / "log.jsonl")]
    assert records == [
        ("run", 0),
        *(("train", step) for step in (1, 2, 3)),
        ("eval", 3),
        ("train", 4),
        ("run", 4),
        *(("train", step) for step in (5, 6)),
        ("final", 6),
    ]


def test_log_records_say_what_people_plot(config: TrainConfig, halfway: Path) -> None:
    begin, record = read_log(halfway / "log.jsonl")[:2]
    assert {"commit", "command", "versions", "devices"} <= begin.keys()
    expected = {"step", "tokens", "epoch", "lr", "tokens_per_second", "loss", "lm", "index"}
    assert expected | {"balance", "draft_ce", "grad_norm_backbone"} <= record.keys()
    assert record["lm"] == pytest.approx(5.6, abs=0.5)  # near ln 264 at the start
    assert record["tokens"] <= 2 * config.data.tokens_per_step


def test_a_spoiled_log_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"kind": "train", "step": 1}\nnonsense\n{"kind": "train", "step": 2}\n')
    with pytest.raises(TrainingError, match="line 2: not a log record"), LogFile(log, step=2):
        pass


def test_the_curve_is_a_picture(halfway: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    draw_curve(halfway / "log.jsonl", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    with pytest.raises(TrainingError, match="no training record"):
        draw_curve(tmp_path / "nothing.jsonl", picture)


def test_without_matplotlib_the_run_says_so_before_it_starts(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(BackendUnavailable, match=r'pip install "cedar-lm\[plots\]".*curve=false'):
        train(replace(config, curve=True), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_run_says_when_the_index_loss_is_off(config: TrainConfig, tmp_path: Path) -> None:
    on, off = SilentReporter(), SilentReporter()
    train(config, tmp_path / "on", stop_after=1, reporter=on)
    without = replace(config, index=replace(config.index, weight=0))
    train(without, tmp_path / "off", stop_after=1, reporter=off)
    assert "The index loss is off" in " ".join(off.notes)
    assert "The index loss is off" not in " ".join(on.notes)


# --- the finished model -----------------------------------------------------------------------


@pytest.mark.parametrize("form", [ExportFormat.FP8FP4, ExportFormat.BF16])
def test_the_export_is_the_trained_model(
    config: TrainConfig, stopped: Path, form: ExportFormat
) -> None:
    qat = form is ExportFormat.FP8FP4
    made = replace(config, export=form, steps=6)
    result = train(made, stopped, resume=True)
    assert result.export is not None
    assert result.export_evaluation is not None
    files = {path.name for path in result.export.iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= files
    assert ModelConfig.from_file(result.export) == made.model.with_storage(form.value)
    trained, exported = result.evaluation, result.export_evaluation
    assert trained.keys() == exported.keys()
    # Trained through its storage format the model loses nothing but bfloat16 roundings.
    assert exported["loss_per_token"] == pytest.approx(trained["loss_per_token"], rel=0.02)
    assert exported["tokens"] == trained["tokens"]
    if qat:
        assert exported["loss_per_token"] != trained["loss_per_token"]


def test_a_run_can_start_from_a_checkpoint_and_train_the_draft_head(
    config: TrainConfig, stopped: Path, tmp_path: Path
) -> None:
    first = train(replace(config, export=ExportFormat.BF16), stopped, resume=True)
    stage = apply_overrides(
        replace(config, init_from=str(first.export)), ["draft.mode=stage", "steps=1"]
    )
    notes = SilentReporter()
    train(stage, tmp_path / "stage", reporter=notes)
    assert "Only the draft head is trained" in " ".join(notes.notes)
    before, after = everything_saved(stopped), everything_saved(tmp_path / "stage")
    name = "layers.2.attn.wq_a.weight"
    assert torch.equal(after[name], before[name].bfloat16().float())
    moved = "mtp.0.attn.wq_a.weight"
    assert not torch.equal(after[moved], before[moved].bfloat16().float())


def test_engram_classes_have_to_be_the_tokenizers(config: TrainConfig, tmp_path: Path) -> None:
    wrong = replace(config.model, engram_compressed_vocab_size=77)
    with pytest.raises(TrainingError, match=r"engram_compressed_vocab_size is 77, but .* has 2"):
        train(replace(config, model=wrong), tmp_path)


def test_a_name_that_freezes_nothing_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="freeze names 'vision'"):
        train(replace(config, freeze=("vision",)), tmp_path)


def test_named_operations_are_compiled(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def compiler(function: Any, *, dynamic: bool) -> Any:
        assert dynamic
        asked.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compiler)
    named = replace(config, compile=("mhc_coefficients", "rotate"))
    model = build_model(named, torch.device("cpu"))
    assert asked == [model.ops.mhc_coefficients, model.ops.rotate]
    with pytest.raises(
        TrainingError, match="compile names mhc; the operations are attention_mass, "
    ):
        build_model(replace(config, compile=("mhc",)), torch.device("cpu"))


def test_devices_are_checked() -> None:
    assert choose_device("cpu").type == "cpu"
    for name, message in (("gpu", "expected"), ("mps", "expected"), ("cuda:99", "CUDA devices")):
        with pytest.raises(TrainingError, match=message):
            choose_device(name)
