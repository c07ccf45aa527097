"""What the tests of the chat page share: a server that plays the model, and a person's browser."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from playwright.sync_api import Browser, BrowserContext, Page, expect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cedar.server.page_routes import PageInfo, add_page

CHROMIUM = os.environ.get("CEDAR_CHROMIUM") or shutil.which("chromium")
INFO = PageInfo(
    model="cedar-play",
    images=True,
    thinking=True,
    cache_bytes_per_token=106,
    full_cache_bytes_per_token=10_240,
    pool_tokens=8192,
    full_cache_heads=64,
    window_tokens=32,
    max_images=3,
)
_GUARDED = ("/v1/chat/completions", "/page/state", "/page/markdown")
PROMPT_TOKENS = 640
# A PNG of one red pixel.
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQ"
    "AAAABJRU5ErkJggg=="
)

REPLY = """Here is a **short** answer with `code` and a list:

- one
- two

```python
def tree(rings):
    return rings + 1
```

| tree | height |
| --- | ---: |
| cedar | 40 m |

That is all."""

HOSTILE = """<script>window.broken = 1</script>

<img src=x onerror="window.broken = 2">

[link](javascript:window.broken=3) [data](data:text/html,<script>window.broken=4</script>)

<a href="javascript:window.broken=5">raw</a> <iframe src="https://example.invalid/"></iframe>

![picture](https://example.invalid/track.png) <svg onload="window.broken=6">

<style>*{display:none}</style>

[good](https://example.invalid/) <b style="position:fixed">bold</b>
"""


@dataclass
class Play:
    """What the playing server was asked, and how it behaves."""

    key: str | None = None
    pause: float = 0.002
    bodies: list[dict[str, Any]] = field(default_factory=list)
    watched: list[str | None] = field(default_factory=list)
    refusals: list[Response] = field(default_factory=list)
    cancelled: int = 0
    watch: bool = True

    def reset(self) -> None:
        """Forget everything, for the next test."""
        vars(self).update(vars(Play()))


def build_app(play: Play) -> FastAPI:
    """An app with the page and a Chat Completions endpoint that follows a script."""
    app = FastAPI(openapi_url=None)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        play.bodies.append(body)
        play.watched.append(request.headers.get("x-cedar-watch"))
        if play.refusals:
            return play.refusals.pop(0)
        return StreamingResponse(_stream(play, body), media_type="text/event-stream")

    add_page(app, INFO)
    app.add_middleware(_KeyCheck, play=play)
    return app


class _KeyCheck:
    """Asks for the key where the real server does."""

    def __init__(self, app: ASGIApp, play: Play) -> None:
        self._app, self._play = app, play

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._play.key and scope["path"] in _GUARDED:
            given = dict(scope["headers"]).get(b"authorization", b"").decode()
            if given != f"Bearer {self._play.key}":
                await refusal(401, "an API key is needed.")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def refusal(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    """An error as the real server forms it; underscores in header names become dashes."""
    error = {"message": message, "type": "error", "param": param, "code": None}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"error": error}, status_code=status, headers=named)


async def _stream(play: Play, body: dict[str, Any]) -> AsyncIterator[str]:
    try:
        async for chunk in _script(play, body):
            yield f"data: {json.dumps(chunk)}\n\n"
            await asyncio.sleep(play.pause)
    except asyncio.CancelledError:
        play.cancelled += 1
        raise
    if "cut off" not in _asked(body):
        yield "data: [DONE]\n\n"


async def _script(play: Play, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    asked = _asked(body)
    tokens = 0

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        nonlocal tokens
        tokens += 1
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        said: dict[str, Any] = {"object": "chat.completion.chunk", "choices": [choice]}
        if play.watch:
            said["cedar"] = figures(PROMPT_TOKENS + tokens, tokens)
        return said

    yield chunk({"role": "assistant", "content": ""})
    if body.get("reasoning_effort", "none") != "none":
        for word in _words("The person asks about trees. I should answer with a list."):
            yield chunk({"reasoning_content": word})
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        first = {"id": "call_1", "type": "function", "function": {"name": "get_weather"}}
        yield chunk({"tool_calls": [{"index": 0, **first}]})
        for part in ('{"place": ', '"Paris", ', '"unit": "celsius"}'):
            yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
        yield chunk({}, "tool_calls")
    else:
        for word in _words(_answer(asked)):
            yield chunk({"content": word})
            if "break" in asked and tokens > 8:
                yield {"error": {"message": "the engine lost this request"}}
                return
        if "cut off" in asked:
            return
        yield chunk({}, "length" if "limit" in asked else "stop")
    yield {
        "choices": [],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": tokens,
            "completion_tokens_details": {"reasoning_tokens": 12},
        },
    }


def figures(context: int, tokens: int) -> dict[str, Any]:
    """Figures as the real server gives them, with a selection that moves."""
    selected = sorted(
        {(each * 37 + tokens * (each % 3)) % (context - 40) // 2 for each in range(28)}
    )
    return {
        "context_tokens": context,
        "cache_bytes": context * 106 + 26_000,
        "full_cache_bytes": context * 10_240,
        "cached_tokens": 512,
        "tokens_per_second": 38 + 6 * ((tokens * 7) % 11) / 11,
        "drafted": [tokens, tokens, tokens * 3 // 4, tokens // 2, tokens // 3],
        "accepted": [tokens * 4 // 5, tokens * 3 // 5, tokens * 2 // 5, tokens // 4, tokens // 9],
        "selected": [[2 * each, 2 * each + 2] for each in selected],
    }


def _asked(body: dict[str, Any]) -> str:
    content = body["messages"][-1].get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content)


def _answer(asked: str) -> str:
    if "hostile" in asked:
        return HOSTILE
    if "forever" in asked:
        return "again and " * 2000
    if "echo" in asked:
        return asked
    return REPLY


def _words(text: str) -> list[str]:
    return [text[start : start + 7] for start in range(0, len(text), 7)]


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of the app, served on a free port by a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def cedar_served(*arguments: str) -> Iterator[str]:
    """The address of the installed command `cedar serve` with the bundled model."""
    command = [str(Path(sys.executable).with_name("cedar")), "serve", "cedar-tiny", "--port", "0"]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the server ended before it said where it listens"
                found = re.search(r"http://127\.0\.0\.1:\d+/", line)
            yield found[0]
        finally:
            process.terminate()
            process.communicate(timeout=30)
    assert process.returncode == 0


def wait_until(done: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for something to become true; fails when it does not."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@dataclass
class Visit:
    """One person's browser: a page, and everything that its console complained about."""

    page: Page
    context: BrowserContext
    complaints: list[str]

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def finished(self, replies: int = 1) -> None:
        """Wait until so many replies are there, rendered, and nothing is being written."""
        expect(self.page.locator(".reply")).to_have_count(replies)
        expect(self.page.locator("body.busy")).to_have_count(0)
        expect(self.page.locator(".reply .body > .plain:visible")).to_have_count(0)

    def press(self, name: str) -> None:
        """Press the button of that name."""
        self.page.get_by_role("button", name=name, exact=True).click()

    def complained(self, *words: str) -> None:
        """The console complained about just these, in this order, and of nothing else."""
        for _ in range(100):
            if len(self.complaints) >= len(words):
                break
            self.page.wait_for_timeout(20)
        found, self.complaints[:] = list(self.complaints), []
        assert len(found) == len(words), found
        assert all(word in text for word, text in zip(words, found, strict=True)), found


@contextmanager
def visiting(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """A visit with an empty storage."""
    options = {"viewport": {"width": 1360, "height": 850}, **options}
    context = browser.new_context(**options)
    context.set_default_timeout(8000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    expect(page.locator("#model")).to_be_visible()
    yield Visit(page, context, complaints)
    context.close()
