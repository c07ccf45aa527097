"""Many clients at once, bad ones among them: nothing breaks or leaks, every answer is right."""

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from served import Served, serving

pytestmark = pytest.mark.soak

CLIENTS = 64
SECONDS = 120.0
PROMPTS = [f"{start} {number}" for start in ("In the beginning", "We the") for number in range(8)]
LENGTHS = (5, 12, 24)


async def send(url: str, path: str, body: bytes, *, length: int | None = None) -> Any:
    """Open a connection and send a request; reader and writer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def ask(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of a response."""
    reader, writer = await send(url, path, body)
    try:
        return await answer_of(reader)
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader, pause: float = 0.0) -> tuple[int, bytes]:
    """Status and body, chunk by chunk with a pause after each."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split()[1])
    sizes = [line for line in head.split("\r\n") if line.startswith("content-length:")]
    if sizes:
        return status, await reader.readexactly(int(sizes[0].partition(":")[2]))
    found = b""
    while size := int(await reader.readline(), 16):
        found += await reader.readexactly(size)
        await reader.readexactly(2)
        await asyncio.sleep(pause)
    return status, found


def request(prompt: str, length: int, **more: Any) -> bytes:
    given: dict[str, Any] = {"model": "cedar-tiny", "prompt": prompt, "max_tokens": length}
    given["temperature"] = 0
    if more.get("stream"):
        given["stream_options"] = {"include_usage": True}
    return json.dumps(given | {"ignore_eos": True} | more).encode()


def text_of(stream: bytes, length: int) -> str:
    """The text of a stream, which must be whole."""
    blocks = stream.decode().strip().split("\n\n")
    *data, usage = [json.loads(block[6:]) for block in blocks[:-1] if block.startswith("data: ")]
    assert blocks[-1] == "data: [DONE]", blocks[-1]
    assert data[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == length
    return "".join(each["choices"][0]["text"] for each in data)


class Crowd:
    """Clients of all kinds; seen: what each kind got."""

    def __init__(self, url: str, expected: dict[tuple[str, int], str]) -> None:
        self.url, self.expected = url, expected
        self.seen: Counter[tuple[str, Any]] = Counter()

    async def client(self, chance: random.Random, end: float) -> None:
        """One after the other, until the time is over."""
        kinds = [self.stream] * 6 + [self.leave] * 2 + [self.lag, self.broken, self.huge]
        while time.monotonic() < end:
            await chance.choice(kinds)(chance)

    def compare(self, text: str, prompt: str, length: int) -> None:
        self.seen["text", text == self.expected[prompt, length]] += 1

    async def stream(self, chance: random.Random) -> None:
        prompt, length = chance.choice(PROMPTS), chance.choice(LENGTHS)
        body = request(prompt, length, stream=True)
        status, found = await ask(self.url, "/v1/completions", body)
        self.seen["stream", status] += 1
        if status == 200:
            self.compare(text_of(found, length), prompt, length)
        else:
            assert status == 429
            await asyncio.sleep(0.2)

    async def leave(self, chance: random.Random) -> None:
        body = request(chance.choice(PROMPTS), 500, stream=True)
        reader, writer = await send(self.url, "/v1/completions", body)
        if chance.random() < 0.7:
            await reader.read(chance.randint(1, 2000))
        writer.close()
        self.seen["leave", None] += 1

    async def lag(self, chance: random.Random) -> None:
        prompt = chance.choice(PROMPTS)
        reader, writer = await send(self.url, "/v1/completions", request(prompt, 24, stream=True))
        try:
            status, found = await answer_of(reader, 0.02)
        finally:
            writer.close()
        self.seen["lag", status] += 1
        if status == 200:
            self.compare(text_of(found, 24), prompt, 24)

    async def broken(self, chance: random.Random) -> None:
        good = request(chance.choice(PROMPTS), 5)
        bodies = [b"", b"{", b"\xff" * 50, good[:-3], b"[" * 9999, good.replace(b"5", b"-5")]
        path = chance.choice(
            ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/nothing"]
        )
        status, _ = await ask(self.url, path, chance.choice(bodies))
        self.seen["broken", status] += 1
        assert 400 <= status < 500

    async def huge(self, chance: random.Random) -> None:
        tokens = [5] * chance.choice([3000, 9000, 100_000])
        given = {"model": "cedar-tiny", "prompt": tokens, "max_tokens": 1}
        status, _ = await ask(self.url, "/v1/completions", json.dumps(given).encode())
        self.seen["huge", status] += 1
        assert status in (200, 400, 429)


def figures(served: Served) -> dict[str, float]:
    import urllib.request

    with urllib.request.urlopen(f"{served.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name = line.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    status = Path(f"/proc/{served.process.pid}/status")
    if status.exists():
        rss = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        found["rss"] = float(rss.split()[1]) * 1024
    return found


def settled(served: Served) -> dict[str, float]:
    """The figures once nothing runs any more."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = figures(served)
        if not found["vllm:num_requests_running"] and not found["vllm:num_requests_waiting"]:
            return found
        time.sleep(0.2)
    raise AssertionError(f"requests are left over: {found}")


@pytest.mark.timeout(600)
def test_a_crowd() -> None:
    options = ("--pool-tokens", "16384", "--max-waiting", "60", "--no-prefix-cache")
    with serving(*options) as served:
        expected = {}
        for prompt in PROMPTS:
            for length in LENGTHS:
                body = request(prompt, length)
                status, found = asyncio.run(ask(served.url, "/v1/completions", body))
                assert status == 200
                expected[prompt, length] = json.loads(found)["choices"][0]["text"]

        async def crowd(seconds: float, seed: int) -> Counter[tuple[str, Any]]:
            people = Crowd(served.url, expected)
            end = time.monotonic() + seconds
            clients = (
                people.client(random.Random(f"{seed} {number}"), end) for number in range(CLIENTS)
            )
            await asyncio.gather(*clients)
            return people.seen

        asyncio.run(crowd(SECONDS / 4, 1))  # what is allocated once has been
        before = settled(served)
        seen = asyncio.run(crowd(SECONDS, 2))
        after = settled(served)
        assert not [key for key in seen if isinstance(key[1], int) and key[1] >= 500], seen
        assert seen["stream", 200] > CLIENTS, seen
        # In single precision other neighbours round otherwise, which now and then decides a token
        # between two equally likely ones. A text of another request would differ nearly always.
        assert seen["text", True] > 0.85 * (seen["text", True] + seen["text", False]), seen
        assert after["vllm:kv_cache_usage_perc"] == 0.0  # no prefix cache, so no page is held
        if "rss" in before:
            assert after["rss"] < before["rss"] + (64 << 20), (before["rss"], after["rss"])
        assert "Traceback" not in served.log
        assert served.end() == 0
