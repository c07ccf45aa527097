"""`cedar chat`: talk with a checkpoint in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cedar.cli.options import Checkpoint, EngineOptions, ModelOptions, grouped, open_core
from cedar.cli.sampling import SamplingOptions, Temperature
from cedar.errors import CedarError, RequestError

if TYPE_CHECKING:
    from cedar.engine.core import EngineCore
    from cedar.engine.output import Usage
    from cedar.engine.params import SamplingParams
    from cedar.inputs.tokenizer import Tokenizer

__all__ = ["Conversation", "command"]

_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_SYSTEM, _NO_REASONING = "<｜System｜>", "</think>"
_HELP = "/reset forgets the conversation, /exit (or end of input) ends; Ctrl-C ends an answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChatSampling(SamplingOptions):
    temperature: Temperature = 0.8


@grouped
def command(
    checkpoint: Checkpoint,
    sampling: _ChatSampling,
    model: ModelOptions,
    engine: EngineOptions,
    system: Annotated[
        str, typer.Option(help="Text before the conversation, such as instructions.")
    ] = "",
    protocol: Annotated[
        bool,
        typer.Option(
            "--protocol",
            help="Use the control tokens of the prompt protocol, for a model trained on them; "
            "otherwise turns are plain text.",
        ),
    ] = False,
) -> None:
    """Talk with a model: a line is a turn, the answer streams to standard output.

    After each answer standard error has its figures: tokens per second, prompt tokens found in the
    cache, accepted drafts, bytes held. A turn that cannot be served is reported and forgotten, and
    the conversation goes on.
    """
    params = sampling.params(stop=() if protocol else ("\nUser:",))
    loaded, core = open_core(checkpoint, model, engine, max_running=1)
    config = loaded.model.config
    notes = Console(stderr=True)
    try:
        conversation = Conversation(
            loaded.tokenizer, config.bos_token_id, config.eos_token_id, protocol, system
        )
        if config.has_vision:
            # An answer is part of the next prompt, where this token would ask for a picture.
            never = {config.image_token_id: float("-inf")}
            params = replace(params, logit_bias={**params.logit_bias, **never})
        if sys.stdin.isatty():
            notes.print(f"[dim]{_HELP}[/dim]", soft_wrap=True)
        for line in _lines():
            if line == "/reset":
                conversation.reset()
            elif line.startswith("/"):
                notes.print(f"[dim]{_HELP}[/dim]", soft_wrap=True)
            else:
                _turn(core, conversation, line, params, sampling.timeout, notes)
    finally:
        core.close()


@dataclass(slots=True)
class Conversation:
    """The tokens of a conversation, which only ever grow: so every turn finds the last one cached.

    protocol: turns are marked by control tokens, else by "User:" and "Assistant:" at the beginning
    of a line, which a model of plain text may take for a dialogue. Raises `RequestError` if the
    tokenizer lacks the control tokens.
    """

    tokenizer: Tokenizer
    bos: int
    eos: int
    protocol: bool = False
    system: str = ""
    tokens: list[int] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        needed = (_USER, _ASSISTANT, _NO_REASONING, *((_SYSTEM,) if self.system else ()))
        missing = [name for name in needed if name not in self.tokenizer.control_ids]
        if self.protocol and missing:
            raise RequestError(
                f"--protocol needs control tokens that this tokenizer lacks: {', '.join(missing)}. "
                "Chat without --protocol."
            )
        self.reset()

    def reset(self) -> None:
        """Back to the beginning."""
        self.turns, self.tokens = 0, [self.bos]
        if self.system and self.protocol:
            self.tokens += [self._control(_SYSTEM), *self._plain(self.system)]
        elif self.system:
            self.tokens += self._plain(self.system + "\n\n")

    def ask(self, text: str) -> list[int]:
        """The prompt for an answer to ``text``; nothing is kept before `answered`."""
        if self.protocol:
            header = [self._control(_ASSISTANT), self._control(_NO_REASONING)]
            return [*self.tokens, self._control(_USER), *self._plain(text), *header]
        start = "\n" if self.turns else ""
        return [*self.tokens, *self._plain(f"{start}User: {text}\nAssistant:")]

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        """Keep a turn: its prompt and the tokens of the answer."""
        self.turns += 1
        self.tokens = [*prompt, *answer, *([self.eos] if self.protocol else [])]

    def _plain(self, text: str) -> list[int]:
        # What somebody types can never become a control token.
        return self.tokenizer.encode(text, control=False)

    def _control(self, name: str) -> int:
        return self.tokenizer.control_ids[name]


def _lines() -> Iterator[str]:
    """What is typed, without empty lines, up to /exit or the end of input."""
    while True:
        try:
            line = input("User: " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is no text: {error}. Expected UTF-8.") from None
        if line == "/exit":
            return
        if line:
            yield line


def _turn(
    core: EngineCore,
    conversation: Conversation,
    text: str,
    params: SamplingParams,
    timeout: float | None,
    notes: Console,
) -> None:
    """Stream one answer and its figures."""
    answer: list[int] = []
    usage, reason, error = None, None, None
    held = 0
    try:
        prompt = conversation.ask(text)
        id = core.submit(core.request(prompt, params, timeout=timeout))
        if sys.stdin.isatty():
            _write("Assistant:")
        with _interruptible() as interrupted:
            while reason is None:
                if interrupted:
                    core.cancel(id)
                for output in core.step():
                    _write(output.text)
                    answer += output.tokens
                    usage, reason, error = output.usage, output.finish_reason, output.error
                held = max(held, core.stats().bytes_held)
        _write("\n")
        if error is not None:
            raise error
    except CedarError as refused:
        notes.print(f"[bold red]error:[/bold red] {refused}", highlight=False, soft_wrap=True)
        return
    conversation.answered(prompt, answer)
    if usage is not None:
        notes.print(f"[dim]{_figures(usage, held, reason)}[/dim]", soft_wrap=True)


def _figures(usage: Usage, held: int, reason: str | None) -> str:
    accepted = "no drafts"
    if usage.drafted:
        accepted = (
            f"{usage.accepted} of {usage.drafted} drafts accepted "
            f"({usage.accepted_per_step:.2f} tokens a step)"
        )
    return (
        f"{usage.generated_tokens} tokens at {usage.tokens_per_second:.1f} tokens/s, "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, "
        f"{accepted}, {held:,} cache bytes held, finish: {reason}, seed {usage.seed}"
    )


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collects Ctrl-C instead of raising it in the middle of a step."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
