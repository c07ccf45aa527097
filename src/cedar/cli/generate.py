"""`cedar generate`: stream text from any checkpoint directory."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["command"]


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint directory, or a bundled name such as cedar-tiny.")
    ],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help='Text to continue; "-" reads standard input.')
    ] = "",
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the text to continue from a file.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="At most so many.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens only.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    device: Annotated[str, typer.Option(help='"auto", "cpu" or "cuda[:n]".')] = "auto",
    dtype: Annotated[
        str, typer.Option(help='"auto" (float32 on a CPU), "float32" or "bfloat16".')
    ] = "auto",
    control_tokens: Annotated[
        bool, typer.Option(help="Read spellings like <｜User｜> in the prompt as control tokens.")
    ] = False,
    begin: Annotated[bool, typer.Option(help="Put the begin-of-text token first.")] = True,
    packed: Annotated[
        bool, typer.Option(help="Keep quantised weights packed: little memory, slower.")
    ] = False,
    mapped_engram: Annotated[
        bool, typer.Option(help="Leave the Engram tables on disk, read rows as needed.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Text only.")] = False,
) -> None:
    """Continue a text, streaming it to standard output; figures go to standard error.

    The prompt is plain text: no chat template is applied.
    """
    from cedar.cli.options import parse_device, parse_dtype
    from cedar.engine import SamplingParams, generate, load_model

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = _prompt_text(prompt, prompt_file)
    place, kind = parse_device(device), parse_dtype(dtype)
    notes = Console(stderr=True, quiet=quiet)
    loaded = load_model(
        checkpoint, device=place, dtype=kind, packed=packed, mapped_engram=mapped_engram
    )
    ids = [loaded.model.config.bos_token_id] if begin else []
    ids += loaded.tokenizer.encode(text, control=control_tokens)
    stream = loaded.tokenizer.stream()
    if not quiet:
        sys.stdout.write(text)
    shown = 0
    for state in generate(loaded, ids, params):
        for token in state.tokens[shown:]:
            sys.stdout.write(stream.push(token))
        shown = len(state.tokens)
        sys.stdout.flush()
    sys.stdout.write(stream.finish() + "\n")
    sys.stdout.flush()
    rate = len(state.tokens) / state.decode_seconds if state.decode_seconds else 0.0
    notes.print(
        f"[dim]{state.prompt_tokens} prompt tokens in {state.prefill_seconds:.2f} s, "
        f"{len(state.tokens)} tokens at {rate:.1f} tokens/s, finish: {state.finish_reason}, "
        f"seed {state.seed}[/dim]"
    )


def _prompt_text(prompt: str, file: Path | None) -> str:
    from cedar.errors import RequestError

    if file is None:
        return sys.stdin.read() if prompt == "-" else prompt
    if prompt:
        raise RequestError("both --prompt and --prompt-file are given; give one of them.")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompt-file {file} cannot be read as text: {error}.") from None
