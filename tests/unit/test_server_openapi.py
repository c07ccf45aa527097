"""The OpenAPI document says what the server does: bodies, statuses, answers, errors."""

import asyncio
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from cedar.server.completion_request import NOTES, completion_record
from cedar.server.describe import describe
from cedar.server.keys import KeyRing
from serving import FakeEngine, ask, make_app, post

APP = make_app(FakeEngine(text='{"a": 1}'))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
SCHEMA.config.phases.coverage.enabled = False  # every bound of every field: long
THOROUGH = schemathesis.openapi.from_asgi("/openapi.json", APP)


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def check(case: Any) -> None:
    """Whatever is sent, as described or not: no 5xx, nothing that is not described.

    Rules between fields (stream_options needs stream, a tool that is chosen must be declared) are
    not in the schemas, so bodies that these accept may get 400.
    """
    case.call_and_validate(excluded_checks=[positive_data_acceptance])


@SCHEMA.parametrize()
@bounded(4)
def test_the_document_is_kept(case: Any) -> None:
    check(case)


@pytest.mark.soak
@THOROUGH.parametrize()
@bounded(150)
def test_the_document_is_kept_by_many_requests(case: Any) -> None:
    check(case)


def test_every_route_is_described() -> None:
    document = asyncio.run(ask(APP, "GET", "/openapi.json")).json()
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in APP.routes
        for method in getattr(route, "methods", None) or ()
        if method in ("GET", "POST") and not route.path.startswith("/page")
    }
    described = {(path, method) for path, found in document["paths"].items() for method in found}
    assert routes - described == {("/openapi.json", "get"), ("/", "get")}
    assert described <= routes


def test_keys_are_described_if_they_are_asked_for() -> None:
    keys = KeyRing.from_text("a:0123456789abcdef")
    document = make_app(FakeEngine(), keys).openapi()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            guarded = path not in ("/health", "/ready", "/metrics")
            assert ("security" in operation) == guarded
            assert ("401" in operation["responses"]) == guarded
    assert "securitySchemes" not in APP.openapi()["components"]


def test_every_field_of_completions_is_in_the_notes_or_plain() -> None:
    assert set(NOTES) <= set(completion_record(10, 1).fields)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "cedar-tiny", "prompt": "a"},
        {"model": "cedar-tiny", "prompt": ["a"], "n": 2, "echo": True, "logprobs": 2},
        {"model": "cedar-tiny", "prompt": [[1], [2, 3]], "max_tokens": 0},
    ],
)
def test_answers_are_as_described(body: dict[str, Any]) -> None:
    document = APP.openapi()
    described = document["paths"]["/v1/completions"]["post"]
    answer = asyncio.run(post(APP, "/v1/completions", **body)).json()
    schema = described["responses"]["200"]["content"]["application/json"]["schema"]
    validator = jsonschema_rs.validator_for(schema)
    assert validator.is_valid(answer)
    assert not validator.is_valid(answer | {"object": "other"})


def test_the_document_is_of_this_server() -> None:
    document = describe(APP.state.service, keys=False)
    model = document["components"]["schemas"]["CompletionRequest"]["properties"]["model"]
    assert model == {"type": "string", "enum": ["cedar-tiny", "other"]}
