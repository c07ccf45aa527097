"""`cedar serve`: the HTTP server, with the chat page."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cedar.checkpoint.locate import bundled_checkpoints
from cedar.cli.options import Checkpoint, EngineOptions, ModelOptions, grouped

if TYPE_CHECKING:
    from cedar.engine.assemble import EngineConfig
    from cedar.engine.build import LoadedModel
    from cedar.server.keys import KeyRing
    from cedar.server.settings import ServerSettings

__all__ = ["command"]

EXIT_BUSY = 1


@grouped
def command(
    model: ModelOptions,
    engine: EngineOptions,
    checkpoint: Checkpoint = "cedar-tiny",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which requests ask for the model; may be repeated. Default: DIR's name."
        ),
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Whether chat requests that do not say reason first; default: yes, but not the "
            "bundled model.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help='Ask for a key of this file; lines of "name key". Or CEDAR_API_KEYS.'),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Answer requests for this host name, besides localhost and addresses; may be "
            "repeated. With API keys any name will do."
        ),
    ] = None,
    allow_image_host: Annotated[
        list[str] | None,
        typer.Option(help="Fetch images from this host; may be repeated. Default: fetch none."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Let web pages of this origin call the API; may be repeated."),
    ] = None,
    max_body: Annotated[int, typer.Option(help="Most bytes of a request.")] = 32 << 20,
    max_images: Annotated[int, typer.Option(help="Most images of a request.")] = 16,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Serve the chat page at /.")
    ] = True,
    log_text: Annotated[
        bool, typer.Option("--log-text", help="Log prompts and answers, which is off for privacy.")
    ] = False,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may take to end after SIGTERM.")
    ] = 30.0,
    max_running: Annotated[int, typer.Option(help="Sequences that run at a time.")] = 16,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; those beyond get 429.")
    ] = 256,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, and a chat page.

    Point a client at http://127.0.0.1:8000/v1. Drafts are on if the model has a draft head.
    SIGTERM or Ctrl-C lets running requests finish; a second one ends them.
    """
    from cedar.server.keys import KeyRing
    from cedar.server.listen import AddressInUse, open_socket
    from cedar.server.settings import ServerSettings

    _log_to_stderr()
    keys = KeyRing.load(api_key_file, os.environ)
    settings = ServerSettings(
        models=tuple(served_model_name or (Path(checkpoint).resolve().name,)),
        thinking=checkpoint not in bundled_checkpoints() if thinking is None else thinking,
        max_body=max_body,
        max_images=max_images,
        image_hosts=tuple(allow_image_host or ()),
        hosts=None if keys is not None and not allow_host else tuple(allow_host or ()),
        cors_origins=tuple(cors_origin or ()),
        page=page,
        log_text=log_text,
        drain_seconds=drain_seconds,
    )
    # All that can be wrong with the arguments is found before the weights are read.
    limits = {"max_running": max_running, "max_waiting": max_waiting}
    engine.config(None, **limits)
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        listener = open_socket(host, port)
    except AddressInUse as busy:
        notes.print(f"error: {busy}")
        raise typer.Exit(EXIT_BUSY) from None
    with listener:
        loaded = model.load(checkpoint)
        config = engine.config(loaded.model.config, **limits)
        url = _url(listener)
        notes.print(f"Cedar serves {settings.model} at {url}")
        if page:
            notes.print(f"Chat page: {url}/   API: {url}/v1")
        if keys is None and not _is_local(listener):
            notes.print("Anyone who reaches this machine can use it: no API keys are set.")
        asyncio.run(_serve(loaded, config, settings, keys, listener))


async def _serve(
    loaded: LoadedModel,
    config: EngineConfig,
    settings: ServerSettings,
    keys: KeyRing | None,
    listener: socket.socket,
) -> None:
    from cedar.cli.served import ServedEngine
    from cedar.engine.engine import Engine
    from cedar.server.app import build_app
    from cedar.server.listen import DrainingServer

    async with Engine(loaded, config) as engine:
        served = ServedEngine(engine, loaded.model.config, max_running=config.max_running)
        app = build_app(served, settings, keys)
        await DrainingServer(app, engine.close).serve(sockets=[listener])


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _is_local(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _log_to_stderr() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("cedar").setLevel(logging.INFO)
