"""`cedar evaluate`: how well a model predicts held-out text."""

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint directory, or a bundled name such as cedar-tiny.")
    ],
    corpus: Annotated[
        Path, typer.Argument(help='.jsonl or .jsonl.xz: a "text" (and perhaps "source") a line.')
    ],
    seq_len: Annotated[int, typer.Option(help="Longer documents are split here.")] = 2048,
    device: Annotated[str, typer.Option(help='"auto", "cpu" or "cuda[:n]".')] = "auto",
    dtype: Annotated[
        str, typer.Option(help='"auto" (float32 on a CPU), "float32" or "bfloat16".')
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON in the last line.")
    ] = False,
) -> None:
    """Loss per token and byte and next-token accuracy, with and without Engram, by source."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from cedar.cli.options import parse_device, parse_dtype
    from cedar.engine import load_model
    from cedar.train.evaluate import evaluate_sources, held_out_sources

    place, kind = parse_device(device), parse_dtype(dtype)
    loaded = load_model(checkpoint, device=place, dtype=kind)
    sources = held_out_sources(corpus, loaded, seq_len)
    console = Console()
    steps = track(sources.items(), "Evaluating", console=Console(stderr=True), transient=True)
    results = evaluate_sources(loaded, steps)
    table = Table(title=f"{checkpoint} on {corpus.name}", title_justify="left")
    headings = {
        "tokens": "tokens",
        "loss_per_token": "nats/\ntoken",
        "loss_per_byte": "nats/\nbyte",
        "bits_per_byte": "bits/\nbyte",
        "accuracy": "next\ntoken",
        "loss_per_byte_without_engram": "no Engram:\nnats/byte",
        "accuracy_without_engram": "no Engram:\nnext token",
    }
    shown = [name for name in headings if name in results["all"]]
    table.add_column("source")
    for name in shown:
        table.add_column(headings[name], justify="right", no_wrap=True)
    for source, found in results.items():
        cells = (f"{found[n]:,.0f}" if n == "tokens" else f"{found[n]:.4f}" for n in shown)
        table.add_row(source, *cells, style="bold" if source == "all" else None)
    console.print(table)
    if as_json:
        typer.echo(json.dumps(results))
