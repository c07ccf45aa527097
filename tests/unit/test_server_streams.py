"""Clients that leave, lag or are refused late: what becomes of their requests."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from cedar.errors import RequestError
from cedar.server.app import service_of
from serving import FakeEngine, Stream, events_of, make_app

PATH = "/v1/completions"


def body(**more: Any) -> bytes:
    given = {"model": "cedar-tiny", "prompt": "a", "max_tokens": 1000}
    return json.dumps(given | more).encode()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until something holds."""
    while not condition():
        await asyncio.sleep(0.001)


def test_the_status_waits_for_the_first_token() -> None:
    async def test() -> None:
        engine = FakeEngine(gate=asyncio.Event())
        stream = Stream(make_app(engine), "POST", PATH, body(stream=True))
        await until(lambda: bool(engine.open))
        await asyncio.sleep(0.01)
        assert not stream.messages
        engine.gate.set()  # type: ignore[union-attr]
        assert (await stream.rest()).status == 200

    run(test)


def test_a_failure_before_the_first_token_is_a_plain_error() -> None:
    async def test() -> None:
        for fail, status in ((RequestError("no good"), 400), (ZeroDivisionError("secret"), 500)):
            engine = FakeEngine(fail=fail, fail_after=0)
            answer = await Stream(make_app(engine), "POST", PATH, body(stream=True)).rest()
            assert answer.status == status
            assert answer.headers["content-type"] == "application/json"
            assert b"secret" not in answer.body
            assert not engine.open

    run(test)


def test_a_failure_after_the_first_token_is_an_event() -> None:
    async def test() -> None:
        for fail, kind in (
            (RequestError("no good"), "invalid_request_error"),
            (ZeroDivisionError("secret"), "server_error"),
        ):
            # Slow enough that the first token is on its way before the failure.
            engine = FakeEngine(fail=fail, fail_after=2, pace=0.01)
            answer = await Stream(make_app(engine), "POST", PATH, body(stream=True)).rest()
            assert answer.status == 200
            *_, (_, error), (_, done) = events_of(answer)
            assert done == "[DONE]"
            assert error["error"]["type"] == kind
            assert b"secret" not in answer.body
            whole = await Stream(make_app(engine), "POST", PATH, body()).rest()
            assert whole.status == (400 if kind.startswith("invalid") else 500)
            assert not engine.open

    run(test)


def test_a_client_that_leaves_ends_its_request() -> None:
    """At every stage: before the first token, within a stream, and without streaming."""

    async def test() -> None:
        for stream_it in (True, False):
            for tokens_first in (0, 3):
                engine = FakeEngine(text="word " * 300, gate=asyncio.Event(), pace=0.001)
                app = make_app(engine)
                client = Stream(app, "POST", PATH, body(stream=stream_it))
                await until(lambda engine=engine: bool(engine.open))
                if tokens_first:
                    engine.gate.set()  # type: ignore[union-attr]
                    await until(lambda engine=engine, most=tokens_first: engine.generated >= most)
                assert service_of(app).door.inside == 1
                client.leave()
                await client.task
                assert engine.cancelled == ["request-0"]
                assert not engine.open
                assert engine.generated < 300
                assert service_of(app).door.inside == 0

    run(test)


def test_a_client_that_leaves_between_status_and_text() -> None:
    async def test() -> None:
        engine = FakeEngine(text="word " * 300, pace=0.001)
        app = make_app(engine)
        client = Stream(app, "POST", PATH, body(stream=True))
        client.leaves_at = "http.response.start"
        await client.task
        assert len(client.messages) == 1
        assert engine.cancelled == ["request-0"]
        assert service_of(app).door.inside == 0

    run(test)


def test_a_client_that_leaves_ends_all_prompts_of_its_batch() -> None:
    async def test() -> None:
        engine = FakeEngine(gate=asyncio.Event())
        client = Stream(make_app(engine), "POST", PATH, body(prompt=["a", "b", "c"], stream=True))
        await until(lambda: len(engine.open) == 3)
        client.leave()
        await client.task
        assert sorted(engine.cancelled) == ["request-0", "request-1", "request-2"]

    run(test)


def test_a_batch_that_does_not_fit_leaves_nothing() -> None:
    async def test() -> None:
        engine = FakeEngine(gate=asyncio.Event(), most_open=2)
        client = Stream(make_app(engine), "POST", PATH, body(prompt=["a", "b", "c"]))
        answer = await client.rest()
        assert answer.status == 429
        assert answer.headers["retry-after"] == "2"
        assert sorted(engine.cancelled) == ["request-0", "request-1"]
        assert not engine.open

    run(test)


def test_a_reader_that_stalls_is_cancelled() -> None:
    async def test() -> None:
        engine = FakeEngine(text="word " * 500, pace=0.001)
        app = make_app(engine, stall_seconds=0.05)
        client = Stream(app, "POST", PATH, body(stream=True), most=1)
        await client.chunk()
        await client.task  # it ends although the client is still there
        assert not client.left.is_set()
        assert engine.cancelled == ["request-0"]
        assert service_of(app).door.inside == 0

    run(test)


def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    async def test() -> None:
        engine = FakeEngine(text="word " * 500)
        app = make_app(engine, stall_seconds=60, buffered_outputs=20)
        client = Stream(app, "POST", PATH, body(stream=True), most=1)
        await client.chunk()
        await until(lambda: not engine.open)  # long before the reader counts as stalled
        assert engine.cancelled == ["request-0"]
        assert engine.generated < 60
        await client.rest()
        assert service_of(app).door.inside == 0

    run(test)


def test_a_slow_reader_within_the_bounds_gets_everything() -> None:
    async def test() -> None:
        engine = FakeEngine(text="word " * 100)
        client = Stream(make_app(engine), "POST", PATH, body(stream=True), most=1)
        for _ in range(3):
            await client.chunk()
            await asyncio.sleep(0.02)
        answer = await client.rest()
        parts = [data["choices"][0]["text"] for _, data in events_of(answer)[:-1]]
        assert "".join(parts) == "word " * 100
        assert not engine.cancelled

    run(test)


def test_silence_is_filled_with_comments() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        gate.set()
        engine = FakeEngine(text="one two three four", gate=gate, pace=0.001)
        client = Stream(make_app(engine, ping_seconds=0.01), "POST", PATH, body(stream=True))
        await client.chunk()  # the status, so the first token was there
        gate.clear()
        pings = 0
        while pings < 2:
            pings += (await client.chunk())["body"] == b": waiting\n\n"
        gate.set()
        answer = await client.rest()
        parts = [data["choices"][0]["text"] for _, data in events_of(answer)[:-1]]
        assert "".join(parts) == "one two three four"

    run(test)


def test_streams_do_not_leak_tasks() -> None:
    async def test() -> None:
        before = len(asyncio.all_tasks())
        engine = FakeEngine(text="word " * 50)
        app = make_app(engine)
        clients = [Stream(app, "POST", PATH, body(stream=True)) for _ in range(4)]
        await until(lambda: engine.generated > 20)
        for client in clients[::2]:
            client.leave()
        await asyncio.gather(*(client.task for client in clients))
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == before
        assert not engine.open

    run(test)
