"""The chat page: its files, the figures it shows, and Markdown rendered for it.

The page itself holds nothing secret and may be served to anyone who reaches the server. What it
asks for is for those with a key, if the server has keys.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from cedar.server.markdown import MarkdownRenderer

__all__ = ["MAX_MARKDOWN_BYTES", "PageInfo", "add_page"]

# The longest rendering that a request may cost is about a second of one core.
MAX_MARKDOWN_BYTES = 64 * 1024

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, no inline script or style, no frame around it, and HTML only through the
# page's one named policy (in browsers that know trusted types).
_CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types cedar-markdown",
    )
)
_HEADERS = {
    "Content-Security-Policy": _CONTENT_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PageInfo:
    """What the page shows of the served model; ``GET /page/state`` gives it as JSON.

    images, thinking: whether requests may carry pictures and ask for reasoning;
    default_thinking: whether the model reasons when the person has not chosen.
    cache_bytes_per_token: what a further token of a context takes in the packed cache;
    full_cache_bytes_per_token: what it would take as bf16 keys and values of all
    ``full_cache_heads`` heads in every layer. pool_tokens: tokens that the cache can hold.
    window_tokens: how far back every layer attends besides the selection; 0 if not told.
    max_images: most pictures of one request.
    """

    model: str
    images: bool
    thinking: bool
    cache_bytes_per_token: float
    full_cache_bytes_per_token: float
    pool_tokens: int
    full_cache_heads: int = 64
    window_tokens: int = 0
    max_images: int = 8
    default_thinking: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """One file of the page, held in memory."""

    body: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "_File":
        body = path.read_bytes()
        digest = hashlib.sha256(body).hexdigest()
        return cls(body=body, media_type=_TYPES[path.suffix], etag=f'"{digest[:32]}"')

    def answer(self, request: Request) -> Response:
        # no-cache: the browser asks each time, so page and server are always of one version.
        headers = {**_HEADERS, "Cache-Control": "no-cache", "ETag": self.etag}
        known = [each.strip() for each in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def add_page(app: FastAPI, info: PageInfo) -> None:
    """Add the chat page to ``app``.

    `/` and `/page/FILE` are the page's files, and only those that were there at the start, so no
    path can lead out of the folder. `GET /page/state` gives ``info``; `POST /page/markdown` turns
    ``{"text": ...}`` into ``{"html": ...}``; these two are for those who may use the server. None
    of it is in the OpenAPI description: it is the page's own and may change with it.
    """
    folder = Path(__file__).parent / "page"
    files = {each.name: _File.read(each) for each in folder.iterdir() if each.suffix in _TYPES}
    renderer = MarkdownRenderer()

    async def index(request: Request) -> Response:
        return files["index.html"].answer(request)

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            return _refusal(404, "the page has no such file.")
        return found.answer(request)

    async def state() -> Response:
        return _data(asdict(info))

    async def markdown(request: Request) -> Response:
        text = await _text_of(request)
        if isinstance(text, Response):
            return text
        return _data({"html": await run_in_threadpool(renderer.render, text)})

    for path, endpoint, method in (
        ("/page/state", state, "GET"),
        ("/page/markdown", markdown, "POST"),
    ):
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            include_in_schema=False,
            response_model=None,
        )
    app.add_route("/", index, methods=["GET"], include_in_schema=False)
    app.add_route("/page/{name}", file, methods=["GET"], include_in_schema=False)


async def _text_of(request: Request) -> str | Response:
    """The ``text`` of a request for Markdown, or the refusal to answer with."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return _refusal(415, f"the content type is {kind or 'missing'}; expected application/json.")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_MARKDOWN_BYTES:
                return _refusal(413, f"the body is longer than {MAX_MARKDOWN_BYTES} bytes.")
    except ClientDisconnect:
        return _refusal(400, "the connection ended within the body.")
    try:
        text = json.loads(body.decode())["text"]
        text.encode()  # a lone surrogate is valid JSON but no text
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return _refusal(400, 'the body is not {"text": "..."}; expected an object with a string.')
    return text


def _data(content: dict[str, Any]) -> Response:
    return JSONResponse(content, headers={**_HEADERS, "Cache-Control": "no-store"})


def _refusal(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status, headers=_HEADERS)
