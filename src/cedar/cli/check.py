"""``cedar check``: whether the files of a checkpoint fit its configuration, by headers only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cedar.checkpoint.check import check_directory, check_files
from cedar.checkpoint.locate import bundled_checkpoints
from cedar.config import ModelConfig


def command(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A checkpoint directory or bundled name, or one file."),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="The configuration, if it is not config.json in the directory."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON document.")
    ] = False,
) -> None:
    """List every missing, unexpected and misshapen tensor of a checkpoint in one report.

    Reads the headers and the index, no weights. Exit code 1 if anything is wrong.
    """
    checkpoint = bundled_checkpoints().get(str(checkpoint), checkpoint)
    if config is None:
        report = check_directory(checkpoint)
    else:
        report = check_files(checkpoint, ModelConfig.from_file(config))
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        console = Console(soft_wrap=True, markup=False, highlight=False)
        for line in report.lines():
            console.print(line, style="red")
        size = f"{report.tensors:,} tensors, {report.nbytes:,} bytes, stored as {report.storage}"
        if report.ok:
            console.print(f"ok: {size}", style="green")
        else:
            console.print(f"problems: {len(report.lines()):,} in {size}", style="bold red")
    raise typer.Exit(0 if report.ok else 1)
