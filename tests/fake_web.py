"""A server that stands for the public web, and the resolver that leads to it."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from cedar.server.fetch import Fetcher

__all__ = ["PUBLIC", "Web", "answered", "redirect"]

PUBLIC = "93.184.216.34"
Answer = bytes | Callable[[socket.socket], None]


def answered(
    body: bytes = b"picture", *lines: str, status: str = "200 OK", kind: str = "image/png"
) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *lines]
    if kind:
        head.append(f"Content-Type: {kind}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return f"HTTP/1.1 {status}\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")


class Web:
    """A server on this machine that stands for all public hosts, and their resolver.

    answers: by host and path. names: what a host resolves to, by default `PUBLIC`.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.names: dict[str, list[str]] = {}
        self.resolved: list[tuple[str, int]] = []
        self.connected: list[tuple[str, int]] = []
        self.requests: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append((host, port))
        return self.names.get(host, [PUBLIC])

    def connect(self, address: str, port: int, seconds: float) -> socket.socket:
        self.connected.append((address, port))
        return socket.create_connection(self._listener.getsockname(), timeout=seconds)

    def fetcher(self, *allow: str, **settings: object) -> Fetcher:
        chosen: dict[str, object] = {
            "resolve": self.resolve,
            "connect": self.connect,
            "seconds": 5.0,
        }
        return Fetcher(allow or ("example.org",), **(chosen | settings))  # type: ignore[arg-type]

    def close(self) -> None:
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                part = connection.recv(65_536)
                if not part:
                    return
                head += part
            request = head.decode("latin-1")
            self.requests.append(request)
            lines = request.split("\r\n")
            host = next(line[6:] for line in lines if line.startswith("Host: "))
            answer = self.answers.get(host + lines[0].split(" ")[1], b"HTTP/1.1 404 Gone\r\n\r\n")
            if callable(answer):
                answer(connection)
            else:
                connection.sendall(answer)
