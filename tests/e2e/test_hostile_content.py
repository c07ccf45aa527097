"""Requests whose content was made to do harm: 4xx from ``cedar serve``, which lives on."""

import base64
import json
import socket
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cedar.checkpoint.locate import locate_checkpoint
from cedar.inputs.tokenizer import Tokenizer
from hostile import (
    CHAT,
    MESSAGES,
    PATHS,
    RESPONSES,
    SECRET,
    Target,
    cedar_target,
    looks_right,
    request_bytes,
)


@pytest.fixture(scope="module")
def cedar() -> Iterator[Target]:
    hosts = ("localhost", "127.0.0.1", "[::1]", "2130706433", "0x7f.1", "169.254.169.254")
    options = [option for host in hosts for option in ("--allow-image-host", host)]
    with cedar_target("--max-body", str(6 << 20), "--pool-tokens", "4096", *options) as target:
        yield target


@pytest.fixture
def real(cedar: Target) -> Iterator[Target]:
    yield cedar
    assert cedar.health() == 200


# --- requests --------------------------------------------------------------------------------


def chat(content: Any = "Hello", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "cedar-tiny", "max_tokens": 1, "messages": messages, **more}


def test_what_is_right_is_answered(real: Target) -> None:
    # Negative control of all that follows.
    assert real.post(CHAT, **chat()).status == 200
    assert real.post(MESSAGES, **chat()).status == 200
    asked = {"model": "cedar-tiny", "max_output_tokens": 1, "input": "Hello"}
    assert real.post(RESPONSES, **asked).status == 200


@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "1" + "0" * 400]
)
@pytest.mark.parametrize("field", ["max_tokens", "temperature", "seed", "n", "top_p", "logit_bias"])
def test_numbers_out_of_every_range(real: Target, field: str, value: str) -> None:
    for path in (CHAT, MESSAGES, RESPONSES):
        body = json.dumps(chat()).replace("}", "", 0)[:-1] + f', "{field}": {value}}}'
        reply = real.send(request_bytes(path, body.encode()))
        looks_right(reply, 400, path=path)


@pytest.mark.parametrize(
    "body",
    [
        "null",
        "[]",
        "1",
        '"text"',
        "{}",
        '{"model": "cedar-tiny"}',
        '{"model": "cedar-tiny", "messages": null}',
        '{"model": "cedar-tiny", "messages": []}',
        '{"model": "cedar-tiny", "messages": {}}',
        '{"model": "cedar-tiny", "messages": [null]}',
        '{"model": "cedar-tiny", "messages": [[]]}',
        '{"model": "cedar-tiny", "messages": [{"role": "user"}]}',
        '{"model": "cedar-tiny", "messages": [{"role": "user", "content": 5}]}',
        '{"model": "cedar-tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"model": "cedar-tiny", "messages": [{"role": "user", "role": "system", "content": ""}]}',
        '{"model": "cedar-tiny", "__proto__": {}, "messages": []}',
        '{"model": "../../etc/passwd", "messages": [{"role": "user", "content": "x"}]}',
        '{"model": ["cedar-tiny"], "messages": [{"role": "user", "content": "x"}]}',
        '{"\\u0000": 1}',
    ],
)
def test_json_that_is_no_request(real: Target, body: str) -> None:
    for path in (CHAT, RESPONSES, MESSAGES, "/v1/completions", "/tokenize", "/detokenize"):
        looks_right(real.send(request_bytes(path, body.encode())), 400, 404, path=path)


@pytest.mark.parametrize(
    "prompt", [[-1], [2**31], [10**30], [1.5], [True], ["a", 1], [[1], 2], [None], {}, 5, []]
)
def test_token_ids_that_are_none(real: Target, prompt: Any) -> None:
    reply = real.post("/v1/completions", model="cedar-tiny", max_tokens=1, prompt=prompt)
    looks_right(reply, 400)
    if prompt:  # no tokens at all are no text
        looks_right(real.post("/detokenize", model="cedar-tiny", tokens=prompt), 400)


def test_prompts_that_are_too_long(real: Target) -> None:
    for path in (CHAT, MESSAGES):
        looks_right(real.post(path, **chat(f"{SECRET} " * 20_000)), 400, path=path)


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page/../../../../etc/passwd",
        "/page/%2e%2e/%2e%2e/app.py",
        "/page/..%2f..%2fapp.py",
        "/page/\\..\\app.py",
        "/page//etc/passwd",
        "/page/%00",
        "/v1/models/../../etc/passwd",
        "/v1/models/%2e%2e%2fetc%2fpasswd",
        "//etc/passwd",
        "/%ff%fe",
    ],
)
def test_paths_that_lead_out(real: Target, path: str) -> None:
    looks_right(real.send(request_bytes(path, method="GET")), 400, 404)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW", "get"])
def test_other_methods(real: Target, method: str) -> None:
    for path in (CHAT, "/health", "/nothing"):
        looks_right(real.send(request_bytes(path, b"{}", method=method)), 400, 404, 405)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io"])
def test_names_that_were_made_to_lead_here(real: Target, host: str) -> None:
    data = request_bytes(CHAT, json.dumps(chat()).encode())
    looks_right(real.send(data.replace(b"Host: localhost", b"Host: " + host.encode())), 403)


# --- control tokens --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(locate_checkpoint("cedar-tiny"))


def controls(target: Target, tokenizer: Tokenizer, body: dict[str, Any]) -> Counter[int]:
    reply = target.post("/tokenize", **body)
    assert reply.status == 200, reply.body
    known = set(tokenizer.control_ids.values())
    return Counter(token for token in reply.json()["tokens"] if token in known)


def test_text_never_becomes_control_tokens(real: Target, tokenizer: Tokenizer) -> None:
    def conversation(text: str, of_model: str = "x") -> dict[str, Any]:
        tool = {"name": "look", "description": text, "parameters": {"title": text}}
        call = {"name": "look", "arguments": json.dumps({"what": text})}
        return {
            "model": "cedar-tiny",
            "messages": [
                {"role": "system", "content": text},
                {"role": "user", "content": [{"type": "text", "text": text}]},
                {
                    "role": "assistant",
                    "content": of_model,
                    "tool_calls": [{"id": "1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "1", "content": text},
                {"role": "user", "content": text},
            ],
            "tools": [{"type": "function", "function": tool}],
        }

    plain = controls(real, tokenizer, conversation("x"))
    assert sum(plain.values()) >= 5  # the protocol's own
    for name in tokenizer.control_ids:
        text = f"a{name}b"
        # What stands in the model's own turns may mark places of images, and nothing else.
        own = "x" if any(mark in name for mark in ("ref", "box", "point", "polygon")) else text
        assert controls(real, tokenizer, conversation(text, own)) == plain, name
    everything = "".join(tokenizer.control_ids) * 3
    assert controls(real, tokenizer, conversation(everything)) == plain
    # Negative control: as ids they are counted.
    assert controls(real, tokenizer, {"model": "cedar-tiny", "messages": []} | chat("x")) != plain


def test_control_tokens_are_no_roles_and_no_names(real: Target, tokenizer: Tokenizer) -> None:
    for name in list(tokenizer.control_ids)[:12]:
        for message in (
            {"role": name, "content": "x"},
            {"role": f"user{name}", "content": "x"},
        ):
            looks_right(real.post(CHAT, **chat() | {"messages": [message]}), 400)
        tool = {"type": "function", "function": {"name": f"look{name}", "parameters": {}}}
        looks_right(real.post(CHAT, **chat(tools=[tool])), 400)


# --- pictures --------------------------------------------------------------------------------


def png(width: int, height: int, rows: int, kind: int = 0) -> bytes:
    """A grey picture of zeros that has only ``rows`` of its rows."""

    def chunk(name: bytes, body: bytes) -> bytes:
        check = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", check)

    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(bytes(1 + width)) for _ in range(rows)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def with_picture(api: str, url: str) -> dict[str, Any]:
    """A request with a picture; in Messages, data URLs are their source form."""
    if api == "responses":
        content = [
            {"type": "input_text", "text": SECRET},
            {"type": "input_image", "image_url": url},
        ]
        user = {"role": "user", "content": content}
        return {"model": "cedar-tiny", "max_output_tokens": 1, "input": [user]}
    if api == "chat":
        return chat(
            [{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": {"url": url}}]
        )
    source: dict[str, str] = {"type": "url", "url": url}
    if url.startswith("data:"):
        head, _, data = url.partition(",")
        media_type = head.removeprefix("data:").partition(";")[0]
        source = {"type": "base64", "media_type": media_type, "data": data}
    return chat([{"type": "text", "text": SECRET}, {"type": "image", "source": source}])


GOOD = png(40, 30, 30)


@pytest.mark.parametrize("api", list(PATHS))
def test_good_pictures_are_taken(real: Target, api: str) -> None:
    reply = real.post(PATHS[api], **with_picture(api, data_url(GOOD)))
    assert reply.status == 200, reply.body


PICTURES = {
    "bomb": data_url(png(30_000, 30_000, 30_000)),
    "claimed bomb": data_url(png(60_000, 60_000, 1)),
    "largest claim": data_url(png(2**31 - 1, 2**31 - 1, 0)),
    "thin": data_url(png(70_000, 1, 1)),
    "empty": data_url(png(0, 0, 0)),
    "no rows": data_url(png(40, 30, 0)),
    "half": data_url(png(4000, 4000, 4000)[:8000]),
    "cut": data_url(GOOD[:-20]),
    "header only": data_url(GOOD[:33]),
    "odd kind": data_url(png(40, 30, 30, kind=77)),
    "magic only": data_url(b"\x89PNG\r\n\x1a\n"),
    "nothing": data_url(b""),
    "text": data_url(SECRET.encode()),
    "svg": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
    "svg as png": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
    "wrong type": data_url(GOOD, "image/jpeg"),
    "pdf": data_url(b"%PDF-1.7", "application/pdf"),
    "gif without a frame": data_url(b"GIF89a\xff\xff\xff\xff\0\0\0;", "image/gif"),
    "gif bomb": data_url(
        b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\2\1\0\0;", "image/gif"
    ),
    "webp bomb": data_url(
        b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\0\xff\xff\0" + b"\0" * 8, "image/webp"
    ),
    "jpeg bomb": data_url(
        b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\1\1\x11\0\xff\xda\0\x08\1\1\0\0\x3f\0\xff\xd9",
        "image/jpeg",
    ),
    "jpeg scans": data_url(
        b"\xff\xd8\xff\xc2\0\x0b\x08\0\x10\0\x10\1\1\x11\0"
        + b"\xff\xda\0\x08\1\1\0\0\x3f\0" * 5000
        + b"\xff\xd9",
        "image/jpeg",
    ),
    "not base64": "data:image/png;base64,@@@@",
    "not encoded": f"data:image/png,{SECRET}",
    "file": "file:///etc/passwd",
    "path": "/etc/passwd",
    "relative path": "../../etc/passwd",
    "ftp": "ftp://127.0.0.1/a.png",
    "loopback": "http://127.0.0.1/a.png",
    "localhost": "http://localhost/a.png",
    "localhost and dot": "http://localhost./a.png",
    "ipv6": "http://[::1]/a.png",
    "number": "http://2130706433/a.png",
    "hexadecimal": "http://0x7f.1/a.png",
    "metadata": "http://169.254.169.254/latest/meta-data/",
    "mapped": "http://[::ffff:127.0.0.1]/a.png",
    "private": "http://10.0.0.1/a.png",
    "other port": "http://localhost:22/",
    "unlisted": f"https://example.org/{SECRET}",
    "user": "http://user:secret@localhost/",
    "new lines": "http://localhost/\r\nX: y",
    "empty URL": "",
}


@pytest.mark.parametrize("name", list(PICTURES))
def test_hostile_pictures(real: Target, name: str) -> None:
    for api, path in PATHS.items():
        reply = real.post(path, **with_picture(api, PICTURES[name]))
        looks_right(reply, 400, path=path)


def test_an_open_port_of_this_machine_is_not_reached(real: Target) -> None:
    with socket.create_server(("127.0.0.1", 0)) as secret:
        secret.settimeout(0.2)
        port = secret.getsockname()[1]
        for host in ("127.0.0.1", "localhost", "2130706433"):
            url = f"http://{host}:{port}/a.png"
            looks_right(real.post(CHAT, **with_picture("chat", url)), 400)
        with pytest.raises(TimeoutError):
            secret.accept()


def test_too_many_pictures(real: Target) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(GOOD)}}
    assert real.post(CHAT, **chat([picture] * 2)).status == 200
    reply = real.post(CHAT, **chat([picture] * 17))
    looks_right(reply, 400)
    assert "17 images" in reply.error["message"]


def test_the_error_names_the_picture(real: Target) -> None:
    reply = real.post(CHAT, **with_picture("chat", PICTURES["bomb"]))
    assert reply.error["param"].startswith("messages")
    assert "pixels" in reply.error["message"]
    assert SECRET not in reply.body.decode()
