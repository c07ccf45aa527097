"""Many prompts at once, from a script: submit all, step until all are done."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cedar.engine.assemble import EngineConfig, build_core
from cedar.engine.build import LoadedModel, load_model
from cedar.engine.core import EngineCore
from cedar.engine.limits import sampling_of
from cedar.engine.output import Output, TokenLogprob, Usage
from cedar.engine.sampler import SamplingParams
from cedar.engine.stats import EngineStats
from cedar.errors import RequestError

__all__ = ["LLM", "Completion", "Sample"]


@dataclass(slots=True, kw_only=True)
class Sample:
    """One continuation of a prompt; see `Output` for the fields."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0))

    def take(self, output: Output) -> None:
        """Append what is new."""
        self.text += output.text
        self.tokens += output.tokens
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        self.finish_reason, self.error = output.finish_reason, output.error
        self.usage = output.usage


@dataclass(slots=True, kw_only=True)
class Completion:
    """All samples of a prompt; text, tokens and so on are those of the first."""

    prompt: str | Sequence[int]
    samples: list[Sample]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def tokens(self) -> list[int]:
        return self.samples[0].tokens

    @property
    def finish_reason(self) -> str | None:
        return self.samples[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.samples[0].usage

    @property
    def error(self) -> Exception | None:
        return self.samples[0].error


class LLM:
    """A checkpoint behind an engine, for offline use by one thread.

    name: a checkpoint directory, a bundled name, or a `LoadedModel`. options: fields of
    `EngineConfig`, and those of `load_model` if a name is given.
    """

    def __init__(
        self, name: str | Path | LoadedModel, config: EngineConfig | None = None, **options: Any
    ) -> None:
        known = EngineConfig.field_names()
        engine = {key: options.pop(key) for key in list(options) if key in known}
        if config is not None and engine:
            raise RequestError(
                f"LLM got both config and {', '.join(engine)}; put them into the config."
            )
        allowed = () if isinstance(name, LoadedModel) else _LOADING
        unknown = [key for key in options if key not in allowed]
        if unknown:
            raise RequestError(
                f"LLM has no option {', '.join(unknown)}; expected one of "
                f"{', '.join((*allowed, *known))}."
            )
        config = config or EngineConfig(**engine)
        self.loaded = name if isinstance(name, LoadedModel) else load_model(name, **options)
        self.core = build_core(self.loaded, config)

    @classmethod
    def around(cls, core: EngineCore) -> "LLM":
        """The same face for a core that exists already."""
        llm = cls.__new__(cls)
        llm.core = core
        return llm

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams
        | Mapping[str, Any]
        | Sequence[SamplingParams | Mapping[str, Any]]
        | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Continue every prompt; results are in the order of the prompts.

        prompts: texts (the begin-of-text token is put before each) or token lists, many or one.
        params: for all, or one for each. A prompt that cannot be served raises `RequestError`
        with its number before any is run; what goes wrong later is in ``Completion.error``.
        """
        listed = _as_prompts(prompts)
        given = _as_params(params, len(listed))
        requests = []
        for number, (prompt, each) in enumerate(zip(listed, given, strict=True)):
            try:
                requests.append(self.core.request(prompt, each))
            except RequestError as error:
                raise RequestError(f"prompt {number}: {error}") from None
        counts = [sampling_of(request).n for request in requests]
        done = [
            Completion(prompt=prompt, samples=[Sample() for _ in range(count)])
            for prompt, count in zip(listed, counts, strict=True)
        ]
        found = {request.id: each for request, each in zip(requests, done, strict=True)}
        waiting = list(reversed(requests))
        bar = _Bar(len(requests)) if progress and requests else None
        left = {request.id: count for request, count in zip(requests, counts, strict=True)}
        with bar.show() if bar else nullcontext():
            try:
                while left:
                    while waiting and self.core.accepts:
                        self.core.submit(waiting.pop())
                    for output in self.core.step():
                        if output.id not in found:
                            continue  # of another caller of the same core
                        found[output.id].samples[output.index].take(output)
                        if output.prompt_logprobs is not None:
                            found[output.id].prompt_logprobs = output.prompt_logprobs
                        ended = output.finish_reason is not None
                        if ended:
                            left[output.id] -= 1
                        if ended and not left[output.id]:
                            del left[output.id]
                        if bar:
                            bar.moved(output, ended and output.id not in left)
            finally:
                for id in left:
                    self.core.cancel(id)
        return done

    def stats(self) -> EngineStats:
        """Figures since the start."""
        return self.core.stats()

    def close(self) -> None:
        """Let go of pools and files."""
        self.core.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_LOADING = ("device", "dtype", "packed", "engram")


class _Bar:
    """Prompts done, tokens so far and their rate, on standard error; gone afterwards."""

    def __init__(self, total: int) -> None:
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.1f}/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, tokens=0, rate=0.0)
        self._tokens = 0

    def show(self) -> AbstractContextManager[Any]:
        return self._progress

    def moved(self, output: Output, ended: bool) -> None:
        self._tokens += len(output.tokens)
        seconds = self._progress.tasks[0].elapsed or 0.0
        rate = self._tokens / seconds if seconds else 0.0
        self._progress.update(self._task, advance=int(ended), tokens=self._tokens, rate=rate)


def _as_prompts(
    prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
) -> list[str | Sequence[int]]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: Any, count: int) -> list[Any]:
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"there are {count} prompts but {len(params)} sampling parameters.")
    return list(params)
