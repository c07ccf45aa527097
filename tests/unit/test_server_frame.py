"""Ids, logs, faults, other origins, models, tokens, metrics: around the endpoints."""

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cedar.server.settings import ServerSettings
from serving import Answer, FakeEngine, ask, make_app, post, tokenizer

PATH = "/v1/completions"
BODY = {"model": "cedar-tiny", "prompt": "a"}


def get(path: str, headers: Any = None, method: str = "GET", **settings: Any) -> Answer:
    return asyncio.run(ask(make_app(FakeEngine(), **settings), method, path, headers=headers))


def send(path: str, engine: FakeEngine | None = None, **body: Any) -> Answer:
    return asyncio.run(post(make_app(engine or FakeEngine()), path, **body))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/x", 404),
        ("GET", PATH, 405),
        ("POST", PATH, 400),
        ("DELETE", "/v1/models", 405),
        ("GET", "/", 200),
    ],
)
def test_every_response_has_an_id(method: str, path: str, status: int) -> None:
    answer = get(path, method=method)
    assert answer.status == status
    assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])
    if status >= 400:
        assert answer.error["message"]
    if status == 405:
        assert answer.headers["allow"]


def test_an_id_of_the_client_is_kept_if_it_is_harmless() -> None:
    assert get("/health", {"X-Request-Id": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"
    for bad in ("a b", "x" * 65, "ä", ""):
        got = get("/health", {"X-Request-Id": bad.encode("utf-8").decode("latin-1")})
        assert got.headers["x-request-id"].startswith("req_")


def test_errors_have_the_form_of_their_api() -> None:
    for path in ("/v1/chat/completions", PATH, "/v1/responses", "/v1/nothing"):
        found = get(path, method="POST" if path != "/v1/nothing" else "GET").json()
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        found = get(path, method="POST").json()
        assert found["type"] == "error"
        assert set(found["error"]) == {"type", "message"}


def test_a_fault_is_logged_by_its_id_without_texts(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(fail=ZeroDivisionError("about THE SECRET PROMPT"))
    with caplog.at_level(logging.DEBUG):
        answer = send(PATH, engine, **BODY | {"prompt": "THE SECRET PROMPT"})
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    id = answer.headers["x-request-id"]
    assert id in answer.error["message"]
    assert f"request {id} failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert "serving.py" in caplog.text  # where it was raised
    assert "SECRET" not in caplog.text
    assert b"SECRET" not in answer.body


def test_texts_are_logged_only_if_wanted(caplog: pytest.LogCaptureFixture) -> None:
    for wanted in (False, True):
        caplog.clear()
        app = make_app(FakeEngine(text="a reply"), log_text=wanted)
        with caplog.at_level(logging.DEBUG):
            asyncio.run(post(app, PATH, **BODY | {"prompt": "THE SECRET PROMPT"}))
        assert ("SECRET" in caplog.text) == wanted
        assert ("reply" in caplog.text) == wanted
        assert "POST /v1/completions 200" in caplog.text


def test_paths_of_clients_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        get("/v1/models/THE%0aSECRET")
        get("/THE SECRET")
    assert "SECRET" not in caplog.text
    assert "GET /v1/models/{model:path} 404" in caplog.text
    assert "GET other 404" in caplog.text


def test_other_origins_only_if_allowed() -> None:
    origin = {"Origin": "https://a.example"}
    asks = origin | {"Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in get("/v1/models", origin).headers
    assert get(PATH, asks, method="OPTIONS").status == 405
    allowed = {"cors_origins": ("https://a.example",)}
    for path, method, headers in (
        ("/v1/models", "GET", origin),
        (PATH, "OPTIONS", asks),
        (PATH, "POST", origin),  # an error
    ):
        answer = get(path, headers, method, **allowed)
        assert answer.headers["access-control-allow-origin"] == "https://a.example", path
        assert "x-request-id" in answer.headers
    other = {"Origin": "https://b.example"}
    assert "access-control-allow-origin" not in get("/v1/models", other, **allowed).headers


def test_a_fault_can_be_read_by_other_origins() -> None:
    app = make_app(FakeEngine(fail=ZeroDivisionError()), cors_origins=("https://a.example",))
    answer = asyncio.run(post(app, PATH, {"Origin": "https://a.example"}, **BODY))
    assert answer.status == 500
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_models() -> None:
    from anthropic.types import ModelInfo
    from openai.types import Model

    listed = get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == ["cedar-tiny", "other"]
    assert (listed["object"], listed["has_more"]) == ("list", False)
    for entry in listed["data"]:
        Model.model_validate(entry, strict=True)
        ModelInfo.model_validate(entry)
        one = get(f"/v1/models/{entry['id']}").json()
        assert one == entry | {"created": one["created"], "created_at": one["created_at"]}
    missing = get("/v1/models/a/b")
    assert missing.error["code"] == "model_not_found"


def test_tokens_there_and_back() -> None:
    text = "Hello <｜User｜> 你好"
    plain = tokenizer().encode(text, control=False)
    found = send("/tokenize", prompt=text).json()
    assert found["tokens"] == [0, *plain]
    assert (found["count"], found["max_model_len"]) == (len(plain) + 1, 2048)
    assert found["token_strs"] is None
    bare = send("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True).json()
    assert bare["tokens"] == plain
    assert len(bare["token_strs"]) == len(plain)
    special = send("/tokenize", prompt=text, parse_special=True).json()
    assert tokenizer().control_ids["<｜User｜>"] in special["tokens"]
    assert send("/detokenize", tokens=plain).json() == {"prompt": text}
    assert send("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_clients_find_begin_and_end_of_text_by_their_spelling() -> None:
    info = get("/tokenizer_info").json()
    for name, id in (("bos_token", 0), ("eos_token", 1)):
        found = send("/tokenize", prompt=info[name], add_special_tokens=False).json()
        assert found["tokens"] == [id]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [2560]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_wrong_tokens(path: str, body: dict[str, Any], param: str) -> None:
    answer = send(path, **body)
    assert answer.status == 400
    assert answer.error["param"] == param


def test_metrics() -> None:
    async def test() -> str:
        app = make_app(FakeEngine(text="one two three"))
        await post(app, PATH, **BODY, n=2)
        await post(app, PATH, **BODY, nonsense=1)
        answer = await ask(app, "GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return answer.body.decode()

    samples = {
        (s.name, *(value for name, value in sorted(s.labels.items()) if name != "model_name")): s
        for family in text_string_to_metric_families(asyncio.run(test()))
        for s in family.samples
    }
    tokens = len(tokenizer().encode("one two three"))
    expected = {
        ("vllm:num_requests_running",): 0,
        ("vllm:num_requests_waiting",): 0,
        ("vllm:kv_cache_usage_perc",): 0.25,
        ("vllm:prompt_tokens_total",): 10,
        ("vllm:generation_tokens_total",): 2 * tokens,
        ("vllm:prefix_cache_hits_total",): 5,
        ("vllm:prefix_cache_queries_total",): 10,
        ("vllm:spec_decode_num_draft_tokens_total",): 6,
        ("vllm:spec_decode_num_accepted_tokens_total",): 4,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 1,
        ("vllm:request_success_total", "stop"): 1,
        ("vllm:request_success_total", "abort"): 0,
        ("vllm:time_to_first_token_seconds_count",): 2,
        ("vllm:inter_token_latency_seconds_count",): 2 * (tokens - 1),
        ("vllm:e2e_request_latency_seconds_count",): 2,
        ("vllm:request_generation_tokens_sum",): 2 * tokens,
        ("cedar:http_responses_total", PATH, "200"): 1,
        ("cedar:http_responses_total", PATH, "400"): 1,
    }
    for key, value in expected.items():
        assert samples[key].value == value, key
    named = [s for s in samples.values() if s.name.startswith("vllm:")]
    assert all(s.labels["model_name"] == "cedar-tiny" for s in named)


def test_two_servers_in_one_process_count_apart() -> None:
    async def test() -> None:
        first, second = make_app(FakeEngine()), make_app(FakeEngine())
        await post(first, PATH, **BODY)
        one, other = await ask(first, "GET", "/metrics"), await ask(second, "GET", "/metrics")
        name = b'cedar:http_responses_total{route="/v1/completions"'
        assert name in one.body
        assert name not in other.body

    asyncio.run(test())


def test_other_content_types_are_refused() -> None:
    """So that a page elsewhere cannot use the server by a form."""
    app = make_app(FakeEngine())
    headers = {"content-type": "text/plain"}
    answer = asyncio.run(ask(app, "POST", PATH, json.dumps(BODY).encode(), headers))
    assert answer.status == 415


def test_bodies_are_bounded() -> None:
    app = make_app(FakeEngine(), max_body=100)
    answer = asyncio.run(post(app, PATH, **BODY | {"prompt": "a" * 200}))
    assert answer.status == 413


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"models": ()}, "models"),
        ({"models": ("",)}, "models"),
        ({"max_body": 0}, "max_body"),
        ({"max_images": -1}, "max_images"),
        ({"drain_seconds": -1.0}, "drain_seconds"),
        ({"stall_seconds": 0.0}, "stall_seconds"),
        ({"cors_origins": ("example.org",)}, "cors_origins"),
    ],
)
def test_bad_settings(setting: dict[str, Any], word: str) -> None:
    from cedar.errors import ConfigError

    with pytest.raises(ConfigError, match=word):
        ServerSettings(**{"models": ("a",)} | setting)
