"""``cedar env``: what this installation consists of and what it would run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from cedar.environment import devices, versions
from cedar.errors import BackendUnavailable
from cedar.ops import select_ops


def command(
    device: Annotated[
        str | None, typer.Option(help="The device to choose for; a GPU if there is one.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """Show versions, devices, and the chosen implementation of every operation with its reason."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = _describe(chosen)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    versions = Table("package", "version", title="Versions", title_justify="left")
    for name, version in found["versions"].items():
        versions.add_row(name, version or "not installed")
    devices = Table("device", "is", title="Devices", title_justify="left")
    for name, text in found["devices"].items():
        devices.add_row(name, text)
    operations = Table(
        "operation", "runs", "because", title=f"Operations on {chosen}", title_justify="left"
    )
    for choice in found["ops"]:
        operations.add_row(choice["op"], choice["implementation"], choice["reason"])
    for table in (versions, devices, operations):
        console.print(table)


def _describe(device: str) -> dict[str, Any]:
    try:
        choices = select_ops(torch.device(device)).describe()
    except RuntimeError as error:
        raise BackendUnavailable(f'--device "{device}": {error}') from None
    return {
        "versions": versions(),
        "devices": devices(),
        "device": device,
        "ops": [
            {"op": c.op, "implementation": c.implementation, "reason": c.reason} for c in choices
        ],
    }
