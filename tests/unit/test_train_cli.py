"""`cedar train`, as it is typed."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from train_setting import write_corpus
from typer.testing import CliRunner

from cedar.cli.train import command
from cedar.errors import CedarError
from cedar.train.report import ConsoleReporter

RECIPE = """
from dataclasses import replace
from pathlib import Path
from train_setting import small_config

def short():
    return replace(small_config(Path(__file__).parent), steps=2)
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    (tmp_path / "recipe_for_cli.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "recipe_for_cli", raising=False)
    monkeypatch.chdir(tmp_path)
    made = typer.Typer()
    made.command()(command)
    return made


def test_a_run_from_start_to_export(app: typer.Typer, tmp_path: Path) -> None:
    given = ["recipe_for_cli:short", "export=fp8fp4", "curve=true", "log_interval=1", "--json"]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(result.stdout.splitlines()[-1])
    run = tmp_path / "runs" / "recipe_for_cli-short"
    assert document["run"] == str(run.relative_to(tmp_path))
    assert document["finished"]
    assert document["step"] == 2
    assert document["evaluation"]["loss_per_byte"] > 0
    assert document["export_evaluation"]["accuracy_without_engram"] >= 0
    assert (run / "export" / "config.json").exists()
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "step 1: " in result.stdout
    assert "tok/s" in result.stdout
    assert "loss per byte" in result.stdout


def test_an_interrupted_run_exits_0_and_says_how_to_resume(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: ConsoleReporter, step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    write_corpus(tmp_path / "my texts.jsonl", documents=8)
    given = ["recipe_for_cli:short", "data.holdout_every=4", "--corpus", "my texts.jsonl"]
    with monkeypatch.context() as patch:
        patch.setattr(ConsoleReporter, "advance", interrupt)
        stopped = CliRunner().invoke(app, [*given, "--out", "here"], catch_exceptions=False)
    assert stopped.exit_code == 0
    assert "Stopped after step 1 of 2; everything is saved in here." in stopped.stdout
    again = (
        "cedar train recipe_for_cli:short data.holdout_every=4 --corpus 'my texts.jsonl' "
        "--out here --resume"
    )
    assert again in stopped.stdout
    resumed = CliRunner().invoke(app, [*given, "--out", "here", "--resume"], catch_exceptions=False)
    assert resumed.exit_code == 0
    assert "Resumed after step 1." in resumed.stdout
    assert "Finished: here" in resumed.stdout


def test_mistakes_are_the_users_errors(app: typer.Typer) -> None:
    for given, message in (
        (["recipe_for_cli:short", "step=3"], "did you mean 'steps'"),
        (["nothing"], "Cedar brings: recipes.tiny:pretrain"),
        (["recipe_for_cli:short", "--resume"], "no checkpoint to resume from"),
        (["recipe_for_cli:short", "--corpus", "nowhere"], "nowhere does not exist"),
    ):
        result = CliRunner().invoke(app, given)
        assert isinstance(result.exception, CedarError)
        assert message in str(result.exception)
