"""The page's routes: files with their types and policy, the state, and Markdown."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from cedar.server import page_routes
from cedar.server.page_routes import MAX_MARKDOWN_BYTES, PageInfo, add_page

FOLDER = Path(page_routes.__file__).parent / "page"
INFO = PageInfo(
    model="tiny",
    images=False,
    thinking=True,
    cache_bytes_per_token=106.5,
    full_cache_bytes_per_token=10_240,
    pool_tokens=4096,
)


class Answer:
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def json(self) -> Any:
        return json.loads(self.body)


@pytest.fixture(scope="module")
def app() -> FastAPI:
    made = FastAPI()
    add_page(made, INFO)
    return made


def ask(
    app: FastAPI,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | list[bytes] = b"",
) -> Answer:
    """One request, handed to the application itself; None in body is a disconnect."""
    parts = body if isinstance(body, list) else [body]
    messages = [
        {"type": "http.request", "body": part, "more_body": place < len(parts) - 1}
        if part is not None
        else {"type": "http.disconnect"}
        for place, part in enumerate(parts)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    asyncio.run(app(scope, receive, send))
    start = sent[0]
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], found, b"".join(each.get("body", b"") for each in sent[1:]))


def markdown(app: FastAPI, body: bytes | list[Any], kind: str = "application/json") -> Answer:
    return ask(app, "/page/markdown", method="POST", headers={"content-type": kind}, body=body)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/index.html", "text/html; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_files_have_their_type_and_policy(app: FastAPI, path: str, kind: str) -> None:
    answer = ask(app, path)
    assert answer.status == 200
    assert answer.headers["content-type"] == kind
    assert answer.body == (FOLDER / (path.rpartition("/")[2] or "index.html")).read_bytes()
    policy = dict(
        each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'self'"
    assert policy["img-src"] == "'self' data: blob:"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "script-src" not in policy
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_every_file_that_is_named_exists_and_every_file_is_named(app: FastAPI) -> None:
    texts = {each.name: each.read_text(encoding="utf-8") for each in FOLDER.iterdir()}
    index = set(re.findall(r'(?:src|href)="page/([^"]+)"', texts["index.html"]))
    imported = {
        name
        for file, text in texts.items()
        if file.endswith(".js")
        for name in re.findall(r'from "\./([^"]+)"', text)
    }
    assert index | imported == set(texts) - {"index.html"}


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for each in FOLDER.iterdir():
        text = each.read_text(encoding="utf-8")
        addresses = set(re.findall(r"(?:https?:)?//[\w-]+\.[\w./-]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, each.name
        assert "@import" not in text
        # The policy forbids these, so they would not even work.
        assert not re.search(r"<[^>]+\s(style|on\w+)=", text), each.name
        assert not re.search(r"\beval\(|new Function\(|insertAdjacentHTML|outerHTML", text), (
            each.name
        )
    holders = [e.name for e in FOLDER.glob("*.js") if "innerHTML" in e.read_text(encoding="utf-8")]
    assert holders == ["markdown.js"]


def test_files_stay_short() -> None:
    for each in FOLDER.iterdir():
        assert len(each.read_text(encoding="utf-8").splitlines()) <= 300, each.name


def test_head_gives_no_body(app: FastAPI) -> None:
    answer = ask(app, "/", method="HEAD")
    assert answer.status == 200
    assert int(answer.headers["content-length"]) > 1000


def test_a_known_file_is_not_sent_again(app: FastAPI) -> None:
    tag = ask(app, "/page/page.css").headers["etag"]
    again = ask(app, "/page/page.css", headers={"if-none-match": f'"other", {tag}'})
    assert (again.status, again.body) == (304, b"")
    assert ask(app, "/page/page.css", headers={"if-none-match": '"other"'}).status == 200
    assert ask(app, "/page/main.js").headers["etag"] != tag


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/nothing.js",
        "/page/../page_routes.py",
        "/page/..%2fpage_routes.py",
        "/page//etc/passwd",
        "/page/\x00",
        "/page/__pycache__",
    ],
)
def test_no_path_leads_out_of_the_folder(app: FastAPI, path: str) -> None:
    assert ask(app, path).status == 404


def test_the_state_is_what_was_told(app: FastAPI) -> None:
    answer = ask(app, "/page/state")
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json() == asdict(INFO)


def test_markdown_is_rendered(app: FastAPI) -> None:
    answer = markdown(app, [b'{"text": "**a', b'** <b>"}'], "Application/JSON; charset=utf-8")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json() == {"html": "<p><strong>a</strong> &lt;b&gt;</p>\n"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"text": 1}',
        b'{"text": null}',
        b'{"text": ["a"]}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 50_000,
        b'{"text": ' + b"9" * 5000 + b"}",
        [b'{"text": ', None],
    ],
)
def test_other_bodies_are_refused(app: FastAPI, body: Any) -> None:
    answer = markdown(app, body)
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_long_text_is_refused_before_all_of_it_is_read(app: FastAPI) -> None:
    fits = b'{"text": "' + b"a" * (MAX_MARKDOWN_BYTES - 12) + b'"}'
    assert len(fits) == MAX_MARKDOWN_BYTES
    assert markdown(app, fits).status == 200
    refused = markdown(app, fits + b" ")
    assert refused.status == 413
    assert str(MAX_MARKDOWN_BYTES) in refused.json()["error"]["message"]
    parts = [b"a" * MAX_MARKDOWN_BYTES, b"b", b"c", b"d"]
    assert markdown(app, parts).status == 413


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_forms_of_other_sites_cannot_ask(app: FastAPI, kind: str) -> None:
    assert markdown(app, b'{"text": "a"}', kind).status == 415


def test_the_page_is_not_part_of_the_interface(app: FastAPI) -> None:
    assert app.openapi()["paths"] == {}
