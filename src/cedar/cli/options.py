"""Options that commands share: each is declared once, in a group that reads it.

A group is a frozen dataclass whose fields are options. A command takes it as one argument, and
`grouped` shows its fields to typer. Nothing heavy is imported before a group is used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from cedar.errors import BackendUnavailable, RequestError

if TYPE_CHECKING:
    import torch

    from cedar.config import ModelConfig
    from cedar.engine import EngineConfig, LoadedModel
    from cedar.engine.core import EngineCore

__all__ = [
    "Checkpoint",
    "EngineOptions",
    "ModelOptions",
    "grouped",
    "open_core",
    "parse_device",
    "parse_dtype",
]

_MODEL, _ENGINE = "Model", "Engine"  # headings of --help

Checkpoint = Annotated[
    str, typer.Argument(help="Checkpoint directory, or a bundled name such as cedar-tiny.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Where a model runs and how its weights are held."""

    device: Annotated[
        str, typer.Option(help='"auto", "cpu" or "cuda[:n]".', rich_help_panel=_MODEL)
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help='"auto" (float32 on a CPU), "float32" or "bfloat16".', rich_help_panel=_MODEL
        ),
    ] = "auto"
    packed: Annotated[
        bool | None,
        typer.Option(
            "--packed/--dequantized",
            help="Keep quantised weights packed (little memory; slower without kernels) or not. "
            "Default: packed where kernels run.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    engram: Annotated[
        str,
        typer.Option(
            help='Engram tables: "model" keeps them with the other weights, "host" in host memory '
            '(a GPU fetches rows ahead), "disk" in their files.',
            rich_help_panel=_MODEL,
        ),
    ] = "model"

    def load(self, checkpoint: str) -> LoadedModel:
        """The model and its tokenizer; raises what `load_model` does."""
        from cedar.engine.build import load_model

        return load_model(
            checkpoint,
            device=parse_device(self.device),
            dtype=parse_dtype(self.dtype),
            packed=self.packed,
            engram=self.engram,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an engine uses memory and time: the settings of `EngineConfig`, by the same names."""

    draft: Annotated[
        bool | None,
        typer.Option(
            "--draft/--no-draft",
            help="Draft tokens and verify them; the text is the same. Default: on if the model "
            "has a draft head.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    max_draft: Annotated[
        int | None,
        typer.Option(
            help="Drafts verified at once; default: the whole block.", rich_help_panel=_ENGINE
        ),
    ] = None
    replay: Annotated[
        str,
        typer.Option(
            help='Prefill: "decoder" runs the decoder over the last window only, '
            '"encoder+decoder" also keeps hits of the prefix cache whole, "off" runs every token '
            "through every layer.",
            rich_help_panel=_ENGINE,
        ),
    ] = "decoder"
    token_budget: Annotated[
        int,
        typer.Option(
            help="Tokens of one step; long prompts run in chunks.", rich_help_panel=_ENGINE
        ),
    ] = 1024
    pool_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the cache holds; default: the longest sequence.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    page_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a page; default: what suits the model.", rich_help_panel=_ENGINE
        ),
    ] = None
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Find beginnings of prompts that were run before.",
            rich_help_panel=_ENGINE,
        ),
    ] = True
    prefix_hits: Annotated[
        str,
        typer.Option(
            help='"replay" takes all that was found and runs its end again as --replay says, '
            '"exact" takes only what a snapshot of the windows continues.',
            rich_help_panel=_ENGINE,
        ),
    ] = "replay"
    ring_snapshots: Annotated[
        int, typer.Option(help="Snapshots of windows that are kept.", rich_help_panel=_ENGINE)
    ] = 64
    disk_cache: Annotated[
        Path | None,
        typer.Option(
            "--disk-cache",
            "--cache-directory",
            help="Keep cached prefixes on disk, in this directory.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    disk_bytes: Annotated[
        int, typer.Option(help="Most bytes of that directory.", rich_help_panel=_ENGINE)
    ] = 16 << 30
    decoding: Annotated[
        str,
        typer.Option(
            help='Decoding steps: "graphs" records them as CUDA graphs, "device" runs the same '
            'without recording, "host" plans every step like a prefill, "auto" takes what suits.',
            rich_help_panel=_ENGINE,
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="The same bits whatever runs beside a request, with drafts and without; slower.",
            rich_help_panel=_ENGINE,
        ),
    ] = False

    def config(self, model: ModelConfig | None, **settings: Any) -> EngineConfig:
        """The engine's configuration; ``settings`` are those that are no options.

        model: decides whether to draft where that was left open. None, before the weights are
        read, only to refuse what is wrong: raises `ConfigError`.
        """
        from cedar.engine.assemble import EngineConfig
        from cedar.errors import ConfigError

        if self.disk_cache is not None and not self.prefix_cache:
            raise ConfigError(
                "engine: disk_cache needs the prefix cache, which --no-prefix-cache turns off."
            )
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.draft is None:
            own["draft"] = model is not None and model.has_draft
        return EngineConfig(**own | settings)


def open_core(
    checkpoint: str, model: ModelOptions, engine: EngineOptions, *, max_running: int
) -> tuple[LoadedModel, EngineCore]:
    """A model and an engine's loop around it. Wrong settings are refused before it is read."""
    from cedar.engine.assemble import build_core

    engine.config(None, max_running=max_running)
    loaded = model.load(checkpoint)
    return loaded, build_core(loaded, engine.config(loaded.model.config, max_running=max_running))


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command in whose place typer sees the fields of its groups as options of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            shown.append(_option(parameter.name, hints[parameter.name], parameter.default))
            continue
        kind = groups[parameter.name]
        types = get_type_hints(kind, include_extras=True)
        shown += [_option(field.name, types[field.name], field.default) for field in fields(kind)]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def parse_device(name: str) -> torch.device:
    """The device that ``--device`` names; "auto" is the first GPU, or the CPU without one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BackendUnavailable(
            f'--device is {name!r}; expected "auto", "cpu" or "cuda:0".'
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendUnavailable(
            f"--device is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices. "
            "Use --device cpu."
        )
    return device


def parse_dtype(name: str) -> torch.dtype | None:
    """The type that ``--dtype`` names; None for "auto"."""
    import torch

    known = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise RequestError(f"--dtype is {name!r}; expected one of {', '.join(known)}.")
    return known[name]
