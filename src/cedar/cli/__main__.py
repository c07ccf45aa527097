"""``cedar``: finds the command that is asked for, and prints the errors that users can cause."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from cedar.errors import BackendUnavailable, CedarError

# Name -> what it does. The function is ``command`` in the module of the same name; its own
# docstring is the long help. Nothing is imported to print this list.
COMMANDS: Mapping[str, str] = {
    "generate": "Generate text with a checkpoint.",
    "chat": "Talk with a checkpoint in the terminal.",
    "serve": "Serve a checkpoint over HTTP, with a chat page.",
    "train": "Train a model by recipe.",
    "evaluate": "Measure a model on held-out text.",
    "parity": "Compare this implementation with golden files.",
    "plan": "Show layers, parameters and cache bytes of a model.",
    "check": "Check the headers of a checkpoint.",
    "convert": "Write a checkpoint in another storage form.",
    "bench": "Measure this machine.",
    "env": "Show versions, devices and chosen implementations.",
}
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in `SystemExit`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in given if not word.startswith("-")), None)
    try:
        application(chosen)(args=given, prog_name="cedar")
    except CedarError as error:
        _print_error(error)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def application(chosen: str | None = None) -> typer.Typer:
    """The command line with all commands, of which only ``chosen`` is imported."""
    app = typer.Typer(
        name="cedar",
        help="The DeepSeek-V4.1-Flash architecture: exact model, inference, training.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name, summary in COMMANDS.items():
        function = _guarded(name, _load(name)) if name == chosen else _not_loaded
        text = None if name == chosen else summary
        app.command(name, help=text, short_help=summary)(function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"cedar {version('cedar-lm')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version  # its callback has done everything


def _load(name: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(f"cedar.cli.{name}")
    except ImportError as error:
        raise _missing(name, error) from error
    function: Callable[..., Any] = module.command
    return function


def _not_loaded() -> None:
    raise AssertionError("the command that runs is always loaded")


def _missing(name: str, error: ImportError) -> BackendUnavailable:
    return BackendUnavailable(
        f"cedar {name}: needs a module that is not installed ({error}). "
        "Install it, or the extra that brings it: pip install 'cedar-lm[serve,plots]'."
    )


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except CedarError as error:
            _print_error(error)
            raise typer.Exit(EXIT_ERROR) from None
        except ModuleNotFoundError as error:  # commands import what they need when they run
            if error.name is None or error.name.partition(".")[0] == "cedar":
                raise
            _print_error(_missing(name, error))
            raise typer.Exit(EXIT_ERROR) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return run


def _print_error(error: CedarError) -> None:
    from rich.console import Console
    from rich.text import Text

    message = Text.assemble(("error: ", "bold red"), str(error))
    Console(stderr=True).print(message, soft_wrap=True)


if __name__ == "__main__":
    main()
