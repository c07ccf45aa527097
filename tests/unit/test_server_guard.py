"""Limits on requests, by calling the middleware as a server does."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asgi_parts import CHAT, GONE, JSON, MESSAGES, PAUSE, Answer, Echo, ask
from cedar.errors import ConfigError
from cedar.server.errors import ApiError
from cedar.server.guard import Limits, LimitsMiddleware


def guarded(
    app: ASGIApp, admit: Callable[[Scope], None] | None = None, **limits: Any
) -> LimitsMiddleware:
    paths = [CHAT, MESSAGES, "/tokenize"]
    return LimitsMiddleware(app, json_paths=paths, limits=Limits(**limits), admit=admit)


def answer(
    *parts: Any, limits: dict[str, Any] | None = None, **request: Any
) -> tuple[Answer, Echo]:
    app = Echo()
    return asyncio.run(ask(guarded(app, **(limits or {})), *parts, **request)), app


def refusal(status: int, code: str, *parts: Any, **request: Any) -> dict[str, Any]:
    """The error, after seeing that it has the form of its API and that the app never ran."""
    refused, app = answer(*parts, **request)
    assert refused.status == status
    assert app.bodies == []
    assert refused.error["code"] == code
    assert set(refused.error) == {"message", "type", "param", "code"}
    again, _ = answer(*parts, **(request | {"path": MESSAGES}))
    assert again.status == status
    whole = json.loads(again.body)
    assert whole["type"] == "error"
    assert set(whole["error"]) == {"type", "message"}
    # The length of a path is part of some messages.
    assert re.sub(r"\d+", "N", whole["error"]["message"]) == re.sub(
        r"\d+", "N", refused.error["message"]
    )
    return refused.error


# --- what passes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        (b'{"a": 1}',),
        (b'{"a"', b": ", b"1}"),
        tuple(bytes([byte]) for byte in b'{"a": 1}'),
        (b"", b'{"a": 1}', b""),
    ],
)
def test_a_body_arrives_in_one_piece_and_the_answer_as_it_was_sent(
    parts: tuple[bytes, ...],
) -> None:
    found, app = answer(*parts)
    assert app.bodies == [b'{"a": 1}']
    assert found.status == 200
    assert [message.get("body") for message in found.messages[1:]] == [
        b"part ",
        b"by ",
        b"part",
        b"",
    ]


def test_the_app_sees_the_client_leave_and_nothing_of_a_body_it_did_not_want() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            message = await receive()
            seen.append(message["type"])
            assert message.get("body", b"") in (b"", b"{}")

    for path, method in ((CHAT, "POST"), ("/health", "GET"), ("/health", "POST"), (CHAT, "PUT")):
        seen.clear()
        parts = [b"{}"] if path == CHAT and method == "POST" else [b"a", b"b", b"c"]
        asyncio.run(ask(guarded(app), *parts, path=path, method=method))
        assert seen == ["http.request", "http.disconnect"]


def test_a_client_that_leaves_within_its_body_is_not_answered() -> None:
    found, app = answer(b"{", GONE)
    assert found.messages == []
    assert app.bodies == []


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
def test_other_paths_need_no_json(path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        found, app = answer(b"\xff" * 10, path=path, method=method, headers=[])
        assert found.status == 200
        assert app.bodies == [b""]


def test_lifespan_passes_and_websockets_are_closed() -> None:
    called: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        called.append(scope["type"])

    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(dict(message))

    for kind in ("lifespan", "websocket"):
        asyncio.run(guarded(app)({"type": kind}, receive, send))
    assert called == ["lifespan"]
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- bodies ----------------------------------------------------------------------------------


def test_bodies_that_are_too_long() -> None:
    limits = {"body_bytes": 10}
    found, app = answer(b'"01234567"', limits=limits)
    assert found.status == 200
    assert app.bodies == [b'"01234567"']
    said = refusal(413, "body_too_large", b'"012345678"', limits=limits)
    assert "longer than 10 bytes" in said["message"]
    # In pieces and without a length: the third piece is the last that is asked for.
    refusal(413, "body_too_large", b" " * 4, b" " * 4, b" " * 4, PAUSE, limits=limits)
    # By its announcement alone, whatever comes; 413 also where no body is wanted.
    for announced in (b"11", b"0000000011", b"9" * 30):
        headers = [JSON, (b"content-length", announced)]
        refusal(413, "body_too_large", PAUSE, headers=headers, limits=limits)
        other, _ = answer(PAUSE, path="/health", headers=headers, limits=limits)
        assert other.status == 413


@pytest.mark.parametrize("announced", [b"-1", b"x", b"", b"1 1", b"+1", "٣".encode()])
def test_lengths_that_are_no_numbers(announced: bytes) -> None:
    refusal(400, "invalid_length", PAUSE, headers=[JSON, (b"content-length", announced)])


def test_two_lengths_are_one_too_many() -> None:
    headers = [JSON, (b"transfer-encoding", b"chunked"), (b"content-length", b"2")]
    refusal(400, "ambiguous_length", PAUSE, headers=headers)
    found, _ = answer(PAUSE, path="/health", method="GET", headers=headers)
    assert (found.status, found.headers["connection"]) == (400, "close")
    for kept in (headers[:2], headers[::2]):
        assert answer(b"{}", headers=kept)[0].status == 200


def test_bodies_that_take_too_long() -> None:
    limits = {"body_seconds": 0.05}
    said = refusal(408, "body_timeout", b"{", PAUSE, b"}", limits=limits)
    assert "within 0.05 seconds" in said["message"]
    found, _ = answer(PAUSE, limits=limits)
    assert found.status == 408
    assert found.headers["connection"] == "close"

    async def drip() -> Answer:
        async def receive() -> Message:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b" ", "more_body": True}

        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(dict(message))

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [JSON]}
        await guarded(Echo(), **limits)(scope, receive, send)
        return Answer(sent)

    assert asyncio.run(drip()).status == 408  # each piece in time, all of them not


def test_a_slow_app_is_not_hurried() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.sleep(0.1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert asyncio.run(ask(guarded(app, body_seconds=0.02), b"{}")).status == 200


def test_bytes_of_all_requests_together() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        entered.set()
        await leave.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        middleware = guarded(app, held_bytes=10)
        first = asyncio.ensure_future(ask(middleware, b'"123456"'))
        await entered.wait()
        refused = await ask(middleware, b'"', b'1"')
        assert refused.status == 429
        assert refused.headers["retry-after"] == "2"
        assert refused.error["code"] == "overloaded"
        small = asyncio.ensure_future(ask(middleware, b"{}"))
        await asyncio.sleep(0)
        leave.set()
        assert (await first).status == (await small).status == 200
        # Everything is given back: by answers, refusals, departures and faults.
        for parts in ([b'"', b"\xff"], [b'"', GONE], [b"[" * 200]):
            await ask(middleware, *parts)
        middleware._app = None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            await ask(middleware, b'"123456"')
        assert middleware._held == 0

    asyncio.run(main())


# --- heads -----------------------------------------------------------------------------------


def test_too_many_headers() -> None:
    headers = [JSON] + [(b"x-%d" % i, b"y") for i in range(9)]
    limits = {"header_count": 10}
    assert answer(b"{}", headers=headers, limits=limits)[0].status == 200
    said = refusal(431, "headers_too_large", PAUSE, headers=[*headers, (b"x", b"")], limits=limits)
    assert "11 headers" in said["message"]


def test_headers_that_are_too_long() -> None:
    limits = {"header_bytes": 500}
    room = 500 - len(MESSAGES) - len(JSON[0]) - len(JSON[1]) - 4 - 4 - 1 - 8
    fits = [JSON, (b"x", b"y" * room)]
    assert answer(b"{}", headers=fits, limits=limits)[0].status == 200
    refusal(431, "headers_too_large", PAUSE, headers=[JSON, (b"x", b"y" * 480)], limits=limits)
    # The target counts, too.
    refusal(431, "headers_too_large", PAUSE, query=b"q" * 480, limits=limits)


@pytest.mark.parametrize(
    "declared",
    [
        b"application/json",
        b"Application/JSON",
        b"application/json; charset=utf-8",
        b'application/json;charset="UTF-8"',
        b"application/json ; x=y",
        b"application/ld+json",
        b"application/vnd.api+json;charset=utf8",
    ],
)
def test_types_that_are_json(declared: bytes) -> None:
    assert answer(b"{}", headers=[(b"Content-Type", declared)])[0].status == 200


@pytest.mark.parametrize(
    "declared",
    [
        None,
        b"",
        b"text/plain",
        b"text/json",
        b"application/x-www-form-urlencoded",
        b"multipart/form-data; boundary=application/json",
        b"text/plain; application/json",
        b"application/jsonp",
        b"application/json, text/plain",
        b"application/json; charset=utf-16",
        b"application/json; charset=latin-1",
        b"application/octet-stream",
        b"\xff",
    ],
)
def test_types_that_are_not(declared: bytes | None) -> None:
    headers = [] if declared is None else [(b"content-type", declared)]
    for parts in ((b"{}",), (b"",), (PAUSE,)):  # without reading a body, or with none
        refusal(415, "unsupported_media_type", *parts, headers=headers)


def test_compressed_bodies_are_refused() -> None:
    for encoding in (b"gzip", b"br", b"identity, gzip"):
        refusal(415, "unsupported_encoding", PAUSE, headers=[JSON, (b"content-encoding", encoding)])
    headers = [JSON, (b"content-encoding", b"Identity")]
    assert answer(b"{}", headers=headers)[0].status == 200


@pytest.mark.parametrize(
    ("host", "good"),
    [
        (None, True),
        (b"localhost", True),
        (b"LOCALHOST:8000", True),
        (b"app.localhost", True),
        (b"127.0.0.1:8000", True),
        (b"[::1]:8000", True),
        (b"192.168.1.5", True),
        (b"cedar.example.org", True),
        (b"CEDAR.example.org.:443", True),
        (b"evil.example.org", False),
        (b"example.org", False),
        (b"localhost.evil.org", False),
        (b"127.0.0.1.evil.org", False),
        (b"evil.org:127.0.0.1", False),
        (b"x@localhost.evil.org", False),
        (b"[::1", False),
        (b"\xff", False),
    ],
)
def test_a_page_elsewhere_cannot_let_its_name_lead_here(host: bytes | None, good: bool) -> None:
    headers = [JSON] if host is None else [JSON, (b"host", host)]
    limits: dict[str, Any] = {"hosts": ("Cedar.example.org",)}
    if good:
        assert answer(b"{}", headers=headers, limits=limits)[0].status == 200
        return
    refusal(403, "unknown_host", PAUSE, headers=headers, limits=limits)
    assert answer(b"{}", headers=headers)[0].status == 200  # negative control: off by default


def test_admission_is_decided_before_the_body_is_read() -> None:
    app = Echo()

    def admit(scope: Scope) -> None:
        if dict(scope["headers"]).get(b"x-api-key") != b"good":
            raise ApiError(
                401, "No.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        scope["key"] = "good"

    middleware = guarded(app, admit)
    refused = asyncio.run(ask(middleware, PAUSE))
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    refused = asyncio.run(ask(middleware, PAUSE, path=MESSAGES))
    assert json.loads(refused.body)["error"] == {"type": "authentication_error", "message": "No."}
    assert (
        asyncio.run(ask(middleware, b"{}", headers=[JSON, (b"x-api-key", b"good")])).status == 200
    )
    assert app.bodies == [b"{}"]


def test_errors_of_the_app_are_left_to_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(400, "mine")

    with pytest.raises(ApiError, match="mine"):
        asyncio.run(ask(guarded(app), b"{}"))


def test_nothing_is_logged_and_nothing_repeated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for parts, headers in (
        ([b'{"secret": "\xff"}'], [JSON]),
        ([b'{"secret": ' + b"[" * 200], [JSON]),
        ([b"{}"], [(b"content-type", b"text/secret")]),
        ([b"{}"], [JSON, (b"x", b"secret" * 9999)]),
        ([b"{}"], [JSON, (b"content-length", b"secret")]),
    ):
        found, _ = answer(*parts, headers=headers)
        assert found.status in (400, 415, 431)
        assert b"secret" not in found.body
    assert [record for record in caplog.records if record.name.startswith("cedar")] == []


def test_impossible_limits_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Limits(body_bytes=0, header_count=-1, body_seconds=0.0, json_depth=0)
    for name in ("body_bytes", "header_count", "body_seconds", "json_depth"):
        assert f"{name} is " in str(caught.value)


# --- JSON ------------------------------------------------------------------------------------


def test_depth() -> None:
    limits = {"json_depth": 5}
    for kind in (b"[]", b"{}"):
        deep = kind[:1] * 5 + kind[1:] * 5
        assert answer(deep, limits=limits)[0].status == 200
        said = refusal(400, "too_deep", kind[:1] * 6, PAUSE, limits=limits)
        assert "more than 5 levels" in said["message"]
    assert answer(b"[]" * 1000 + b"]" * 9, limits=limits)[0].status == 200  # for a parser to refuse
    assert answer(b'"' + b"[" * 1000 + b'"', limits=limits)[0].status == 200
    assert answer(rb'"\"' + b"[" * 1000 + rb'\\"', limits=limits)[0].status == 200
    refusal(400, "too_deep", rb'["\\",' + b"[" * 1000, limits=limits)


def test_a_million_levels_are_refused_at_once() -> None:
    for start in (b"", b'{"messages": '):
        for piece in (b"[", b'{"a":', b'[{"a":'):
            refusal(400, "too_deep", start + piece * 10**6)


def test_numbers_of_values() -> None:
    limits = {"json_values": 10}
    assert answer(b"[" + b"1," * 9 + b"1]", limits=limits)[0].status == 200
    refusal(400, "too_many_values", b"[" + b"1," * 10 + b"1]", limits=limits)
    refusal(400, "too_many_values", b"[[],[],[],[],[],[]]", limits=limits)
    assert answer(b'["' + b"," * 1000 + b'"]', limits=limits)[0].status == 200


@pytest.mark.parametrize(
    "parts",
    [
        (b"\xff",),
        (b'"\xc3"',),
        (b'"\xc3', b'"'),
        (b'"\xe2\x82',),
        (b'"\xed\xa0\x80"',),  # a surrogate
        (b'"\xc0\xaf"',),  # overlong
        (b'"\xf4\x90\x80\x80"',),  # beyond Unicode
        ("{}".encode("utf-16"),),
        (b"\x1f\x8b\x08\x00",),
    ],
)
def test_what_is_not_utf8(parts: tuple[bytes, ...]) -> None:
    refusal(400, "invalid_utf8", *parts)


def test_characters_may_be_cut_between_pieces() -> None:
    text = '{"a": "Grüße, 世界 🌲"}'.encode()
    found, app = answer(*(bytes([byte]) for byte in text))
    assert found.status == 200
    assert app.bodies == [text]
