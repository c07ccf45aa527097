"""Servers to be attacked, and a client that sends any bytes."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cedar.server.connection import Connection, uvicorn_settings
from cedar.server.guard import Limits, LimitsMiddleware
from serving import Answer

__all__ = [
    "CHAT",
    "MESSAGES",
    "PATHS",
    "PATIENCE",
    "RESPONSES",
    "SECRET",
    "Target",
    "cedar_target",
    "echo_target",
    "looks_right",
    "request_bytes",
]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
SECRET = "words-of-a-user"  # in what is sent; must never be in a log
PATIENCE = 0.4  # seconds, of the server in this process


def request_bytes(
    path: str, body: bytes = b"", *lines: str, method: str = "POST", length: bool = True
) -> bytes:
    """A request as it goes over the wire; lines: more headers."""
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", *lines]
    if length:
        head.append(f"Content-Length: {len(body)}")
    if not any(line.lower().startswith("content-type") for line in lines):
        head.append("Content-Type: application/json")
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


@dataclass
class Target:
    """A running server."""

    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send(self, data: bytes) -> Answer:
        """Send bytes, as far as they are taken, and read one response."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
            return self.read(connection)

    @staticmethod
    def read(connection: socket.socket) -> Answer:
        response = http.client.HTTPResponse(connection)
        response.begin()
        with response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())

    def post(self, path: str, **body: Any) -> Answer:
        return self.send(request_bytes(path, json.dumps(body).encode()))

    def health(self) -> int:
        return self.send(request_bytes("/health", method="GET")).status


def looks_right(reply: Answer, *statuses: int, path: str = CHAT) -> None:
    """The status is one of these, and the error has the form of its API."""
    assert reply.status in statuses, (reply.status, reply.body[:300])
    assert reply.headers["content-type"].startswith("application/json")
    assert isinstance(reply.error["message"], str)
    if path == MESSAGES:
        assert reply.json()["type"] == "error"
        assert set(reply.error) == {"type", "message"}


class _Impatient(Connection):
    head_seconds = PATIENCE
    linger_seconds = PATIENCE


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Parses what it gets, as an application would."""
    body = (await receive()).get("body", b"")
    status = 200 if scope["path"] == "/health" else 404
    if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
        try:
            json.loads(body)
            status = 200
        except ValueError:
            status = 400
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    error: dict[str, Any] = {"error": {"message": "not found, or not JSON"}}
    if scope["path"] == MESSAGES:
        error = {"type": "error", "error": {"type": "invalid", "message": "not JSON"}}
    await send({"type": "http.response.body", "body": json.dumps(error).encode()})


@contextlib.contextmanager
def echo_target(app: ASGIApp = _echo) -> Iterator[Target]:
    """The limits and connections alone, with little patience, around a small app."""
    limits = Limits(body_bytes=6 << 20, body_seconds=PATIENCE)
    paths = (CHAT, RESPONSES, MESSAGES, "/tokenize")
    guarded = LimitsMiddleware(app, json_paths=paths, limits=limits)
    settings = uvicorn_settings() | {"http": _Impatient}
    config = uvicorn.Config(guarded, lifespan="off", log_config=None, **settings)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield Target(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def cedar_target(*arguments: str) -> Iterator[Target]:
    """The installed command on the bundled model. At its end its log is looked through."""
    command = [str(Path(sys.executable).with_name("cedar")), "serve", "cedar-tiny", "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--no-thinking", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        first = process.stderr.readline()
        found = re.search(r" at http://127\.0\.0\.1:(\d+)", first)
        assert found, first

        def keep() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                log.write(line)

        thread = threading.Thread(target=keep)
        thread.start()
        try:
            yield Target(int(found[1]))
        finally:
            process.terminate()
            process.wait(60)
            thread.join()
            process.stderr.close()
        log.seek(0)
        text = log.read()
    assert "Traceback" not in text, text
    assert SECRET not in text, text
