"""Bytes made to do harm: each is answered by 4xx, and the server lives on.

They go to the limits alone, around a small app, and to the installed ``cedar serve`` alike.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from hostile import (
    CHAT,
    MESSAGES,
    PATHS,
    PATIENCE,
    SECRET,
    Target,
    cedar_target,
    echo_target,
    looks_right,
    request_bytes,
)


@pytest.fixture(scope="module")
def cedar() -> Iterator[Target]:
    with cedar_target("--max-body", str(6 << 20)) as target:
        yield target


@pytest.fixture(scope="module")
def echo() -> Iterator[Target]:
    with echo_target() as target:
        yield target


@pytest.fixture(params=["echo", "cedar"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Each of both servers, and it is alive afterwards."""
    found: Target = request.getfixturevalue(request.param)
    yield found
    assert found.health() == 200


# --- bytes that are no request ---------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 1000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /nothing HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nNo colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX : y\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"G\xffT / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        request_bytes(CHAT, b"{}", "Content-Length: 5"),
        request_bytes(CHAT, b"{}", "Content-Length: -2", length=False),
        request_bytes(CHAT, b"{}", "Content-Length: 0x2", length=False),
        request_bytes(CHAT, b"{}", "Content-Length: " + "9" * 40, length=False),
        request_bytes(CHAT, b"{}", "Transfer-Encoding: gzip", length=False),
        request_bytes(CHAT, b"{}", "Transfer-Encoding: chunked, chunked", length=False),
        request_bytes(CHAT, b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=False),
        request_bytes(CHAT, b"-1\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=False),
        request_bytes(CHAT, b"2\r\n{}xx0\r\n\r\n", "Transfer-Encoding: chunked", length=False),
        request_bytes(CHAT, b"f" * 99_999, "Transfer-Encoding: chunked", length=False),
    ],
)
def test_what_is_not_http(target: Target, data: bytes) -> None:
    looks_right(target.send(data), 400, 404, 405, 413, 431)


def test_requests_inside_of_requests(target: Target) -> None:
    inner = request_bytes("/health", method="GET")
    data = request_bytes(CHAT, b"0\r\n\r\n" + inner, "Transfer-Encoding: chunked")
    with target.connect() as connection:
        connection.sendall(data)
        reply = target.read(connection)
        looks_right(reply, 400)
        assert reply.headers["connection"] == "close"
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""  # no answer to what one of both takes for a body


@pytest.mark.parametrize(
    "lines",
    [
        [f"X-{i}: {SECRET}" for i in range(200)],
        [f"X-{i}: {SECRET}" for i in range(100_000)],
        ["X: " + SECRET * 5000],
        ["X: " + "y" * 4_000_000],
        ["y" * 4_000_000 + ": x"],
        ["Cookie: a=b"] * 50_000,
    ],
    ids=["many", "very many", "long", "very long", "long name", "cookies"],
)
def test_header_floods(target: Target, lines: list[str]) -> None:
    for path in (CHAT, MESSAGES):
        looks_right(target.send(request_bytes(path, b"{}", *lines)), 431)


def test_a_flood_of_the_request_line(target: Target) -> None:
    for path in ("/" + "a" * 40_000, "/v1/models?" + "a" * 3_000_000):
        looks_right(target.send(request_bytes(path, method="GET")), 431)


def drip(connection: socket.socket) -> None:
    """Send byte after byte for longer than the server waits for all of them."""
    end = time.monotonic() + 3 * PATIENCE
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            connection.sendall(b"x")
            time.sleep(0.02)


def test_headers_that_never_end(echo: Target) -> None:
    with echo.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        drip(connection)
        reply = echo.read(connection)
    looks_right(reply, 408)
    assert reply.headers["connection"] == "close"
    assert echo.health() == 200


def test_many_connections_that_say_nothing(target: Target) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(target.connect()) for _ in range(100)]
        for connection in silent[::2]:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
        assert target.health() == 200


def test_silent_connections_are_closed(echo: Target) -> None:
    with echo.connect() as silent, echo.connect() as used:
        used.sendall(request_bytes("/health", method="GET"))
        assert echo.read(used).status == 200
        silent.settimeout(20)
        assert silent.recv(100) == b""
    assert echo.health() == 200


# --- bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("api", list(PATHS))
def test_bodies_that_are_too_long(target: Target, api: str) -> None:
    path = PATHS[api]
    announced = request_bytes(path, b"{}", f"Content-Length: {7 << 20}", length=False)
    looks_right(target.send(announced), 413, path=path)
    whole = request_bytes(path, b'"' + b"x" * (7 << 20) + b'"')
    looks_right(target.send(whole), 413, path=path)
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    chunked = request_bytes(path, chunk * 120, "Transfer-Encoding: chunked", length=False)
    looks_right(target.send(chunked), 413, path=path)


def test_a_client_that_asks_first_is_spared(target: Target) -> None:
    with target.connect() as connection:
        expecting = f"Content-Length: {7 << 20}", "Expect: 100-continue"
        connection.sendall(request_bytes(CHAT, b"", *expecting, length=False))
        looks_right(target.read(connection), 413)


@pytest.mark.parametrize("api", list(PATHS))
def test_bodies_that_come_drop_by_drop(echo: Target, api: str) -> None:
    with echo.connect() as connection:
        connection.sendall(request_bytes(PATHS[api], b'{"', "Content-Length: 9999", length=False))
        drip(connection)
        reply = echo.read(connection)
    looks_right(reply, 408, path=PATHS[api])
    assert echo.health() == 200


def test_what_follows_a_refusal_is_not_waited_for(echo: Target) -> None:
    with echo.connect() as connection:
        headers = "Content-Length: 9999", "Content-Type: text/plain"
        connection.sendall(request_bytes(CHAT, b"x", *headers, length=False))
        looks_right(echo.read(connection), 415)
        connection.sendall(b"x")
        connection.settimeout(20)
        assert connection.recv(100) == b""  # closed, though we owe 9997 bytes
    # A client that does send them may go on with the connection.
    with echo.connect() as connection:
        connection.sendall(request_bytes(CHAT, b"x" * 9999, "Content-Type: text/plain"))
        looks_right(echo.read(connection), 415)
        connection.sendall(request_bytes("/health", method="GET"))
        assert echo.read(connection).status == 200


def test_clients_that_leave_in_the_middle(target: Target) -> None:
    data = request_bytes(CHAT, b'{"messages": [], "x": "' + b"y" * 5000)
    for kept in (1, 20, 60, len(data) - 10):
        with target.connect() as connection:
            connection.sendall(data[:kept])
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)


@pytest.mark.parametrize("start", ["", '{"messages": ', '{"model": "cedar-tiny", "input": '])
@pytest.mark.parametrize("piece", ["[", '{"a":', '[{"":'])
def test_a_million_levels(target: Target, start: str, piece: str) -> None:
    for path in PATHS.values():
        body = (start + piece * 10**6).encode()
        looks_right(target.send(request_bytes(path, body)), 400, path=path)


def test_millions_of_values(target: Target) -> None:
    for piece, number in (("[],", 1_100_000), ("{},", 1_100_000), ("1,", 2_100_000)):
        reply = target.send(request_bytes(CHAT, f'{{"messages": [{piece * number}1]}}'.encode()))
        looks_right(reply, 400)
        assert reply.error["code"] == "too_many_values"


@pytest.mark.parametrize("api", list(PATHS))
@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe{\x00}\x00",
        b'{"messages": "\xff"}',
        b'{"messages": "\xed\xa0\x80"}',
        b'{"messages": "\xc0\xaf"}',
        b'{"messages": "\xf0\x9f"}',
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
        b'\xef\xbb\xbf{"messages": ',
        b"",
        b"{",
        b"nul",
        b"{} {}",
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": "\\ud800',
        b'"' + b"\\" * 100_001,
        b"[" * 90,
    ],
)
def test_what_is_not_json(target: Target, api: str, body: bytes) -> None:
    path = PATHS[api]
    looks_right(target.send(request_bytes(path, body)), 400, path=path)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_pages_elsewhere_cannot_post_without_asking(target: Target, kind: str) -> None:
    data = request_bytes(CHAT, b"{}", f"Content-Type: {kind}", "Origin: https://evil.example")
    looks_right(target.send(data), 415)
