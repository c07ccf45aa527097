"""``cedar parity``: this implementation against golden files, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from cedar.analysis.parity import Comparison, Report

__all__ = ["command"]

_WIDTH = 180  # of the table where there is no terminal to ask


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory of files in the golden format.")
    ],
    prefix: Annotated[
        str, typer.Option(metavar="NAME", help="Only sets whose name starts with this.")
    ] = "",
    device: Annotated[
        str,
        typer.Option(help='"cuda" compares what a GPU computes, kernels included.'),
    ] = "cpu",
) -> None:
    """Compare this implementation with every golden set in a directory.

    Configurations come from the JSON files next to the tensors. The last line is one JSON
    document. Exit code 1 if anything differs by more than its tolerance.
    """
    # Here and not above, so that `cedar --help` does not wait for torch.
    import torch
    from rich.console import Console

    from cedar.analysis.parity import run_parity
    from cedar.cli.options import parse_device

    place = parse_device(device)
    torch.set_num_threads(1)  # the tensors are so small that threads only wait for each other
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    with console.status("reading") as status:
        report = run_parity(
            directory, prefix, device=place, on_set=lambda name: status.update(name)
        )
    console.print(_table(report))
    summary = report.summary()
    verdict = f"{summary['failed']} of {summary['compared']} comparisons failed"
    style = "bold red" if summary["failed"] else "green"
    console.print(f"{verdict} in {summary['sets']} sets", style=style, highlight=False)
    typer.echo(json.dumps(summary))
    raise typer.Exit(1 if summary["failed"] else 0)


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table(title="Parity", title_justify="left")
    for name in ("set", "tensor", "kind", "tolerance", "worst", "where"):
        table.add_column(name, overflow="fold", justify="right" if name == "worst" else "left")
    failed = len(report.failures)
    for number, line in enumerate(report.ordered):
        table.add_row(*_cells(line), style="" if line.passed else "bold red")
        if number == failed - 1:
            table.add_section()
    return table


def _cells(line: Comparison) -> list[str]:
    from rich.markup import escape

    worst = "-" if line.worst is None else f"{line.worst:.3g}"
    mark = "" if line.passed else "FAILED "
    cells = (line.set_name, line.tensor, mark + line.kind, line.tolerance, worst, line.where)
    return [escape(cell) for cell in cells]
