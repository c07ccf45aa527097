"""The options that shape a text: sampling and stopping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cedar.errors import RequestError

if TYPE_CHECKING:
    from cedar.engine.params import SamplingParams

__all__ = ["SamplingOptions", "Temperature", "parse_logit_bias"]

_PANEL = "Sampling"  # heading of --help

Temperature = Annotated[
    float, typer.Option(help="0 takes the most likely token.", rich_help_panel=_PANEL)
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """What every command that generates text understands; see `SamplingParams`."""

    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", "-n", help="At most so many.", rich_help_panel=_PANEL),
    ] = 256
    temperature: Temperature = 1.0
    top_k: Annotated[
        int,
        typer.Option(
            help="Sample from so many likeliest tokens; 0 is off.", rich_help_panel=_PANEL
        ),
    ] = 0
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample from the likeliest tokens that reach this share; 1 is off.",
            rich_help_panel=_PANEL,
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        typer.Option(help="Drop tokens below this share of the likeliest.", rich_help_panel=_PANEL),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(
            help="Above 1 makes every token seen so far less likely.", rich_help_panel=_PANEL
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="Taken from a token's logit for each time it was generated.",
            rich_help_panel=_PANEL,
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        typer.Option(
            help="Taken from the logit of every token that was generated.", rich_help_panel=_PANEL
        ),
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN=BIAS",
            help="Added to a token's logit; may be repeated.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_PANEL)
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the answer; may be repeated.", rich_help_panel=_PANEL),
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            help="Token id that ends the answer; may be repeated.", rich_help_panel=_PANEL
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(help="Give up after so many seconds.", rich_help_panel=_PANEL),
    ] = None

    def params(self, *, stop: Sequence[str] = (), **more: Any) -> SamplingParams:
        """The sampling parameters; ``stop`` is added to the texts that were given.

        Raises `RequestError` for bad values, and for a bad timeout too, which is no part of them.
        """
        from cedar.engine.limits import check_times
        from cedar.engine.params import SamplingParams

        check_times(0, self.timeout)
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            seed=self.seed,
            stop=(*(self.stop or ()), *stop),
            stop_token_ids=tuple(self.stop_token_id or ()),
            **more,
        )


def parse_logit_bias(given: Sequence[str] | None) -> dict[int, float]:
    """``TOKEN=BIAS`` strings as a mapping; `RequestError` for anything else."""
    bias = {}
    for each in given or ():
        token, separator, value = each.partition("=")
        try:
            if not separator:
                raise ValueError
            bias[int(token)] = float(value)
        except ValueError:
            raise RequestError(
                f"--logit-bias is {each!r}; expected a token id, an equals sign and a number, "
                "such as 42=-5."
            ) from None
    return bias
