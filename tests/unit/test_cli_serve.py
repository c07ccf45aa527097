"""`cedar serve`: what is wrong with its options is said before any weight is read."""

import socket

import pytest

from cedar.cli.__main__ import main
from cedar.errors import BackendUnavailable
from cedar.server.listen import AddressInUse, open_socket


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **settings: object) -> None:
        from cedar.checkpoint.locate import locate_checkpoint

        locate_checkpoint(name)
        raise AssertionError("the weights are read")

    monkeypatch.setattr("cedar.engine.build.load_model", load)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("CEDAR_API_KEYS", raising=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("nowhere",), ("nowhere", "cedar-tiny")),
        (("--host", "no.such.host.invalid"), ("--host",)),
        (("--host", "203.0.113.7"), ("203.0.113.7",)),
        (("--max-body", "0"), ("max_body",)),
        (("--max-running", "0"), ("max_running",)),
        (("--api-key-file", "nowhere"), ("nowhere",)),
        (("--allow-image-host", "http://x"), ("http://x",)),
        (("--replay", "sometimes"), ("replay", "decoder")),
        (("--port", "70000"), ("port",)),
        (("--cors-origin", "example.org"), ("cors_origins",)),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", *options])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said


def test_a_port_is_taken_once() -> None:
    with open_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"port {port} of 127.0.0.1 is in use"):
            open_socket("127.0.0.1", port)
    with open_socket("127.0.0.1", port), pytest.raises(AddressInUse):
        open_socket("127.0.0.1", port)


def test_clients_that_come_early_wait() -> None:
    with open_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        pass


def test_other_addresses() -> None:
    with open_socket("localhost", 0):
        pass
    with pytest.raises(BackendUnavailable, match=r"203\.0\.113\.7"):
        open_socket("203.0.113.7", 0)
