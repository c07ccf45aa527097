"""The chat page in a browser: sending, streaming, stopping, figures, looks."""

from typing import Any

from playing import INFO, REPLY, Play, Visit, visiting, wait_until
from playwright.sync_api import Browser, Page, expect


def message_field(page: Page) -> Any:
    return page.get_by_label("Message", exact=True)


def test_a_message_is_sent_and_its_reply_streams_in(visit: Visit, play: Play) -> None:
    page = visit.page
    play.pause = 0.02
    expect(page.get_by_role("heading", name="What shall we talk about?")).to_be_visible()
    visit.send("Tell me about trees.\nAnd why?")
    expect(message_field(page)).to_have_value("")
    expect(page.locator(".user .plain")).to_have_text("Tell me about trees.\nAnd why?")
    expect(page.locator(".reply")).to_have_attribute("aria-busy", "true")
    # The first block is rendered while later ones are still being written.
    expect(page.locator(".reply[aria-busy=true] .markdown strong")).to_have_text("short")
    visit.finished()
    reply = page.locator(".reply")
    expect(reply).to_have_attribute("aria-busy", "false")
    expect(reply.locator("li")).to_have_text(["one", "two"])
    expect(reply.locator("pre")).to_contain_text("return rings + 1")
    expect(reply.locator("td[align=right]")).to_have_text("40 m")
    expect(reply.locator(".tools")).to_contain_text("tokens/s")
    body = play.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Tell me about trees.\nAnd why?"}]
    assert (body["model"], body["stream"]) == (INFO.model, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["reasoning_effort"] == "none"
    assert play.watched == ["1"]


def test_the_conversation_goes_along_with_the_next_message(visit: Visit, play: Play) -> None:
    visit.send("echo one")
    visit.finished(1)
    visit.send("echo two")
    visit.finished(2)
    assert [(m["role"], m["content"]) for m in play.bodies[1]["messages"]] == [
        ("user", "echo one"),
        ("assistant", "echo one"),
        ("user", "echo two"),
    ]


def test_shift_enter_starts_a_line(visit: Visit, play: Play) -> None:
    message_field(visit.page).press_sequentially("echo a")
    visit.page.keyboard.press("Shift+Enter")
    message_field(visit.page).press_sequentially("b")
    visit.page.keyboard.press("Enter")
    visit.finished()
    assert play.bodies[0]["messages"][0]["content"] == "echo a\nb"


def test_nothing_is_sent_without_text(visit: Visit, play: Play) -> None:
    visit.send("  \n ")
    visit.press("Send")
    visit.page.wait_for_timeout(100)
    assert play.bodies == []


def test_stop_keeps_what_was_written_and_frees_the_server(visit: Visit, play: Play) -> None:
    page = visit.page
    for number, stop in enumerate(("button", "Escape"), start=1):
        visit.send("go on forever")
        expect(page.locator(".reply").last).to_contain_text("again and again")
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_hidden()
        if stop == "button":
            visit.press("Stop")
        else:
            page.keyboard.press(stop)
        visit.finished(number)
        expect(page.locator(".reply").last).to_contain_text("Stopped.")
        wait_until(lambda number=number: play.cancelled == number)
        expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
    # The kept part belongs to the conversation.
    visit.send("echo on")
    visit.finished(3)
    assert play.bodies[2]["messages"][1]["content"].startswith("again and again")


def test_a_reply_can_be_written_again(visit: Visit, play: Play) -> None:
    visit.send("echo one")
    visit.finished(1)
    visit.send("echo two")
    visit.finished(2)
    visit.page.get_by_role("button", name="Write this reply again").first.click()
    visit.finished(1)
    expect(visit.page.locator(".user")).to_have_count(1)
    assert play.bodies[2]["messages"] == [{"role": "user", "content": "echo one"}]


def test_a_message_can_be_edited_and_what_followed_is_replaced(visit: Visit, play: Play) -> None:
    page = visit.page
    visit.send("echo one")
    visit.finished(1)
    visit.send("echo two")
    visit.finished(2)
    edit = page.get_by_role("button", name="Edit and send again").first
    edit.click()
    field = page.get_by_label("Edit message")
    expect(field).to_be_focused()
    expect(field).to_have_value("echo one")
    page.keyboard.press("Escape")
    expect(field).to_have_count(0)
    expect(edit).to_be_focused()
    edit.click()
    field.fill("echo three")
    page.keyboard.press("Enter")
    visit.finished(1)
    expect(page.locator(".user .plain")).to_have_text("echo three")
    assert play.bodies[2]["messages"] == [{"role": "user", "content": "echo three"}]


def test_reasoning_is_folded_and_follows_the_effort(visit: Visit, play: Play) -> None:
    page = visit.page
    level = page.get_by_label("Reasoning effort")
    expect(level).to_be_disabled()
    page.get_by_role("switch", name="Reason").check()
    expect(level).to_have_attribute("aria-valuetext", "75, high")
    level.press("ArrowLeft")
    expect(page.locator("#effort-name")).to_have_text("74")
    visit.send("Why?")
    visit.finished()
    assert play.bodies[0]["reasoning_effort"] == 74
    thought = page.get_by_text("The person asks about trees.")
    expect(thought).to_be_hidden()
    page.get_by_text("Reasoned for").click()
    expect(thought).to_be_visible()
    expect(page.locator(".reasoning summary")).to_contain_text("12 tokens")
    level.press("End")
    expect(page.locator("#effort-name")).to_have_text("100 max")
    visit.send("And?")
    visit.finished(2)
    assert play.bodies[1]["reasoning_effort"] == 100
    assert play.bodies[1]["messages"][1]["reasoning_content"].startswith("The person asks")


def test_the_live_figures_follow_the_reply(visit: Visit, play: Play) -> None:
    page = visit.page
    live = page.get_by_role("complementary", name="Live figures")
    expect(live).to_contain_text("106 B a token")
    strip = page.locator("#f-strip")
    expect(strip).to_have_attribute("aria-label", "Nothing was generated yet.")
    blank = strip.screenshot()
    visit.send("Tell me about trees.")
    visit.finished()
    tokens = 642 + len(range(0, len(REPLY), 7))
    expect(page.locator("#f-context")).to_have_text(str(tokens))
    expect(page.locator("#f-ratio")).to_have_text("1/71 of full size")
    expect(live).to_contain_text("bf16 keys and values of 64 heads in every layer")
    expect(live).to_contain_text("512 80 %")
    expect(live).to_contain_text("of 640 prompt tokens")
    expect(page.locator("#f-places li")).to_have_count(5)
    expect(page.locator("#f-places li").first).to_contain_text("of")
    expect(strip).to_have_attribute(
        "aria-label", f"56 of {tokens} tokens in 28 places, besides the last 32"
    )
    assert strip.screenshot() != blank
    share = page.locator("#f-cache-bar").evaluate("e => Number.parseFloat(e.style.width)")
    assert 1 < share < 2


def test_the_page_works_without_figures(visit: Visit, play: Play) -> None:
    play.watch = False
    visit.send("echo plain server")
    visit.finished()
    expect(visit.page.locator("#f-speed")).to_have_text("–")
    expect(visit.page.locator(".reply")).to_contain_text("plain server")


def test_dark_and_light_follow_the_system_and_the_button(
    browser: Browser, address: str, play: Play
) -> None:
    play.reset()
    background = "getComputedStyle(document.body).backgroundColor"
    with visiting(browser, address, color_scheme="dark") as visit:
        page = visit.page
        dark = page.evaluate(background)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(background)
        assert dark != light
        for name, colour in (("light", light), ("dark", dark), ("like the system", light)):
            page.locator("#theme").click()
            expect(page.locator("#theme")).to_have_attribute("aria-label", f"Theme: {name}")
            assert page.evaluate(background) == colour
            if name == "dark":
                page.reload()
                expect(page.locator("#model")).to_be_visible()
                assert page.evaluate(background) == dark
        assert visit.complaints == []


def test_a_narrow_screen_shows_everything(browser: Browser, address: str, play: Play) -> None:
    play.reset()
    narrow = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
    with visiting(browser, address, **narrow) as visit:
        page = visit.page
        page.get_by_role("switch", name="Reason").check()
        visit.send("Tell me about trees and about averyveryveryverylongword" + "d" * 60)
        visit.finished()
        overflow = "document.documentElement.scrollWidth - innerWidth"
        assert page.evaluate(overflow) <= 0
        for button in ("Add pictures", "Send", "Settings", "Chats", "New chat"):
            box = page.get_by_role("button", name=button, exact=True).bounding_box()
            assert box
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360, button
        live = page.get_by_role("complementary", name="Live figures")
        expect(live).to_be_hidden()
        page.locator("#live-line").tap()
        expect(live).to_be_visible()
        expect(live).to_be_focused()
        assert page.evaluate(overflow) <= 0
        page.keyboard.press("Escape")
        expect(live).to_be_hidden()
        expect(page.locator("#open-live")).to_be_focused()
        page.get_by_role("button", name="Chats", exact=True).tap()
        expect(page.get_by_role("navigation", name="Chats")).to_contain_text("Tell me about trees")
        page.locator("#backdrop").tap(position={"x": 340, "y": 300})
        expect(page.get_by_role("navigation", name="Chats")).to_be_hidden()
        assert visit.complaints == []
