"""What a request to ``/v1/completions`` may say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cedar.inputs.chat import ProtocolError
from cedar.inputs.chat.body import read_body
from cedar.inputs.chat.record import Either, Items, Object, Record
from cedar.inputs.chat.shape import Anything, Flag, Integer, Notes, Number, Path, Shape, Text
from cedar.server.protocols import EngineLike

__all__ = [
    "IGNORED",
    "NOTES",
    "CompletionRequest",
    "check_ids",
    "check_model",
    "completion_record",
    "read_completion",
]

_MOST_LOGPROBS = 20
_MOST_STOPS = 64
_DEFAULT_TOKENS = 16

IGNORED = ("user", "metadata")
"""Accepted without effect."""

# Field -> what there is to know of it besides its type.
NOTES: Mapping[str, str] = {
    "model": "a served name",
    "prompt": "text, token ids, or a list of either",
    "max_tokens": f"{_DEFAULT_TOKENS} by default; 0 only scores the prompt",
    "temperature": "0 takes the likeliest token",
    "logprobs": f"0 to {_MOST_LOGPROBS}",
    "echo": "with logprobs it also scores the prompt",
    "seed": "repeats the text",
    "best_of": "only if it equals n",
    "suffix": "only empty: text cannot be filled in",
    "top_k": "extension; 0 and -1 are off",
    "min_p": "extension",
    "repetition_penalty": "extension; 1 is off",
    "stop_token_ids": "extension",
    "ignore_eos": "extension",
    "add_special_tokens": "extension; whether text gets the begin-of-text token, true by default",
    "parse_special": "extension; whether text may spell control tokens, false by default",
    "user": "there are no accounts to tell apart",
    "metadata": "nothing is stored",
}


def completion_record(vocab_size: int, max_choices: int) -> Record:
    """The fields and what they may hold."""
    token = Integer(0, vocab_size - 1)
    fields: dict[str, Shape] = {
        "model": Text(),
        "prompt": Either((Text(), Items(Either((Text(), token, Items(token, 1))), 1))),
        "max_tokens": Integer(0),
        "temperature": Number(0, 2),
        "top_p": Number(0, 1, above=True),
        "n": Integer(1, max_choices),
        "stream": Flag(),
        "stream_options": Record({"include_usage": Flag()}, closed=True),
        "logprobs": Integer(0, _MOST_LOGPROBS),
        "echo": Flag(),
        "stop": Either((Text(1), Items(Text(1), most=_MOST_STOPS))),
        "presence_penalty": Number(-2, 2),
        "frequency_penalty": Number(-2, 2),
        "logit_bias": Object(Number(-100, 100)),
        "seed": Integer(0, 2**63 - 1),
        "best_of": Integer(1),
        "suffix": Text(),
        "top_k": Integer(-1),
        "min_p": Number(0, 1),
        "repetition_penalty": Number(0, 100, above=True),
        "stop_token_ids": Items(token, most=_MOST_STOPS),
        "ignore_eos": Flag(),
        "add_special_tokens": Flag(),
        "parse_special": Flag(),
        **{name: Anything() for name in IGNORED},
    }
    return Record(fields, required=("model", "prompt"), closed=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A checked request.

    prompts: token ids of each; texts: the same as text, for ``echo``. drops_text: only the prompt
    is wanted, though the engine generates a token. shows_end: an end-of-text token is reported like
    any other and ends the text all the same.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None
    max_tokens: int
    drops_text: bool
    shows_end: bool
    sampling: Mapping[str, Any]
    ignored: tuple[str, ...]


def read_completion(
    body: bytes, engine: EngineLike, models: Sequence[str], max_choices: int
) -> CompletionRequest:
    """Check a body; raises `ProtocolError` naming the field."""
    info, notes = engine.info, Notes()
    given = completion_record(info.vocab_size, max_choices).check(read_body(body), (), notes)
    check_model(given["model"], models)
    n = given.get("n", 1)
    if given.get("best_of", n) != n:
        notes.fail(
            ("best_of",), f"expected n = {n}, found {given['best_of']}; texts are not ranked."
        )
    if given.get("suffix"):
        notes.fail(("suffix",), "this model cannot fill in text; leave it out.")
    prompts, texts = _prompts(given, engine, notes)
    if len(prompts) * n > max_choices:
        notes.fail(
            ("prompt",),
            f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} choices; allowed are "
            f"{max_choices}.",
        )
    stream, echo, logprobs = (
        given.get("stream", False),
        given.get("echo", False),
        given.get("logprobs"),
    )
    if "stream_options" in given and not stream:
        notes.fail(("stream_options",), "expected stream = true beside it.")
    most = given.get("max_tokens", _DEFAULT_TOKENS)
    sampling = _sampling(given, info.vocab_size, notes)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        if echo:
            sampling["prompt_logprobs"] = logprobs
    # Evaluations read the scores of the prompt as those before the last token's, so that there
    # must be a last token even if it is the end of text.
    shows_end = echo and logprobs is not None and most == 1 and not sampling.get("ignore_eos")
    if shows_end:
        sampling["ignore_eos"] = True
    return CompletionRequest(
        model=given["model"],
        prompts=prompts,
        texts=texts,
        n=n,
        stream=stream,
        include_usage=given.get("stream_options", {}).get("include_usage", False),
        echo=echo,
        logprobs=logprobs,
        max_tokens=max(most, 1),
        drops_text=most == 0,
        shows_end=shows_end,
        sampling=sampling,
        ignored=tuple(name for name in IGNORED if name in given),
    )


def check_model(model: str, models: Sequence[str]) -> None:
    """Raises `ProtocolError` 404 for a model that is not served."""
    if model not in models:
        raise ProtocolError(
            f"model: {model[:100]!r} is not served here; there is {', '.join(models)}.",
            param="model",
            status=404,
            code="model_not_found",
        )


def _prompts(
    given: Mapping[str, Any], engine: EngineLike, notes: Notes
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Token ids and text of every prompt."""
    value = given["prompt"]
    several = isinstance(value, list) and not any(isinstance(item, int) for item in value)
    if isinstance(value, list) and not several and not all(isinstance(one, int) for one in value):
        notes.fail(("prompt",), "token ids stand beside prompts; expected one or the other.")
    begin = given.get("add_special_tokens", True)
    prompts, texts = [], []
    for place, entry in enumerate(value if several else [value]):
        path: Path = ("prompt", place) if several else ("prompt",)
        if isinstance(entry, str):
            _check_size(entry, engine, path, notes)
            ids = engine.tokenizer.encode(entry, control=given.get("parse_special", False))
            ids = [engine.info.bos, *ids] if begin else ids
            if not ids:
                notes.fail(path, "is empty; expected at least one token.")
            texts.append(entry)
        else:
            ids = check_ids(entry, engine, path, notes)
            texts.append(engine.tokenizer.decode(ids))
        prompts.append(tuple(ids))
    return tuple(prompts), tuple(texts)


def _check_size(text: str, engine: EngineLike, path: Path, notes: Notes) -> None:
    """Refuse what cannot fit, however it is cut into tokens, before it is cut."""
    size, most = len(text.encode()), engine.info.room * engine.info.longest_token
    if size > most:
        notes.fail(
            path,
            f"has {size} bytes; {engine.info.room} tokens fit, which are {most} bytes at most.",
            "context_length_exceeded",
        )


def check_ids(ids: Sequence[int], engine: EngineLike, path: Path, notes: Notes) -> list[int]:
    """Those ids that the tokenizer can spell; a model may have more."""
    for place, token in enumerate(ids):
        if token >= engine.tokenizer.vocab_size:
            most = engine.tokenizer.vocab_size - 1
            notes.fail((*path, place), f"expected a token of 0 to {most}, found {token}.")
    return list(ids)


def _sampling(given: Mapping[str, Any], vocab_size: int, notes: Notes) -> dict[str, Any]:
    """What was asked for, by the names of the engine's parameters."""
    same = (
        "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
        "stop_token_ids ignore_eos n"
    )
    found = {name: given[name] for name in same.split() if name in given}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    stop = given.get("stop", [])
    found["stop"] = [stop] if isinstance(stop, str) else stop
    bias = {}
    for key, amount in given.get("logit_bias", {}).items():
        known = key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size
        if not known:
            notes.fail(("logit_bias", key[:100]), f"expected token ids of 0 to {vocab_size - 1}.")
        bias[int(key)] = amount
    return {**found, "logit_bias": bias}
