"""`cedar train`: run or resume a training recipe."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from cedar.train.loop import RunResult

__all__ = ["command"]


def command(
    recipe: Annotated[
        str, typer.Argument(help="What to train: recipes.tiny:pretrain, or module:function.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Changes to the recipe: steps=100 data.seq_len=256 optim.lr=1e-3",
        ),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Text to train on: a .jsonl or .jsonl.xz file, or a directory with "
            "train.jsonl and heldout.jsonl (each perhaps .xz)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the run. [default: runs/ and the recipe's name]"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON in the last line.")
    ] = False,
) -> None:
    """Train a model, or resume a training run.

    Ctrl-C ends a run after its current step with a checkpoint.
    """
    # Here and not above, so that `cedar --help` does not wait for torch.
    from rich.console import Console

    from cedar.train.data import with_corpus
    from cedar.train.loop import train
    from cedar.train.overrides import apply_overrides
    from cedar.train.recipes import load_recipe
    from cedar.train.report import ConsoleReporter

    config = load_recipe(recipe)
    if corpus is not None:
        config = with_corpus(config, corpus)
    config = apply_overrides(config, overrides or [])
    run = out or Path("runs") / recipe.removeprefix("recipes.").replace(":", "-")
    console = Console()
    result = train(config, run, resume=resume, reporter=ConsoleReporter(console))
    if result.finished:
        _show(console, run, result)
    else:
        again = ["cedar", "train", recipe, *(overrides or [])]
        again += ["--corpus", str(corpus)] if corpus is not None else []
        again += ["--out", str(run), "--resume"]
        console.print(
            f"Stopped after step {result.step} of {config.steps}; everything is saved in {run}.\n"
            f"Resume with:\n\n    {shlex.join(again)}\n",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if as_json:
        document = {
            "run": str(run),
            "step": result.step,
            "finished": result.finished,
            "evaluation": result.evaluation,
            "export": None if result.export is None else str(result.export),
            "export_evaluation": result.export_evaluation,
        }
        typer.echo(json.dumps(document))


def _show(console: Console, run: Path, result: RunResult) -> None:
    """The final measurements, of the trained model and of the exported one."""
    from rich.table import Table

    names = [name for name in result.evaluation if name not in ("tokens", "bytes")]
    exported = result.export_evaluation
    table = Table(title=f"Held out: {result.evaluation['tokens']:,.0f} tokens")
    table.add_column("measure")
    table.add_column("trained", justify="right")
    if exported is not None:
        table.add_column("exported", justify="right")
    for name in names:
        row = [name.replace("_", " "), f"{result.evaluation[name]:.4f}"]
        table.add_row(*row, *([f"{exported[name]:.4f}"] if exported is not None else []))
    console.print(table)
    where = result.export or run
    console.print(f"Finished: {where}", markup=False, highlight=False, soft_wrap=True)
