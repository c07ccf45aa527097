"""The chat page in a browser when something is wrong: errors, keys, hostile text, full storage."""

import re

from playing import HOSTILE, Play, Visit, refusal, visiting
from playwright.sync_api import Browser, expect

REFUSALS = [
    (
        refusal(400, "temperature is 9; expected 0 to 2", "temperature"),
        "The server cannot serve this request. Temperature is 9; expected 0 to 2.",
    ),
    (
        refusal(400, "expected a smaller value", "top_p"),
        "The server cannot serve this request. Expected a smaller value. (top_p)",
    ),
    (refusal(404, "no such model."), "The server does not know this address or model."),
    (refusal(413, "the body has 40 MB."), "The request is too large. The body has 40 MB."),
    (refusal(503, "the server drains"), "The server is not ready. The server drains."),
    (
        refusal(500, "a fault", x_request_id="r-1"),
        "Something went wrong in the server. A fault. Request r-1.",
    ),
]


def test_refusals_are_told_in_words(visit: Visit, play: Play) -> None:
    for answer, words in REFUSALS:
        visit.press("New chat")
        play.bodies.clear()
        play.refusals.append(answer)
        visit.send("echo hello")
        alert = visit.page.locator(".reply").get_by_role("alert")
        expect(alert).to_contain_text(words)
        visit.complained(str(answer.status_code))
        # The same request would be refused again if it is too large.
        too_large = answer.status_code == 413
        expect(alert.get_by_role("button")).to_have_count(0 if too_large else 1)
        if too_large:
            continue
        visit.press("Try again")
        visit.finished(1)
        expect(visit.page.locator(".reply .body")).to_have_text("echo hello")
        assert len(play.bodies) == 2
        assert play.bodies[0] == play.bodies[1]


def test_a_full_server_says_when_to_come_back(visit: Visit, play: Play) -> None:
    play.refusals.append(refusal(429, "the queue is full", retry_after="2"))
    visit.send("echo hello")
    button = visit.page.get_by_role("alert").get_by_role("button")
    expect(button).to_have_text(re.compile(r"Try again in [12] s"))
    expect(button).to_have_text("Try again")
    expect(button).to_be_enabled()
    button.click()
    visit.finished(1)
    visit.complained("429")


def test_an_error_within_a_reply_keeps_what_was_written(visit: Visit, play: Play) -> None:
    visit.send("break, please")
    alert = visit.page.locator(".reply").get_by_role("alert")
    expect(alert).to_contain_text("The server gave up on this reply. The engine lost this request.")
    expect(visit.page.locator(".reply .body")).to_contain_text("Here is a short answer")
    expect(visit.page.locator(".reply .tools")).to_contain_text("Not complete.")


def test_a_reply_that_is_cut_off_is_told(visit: Visit) -> None:
    visit.send("echo something that is cut off")
    alert = visit.page.get_by_role("alert")
    expect(alert).to_contain_text("The connection ended before the reply was complete.")
    expect(visit.page.locator(".reply .body")).to_have_text("echo something that is cut off")


def test_a_reply_that_reached_its_limit_says_so(visit: Visit) -> None:
    visit.send("echo to the limit")
    visit.finished()
    expect(visit.page.locator(".reply .tools")).to_contain_text("longest allowed reply")


def test_a_server_that_is_gone_is_told_and_tried_again(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/**", lambda route: route.abort())
    visit.send("echo hello")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    visit.complained("ERR_FAILED")
    page.unroute("**/v1/**")
    visit.press("Try again")
    visit.finished(1)
    # From the start, too.
    page.route("**/page/state", lambda route: route.abort())
    page.reload()
    expect(page.locator("#banner")).to_contain_text("The server cannot be reached.")
    expect(page.locator(".user")).to_have_text("echo hello")
    page.unroute("**/page/state")
    visit.press("Try again")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#model")).to_be_visible()
    visit.complained("ERR_FAILED")


def test_an_answer_of_something_else_is_told(visit: Visit) -> None:
    visit.page.route(
        "**/v1/**", lambda route: route.fulfill(body="<html>", content_type="text/html")
    )
    visit.send("echo hello")
    expect(visit.page.get_by_role("alert")).to_contain_text(
        "found text/html. Is a proxy in between?"
    )


def test_a_key_is_asked_for_and_kept_for_the_tab_only(visit: Visit, play: Play) -> None:
    page = visit.page
    visit.send("echo **hello**")
    visit.finished()
    play.key = "secret"
    page.reload()
    dialog = page.get_by_role("dialog", name="This server needs an API key")
    expect(dialog.get_by_label("API key")).to_be_focused()
    dialog.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("The server did not accept that key.")
    dialog.get_by_label("API key").fill("secret")
    visit.press("Use it")
    expect(dialog).to_be_hidden()
    # What needs the key is done after it was given: kept replies are rendered.
    expect(page.locator(".reply strong")).to_have_text("hello")
    visit.complained("401", "401")
    page.reload()
    expect(page.locator("#model")).to_be_visible()
    assert page.evaluate("Object.values({...localStorage}).join().includes('secret')") is False
    assert page.evaluate("sessionStorage.getItem('cedar.key')") == "secret"
    # A key that stops working is asked for again, and the message is not lost.
    play.key = "other"
    visit.send("echo again")
    expect(dialog).to_be_visible()
    dialog.get_by_label("API key").fill("other")
    visit.press("Use it")
    visit.finished(2)
    expect(page.locator(".reply").last).to_contain_text("echo again")
    visit.complained("401")
    visit.press("Settings")
    visit.press("Forget the API key")
    assert page.evaluate("sessionStorage.length") == 0


def test_without_a_key_the_page_says_what_is_missing(visit: Visit, play: Play) -> None:
    play.key = "secret"
    visit.page.reload()
    visit.press("Cancel")
    expect(visit.page.locator("#banner")).to_contain_text("The server wants an API key.")
    visit.complained("401")


def test_hostile_markdown_does_nothing(visit: Visit) -> None:
    page = visit.page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    visit.send("be hostile")
    visit.finished()
    reply = page.locator(".reply .body")
    expect(reply).to_contain_text("<script>window.broken = 1</script>")
    assert page.evaluate("window.broken") is None
    assert reply.locator("script, img, iframe, svg:not([aria-hidden]), style, [style]").count() == 0
    assert reply.locator("[onerror], [onload]").count() == 0
    links = reply.locator("a").evaluate_all("all => all.map((a) => [a.href, a.rel, a.target])")
    outside = ["noopener noreferrer nofollow", "_blank"]
    assert links == [
        ["https://example.invalid/track.png", *outside],
        ["https://example.invalid/", *outside],
    ]
    assert [url for url in asked if "example.invalid" in url] == []
    # Nor does anything the person writes, or what a tool is called.
    visit.send(f"echo {HOSTILE}")
    visit.finished(2)
    assert page.locator(".user script, .user img, .user iframe").count() == 0
    assert page.evaluate("window.broken") is None


SLIPPED_THROUGH = """() => {
    const tried = [
        () => document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='broken = 1'>"),
        () => {
            const script = document.createElement("script");
            script.textContent = "window.broken = 2";
            document.head.append(script);
        },
    ];
    let stopped = 0;
    for (const each of tried) try { each(); } catch { stopped += 1; }
    const picture = new Image();
    picture.src = "https://example.invalid/track.png";
    return new Promise((resolve) => { picture.onerror = () => resolve(stopped); });
}"""


def test_the_policy_stops_what_would_slip_through(visit: Visit) -> None:
    page = visit.page
    failed: list[tuple[str, str | None]] = []
    page.on("requestfailed", lambda request: failed.append((request.url, request.failure)))
    assert page.evaluate(SLIPPED_THROUGH) == 2
    assert page.evaluate("window.broken") is None
    assert failed == [("https://example.invalid/track.png", "csp")]
    assert all("blocked" in text for text in visit.complaints)
    visit.complaints.clear()


def test_the_policy_is_what_stops_it(browser: Browser, address: str, play: Play) -> None:
    play.reset()
    with visiting(browser, address, bypass_csp=True) as visit:
        visit.page.evaluate(SLIPPED_THROUGH)
        assert visit.page.evaluate("window.broken") is not None


def test_markdown_that_cannot_be_rendered_stays_plain(visit: Visit) -> None:
    page = visit.page
    page.route("**/page/markdown", lambda route: route.fulfill(status=500, body="{}"))
    visit.send("echo **hello**")
    expect(page.locator("body.busy")).to_have_count(0)
    expect(page.locator(".reply .body")).to_have_text("echo **hello**")
    visit.complained("500")


def test_a_full_storage_loses_the_oldest_chats_first(visit: Visit) -> None:
    page = visit.page
    page.evaluate(
        """() => {
            for (let age = 0; age < 60; age += 1) {
                const chat = {
                    id: `old${age}`, title: "", created: age, changed: age, settings: {},
                    messages: [{ role: "user", text: `old ${age}`, images: [] }],
                };
                localStorage.setItem(`cedar.chat.old${age}`, JSON.stringify(chat));
            }
        }"""
    )
    visit.send("echo new")
    visit.finished()
    titles = page.locator(".chat-title").all_inner_texts()
    assert titles == ["echo new", *(f"old {age}" for age in range(59, 10, -1))]


def test_damaged_storage_does_no_harm(visit: Visit) -> None:
    page = visit.page
    page.evaluate(
        """() => {
            localStorage.setItem("cedar.chat.a", "{");
            localStorage.setItem("cedar.chat.b", '{"id": "b"}');
            localStorage.setItem("cedar.current", '"b"');
            localStorage.setItem("cedar.settings", "[1");
            localStorage.setItem("cedar.theme", "<script>");
        }"""
    )
    page.reload()
    visit.send("echo hello")
    visit.finished()
    expect(page.locator(".chat-title")).to_have_text(["echo hello"])


def test_without_storage_the_page_still_works(browser: Browser, address: str, play: Play) -> None:
    play.reset()
    context = browser.new_context()
    context.add_init_script(
        """for (const name of ["localStorage", "sessionStorage"]) {
            Object.defineProperty(window, name, { get() { throw new DOMException("off"); } });
        }"""
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.get_by_label("Message", exact=True).fill("echo hello")
    page.keyboard.press("Enter")
    expect(page.locator(".reply .body")).to_have_text("echo hello")
    page.locator("#theme").click()
    assert complaints == []
    context.close()
