"""Pictures from the web, fetched for a stranger without being sent anywhere that is not public.

Off unless hosts are listed. A URL's host must be on the list; its name is resolved once, every
address must be public (see `addresses`), and the connection goes to an address that was checked,
so a second answer of the name server changes nothing. Redirects pass the same checks. No proxy,
cookie or credential is used, and nothing of a URL is logged.
"""

import http.client
import io
import queue
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cedar.errors import CapacityError, ConfigError, RequestError
from cedar.server.addresses import (
    AllowedHost,
    Target,
    check_characters,
    is_public,
    looks_numeric,
)

__all__ = ["Connector", "Fetched", "Fetcher", "Resolver"]

Resolver = Callable[[str, int], Sequence[str]]
"""(host, port) -> addresses; OSError if there are none."""
Connector = Callable[[str, int, float], socket.socket]
"""(address, port, seconds) -> a connected TCP socket; OSError if that fails."""

MAX_ADDRESSES = 4  # of one name that are tried
_REDIRECTS = (301, 302, 303, 307, 308)
_HEAD_BYTES = 64 * 1024  # what a response may have besides its body


class Fetched(NamedTuple):
    """A response's body and its media type, lower case without parameters ("" if none)."""

    data: bytes
    media_type: str


class Fetcher:
    """Fetches pictures from the hosts that are listed. Calls block; threads may share one.

    allow: entries for `AllowedHost.parse`, at least one. max_bytes: of a body. seconds: for one
    fetch with everything that belongs to it. concurrent: fetches at once; more of them wait.
    resolve, connect, tls: for tests; by default the system's resolver, TCP and certificates.
    """

    def __init__(
        self,
        allow: Sequence[str],
        *,
        max_bytes: int = 20 << 20,
        seconds: float = 15.0,
        redirects: int = 3,
        concurrent: int = 8,
        resolve: Resolver | None = None,
        connect: Connector | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not allow:
            raise ConfigError("fetching images needs at least one allowed host.")
        self._allowed = tuple(AllowedHost.parse(entry) for entry in allow)
        self._max_bytes, self._seconds, self._redirects = max_bytes, seconds, redirects
        self._resolve = resolve or _system_addresses
        self._connect = connect or _tcp_connection
        self._tls = tls or ssl.create_default_context()
        self._places = threading.BoundedSemaphore(concurrent)

    def fetch(
        self, url: str, *, max_bytes: int | None = None, seconds: float | None = None
    ) -> Fetched:
        """The body of a picture, at most ``max_bytes`` long, within ``seconds``.

        Raises RequestError for whatever goes wrong with it, and CapacityError if too many fetches
        are under way. The messages begin with a verb, so that the caller can say which URL it is;
        they never contain addresses that names lead to, nor text of the response.
        """
        clock = _Clock(self._seconds if seconds is None else min(seconds, self._seconds))
        if not self._places.acquire(timeout=clock.left()):
            raise CapacityError("cannot be fetched now: too many fetches are under way; try later")
        try:
            most = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
            return self._follow(url, most, clock)
        except TimeoutError:
            raise RequestError("was not received completely in time") from None
        except ssl.SSLError as error:
            raise RequestError(
                f"has a host without working TLS ({error.reason or 'failed'})"
            ) from None
        except (OSError, http.client.HTTPException, EOFError, ValueError):
            raise RequestError("could not be fetched: the connection failed") from None
        finally:
            self._places.release()

    def _follow(self, url: str, most: int, clock: "_Clock") -> Fetched:
        for _ in range(self._redirects + 1):
            target = Target.parse(url)
            answer = self._get(target, most, clock)
            if isinstance(answer, Fetched):
                return answer
            check_characters(answer)
            try:
                url = urllib.parse.urljoin(url, answer)
            except ValueError:
                raise RequestError("redirects to what is not a URL") from None
            if target.scheme == "https" and not url.lower().startswith("https:"):
                raise RequestError("redirects from https to something else; that is refused")
        raise RequestError(f"redirects more than {self._redirects} times")

    def _addresses(self, target: Target, clock: "_Clock") -> Sequence[str]:
        if not any(entry.allows(target) for entry in self._allowed):
            raise RequestError(
                f"leads to {target.authority} ({target.scheme}), which is not among the hosts "
                "that this server fetches images from"
            )
        if looks_numeric(target.host) and not is_public(target.host):
            raise RequestError("leads to an address that is not public")
        found = _within(clock, lambda: list(self._resolve(target.host, target.port)))
        if not found:
            raise RequestError("has a host that cannot be found")
        # One private address among public ones is a trap, or a fault that should be seen.
        if not all(is_public(address) for address in found):
            raise RequestError("leads to an address that is not public")
        return found[:MAX_ADDRESSES]

    def _open(self, target: Target, clock: "_Clock") -> socket.socket:
        for address in self._addresses(target, clock):
            try:
                connection = self._connect(address, target.port, clock.left())
            except TimeoutError:
                clock.left()  # raises if it was the whole fetch that ran out of time
                continue
            except OSError:
                continue
            if target.scheme == "http":
                return connection
            try:
                connection.settimeout(clock.left())
                return self._tls.wrap_socket(connection, server_hostname=target.host)
            except BaseException:
                connection.close()
                raise
        raise RequestError("could not be fetched: the connection failed")

    def _get(self, target: Target, most: int, clock: "_Clock") -> Fetched | str:
        """The body, or where a redirect leads."""
        with self._open(target, clock) as raw:
            connection = http.client.HTTPConnection(target.host, target.port)
            connection.auto_open = 0
            # Chunked bodies have up to an eighth of framing, unless it is there to be in the way.
            connection.sock = _TimedSocket(raw, clock, most + most // 8 + _HEAD_BYTES)
            connection.putrequest("GET", target.path, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", target.authority)
            connection.putheader("Accept", "image/png, image/jpeg, image/webp, image/gif")
            connection.putheader("Accept-Encoding", "identity")
            connection.putheader("User-Agent", "cedar")
            connection.putheader("Connection", "close")
            connection.endheaders()
            with connection.getresponse() as response:
                return _picture(response, most)


def _picture(response: http.client.HTTPResponse, most: int) -> Fetched | str:
    if response.status in _REDIRECTS and response.getheader("Location"):
        return str(response.getheader("Location"))
    if response.status != 200:
        raise RequestError(f"was answered with status {response.status}; expected 200")
    if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise RequestError("was answered in a compressed form that was not asked for")
    media_type = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
    main = media_type.partition("/")[0]
    if main not in ("", "image") and media_type not in (
        "application/octet-stream",
        "binary/octet-stream",
    ):
        raise RequestError("was answered with something that is not declared as an image")
    too_long = RequestError(f"is longer than the {most} bytes that are left for it")
    if response.length is not None and response.length > most:
        raise too_long
    data = response.read(most + 1)
    if len(data) > most:
        raise too_long
    if response.length:
        raise RequestError("was cut off")
    return Fetched(data, media_type)


class _Clock:
    """The time that is left for a fetch, all of its steps together."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, more than 0; TimeoutError if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _TimedSocket:
    """What ``http.client`` needs of a socket, with one time limit and one limit of bytes over all.

    A socket's own timeout begins anew with every piece, so a sender of single bytes would never
    meet it.
    """

    def __init__(self, connection: socket.socket, clock: _Clock, most: int) -> None:
        self._connection, self._clock, self._most = connection, clock, most

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(self._clock.left())
        self._connection.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._connection, self._clock, self._most))

    def close(self) -> None:
        """Nothing: the response is still to be read, and who opened the connection closes it."""


class _TimedReader(io.RawIOBase):
    def __init__(self, connection: socket.socket, clock: _Clock, most: int) -> None:
        super().__init__()
        self._connection, self._clock, self._left = connection, clock, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left < 0:
            raise RequestError("was answered with more than an image may have")
        self._connection.settimeout(self._clock.left())
        received = self._connection.recv_into(buffer)
        self._left -= received
        return received


def _within(clock: _Clock, call: Callable[[], list[str]]) -> list[str]:
    """The result of a call that knows no time limit; its thread is left behind if it is late."""
    results: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(call())
        except Exception as error:
            results.put(error)

    threading.Thread(target=run, daemon=True, name="cedar-resolve").start()
    try:
        found = results.get(timeout=clock.left())
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, OSError | UnicodeError):
        raise RequestError("has a host that cannot be found")
    if isinstance(found, Exception):
        raise found
    return found


def _system_addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _tcp_connection(address: str, port: int, seconds: float) -> socket.socket:
    # ``address`` is numeric: nothing is resolved again.
    return socket.create_connection((address, port), timeout=seconds)
