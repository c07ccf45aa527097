"""`cedar generate`: stream text from any checkpoint directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cedar.cli import sampling as options

if TYPE_CHECKING:
    from cedar.engine.core import EngineCore
    from cedar.engine.llm import Sample
    from cedar.engine.output import TokenLogprob
    from cedar.engine.request import Request
    from cedar.inputs.tokenizer import Tokenizer

__all__ = ["command"]


def command(
    checkpoint: options.Checkpoint,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help='Text to continue; "-" reads standard input.')
    ] = "",
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the text to continue from a file.")
    ] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")
    ] = False,
    samples: Annotated[int, typer.Option(help="So many continuations of the prompt.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="Show log probabilities, and so many likeliest tokens.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the prompt; it runs through every layer.")
    ] = None,
    timeout: options.Timeout = None,
    device: options.Place = "auto",
    dtype: options.Dtype = "auto",
    control_tokens: Annotated[
        bool, typer.Option(help="Read spellings like <｜User｜> in the prompt as control tokens.")
    ] = False,
    begin: Annotated[bool, typer.Option(help="Put the begin-of-text token first.")] = True,
    packed: options.Packed = False,
    mapped_engram: options.MappedEngram = False,
    draft: options.Draft = None,
    replay: options.Replay = "decoder",
    pool_tokens: options.PoolTokens = None,
    cache_directory: options.CacheDirectory = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Text only.")] = False,
) -> None:
    """Continue a text, streaming it to standard output; figures go to standard error.

    The prompt is plain text: no chat template is applied.
    """
    from cedar.cli.options import parse_device, parse_dtype
    from cedar.engine.assemble import EngineConfig, build_core
    from cedar.engine.build import load_model
    from cedar.engine.sampler import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=options.parse_logit_bias(logit_bias),
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        n=samples,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    config = EngineConfig(
        max_running=samples,
        draft=bool(draft),
        replay=replay,
        pool_tokens=pool_tokens,
        disk_cache=cache_directory,
    )
    text = _prompt_text(prompt, prompt_file)
    place, kind = parse_device(device), parse_dtype(dtype)
    notes = Console(stderr=True, quiet=quiet)
    loaded = load_model(
        checkpoint, device=place, dtype=kind, packed=packed, mapped_engram=mapped_engram
    )
    ids = [loaded.model.config.bos_token_id] if begin else []
    ids += loaded.tokenizer.encode(text, control=control_tokens)
    core = build_core(loaded, config)
    try:
        request = core.request(ids, params, timeout=timeout)
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
    from cedar.errors import RequestError

    if file is None:
        return sys.stdin.read() if prompt == "-" else prompt
    if prompt:
        raise RequestError("both --prompt and --prompt-file are given; give one of them.")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompt-file {file} cannot be read as text: {error}.") from None
