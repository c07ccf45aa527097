"""Pictures from the web: only from listed hosts, only from public addresses, within limits."""

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cedar.errors import CapacityError, ConfigError, RequestError
from cedar.server import fetch as fetch_module
from cedar.server.fetch import Fetcher
from fake_web import PUBLIC, Web, answered, redirect

SCOPE = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


def refusal(fetcher: Fetcher, url: str, **settings: float) -> str:
    with pytest.raises(RequestError) as caught:
        fetcher.fetch(url, **settings)  # type: ignore[arg-type]
    return str(caught.value)


# --- what works ------------------------------------------------------------------------------


def test_a_picture_is_fetched(web: Web) -> None:
    web.answers["example.org/a?b=c"] = answered(kind="Image/PNG; q=1")
    found = web.fetcher().fetch("http://Example.org./a?b=c#d")
    assert found == (b"picture", "image/png")
    assert web.resolved == [("example.org", 80)]
    assert web.connected == [(PUBLIC, 80)]
    lines = web.requests[0].split("\r\n")
    assert lines[0] == "GET /a?b=c HTTP/1.1"
    names = [line.split(":")[0] for line in lines[1:] if line]
    assert names == ["Host", "Accept", "Accept-Encoding", "User-Agent", "Connection"]
    assert "Accept-Encoding: identity" in lines


@pytest.mark.parametrize(
    "head", ["Transfer-Encoding: chunked\r\n\r\n7\r\npicture\r\n0\r\n\r\n", "\r\npicture"]
)
def test_bodies_without_a_length(web: Web, head: str) -> None:
    web.answers["example.org/"] = f"HTTP/1.1 200 OK\r\n{head}".encode()
    assert web.fetcher().fetch("http://example.org") == (b"picture", "")


def test_the_next_address_is_tried(web: Web) -> None:
    web.answers["example.org/"] = answered()
    web.names["example.org"] = ["1.1.1.1", "1.0.0.1", PUBLIC]

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        if address == "1.1.1.1":
            raise ConnectionRefusedError
        if address == "1.0.0.1":
            raise TimeoutError
        return web.connect(address, port, seconds)

    assert web.fetcher(connect=connect).fetch("http://example.org/").data == b"picture"
    web.names["example.org"] = ["1.1.1.1"] * 2
    assert "connection failed" in refusal(web.fetcher(connect=connect), "http://example.org/")


def test_proxies_of_the_environment_are_not_used(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    web.answers["example.org/"] = answered()
    assert web.fetcher().fetch("http://example.org/").data == b"picture"


# --- where it goes ---------------------------------------------------------------------------


def test_other_hosts_are_not_even_resolved(web: Web) -> None:
    fetcher = web.fetcher("example.org", "*.example.net")
    for url in (
        "http://evil.org/",
        "http://example.org.evil.org/",
        "http://sub.example.org/",
        "http://example.net/",
        "http://example.org:8080/",
        "http://127.0.0.1/",
        "http://localhost/",
    ):
        assert "not among the hosts" in refusal(fetcher, url)
    assert web.resolved == web.connected == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "::ffff:127.0.0.1",
        "fe80::1%eth0",
        "0.0.0.0",
    ],
)
def test_names_that_lead_to_private_addresses(web: Web, address: str) -> None:
    web.answers["example.org/"] = answered()
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        web.names["example.org"] = addresses
        said = refusal(web.fetcher(), "http://example.org/")
        assert "not public" in said
        assert address not in said
    assert web.connected == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost.",
        "LOCALHOST",
        "127.0.0.1",
        "127.1",
        "127.0.0.1.",
        "2130706433",
        "0177.0.0.1",
        "0x7f.0.0.1",
        "0x7f000001",
        "0",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::127.0.0.1]",
        "169.254.169.254",
        "2852039166",
        "10.0.0.1",
        "192.168.0.1",
        "255.255.255.255",
    ],
)
def test_this_machine_in_every_spelling_even_if_it_is_listed(web: Web, host: str) -> None:
    # With the system's resolver, which reads all of them as addresses.
    fetcher = web.fetcher(host, resolve=None)
    assert "not public" in refusal(fetcher, f"http://{host}/")
    assert web.connected == []


@settings(deadline=None, suppress_health_check=SCOPE, max_examples=40)
@given(
    number=st.integers(0x7F000000, 0x7FFFFFFF),
    form=st.sampled_from(["{0}", "{0:#x}", "0{0:o}", "0x7f.{1}", "127.{1}", "0177.{1:#x}"]),
)
def test_loopback_in_odd_numbers(web: Web, number: int, form: str) -> None:
    host = form.format(number, number & 0xFFFFFF)
    assert socket.getaddrinfo(host, 80)[0][4][0].startswith("127.")
    assert "not public" in refusal(web.fetcher(host, resolve=None), f"http://{host}/")
    # And a resolver of its own that says otherwise is not asked.
    assert "not public" in refusal(web.fetcher(host), f"http://{host}/")
    assert web.resolved == web.connected == []


def test_a_second_answer_of_the_resolver_changes_nothing(web: Web) -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    web.answers["example.org/"] = answered()
    fetcher = web.fetcher(resolve=lambda host, port: next(answers))
    assert fetcher.fetch("http://example.org/").data == b"picture"
    assert web.connected == [(PUBLIC, 80)]  # the address itself, not the name
    assert "not public" in refusal(fetcher, "http://example.org/")
    assert web.connected == [(PUBLIC, 80)]


def test_a_public_address_may_be_listed(web: Web) -> None:
    web.answers["1.1.1.1/"] = answered()
    fetcher = web.fetcher("1.1.1.1", resolve=None)
    assert fetcher.fetch("http://1.1.1.1/").data == b"picture"
    assert web.connected == [("1.1.1.1", 80)]


@pytest.mark.parametrize(
    "error", [socket.gaierror(-2, "unknown"), OSError(), UnicodeError("label")]
)
def test_names_that_cannot_be_found(web: Web, error: Exception) -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        raise error

    assert "cannot be found" in refusal(web.fetcher(resolve=resolve), "http://example.org/")
    web.names["example.org"] = []
    assert "cannot be found" in refusal(web.fetcher(), "http://example.org/")


# --- redirects -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["301 A", "302 A", "303 A", "307 A", "308 A"])
def test_redirects_are_followed(web: Web, status: str) -> None:
    web.answers["example.org/a"] = redirect("b/c", status)
    web.answers["example.org/b/c"] = redirect("//www.example.org:8000/d?e", status)
    web.answers["www.example.org:8000/d?e"] = redirect("http://example.org/f", status)
    web.answers["example.org/f"] = answered()
    fetcher = web.fetcher("example.org", "*.example.org:8000")
    assert fetcher.fetch("http://example.org/a").data == b"picture"
    assert web.connected == [(PUBLIC, 80)] * 2 + [(PUBLIC, 8000), (PUBLIC, 80)]


def test_the_fourth_redirect_is_too_many(web: Web) -> None:
    for i in range(5):
        web.answers[f"example.org/{i}"] = redirect(f"/{i + 1}")
    web.answers["example.org/5"] = answered()
    assert "more than 3 times" in refusal(web.fetcher(), "http://example.org/1")
    assert web.fetcher().fetch("http://example.org/2").data == b"picture"
    web.answers["example.org/"] = redirect("/")
    assert "more than 3 times" in refusal(web.fetcher(), "http://example.org/")


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("http://evil.org/", "not among the hosts"),
        ("http://127.0.0.1/", "not among the hosts"),
        ("http://169.254.169.254/latest/meta-data", "not among the hosts"),
        ("http://inside.example.org/", "not public"),
        ("http://127.1/", "not among the hosts"),
        ("http://2130706433/", "not public"),
        ("http://example.org:22/", "not among the hosts"),
        ("file:///etc/passwd", "not an http or https URL"),
        ("ftp://example.org/", "not an http or https URL"),
        ("http://a:b@example.org/", "user name"),
        ("http://example.org\\@evil.org/", "characters"),
        ("http://example.org/\xe9", "characters"),
        ("http://[::1/", "not a URL"),
        ("\x01", "characters"),
    ],
)
def test_redirects_pass_the_same_checks(web: Web, to: str, said: str) -> None:
    web.answers["example.org/"] = redirect(to)
    web.names["inside.example.org"] = ["10.0.0.1"]
    fetcher = web.fetcher("example.org", "*.example.org", "2130706433")
    assert said in refusal(fetcher, "http://example.org/")
    assert web.connected == [(PUBLIC, 80)]


def test_a_name_that_changes_its_address_between_redirects(web: Web) -> None:
    answers = iter([[PUBLIC], ["10.0.0.1"]])
    web.answers["example.org/"] = redirect("/next")
    web.answers["example.org/next"] = answered()
    fetcher = web.fetcher(resolve=lambda host, port: next(answers))
    assert "not public" in refusal(fetcher, "http://example.org/")
    assert len(web.requests) == 1


# --- TLS -------------------------------------------------------------------------------------


class OpenTls(ssl.SSLContext):
    """Notes the name that would be checked, and then speaks plain text."""

    names: list[str | bytes | None]

    def wrap_socket(self, sock: socket.socket, *args: object, **settings: object) -> socket.socket:  # type: ignore[override]
        self.names.append(settings.get("server_hostname"))  # type: ignore[arg-type]
        return sock


def test_tls_is_checked_for_the_name_and_not_for_the_address(web: Web) -> None:
    tls = OpenTls(ssl.PROTOCOL_TLS_CLIENT)
    tls.names = []
    web.answers["example.org/"] = answered()
    assert web.fetcher(tls=tls).fetch("https://example.org/").data == b"picture"
    assert tls.names == ["example.org"]
    assert web.connected == [(PUBLIC, 443)]
    web.answers["example.org/"] = redirect("http://example.org/plain")
    web.answers["example.org/plain"] = answered()
    assert "from https to something else" in refusal(web.fetcher(tls=tls), "https://example.org/")


def test_certificates_are_required(web: Web) -> None:
    default = web.fetcher()._tls
    assert default.check_hostname
    assert default.verify_mode is ssl.CERT_REQUIRED


def test_a_host_without_tls(web: Web) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def plain() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(100)

    thread = threading.Thread(target=plain, daemon=True)
    thread.start()

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        return socket.create_connection(listener.getsockname(), timeout=seconds)

    with listener:
        assert "without working TLS" in refusal(
            web.fetcher(connect=connect), "https://example.org/"
        )
    thread.join()


# --- limits ----------------------------------------------------------------------------------


def endless(start: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(piece)

    return send


def test_limits_of_bytes(web: Web) -> None:
    web.answers["example.org/"] = answered(b"x" * 1000)
    assert len(web.fetcher(max_bytes=1000).fetch("http://example.org/").data) == 1000
    assert "longer than the 999 bytes" in refusal(web.fetcher(max_bytes=999), "http://example.org/")
    assert "longer than the 10 bytes" in refusal(
        web.fetcher(max_bytes=999), "http://example.org/", max_bytes=10
    )
    assert "longer than the 999 bytes" in refusal(
        web.fetcher(max_bytes=999), "http://example.org/", max_bytes=5000
    )


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 4096),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1000\r\n" + b"x" * 4096 + b"\r\n",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1;" + b"e" * 4096 + b"\r\nx\r\n",
        ),
        (b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 4096 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"x" * 4096),
        (b"", b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * 100),
        (b"", b"x" * 4096),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n", b"x" * 4096),
    ],
)
def test_what_never_ends_is_refused(web: Web, start: bytes, piece: bytes) -> None:
    web.answers["example.org/"] = endless(start, piece)
    said = refusal(web.fetcher(max_bytes=10_000), "http://example.org/")
    assert "time" not in said


def drip(start: bytes, pause: threading.Event) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(start)
        while not pause.wait(0.02):
            connection.sendall(b"x")

    return send


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX: ", answered(b"x" * 9999)[:-9999]])
def test_senders_of_single_bytes_run_out_of_time(web: Web, start: bytes) -> None:
    stop = threading.Event()
    web.answers["example.org/"] = drip(start, stop)
    assert "in time" in refusal(web.fetcher(seconds=0.2), "http://example.org/")
    assert "in time" in refusal(web.fetcher(), "http://example.org/", seconds=0.1)
    stop.set()


def test_resolvers_and_connections_that_hang_run_out_of_time(web: Web) -> None:
    go_on = threading.Event()

    def resolve(host: str, port: int) -> Sequence[str]:
        go_on.wait(10)
        return [PUBLIC]

    assert "in time" in refusal(web.fetcher(resolve=resolve, seconds=0.1), "http://example.org/")
    go_on.set()

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        assert 0 < seconds <= 0.1
        threading.Event().wait(seconds)
        raise TimeoutError

    assert "in time" in refusal(web.fetcher(connect=connect, seconds=0.1), "http://example.org/")


def test_too_many_fetches_at_once_have_to_wait(web: Web) -> None:
    stop = threading.Event()
    web.answers["example.org/slow"] = lambda connection: bool(stop.wait(10)) and None
    web.answers["example.org/"] = answered()
    fetcher = web.fetcher(concurrent=1)
    thread = threading.Thread(target=refusal, args=(fetcher, "http://example.org/slow"))
    thread.start()
    while not web.requests:
        pass
    with pytest.raises(CapacityError, match="try later"):
        fetcher.fetch("http://example.org/", seconds=0.05)
    stop.set()
    thread.join()
    assert fetcher.fetch("http://example.org/").data == b"picture"  # places are given back


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answered(status="404 Not Found"), "status 404"),
        (answered(status="500 Oops"), "status 500"),
        (answered(status="206 Partial"), "status 206"),
        (answered(status="304 Same"), "status 304"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "status 302"),
        (answered(kind="text/html"), "not declared as an image"),
        (answered(kind="application/json"), "not declared as an image"),
        (answered(b"x", "Content-Encoding: gzip"), "compressed"),
        (answered()[:-1], "cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\npic", "connection failed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "connection failed"),
        (b"", "connection failed"),
        (b"garbage\r\n\r\n", "connection failed"),
        (b"HTTP/1.1 abc\r\n\r\n", "connection failed"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n", "connection failed"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", "connection failed"),
    ],
)
def test_answers_that_are_no_pictures(web: Web, answer: bytes, said: str) -> None:
    web.answers["example.org/"] = answer
    assert said in refusal(web.fetcher(), "http://example.org/")


@pytest.mark.parametrize(
    "kind", ["", "image/webp", "application/octet-stream", "binary/octet-stream"]
)
def test_types_that_may_be_pictures(web: Web, kind: str) -> None:
    web.answers["example.org/"] = answered(kind=kind)
    assert web.fetcher().fetch("http://example.org/").media_type == kind


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)
@given(
    answer=st.binary(max_size=200)
    | st.binary(max_size=80).map(lambda b: b"HTTP/1.1 200 OK\r\n" + b)
)
def test_any_answer_is_a_body_or_a_request_error(web: Web, answer: bytes) -> None:
    web.answers["example.org/"] = answer
    with contextlib.suppress(RequestError):
        assert web.fetcher().fetch("http://example.org/").data in answer


def test_nothing_is_logged_and_answers_are_not_repeated(
    web: Web, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    web.answers["example.org/"] = answered(
        b"inner text", status="403 secret reason", kind="text/secret"
    )
    said = refusal(web.fetcher(), "http://example.org/")
    assert "secret" not in said
    assert "inner" not in said
    assert caplog.records == []


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least one allowed host"):
        Fetcher([])
    with pytest.raises(ConfigError, match="expected a host name"):
        Fetcher(["example.org", "https://example.org"])
    assert fetch_module._system_addresses("127.0.0.1", 80) == ["127.0.0.1"]
