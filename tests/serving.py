"""A server without a model: an engine that says what a test tells it to, and a client of ASGI."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from fastapi import FastAPI

from cedar.checkpoint.locate import locate_checkpoint
from cedar.engine.output import Output, TokenLogprob, Usage
from cedar.engine.stats import EngineStats
from cedar.errors import CapacityError, RequestError
from cedar.inputs.chat import Constraint
from cedar.inputs.tokenizer import Tokenizer
from cedar.server.app import build_app
from cedar.server.keys import KeyRing
from cedar.server.protocols import ModelInfo, Prompt
from cedar.server.settings import ServerSettings

__all__ = ["Answer", "FakeEngine", "Stream", "ask", "events_of", "make_app", "post", "tokenizer"]

INFO = ModelInfo(
    vocab_size=2560,
    bos=0,
    eos=1,
    max_positions=4096,
    pool_tokens=2048,
    max_running=2,
    max_waiting=2,
    accepts_images=True,
    bytes_per_token=106.0,
    slot_bytes=1000,
    full_bytes_per_token=10240,
    heads=4,
    window_tokens=32,
    longest_token=40,
)


@cache
def tokenizer() -> Tokenizer:
    """That of the bundled model."""
    return Tokenizer.from_file(locate_checkpoint("cedar-tiny"))


@dataclass
class Asked:
    """What an engine was asked for."""

    prompt: Prompt
    params: Mapping[str, Any]
    masks: Callable[[], Any] | None
    watch: bool


@dataclass
class FakeEngine:
    """Answers every request with ``text``, one token an output, and keeps what it was asked.

    gate: outputs wait for it, so that a test decides when they come. fail: raised by `submit`, or
    ends the text with "error" after ``fail_after`` tokens. ends: with end of text rather than by
    length. open: requests whose stream has not ended. cancelled: those that were left early.
    """

    text: str = "Hello, world! 你好"
    info: ModelInfo = INFO
    alive: bool = True
    gate: asyncio.Event | None = None
    fail: Exception | None = None
    fail_after: int | None = None
    reason: str = "stop"
    pace: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    constraints: list[tuple[Constraint, bool, bool]] = field(default_factory=list)
    pictures: list[Any] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    most_open: int | None = None
    finished: dict[str, int] = field(default_factory=dict)
    generated: int = 0
    _numbers: Any = field(default_factory=itertools.count)
    _known: dict[str, Asked] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer:
        return tokenizer()

    async def submit(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        *,
        masks: Callable[[], Any] | None = None,
        watch: bool = False,
    ) -> str:
        await asyncio.sleep(0)
        if self.fail is not None and self.fail_after is None:
            raise self.fail
        if self.most_open is not None and len(self.open) >= self.most_open:
            raise CapacityError("too many requests wait.")
        if len(prompt.tokens) >= self.info.room:
            raise RequestError("the prompt is too long.")
        id = f"request-{next(self._numbers)}"
        asked = Asked(prompt, params, masks, watch)
        self.asked.append(asked)
        self._known[id] = asked
        self.open.add(id)
        return id

    async def stream(self, id: str) -> AsyncGenerator[Output, None]:
        asked, over = self._known.pop(id), False
        try:
            for output in self._outputs(id, asked):
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(self.pace)
                self.generated += len(output.tokens)
                yield output
            over = True
        finally:
            self.open.discard(id)
            reason = self.reason if over else "cancelled"
            self.finished[reason] = self.finished.get(reason, 0) + 1
            if not over:
                self.cancelled.append(id)

    def _outputs(self, id: str, asked: Asked) -> list[Output]:
        ids = tokenizer().encode(self.text, control=True)
        most = asked.params["max_tokens"]
        reason = self.reason
        if asked.params.get("ignore_eos"):
            ids = [*ids, self.info.eos]
        if len(ids) > most:
            ids, reason = ids[:most], "length"
        every: list[Output] = []
        for index in range(asked.params.get("n", 1)):
            every += self._sample(id, asked, index, ids, reason)
        # Samples come side by side, as from an engine.
        return sorted(every, key=lambda output: output.usage.generated_tokens)

    def _sample(
        self, id: str, asked: Asked, index: int, ids: Sequence[int], reason: str
    ) -> list[Output]:
        prompt, top = asked.prompt.tokens, asked.params.get("logprobs")
        scored = asked.params.get("prompt_logprobs")
        stream, found = tokenizer().stream(), []
        for place, token in enumerate(ids):
            usage = Usage(
                prompt_tokens=len(prompt),
                cached_tokens=len(prompt) // 2,
                generated_tokens=place + 1,
                drafted=place,
                accepted=place // 2,
                drafted_by_place=(place - place // 3, place // 3),
                accepted_by_place=(place // 2, 0),
                seed=7,
                decode_seconds=0.1 * place,
            )
            output = Output(
                id=id,
                index=index,
                text=stream.push(token),
                tokens=(token,),
                usage=usage,
                logprobs=None if top is None else (score(token, top),),
                selected=(0, 8, 32) if asked.watch else None,
                entry_tokens=8,
            )
            if place == 0 and scored is not None:
                scores = (None, *(score(each, scored) for each in prompt[1:]))
                output = replace(output, prompt_logprobs=scores)
            if self.fail_after == place:
                return [*found, replace(output, finish_reason="error", error=self.fail)]
            found.append(output)
        found[-1] = replace(found[-1], finish_reason=reason)
        return found

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=0,
            running=len(self.open),
            finished=dict(self.finished),
            steps=self.generated,
            prompt_tokens=10,
            cached_tokens=5,
            computed_tokens=20,
            generated_tokens=self.generated,
            preemptions=0,
            drafted=(4, 2),
            accepted=(3, 1),
            accepted_length=1.5,
            busy_seconds=0.5,
            tokens_per_second=10.0,
            pages_used=3,
            pages_total=12,
            bytes_held=300,
            bytes_reserved=1200,
        )

    def place(self, tokens: Sequence[int], pictures: Sequence[Any]) -> Prompt:
        self.pictures += pictures
        return Prompt(tokens=(*tokens, *([7] * len(pictures))), images=tuple(pictures))

    def masks(
        self, constraint: Constraint, *, thinking: bool, starts_in_tools: bool
    ) -> Callable[[], Any]:
        if constraint.kind == "regex":
            raise RequestError("regex: look-ahead cannot be enforced.")
        self.constraints.append((constraint, thinking, starts_in_tools))
        return lambda: None


def score(token: int, top: int) -> TokenLogprob:
    """A made-up score: the token itself is the second likeliest."""
    others = [((token + 1) % 300, -0.1), (token, -0.5), ((token + 2) % 300, float("-inf"))]
    return TokenLogprob(token=token, logprob=-0.5, top=tuple(others[:top]))


def make_app(engine: FakeEngine, keys: KeyRing | None = None, **settings: Any) -> FastAPI:
    """A server around a fake engine."""
    given = {"models": ("cedar-tiny", "other"), "thinking": False}
    return build_app(engine, ServerSettings(**given | settings), keys)


@dataclass
class Answer:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What is wrong, whichever API's form it has."""
        found = self.json()["error"]
        assert isinstance(found, dict)
        return found


class Stream:
    """One request to an ASGI app whose client reads when it likes, and may leave.

    As a server does, it lets ``send`` wait while ``most`` chunks are unread (None: never).
    leaves_at: the type of a message at which the client leaves.
    """

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        most: int | None = None,
    ) -> None:
        raw = [(b"host", b"localhost")]
        if method == "POST":
            raw.append((b"content-type", b"application/json"))
        given = {name.lower(): value for name, value in (headers or {}).items()}
        raw = [(name, value) for name, value in raw if name.decode() not in given]
        raw += [(name.encode(), value.encode()) for name, value in given.items()]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        self._body: list[bytes] = [body]
        self._most = most
        self.left = asyncio.Event()
        self.leaves_at = ""
        self.messages: list[dict[str, Any]] = []
        self._read = 0
        self._changed = asyncio.Condition()
        self.task = asyncio.create_task(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        async with self._changed:
            while self._most is not None and len(self.messages) - self._read > self._most:
                await self._changed.wait()
            if not self.left.is_set():
                self.messages.append(message)
            if message["type"] == self.leaves_at:
                self.left.set()
            self._changed.notify_all()

    async def chunk(self) -> dict[str, Any]:
        """The next message of the server."""
        async with self._changed:
            while self._read >= len(self.messages):
                await asyncio.wait_for(self._changed.wait(), 10)
            self._read += 1
            self._changed.notify_all()
            return self.messages[self._read - 1]

    def leave(self) -> None:
        """Close the connection."""
        self.left.set()

    async def rest(self) -> Answer:
        """Read to the end."""
        while not self.task.done():
            self._read = len(self.messages)
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(0)
        await self.task
        start = self.messages[0]
        return Answer(
            status=start["status"],
            headers={name.decode(): value.decode() for name, value in start["headers"]},
            body=b"".join(message.get("body", b"") for message in self.messages[1:]),
        )


async def ask(
    app: Any, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """One request and its whole response."""
    return await Stream(app, method, path, body, headers).rest()


async def post(
    app: Any, path: str, headers: Mapping[str, str] | None = None, **body: Any
) -> Answer:
    """One request with a JSON body."""
    return await ask(app, "POST", path, json.dumps(body).encode(), headers)


def events_of(answer: Answer) -> list[tuple[str | None, Any]]:
    """Server-sent events: name and data, which is decoded but for ``[DONE]``."""
    found = []
    text = answer.body.decode()
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        name, data = None, None
        for line in block.split("\n"):
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                assert data is None, "one line of data"
                data = value
            else:
                assert line.startswith(":"), line
        if data is not None:
            found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found
