"""`cedar bench`: measure this machine."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


class Subject(StrEnum):
    """What can be measured."""

    ENGINE = "engine"
    MODEL = "model"
    REPLAY = "replay"


def command(
    what: Annotated[
        Subject,
        typer.Argument(help="engine, model, or replay (agreement)."),
    ],
    checkpoint: Annotated[str, typer.Option(help="Checkpoint directory or name.")] = "cedar-tiny",
    device: Annotated[str, typer.Option(help='"auto", "cpu" or "cuda[:n]".')] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: torch's choice.", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats; long work once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only the last line.")] = False,
    corpus: Annotated[Path | None, typer.Option(help="For replay: a .jsonl of texts.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the figures to this file, too.")] = None,
) -> None:
    """Print one JSON line a figure, with commit, command and hardware; then one with them all."""
    import json

    import torch

    from cedar.analysis.bench import engine, model, replay
    from cedar.cli.options import parse_device
    from cedar.engine import load_model
    from cedar.environment import describe_run
    from cedar.errors import RequestError

    if threads:
        torch.set_num_threads(threads)
    about = describe_run()
    loaded = load_model(checkpoint, device=parse_device(device))
    if what is Subject.REPLAY:
        if corpus is None:
            raise RequestError("bench replay compares on text; give one with --corpus FILE.jsonl.")
        measured = replay.measure(loaded, quick, corpus)
    else:
        measured = (engine if what is Subject.ENGINE else model).measure(loaded, quick)
    figures: dict[str, float] = {}
    for name, value in measured:
        figures[name] = round(value, 4)
        line = json.dumps({"figure": name, "value": figures[name], **about})
        if not as_json:
            print(line, flush=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    print(json.dumps(figures))
