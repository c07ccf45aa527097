"""A client of ASGI apps whose bodies come in parts, and an app that echoes them."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CHAT", "GONE", "JSON", "MESSAGES", "PAUSE", "Answer", "Echo", "ask"]

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
JSON = (b"content-type", b"application/json")
PAUSE = object()  # in a body: nothing comes for long
GONE = object()  # in a body: the client leaves


class Echo:
    """An app that answers with what it received, and notes it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"part ", b"by ", b"part"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Answer:
    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.status = messages[0]["status"] if messages else None
        self.headers = (
            {k.decode(): v.decode() for k, v in messages[0]["headers"]} if messages else {}
        )
        self.body = b"".join(message.get("body", b"") for message in messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)["error"]
        assert isinstance(found, dict)
        return found


async def ask(
    app: ASGIApp,
    *parts: Any,
    path: str = CHAT,
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = (JSON,),
    query: bytes = b"",
) -> Answer:
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": list(headers),
    }
    coming = list(parts) or [b""]
    sent: list[Message] = []

    async def receive() -> Message:
        if not coming:
            return {"type": "http.disconnect"}
        part = coming.pop(0)
        if part is PAUSE:
            await asyncio.sleep(60)
        if part is GONE:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(coming)}

    async def send(message: Message) -> None:
        sent.append(dict(message))

    await app(scope, receive, send)
    return Answer(sent)
