"""Limits on requests, kept before anything of them is parsed.

The middleware reads the body of a JSON endpoint to its end, within limits of bytes, time, depth and
number of values, and hands it on in one piece; the bodies of all other requests are dropped. It
never touches responses, so streams pass as they are. No text of a request is logged.
"""

import asyncio
import ipaddress
import re
import urllib.parse
from collections.abc import Callable, Collection
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedar.errors import ConfigError
from cedar.server.errors import ApiError, error_response
from cedar.server.json_scan import JsonScanner

__all__ = ["Limits", "LimitsMiddleware"]

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one request may bring; ConfigError if a limit is below 1.

    body_bytes, body_seconds: of its body, and until all of it has arrived. held_bytes: of the
    bodies of all requests together that have not been answered yet; beyond, 429. header_bytes,
    header_count: of its headers, the target included. json_depth, json_values: see `JsonScanner`.
    hosts: names that the Host header may have besides localhost and plain addresses, None for any.
    A server without keys should set it: a page of any site can let its own name lead to this
    machine, and then ask like a local page, but it cannot choose another name for itself.
    """

    body_bytes: int = 32 << 20
    body_seconds: float = 60.0
    held_bytes: int = 512 << 20
    header_bytes: int = 32 << 10
    header_count: int = 100
    json_depth: int = 100
    json_values: int = 2_000_000
    hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}; expected 1 or more"
            for name in (
                "body_bytes",
                "held_bytes",
                "header_bytes",
                "header_count",
                "json_depth",
                "json_values",
            )
            if getattr(self, name) < 1
        ]
        if not self.body_seconds > 0:
            problems.append(f"body_seconds is {self.body_seconds}; expected more than 0")
        if problems:
            raise ConfigError(f"limits of requests: {'; '.join(problems)}.")


class LimitsMiddleware:
    """Pure ASGI; answers by itself, in the form of the API, whatever breaks a limit.

    413 body too long, 431 headers, 408 body too slow, 415 not JSON or compressed, 403 Host, 429 too
    many bytes of other requests, 400 not UTF-8, too deep or too many values.

    json_paths: the endpoints whose POST takes a JSON body. admit: called with the scope when the
    headers are right and before a body is read; refuses by raising `ApiError` (keys, overload).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        json_paths: Collection[str],
        limits: Limits | None = None,
        admit: Callable[[Scope], None] | None = None,
    ) -> None:
        self._app, self._json_paths = app, frozenset(json_paths)
        self._limits, self._admit = limits or Limits(), admit
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        held = _Held(self)
        try:
            body: bytes | None = b""
            try:
                headers = self._check_head(scope)
                if self._admit is not None:
                    self._admit(scope)
                if scope["method"] == "POST" and scope["path"] in self._json_paths:
                    self._check_json_head(headers)
                    body = await self._read(receive, held)
            except ApiError as error:
                await error_response(scope["path"], error)(scope, receive, send)
                return
            if body is not None:
                await self._app(scope, _Replay(body, receive), send)
        finally:
            held.release()

    def _check_head(self, scope: Scope) -> dict[bytes, bytes]:
        limits, headers = self._limits, scope["headers"]
        length = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        length += sum(len(name) + len(value) + 4 for name, value in headers)
        if len(headers) > limits.header_count or length > limits.header_bytes:
            raise ApiError(
                431,
                f"The request has {len(headers)} headers of {length} bytes; expected at most "
                f"{limits.header_count} and {limits.header_bytes}.",
                code="headers_too_large",
            )
        found = {name.lower(): value for name, value in headers}
        if limits.hosts is not None and not _good_host(found.get(b"host", b""), limits.hosts):
            raise ApiError(
                403,
                "The Host header names a host that this server does not answer for. Add it to "
                "the hosts that the server is started with, or use an address.",
                code="unknown_host",
            )
        if b"transfer-encoding" in found and b"content-length" in found:
            # A proxy may believe the other one, and take the rest for somebody else's request.
            raise ApiError(
                400,
                "The request has both Transfer-Encoding and Content-Length. Send one of them.",
                code="ambiguous_length",
                headers={"Connection": "close"},
            )
        announced = found.get(b"content-length", b"0")
        if not announced.isdigit():
            raise ApiError(400, "Content-Length is not a number.", code="invalid_length")
        # A length of very many digits is not worth converting.
        if len(announced.lstrip(b"0")) > 18 or int(announced) > limits.body_bytes:
            raise self._too_long()
        return found

    def _check_json_head(self, headers: dict[bytes, bytes]) -> None:
        declared = headers.get(b"content-type", b"").decode("latin-1")
        charset = _CHARSET.search(declared)
        # Also without a body: browsers may send other types to any site without asking it.
        if not _JSON_TYPE.fullmatch(declared.partition(";")[0].strip()) or (
            charset is not None and charset[1].lower() not in ("utf-8", "utf8")
        ):
            raise ApiError(
                415,
                "The request has no JSON body. Send Content-Type: application/json, in UTF-8.",
                code="unsupported_media_type",
            )
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise ApiError(
                415,
                "The request body is compressed. Send it without a Content-Encoding.",
                code="unsupported_encoding",
            )

    async def _read(self, receive: Receive, held: "_Held") -> bytes | None:
        """The body, or None if the client has gone before it had sent all of it."""
        limits = self._limits
        scanner = JsonScanner(depth=limits.json_depth, values=limits.json_values)
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    if held.bytes + len(part) > limits.body_bytes:
                        raise self._too_long()
                    held.add(len(part))
                    scanner.feed(part)
                    parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(
                408,
                f"The body did not arrive within {limits.body_seconds:g} seconds.",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None
        scanner.finish()
        return b"".join(parts)

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"The body is longer than {self._limits.body_bytes} bytes, the most that is taken.",
            code="body_too_large",
        )

    def _hold(self, count: int) -> None:
        if self._held + count > self._limits.held_bytes:
            raise ApiError(
                429,
                "The server holds too many large requests. Try again later.",
                code="overloaded",
                headers={"Retry-After": "2"},
            )
        self._held += count

    def _let_go(self, count: int) -> None:
        self._held -= count


class _Held:
    """The bytes that one request holds of all that may be held."""

    def __init__(self, owner: LimitsMiddleware) -> None:
        self._owner = owner
        self.bytes = 0

    def add(self, count: int) -> None:
        self._owner._hold(count)
        self.bytes += count

    def release(self) -> None:
        self._owner._let_go(self.bytes)
        self.bytes = 0


class _Replay:
    """``receive`` for the app: the body in one piece, and then only that the client has gone."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        while True:
            message = await self._receive()
            if message["type"] != "http.request":  # the rest of a body nobody wants is dropped
                return message


def _good_host(header: bytes, names: Collection[str]) -> bool:
    """Whether a Host header is an address, localhost or one of ``names``."""
    if not header:
        return True  # browsers always send it
    try:
        host = urllib.parse.urlsplit("//" + header.decode("ascii")).hostname or ""
    except ValueError:
        return False
    host = host.removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    if host in (name.lower() for name in names):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
