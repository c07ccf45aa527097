"""``cedar convert``: the same weights in another storage form."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cedar.checkpoint.check import check_directory
from cedar.checkpoint.index import INDEX_NAME
from cedar.checkpoint.locate import locate_checkpoint
from cedar.checkpoint.save import DEFAULT_SHARD_BYTES, convert_checkpoint


class StorageName(StrEnum):
    """The storage forms of a checkpoint."""

    FP8FP4 = "fp8fp4"
    BF16 = "bf16"


def command(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint directory, or a bundled name.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A new directory.")],
    storage: Annotated[
        StorageName,
        typer.Option(help="fp8fp4: as released (FP8 dense, FP4 experts); bf16: not quantised."),
    ],
    max_shard_bytes: Annotated[
        int, typer.Option(min=1, help="Largest size of one file.")
    ] = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a checkpoint again in another storage form, with its tokenizer and other small files.

    Weights stream through memory block by block. Engram tables stay FP8 in both forms.
    """
    source = locate_checkpoint(source)
    console = Console(stderr=True)
    with console.status(f"converting to {storage}"):
        convert_checkpoint(source, target, storage, max_shard_bytes=max_shard_bytes)
    for file in sorted(source.iterdir()):
        if file.is_file() and _is_companion(file):
            shutil.copyfile(file, target / file.name)
    report = check_directory(target)
    report.raise_if_bad()
    typer.echo(f"{target}: {report.tensors:,} tensors, {report.nbytes:,} bytes, {storage}")


def _is_companion(file: Path) -> bool:
    rewritten = ("config.json", INDEX_NAME)
    return file.suffix in (".json", ".jinja", ".md", ".txt") and file.name not in rewritten
