"""The chat page for everyone: keyboard alone, screen readers, contrast, less motion, big text."""

import re
from typing import Any

import pytest
from playing import Play, Visit, visiting
from playwright.sync_api import Browser, expect

# Text on what it stands on: 4.5 to 1; parts of controls: 3 to 1 (WCAG 2.2, AA).
TEXTS = [
    ("--text", "--paper"),
    ("--text", "--surface"),
    ("--text", "--raised"),
    ("--text", "--bubble"),
    ("--text", "--hover"),
    ("--muted", "--paper"),
    ("--muted", "--surface"),
    ("--muted", "--raised"),
    ("--muted", "--hover"),
    ("--accent", "--paper"),
    ("--on-accent", "--accent"),
    ("--on-accent", "--accent-strong"),
    ("--danger", "--danger-soft"),
    ("--danger", "--paper"),
    ("--text", "--danger-soft"),
    ("--paper", "--text"),
]
PARTS = [
    ("--control", "--raised"),
    ("--control", "--paper"),
    ("--accent", "--track"),
    ("--copper", "--track"),
    ("--accent", "--raised"),
]
COLOURS = """(names) => {
    const probe = document.createElement("i");
    document.body.append(probe);
    const found = {};
    for (const name of names) {
        probe.style.color = `var(${name})`;
        found[name] = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
    }
    probe.remove();
    return found;
}"""


def contrast(one: list[float], other: list[float]) -> float:
    """The ratio of luminances of two sRGB colours (WCAG 2.2)."""

    def luminance(colour: list[float]) -> float:
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in (each / 255 for each in colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_it_should_be() -> None:
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21)
    assert contrast([119, 119, 119], [255, 255, 255]) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(visit: Visit, scheme: str) -> None:
    visit.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    names = sorted({name for pair in TEXTS + PARTS for name in pair})
    colours = visit.page.evaluate(COLOURS, names)
    low = {
        pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2)
        for least, pairs in ((4.5, TEXTS), (3.0, PARTS))
        for pair in pairs
        if contrast(colours[pair[0]], colours[pair[1]]) < least
    }
    assert low == {}


def nodes(visit: Visit) -> list[dict[str, Any]]:
    """What a screen reader is told: role and name of everything on the page."""
    session = visit.context.new_cdp_session(visit.page)
    found = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    return [
        {"role": each["role"]["value"], "name": each.get("name", {}).get("value", "")}
        for each in found
        if not each.get("ignored")
    ]


def test_everything_has_a_role_and_a_name(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("switch", name="Reason").check()
    visit.send("Tell me about trees.")
    visit.finished()
    visit.press("Settings")
    named = {"button", "textbox", "checkbox", "switch", "slider", "combobox", "spinbutton"}
    named |= {"link", "image", "dialog", "region", "navigation", "complementary", "article"}
    for _ in range(2):
        told = nodes(visit)
        assert [each for each in told if each["role"] in named and not each["name"].strip()] == []
        page.keyboard.press("Escape")
        expect(page.locator("#settings")).to_be_hidden()
    roles = {each["role"] for each in told}
    assert {"banner", "navigation", "main", "complementary", "heading", "status"} <= roles
    levels = page.locator("h1:visible, h2:visible").evaluate_all("all => all.map(e => e.tagName)")
    assert levels[0] == "H1"
    assert levels.count("H1") == 1


def test_ids_are_unique_and_references_lead_somewhere(visit: Visit) -> None:
    lost = visit.page.evaluate(
        """() => {
            const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
            const twice = ids.filter((id, place) => ids.indexOf(id) !== place);
            const lost = [];
            const aria = ["aria-controls", "aria-describedby", "aria-labelledby"];
            for (const name of ["for", "list", ...aria])
                for (const each of document.querySelectorAll(`[${name}]`))
                    if (!ids.includes(each.getAttribute(name))) lost.push(each.outerHTML);
            for (const each of document.querySelectorAll("use"))
                if (!document.querySelector(each.getAttribute("href"))) lost.push(each.outerHTML);
            return [...twice, ...lost];
        }"""
    )
    assert lost == []


def test_the_keyboard_alone_is_enough(visit: Visit, play: Play) -> None:
    page = visit.page
    page.locator("body").evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the message field")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("echo hello")
    page.keyboard.press("Enter")
    visit.finished()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Add pictures")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("switch", name="Reason")).to_be_checked()
    # Every stop of the tab key is visible and shows that it has the focus.
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        stop = page.evaluate(
            """() => {
                const at = document.activeElement;
                if (at === document.body) return null; // the browser's own controls
                const style = getComputedStyle(at);
                const box = at.getBoundingClientRect();
                const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
                const shown = ring || at.id === "message"; // its frame shows it
                const place = [...document.querySelectorAll("*")].indexOf(at);
                return [at.id || at.className, shown, box.width * box.height > 0, place];
            }"""
        )
        if stop is not None and stop in seen:
            break
        seen += [stop] if stop else []
    assert len(seen) >= 12
    assert {"skip", "open-chats", "new-chat", "theme", "scroll", "effort-level", "send"} <= {
        name for name, *_ in seen
    }
    assert [name for name, shown, there, _ in seen if not (shown and there)] == []


def test_the_focus_is_not_lost(visit: Visit) -> None:
    page = visit.page
    page.get_by_label("Message", exact=True).fill("on forever")
    page.get_by_role("button", name="Send", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    visit.finished()
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


def test_only_finished_replies_are_announced(visit: Visit, play: Play) -> None:
    page = visit.page
    play.pause = 0.01
    page.evaluate(
        """() => {
            window.said = [];
            new MutationObserver(() => {
                const text = document.querySelector("#announcer").textContent;
                if (text) window.said.push(text);
            }).observe(document.querySelector("#announcer"), { childList: true, subtree: true });
        }"""
    )
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert live.evaluate_all("all => all.filter(e => e.closest('.scroll')).length") == 0
    visit.send("Tell me about trees.")
    visit.finished()
    expect(page.locator("#announcer")).to_contain_text("Reply:")
    said = page.evaluate("window.said")
    assert len(said) == 1
    assert re.match(r"Reply: Here is a \*\*short\*\* answer", said[0])
    visit.send("on forever")
    expect(page.locator(".reply").last).to_contain_text("again and")
    page.keyboard.press("Escape")
    expect(page.locator("#announcer")).to_have_text("Stopped")


def test_less_motion_is_no_motion(browser: Browser, address: str, play: Play) -> None:
    play.reset()
    moving = "document.getAnimations().length"
    with visiting(browser, address) as visit:
        visit.send("on forever")
        expect(visit.page.locator(".reply")).to_contain_text("again and")
        assert visit.page.evaluate(moving) > 0
    with visiting(browser, address, reduced_motion="reduce") as visit:
        visit.send("on forever")
        expect(visit.page.locator(".reply")).to_contain_text("again and")
        assert visit.page.evaluate(moving) == 0


def test_text_twice_as_large_still_fits(browser: Browser, address: str, play: Play) -> None:
    play.reset()
    with visiting(browser, address, viewport={"width": 640, "height": 700}) as visit:
        page = visit.page
        page.locator("html").evaluate("e => { e.style.fontSize = '200%'; }")
        visit.send("Tell me about trees.")
        visit.finished()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        send = page.get_by_role("button", name="Send", exact=True).bounding_box()
        assert send
        assert send["x"] + send["width"] <= 640
        assert send["y"] + send["height"] <= 700


def test_the_view_follows_the_end_until_someone_reads(visit: Visit, play: Play) -> None:
    page = visit.page
    play.pause = 0.004
    page.set_viewport_size({"width": 1000, "height": 420})
    visit.send("Tell me about trees.")
    visit.finished()
    at_end = """() => {
        const { scrollTop, scrollHeight, clientHeight } = document.querySelector("#scroll");
        return scrollHeight - scrollTop - clientHeight < 3;
    }"""
    assert page.evaluate("document.querySelector('#scroll').scrollHeight") > 500
    page.wait_for_function(at_end)
    visit.send("on forever")
    expect(page.locator(".reply").last).to_contain_text("again and again and again")
    page.wait_for_function(at_end)
    page.mouse.move(500, 200)
    page.mouse.wheel(0, -300)
    latest = page.get_by_role("button", name="Latest")
    expect(latest).to_be_visible()
    page.wait_for_timeout(200)
    assert not page.evaluate(at_end)
    latest.click()
    expect(latest).to_be_hidden()
    page.wait_for_function(at_end)
    page.keyboard.press("Escape")
    visit.finished(2)
