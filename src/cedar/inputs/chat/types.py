"""What a request becomes, and what a reply is made of. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

from cedar.errors import RequestError

__all__ = [
    "Api",
    "ChatRequest",
    "Constraint",
    "ConstraintKind",
    "Event",
    "ImageRef",
    "ProtocolError",
    "TokenScore",
    "UsageDetails",
]


class Api(StrEnum):
    """The three request forms: Chat Completions, Responses, Messages."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


class ProtocolError(RequestError):
    """A request that its API does not allow, or that asks for something not offered here.

    param: the field, as ``messages.0.content[1]``; None if the body as a whole is wrong. status:
    the HTTP status that fits. code: a short name of the mistake for programs, or None.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRef:
    """Where one image of a request is to be found; exactly one of the three sources is set.

    path: the place in the body, for errors. data_url and url are as the client sent them, data are
    encoded image bytes. detail: what the client wished, "low", "high", "original" or "auto".
    """

    path: str
    kind: Literal["data_url", "url", "bytes"]
    data_url: str | None = None
    url: str | None = None
    data: bytes | None = None
    detail: str = "auto"


ConstraintKind = Literal["json_object", "json_schema", "regex", "tools"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What the answer must look like; it concerns the text after the reasoning only.

    value: None for ``json_object``, the schema for ``json_schema``, the expression for ``regex``,
    and for ``tools`` a list of ``{"name": str, "parameters": dict, "strict": bool}``: the only
    tools that may be called, with names as they stand in the markup (``namespace::name``).

    The rest concerns ``tools``. required: at least one call must be made and no text comes before
    it. max_calls: the most calls that one answer may make, None for any number. fallback: what
    the answer must look like if it makes no call, None for any text.
    """

    kind: ConstraintKind
    value: Any = field(default=None, hash=False)
    required: bool = False
    max_calls: int | None = None
    fallback: "Constraint | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked request, ready for the engine.

    stream: the client wants events; include_usage: Chat Completions only, a last chunk with usage.
    thinking: the prompt ends inside the reasoning, so the reply begins with it.
    tokens: the prompt with its begin-of-text token, one image token for each of ``images``; prompt:
    its text. sampling: by names of the engine's sampling parameters, only what the client sent
    (``max_tokens`` apart), ready for ``SamplingParams.from_mapping``.
    max_tokens: None if the client set no limit. constraint: None for any text.
    starts_in_tools: the prompt opened the tool block, so the reply begins inside it.
    ignored: fields that were accepted and have no effect, for a response header.
    state: what `ChatProtocol.reply` needs; of no interest to others.
    """

    api: Api
    model: str
    stream: bool
    include_usage: bool
    thinking: bool
    tokens: tuple[int, ...] = field(repr=False)
    prompt: str
    images: tuple[ImageRef, ...]
    sampling: dict[str, Any]
    max_tokens: int | None
    constraint: Constraint | None
    starts_in_tools: bool
    ignored: tuple[str, ...]
    state: Any = field(default=None, repr=False, compare=False)

    @property
    def n(self) -> int:
        """How many replies were asked for."""
        return int(self.sampling.get("n", 1))


class TokenScore(Protocol):
    """Log probability of a token; `cedar.engine.output.TokenLogprob` is one."""

    @property
    def token(self) -> int:
        """Its id."""

    @property
    def logprob(self) -> float:
        """Natural logarithm of its probability."""

    @property
    def top(self) -> Sequence[tuple[int, float]]:
        """The likeliest tokens at its place, most likely first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageDetails:
    """Counts of one sample that only the engine knows.

    completion_tokens: generated tokens, without one that ended the text. accepted, drafted: draft
    tokens that were right, and all that were verified. stopped_by: the stop string that ended the
    text, if one did.
    """

    completion_tokens: int
    accepted: int = 0
    drafted: int = 0
    stopped_by: str | None = None


class Event(NamedTuple):
    """One server-sent event: its name, if the API names events, and its data."""

    name: str | None
    data: str
