"""`cedar serve` as a process: ports, signals, keys, wrong options."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from served import Served, command, serving

BODY = {"model": "cedar-tiny", "prompt": "The people", "max_tokens": 60, "ignore_eos": True}


def request(served: Served, path: str, body: Any = None, **headers: str) -> HTTPResponse:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    made = urllib.request.Request(served.url + path, data, headers)
    opened: HTTPResponse = urllib.request.urlopen(made, timeout=60)
    return opened


def status(served: Served, path: str, body: Any = None, **headers: str) -> int:
    try:
        with request(served, path, body, **headers) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*options), capture_output=True, text=True, timeout=120, env=environment
    )


def test_a_port_in_use_and_the_first_signal() -> None:
    """A second server says so and ends; running requests outlast SIGTERM, new ones get 503."""
    with serving("--no-page", "--drain-seconds", "60") as served:
        port = served.url.rpartition(":")[2]
        second = run("--port", port)
        assert second.returncode == 1
        assert f"port {port} of 127.0.0.1 is in use" in second.stderr
        assert "Traceback" not in second.stderr
        assert status(served, "/") == 404
        assert "vllm:num_requests_running" in request(served, "/metrics").read().decode()

        stream = request(served, "/v1/completions", BODY | {"stream": True})
        assert stream.readline().startswith(b"data: ")
        served.process.send_signal(signal.SIGTERM)
        codes: list[int] = []
        while 503 not in codes:  # the signal takes a moment
            codes.append(status(served, "/ready"))
        assert status(served, "/v1/completions", BODY) == 503
        rest = stream.read().decode()
        stream.close()
        assert rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in rest
        assert served.process.wait(30) == 0
        assert "1 requests still run" in served.log
        assert "Traceback" not in served.log
        assert "The people" not in served.log


def test_the_second_signal_ends_what_runs() -> None:
    with serving("--drain-seconds", "60", "--pool-tokens", "4096") as served:
        body = BODY | {"stream": True, "max_tokens": 4000}
        stream = request(served, "/v1/completions", body)
        assert stream.readline().startswith(b"data: ")
        served.process.send_signal(signal.SIGTERM)
        while status(served, "/ready") != 503:
            pass
        assert served.end() == 0
        rest = stream.read().decode()
        stream.close()
        # The stream says that it is not complete.
        assert '"code":"cancelled"' in rest or '"code":"engine_stopped"' in rest, rest[-300:]


def test_a_client_that_leaves_frees_its_pages() -> None:
    with serving("--no-draft", "--pool-tokens", "8192") as served:
        stream = request(served, "/v1/completions", BODY | {"stream": True, "max_tokens": 4000})
        stream.readline()
        assert running(served) == 1
        stream.close()
        end = time.monotonic() + 60
        while running(served) and time.monotonic() < end:
            time.sleep(0.05)
        assert running(served) == 0
        assert served.end(signal.SIGINT) == 0  # Ctrl-C with nothing to wait for


def running(served: Served) -> int:
    for line in request(served, "/metrics").read().decode().splitlines():
        if line.startswith("vllm:num_requests_running{"):
            return int(float(line.rpartition(" ")[2]))
    raise AssertionError("no such figure")


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann a-key-of-20-characters\n")
    file.chmod(0o600)
    environment = {"CEDAR_API_KEYS": "bob:b-key-of-20-characters"}
    options = ("--api-key-file", str(file), "--no-draft", "--pool-tokens", "4096")
    with serving(*options, environment=environment) as served:
        body = BODY | {"max_tokens": 1}
        assert status(served, "/v1/completions", body) == 401
        for key in ("a-key-of-20-characters", "b-key-of-20-characters"):
            bearer = {"Authorization": f"Bearer {key}"}
            assert status(served, "/v1/completions", body, **bearer) == 200
        assert status(served, "/v1/models", Authorization="Bearer other") == 401
        assert "key-of-20" not in served.log
