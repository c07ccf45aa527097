"""The chat page on the installed command `cedar serve` with the bundled model."""

import base64
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playing import PIXEL, Visit, cedar_served, visiting, wait_until
from playwright.sync_api import Browser, expect

LETTER = "A letter of the year 1790 upon the harbour, the ships, the roads and the people. " * 4
SECONDS = 60_000


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[str]:
    """The address of a server of its own; the browser comes first, as without it nothing is run."""
    with cedar_served("--pool-tokens", "4096") as url:
        yield url


@pytest.fixture
def visit(browser: Browser, server: str) -> Iterator[Visit]:
    with visiting(browser, server) as each:
        yield each
        assert each.complaints == []


def configure(visit: Visit, **fields: str) -> None:
    visit.press("Settings")
    for label, value in fields.items():
        visit.page.get_by_label(label.replace("_", " ")).fill(value)
    visit.press("Done")


def replied(visit: Visit, number: int) -> Any:
    """The newest of so many replies, once it is finished."""
    expect(visit.page.locator(".reply")).to_have_count(number)
    expect(visit.page.locator("body.busy")).to_have_count(0, timeout=SECONDS)
    expect(visit.page.locator(".failure:visible")).to_have_count(0)
    return visit.page.locator(".reply").last


def figure(visit: Visit, name: str) -> int:
    return int(visit.page.locator(f"#f-{name}").inner_text().replace(",", ""))


def test_a_conversation_with_its_figures(visit: Visit) -> None:
    page = visit.page
    expect(page.locator("#model")).to_have_text("cedar-tiny")
    expect(page.locator("#f-context-note")).to_have_text(re.compile(r"of 4,\d{3} that fit"))
    configure(visit, System_prompt=LETTER, Longest_reply="24", Seed="1", Stop_before="NEVER")
    visit.send("Write to me of the ships.")
    first = replied(visit, 1)
    expect(first.locator(".tools")).to_contain_text(re.compile(r"\d+ tokens? · [\d.]+ tokens/s"))
    context = figure(visit, "context")
    assert context > 100
    expect(page.locator("#f-ratio")).to_have_text(re.compile(r"1/[\d.]+ of full size"))
    label = page.locator("#f-strip").get_attribute("aria-label") or ""
    found = re.match(r"(\d+) of (\d+) tokens in \d+ places?, besides the last 32", label)
    assert found, label
    assert 0 < int(found[1]) <= 64  # 32 entries of one or two tokens
    assert abs(int(found[2]) - context) <= 1
    visit.send("And of the roads?")
    replied(visit, 2)
    assert figure(visit, "context") > context
    assert figure(visit, "hit") >= 64


def test_stop_ends_the_work_of_the_server(visit: Visit, server: str) -> None:
    configure(visit, Longest_reply="3000")
    visit.send("Write to me of the ships.")
    expect(visit.page.locator(".reply .body")).to_have_text(re.compile(r"\w{3}"), timeout=SECONDS)
    visit.press("Stop")
    expect(replied(visit, 1)).to_contain_text("Stopped.")

    def idle() -> bool:
        with urllib.request.urlopen(f"{server}metrics") as answer:
            text = answer.read().decode()
        running = re.findall(r"(?m)^vllm:num_requests_running\b.* ([\d.]+)$", text)
        return [float(each) for each in running] == [0.0]

    wait_until(idle)


def test_a_picture_is_read(visit: Visit) -> None:
    configure(visit, Longest_reply="1")
    visit.send("What do you see?")
    replied(visit, 1)
    without = figure(visit, "context")
    red = {"name": "red.png", "mimeType": "image/png", "buffer": base64.b64decode(PIXEL)}
    visit.press("New chat")
    visit.page.locator("#files").set_input_files([red])
    expect(visit.page.locator("#thumbnails img")).to_have_count(1)
    visit.send("What do you see?")
    replied(visit, 1)
    # The smallest picture has 2 x 2 cells: 2 rows of 2 and a row end, between start and end.
    assert figure(visit, "context") >= without + 8


def test_a_tool_call_is_made_and_answered(visit: Visit) -> None:
    page = visit.page
    place = {"type": "string", "enum": ["Paris", "Rome"]}
    parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    visit.press("Settings")
    page.get_by_label("Declarations").fill(json.dumps([tool]))
    page.get_by_label("Calls").select_option("required")
    visit.press("Done")
    visit.send("What is the weather?")
    replied(visit, 1)
    call = page.get_by_role("region", name="Tool call 1")
    expect(call.locator("code")).to_have_text("get_weather")
    expect(call.locator("pre").first).to_have_text(re.compile(r'\{\s+"place": "(Paris|Rome)"\s+\}'))
    visit.press("Settings")
    page.get_by_label("Calls").select_option("none")
    page.get_by_label("Longest reply").fill("4")
    visit.press("Done")
    for field in page.get_by_role("textbox", name="Result").all():
        field.fill('{"degrees": 14}')
    visit.press("Send results")
    replied(visit, 2)


def test_a_refusal_says_what_is_wrong(visit: Visit) -> None:
    visit.send("too long " * 5000)
    alert = visit.page.locator(".reply").get_by_role("alert")
    expect(alert).to_contain_text("The server cannot serve this request.", timeout=SECONDS)
    expect(alert).to_contain_text(re.compile("4,?096"))
    visit.complained("400")
