"""`cedar generate`: stream text from any checkpoint directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cedar.cli.options import Checkpoint, EngineOptions, ModelOptions, grouped, open_core
from cedar.cli.sampling import SamplingOptions
from cedar.errors import RequestError

if TYPE_CHECKING:
    from cedar.engine.core import EngineCore
    from cedar.engine.llm import Sample
    from cedar.engine.output import TokenLogprob
    from cedar.engine.request import Request
    from cedar.inputs.tokenizer import Tokenizer

__all__ = ["command"]


_MOST_RUNNING = 16  # each running sample has a slot; further ones wait for one


@grouped
def command(
    checkpoint: Checkpoint,
    sampling: SamplingOptions,
    model: ModelOptions,
    engine: EngineOptions,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help='Text to continue; "-" reads standard input.')
    ] = "",
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the text to continue from a file.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, max=1000, help="So many continuations of the prompt.")
    ] = 1,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")
    ] = False,
    control_tokens: Annotated[
        bool,
        typer.Option(
            "--control-tokens",
            help="Read spellings like <｜User｜> in the prompt as control tokens.",
        ),
    ] = False,
    begin: Annotated[bool, typer.Option(help="Put the begin-of-text token first.")] = True,
    logprobs: Annotated[
        int | None, typer.Option(help="Show log probabilities, and so many likeliest tokens.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the prompt; it runs through every layer.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Text only.")] = False,
) -> None:
    """Continue a text, streaming it to standard output; figures go to standard error.

    The prompt is plain text: no chat template is applied.
    """
    params = sampling.params(
        ignore_eos=ignore_eos, n=samples, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    text = _prompt_text(prompt, prompt_file)
    notes = Console(stderr=True, quiet=quiet)
    together = min(samples, _MOST_RUNNING, max(engine.token_budget, 1))
    loaded, core = open_core(checkpoint, model, engine, max_running=together)
    ids = [loaded.model.config.bos_token_id] if begin else []
    ids += loaded.tokenizer.encode(text, control=control_tokens)
    try:
        request = core.request(ids, params, timeout=sampling.timeout)
        if not quiet and samples == 1:
            _write(text)
        found, prompt_scores, held = _run(core, request)
    finally:
        core.close()
    if prompt_scores is not None:
        notes.print("[dim]prompt:[/dim]")
        _show_logprobs(notes, loaded.tokenizer, prompt_scores)
    for number, sample in enumerate(found):
        if samples > 1:
            if not quiet:
                _write(f"--- {number + 1} of {samples} ---\n{text}")
            _write(sample.text + "\n")
        if sample.logprobs is not None:
            _show_logprobs(notes, loaded.tokenizer, sample.logprobs)
        notes.print(f"[dim]{_figures(sample, held)}[/dim]", soft_wrap=True)
        if sample.error is not None:
            raise sample.error


def _run(
    core: EngineCore, request: Request
) -> tuple[list[Sample], tuple[TokenLogprob | None, ...] | None, int]:
    """Run one request to its end; a single sample is written as it comes.

    Returns the samples, the scores of the prompt, and the most cache bytes that were held."""
    from cedar.engine.limits import sampling_of
    from cedar.engine.llm import Sample

    found = [Sample() for _ in range(sampling_of(request).n)]
    prompt_scores, held = None, 0
    core.submit(request)
    while any(sample.finish_reason is None for sample in found):
        for output in core.step():
            found[output.index].take(output)
            if output.prompt_logprobs is not None:
                prompt_scores = output.prompt_logprobs
            if len(found) == 1:
                _write(output.text + ("\n" if output.finish_reason else ""))
        held = max(held, core.stats().bytes_held)
    return found, prompt_scores, held


def _figures(sample: Sample, held: int) -> str:
    usage = sample.usage
    drafts = ""
    if usage.drafted:
        drafts = f"{usage.accepted} of {usage.drafted} drafts accepted, "
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return (
        f"{usage.prompt_tokens} prompt tokens{cached} in {usage.prefill_seconds:.2f} s, "
        f"{usage.generated_tokens} tokens at {usage.tokens_per_second:.1f} tokens/s, "
        f"{drafts}{held:,} cache bytes, finish: {sample.finish_reason}, seed {usage.seed}"
    )


def _show_logprobs(
    notes: Console,
    tokenizer: Tokenizer,
    scores: list[TokenLogprob] | tuple[TokenLogprob | None, ...],
) -> None:
    for each in scores:
        if each is None:
            continue
        others = ", ".join(f"{tokenizer.decode([t])!r} {value:.3f}" for t, value in each.top)
        line = f"{each.logprob:9.4f}  {tokenizer.decode([each.token])!r}"
        notes.print(line + (f"   of {others}" if others else ""), markup=False, highlight=False)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _prompt_text(prompt: str, file: Path | None) -> str:
    if file is not None and prompt:
        raise RequestError("both --prompt and --prompt-file are given; give one of them.")
    if file is None and prompt != "-":
        return _text(prompt.encode("utf-8", "surrogateescape"), "--prompt")
    if file is None:
        return _text(sys.stdin.buffer.read(), "standard input")
    try:
        return _text(file.read_bytes(), f"--prompt-file {file}")
    except OSError as error:
        raise RequestError(f"--prompt-file {file} cannot be read: {error.strerror}.") from None


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is no text: {error}. Expected UTF-8.") from None
