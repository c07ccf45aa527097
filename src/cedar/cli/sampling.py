"""The options of `cedar generate` and `cedar chat` that shape the text or the engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cedar.errors import RequestError

__all__ = [
    "CacheDirectory",
    "Checkpoint",
    "Draft",
    "Dtype",
    "FrequencyPenalty",
    "LogitBias",
    "MappedEngram",
    "MaxTokens",
    "MinP",
    "Packed",
    "Place",
    "PoolTokens",
    "PresencePenalty",
    "RepetitionPenalty",
    "Replay",
    "Seed",
    "Stop",
    "StopTokenId",
    "Temperature",
    "Timeout",
    "TopK",
    "TopP",
    "parse_logit_bias",
]

Checkpoint = Annotated[
    str, typer.Argument(help="Checkpoint directory, or a bundled name such as cedar-tiny.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="At most so many.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Sample from so many likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens only.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 makes every token seen so far less likely.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Taken from a token's logit for each time it was generated.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Taken from the logit of every token that was generated.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN=BIAS", help="Added to a token's logit; may be repeated."),
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]
StopTokenId = Annotated[
    list[int] | None, typer.Option(help="Token id that ends the answer; may be repeated.")
]
Timeout = Annotated[float | None, typer.Option(help="Give up after so many seconds.")]
Place = Annotated[str, typer.Option(help='"auto", "cpu" or "cuda[:n]".')]
Dtype = Annotated[str, typer.Option(help='"auto" (float32 on a CPU), "float32" or "bfloat16".')]
Packed = Annotated[bool, typer.Option(help="Keep quantised weights packed: little memory, slower.")]
MappedEngram = Annotated[
    bool, typer.Option(help="Leave the Engram tables on disk, read rows as needed.")
]
Draft = Annotated[
    bool | None,
    typer.Option("--draft/--no-draft", help="Draft tokens and verify them; the text is the same."),
]
Replay = Annotated[
    str,
    typer.Option(
        help='Prefill: "decoder" runs the decoder over the last window only, "encoder+decoder" '
        'also keeps hits of the prefix cache whole, "off" runs every token through every layer.'
    ),
]
PoolTokens = Annotated[
    int | None, typer.Option(help="Tokens that the cache holds; default: the longest sequence.")
]
CacheDirectory = Annotated[
    Path | None, typer.Option(help="Keep cached prefixes on disk, in this directory.")
]


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
