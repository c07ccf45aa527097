"""Overload, drain, keys and their limits: refused before any work is done."""

import asyncio
import json
from typing import Any

import pytest

from cedar.server.app import service_of
from cedar.server.keys import KeyRing
from serving import Answer, FakeEngine, Stream, ask, make_app, post

PATH = "/v1/completions"
BODY = {"model": "cedar-tiny", "prompt": "a"}
GENERATING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
READING = ("/v1/models", "/v1/models/cedar-tiny", "/tokenizer_info")


async def fill(app: Any, engine: FakeEngine, count: int) -> list[Stream]:
    """So many requests that stay inside, as the engine's gate is shut."""
    clients = [Stream(app, "POST", PATH, json.dumps(BODY).encode()) for _ in range(count)]
    while len(engine.open) < count:
        await asyncio.sleep(0.001)
    assert service_of(app).door.inside == count
    return clients


def test_beyond_the_limit_is_429_without_work() -> None:
    async def test() -> None:
        engine = FakeEngine(gate=asyncio.Event())
        app = make_app(engine, retry_after=7)
        clients = await fill(app, engine, engine.info.max_running + engine.info.max_waiting)
        for path in GENERATING:
            answer = await ask(app, "POST", path, b"{this is never read")
            assert answer.status == 429, path
            assert answer.headers["retry-after"] == "7"
            kind = answer.error["type"]
            assert kind == "rate_limit_error"
        assert len(engine.asked) == 4
        ready = await ask(app, "GET", "/ready")
        assert ready.status == 429
        assert (await ask(app, "GET", "/health")).status == 200
        engine.gate.set()  # type: ignore[union-attr]
        assert [(await client.rest()).status for client in clients] == [200] * 4
        assert (await post(app, PATH, **BODY)).status == 200

    asyncio.run(test())


def test_a_full_engine_is_429_too() -> None:
    async def test() -> Answer:
        return await post(make_app(FakeEngine(most_open=0)), PATH, **BODY)

    answer = asyncio.run(test())
    assert answer.status == 429
    assert answer.headers["retry-after"] == "2"


def test_while_draining_new_requests_get_503_and_old_ones_finish() -> None:
    async def test() -> None:
        engine = FakeEngine(gate=asyncio.Event(), text="whole")
        app = make_app(engine)
        (client,) = await fill(app, engine, 1)
        service_of(app).door.draining = True
        for path in GENERATING:
            answer = await ask(app, "POST", path, b"{}")
            assert answer.status == 503
            assert "retry-after" in answer.headers
        assert (await ask(app, "GET", "/ready")).status == 503
        assert (await ask(app, "GET", "/health")).status == 200
        engine.gate.set()  # type: ignore[union-attr]
        assert (await client.rest()).json()["choices"][0]["text"] == "whole"

    asyncio.run(test())


def test_a_dead_engine_is_503() -> None:
    async def test() -> None:
        engine = FakeEngine()
        app = make_app(engine)
        engine.alive = False
        for method, path in (("POST", PATH), ("GET", "/health"), ("GET", "/ready")):
            answer = await ask(app, method, path, b"{}" if method == "POST" else b"")
            assert answer.status == 503
            assert answer.error["code"] == "engine_stopped"

    asyncio.run(test())


def test_an_engine_that_dies_under_a_request_is_503() -> None:
    async def test() -> None:
        engine = FakeEngine(gate=asyncio.Event(), reason="error")
        app = make_app(engine)
        (client,) = await fill(app, engine, 1)
        engine.alive = False
        engine.gate.set()  # type: ignore[union-attr]
        assert (await client.rest()).status == 503

    asyncio.run(test())


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_keys_are_asked_for(header: str) -> None:
    async def test() -> None:
        engine = FakeEngine()
        app = make_app(engine, KeyRing.from_text("ann:0123456789abcdef,bob:fedcba9876543210"))
        prefix = "Bearer " if header == "authorization" else ""
        good = {header: f"{prefix}0123456789abcdef"}
        for headers in ({}, {header: f"{prefix}0123456789abcdeF"}, {header: prefix + "0"}):
            for path in GENERATING:
                answer = await ask(app, "POST", path, b"{never read", headers)
                assert answer.status == 401, path
                assert answer.error["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
            for path in (*READING, "/page/state", "/v1/unknown"):
                assert (await ask(app, "GET", path, headers=headers)).status == 401, path
        for path in ("/", "/health", "/ready", "/metrics", "/openapi.json", "/page/page.css"):
            assert (await ask(app, "GET", path)).status == 200, path
        for path in (*READING, "/page/state"):
            assert (await ask(app, "GET", path, headers=good)).status == 200, path
        assert (await post(app, PATH, good, **BODY)).status == 200

    asyncio.run(test())


def test_limits_of_a_key_do_not_concern_others(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("ann 0123456789abcdef max_concurrent=1\nbob fedcba9876543210\n")
    file.chmod(0o600)

    async def test() -> None:
        engine = FakeEngine(gate=asyncio.Event())
        app = make_app(engine, KeyRing.from_file(file))
        ann, bob = {"x-api-key": "0123456789abcdef"}, {"x-api-key": "fedcba9876543210"}
        first = Stream(app, "POST", PATH, json.dumps(BODY).encode(), ann)
        while not engine.open:
            await asyncio.sleep(0.001)
        second = await post(app, PATH, ann, **BODY)
        assert second.status == 429
        assert "retry-after" in second.headers
        other = Stream(app, "POST", PATH, json.dumps(BODY).encode(), bob)
        engine.gate.set()  # type: ignore[union-attr]
        assert (await other.rest()).status == 200
        assert (await first.rest()).status == 200
        assert (await post(app, PATH, ann, **BODY)).status == 200  # its place is free again
        first = Stream(app, "POST", PATH, json.dumps(BODY).encode(), ann)
        first.leave()
        await first.task
        assert (await post(app, PATH, ann, **BODY)).status == 200

    asyncio.run(test())


def test_tokens_are_counted_against_a_key(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("ann 0123456789abcdef tokens_per_minute=5\n")
    file.chmod(0o600)

    async def test() -> None:
        app = make_app(FakeEngine(text="one two three four five six"), KeyRing.from_file(file))
        ann = {"x-api-key": "0123456789abcdef"}
        assert (await post(app, PATH, ann, **BODY)).status == 200  # begun, so never cut
        spent = await post(app, PATH, ann, **BODY)
        assert spent.status == 429
        assert 1 <= int(spent.headers["retry-after"]) <= 60

    asyncio.run(test())
