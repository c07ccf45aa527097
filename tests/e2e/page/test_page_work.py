"""The chat page in a browser: settings, pictures, tools, kept chats, export, copying."""

import base64
import io
import json

from PIL import Image
from playing import INFO, PIXEL, REPLY, Play, Visit, wait_until
from playwright.sync_api import expect


def test_settings_go_along(visit: Visit, play: Play) -> None:
    page = visit.page
    visit.press("Settings")
    page.get_by_label("System prompt").fill("You are a tree.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top-k").fill("40")
    page.get_by_label("Longest reply, tokens").fill("99")
    page.get_by_label("Stop before").fill("END\n\nSTOP")
    visit.press("Done")
    visit.send("echo hello")
    visit.finished()
    body = play.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "You are a tree."}
    assert (body["temperature"], body["top_k"], body["max_completion_tokens"]) == (0.5, 40, 99)
    assert body["stop"] == ["END", "STOP"]
    assert not {"top_p", "min_p", "seed", "tools", "presence_penalty"} & set(body)
    # A new chat begins with the same settings, and Reset empties them.
    visit.press("New chat")
    visit.press("Settings")
    expect(page.get_by_label("System prompt")).to_have_value("You are a tree.")
    visit.press("Reset")
    visit.press("Done")
    visit.send("echo hello")
    visit.finished()
    assert play.bodies[1]["messages"] == [{"role": "user", "content": "echo hello"}]
    assert "temperature" not in play.bodies[1]


def test_values_that_no_server_takes_are_not_accepted(visit: Visit) -> None:
    page = visit.page
    visit.press("Settings")
    page.get_by_label("Temperature").fill("-1")
    visit.press("Done")
    expect(page.locator("#settings")).to_be_visible()
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Declarations").fill("{")
    expect(page.locator("#s-tools-problem")).to_contain_text("not JSON")
    visit.press("Done")
    expect(page.locator("#settings")).to_be_visible()
    page.get_by_label("Declarations").fill("")
    visit.press("Done")
    expect(page.locator("#settings")).to_be_hidden()


def test_pictures_are_picked_pasted_and_dropped(visit: Visit, play: Play) -> None:
    page = visit.page
    red = {"name": "red.png", "mimeType": "image/png", "buffer": base64.b64decode(PIXEL)}
    page.locator("#files").set_input_files([red])
    give = """([data, type]) => {
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], `${type}.png`, { type: "image/png" }));
        const options = { bubbles: true, cancelable: true };
        const event = type === "paste"
            ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
            : new DragEvent("drop", { ...options, dataTransfer: transfer });
        document.querySelector("#message").dispatchEvent(event);
    }"""
    page.evaluate(give, [PIXEL, "paste"])
    expect(page.locator("#thumbnails img")).to_have_count(2)
    page.evaluate(give, [PIXEL, "drop"])
    expect(page.locator("#thumbnails img")).to_have_count(3)
    # One more than the server takes.
    page.evaluate(give, [PIXEL, "paste"])
    expect(page.locator(".toast")).to_contain_text("3 pictures at most")
    visit.press("Remove drop.png")
    expect(page.locator("#thumbnails img")).to_have_count(2)
    visit.send("echo what is this?")
    visit.finished()
    parts = play.bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    # A small picture is sent as it is, byte for byte.
    assert parts[0]["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
    expect(page.get_by_role("img", name="red.png")).to_be_visible()
    expect(page.locator("#thumbnails")).to_be_hidden()


def test_a_large_picture_is_made_smaller_and_others_are_refused(visit: Visit, play: Play) -> None:
    page = visit.page
    large = io.BytesIO()
    Image.new("RGB", (4000, 1000), "green").save(large, "PNG")
    files = [
        {"name": "large.png", "mimeType": "image/png", "buffer": large.getvalue()},
        {"name": "odd.png", "mimeType": "image/png", "buffer": b"no picture"},
    ]
    page.locator("#files").set_input_files(files)
    expect(page.locator(".toast")).to_have_text("“odd.png” cannot be read as a picture.")
    visit.send("")
    visit.finished()
    (part,) = play.bodies[0]["messages"][0]["content"]
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (2048, 512)


def test_tool_calls_are_shown_and_answered(visit: Visit, play: Play) -> None:
    page = visit.page
    visit.press("Settings")
    visit.press("Insert an example")
    visit.press("Done")
    visit.send("What is the weather in Paris?")
    visit.finished(1)
    call = page.get_by_role("region", name="Tool call 1")
    expect(call.locator("code")).to_have_text("get_weather")
    expect(call.locator("pre").first).to_have_text('{\n  "place": "Paris",\n  "unit": "celsius"\n}')
    call.get_by_role("textbox", name="Result").fill('{"degrees": 14}')
    visit.press("Send results")
    visit.finished(2)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)
    expect(call.locator(".result pre")).to_have_text('{"degrees": 14}')
    first, second = play.bodies
    assert first["tools"][0]["function"]["name"] == "get_weather"
    assert first["tool_choice"] == "auto"
    asked, called, result = second["messages"]
    assert asked["role"] == "user"
    assert called["tool_calls"] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {
                "name": "get_weather",
                "arguments": '{"place": "Paris", "unit": "celsius"}',
            },
        }
    ]
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 14}'}


def test_chats_are_kept_listed_deleted_and_brought_back(visit: Visit, play: Play) -> None:
    page = visit.page
    visit.send("echo **first**")
    visit.finished()
    visit.press("New chat")
    visit.send("echo second")
    visit.finished()
    chats = page.locator(".chat-title")
    expect(chats).to_have_text(["echo second", "echo **first**"])
    page.reload()
    visit.finished()
    expect(page.locator(".user")).to_have_text("echo second")
    expect(page.locator("#f-context")).not_to_have_text("0")
    chats.nth(1).click()
    expect(page.locator(".reply strong")).to_have_text("first")
    expect(chats.nth(1)).to_have_attribute("aria-current", "true")
    assert page.title() == "echo **first** · Cedar"
    chats.nth(1).hover()
    visit.press("Delete “echo **first**”")
    expect(chats).to_have_text(["echo second"])
    expect(page.locator(".message")).to_have_count(0)
    visit.press("Undo")
    expect(chats).to_have_text(["echo second", "echo **first**"])
    visit.press("Settings")
    visit.press("Delete all chats")
    expect(chats).to_have_count(0)
    page.reload()
    expect(page.get_by_role("heading", name="What shall we talk about?")).to_be_visible()


def test_another_chat_can_be_opened_while_a_reply_is_written(visit: Visit, play: Play) -> None:
    page = visit.page
    visit.send("echo first")
    visit.finished()
    visit.press("New chat")
    visit.send("on forever")
    expect(page.locator(".reply")).to_contain_text("again and")
    page.locator(".chat-title", has_text="echo first").click()
    expect(page.locator(".reply .body")).to_have_text("echo first")
    wait_until(lambda: play.cancelled == 1)
    visit.send("echo more")
    visit.finished(2)
    page.locator(".chat-title", has_text="on forever").click()
    expect(page.locator(".reply")).to_contain_text("Stopped.")


def test_a_chat_is_exported(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("switch", name="Reason").check()
    visit.send("Tell me about trees.")
    visit.finished()
    with page.expect_download() as given:
        visit.press("Export as JSON")
    assert given.value.suggested_filename == "tell-me-about-trees.json"
    chat = json.loads(given.value.path().read_text(encoding="utf-8"))
    assert (chat["format"], chat["version"], chat["model"]) == ("cedar-chat", 1, INFO.model)
    assert [each["role"] for each in chat["messages"]] == ["user", "assistant"]
    assert chat["messages"][1]["text"] == REPLY
    with page.expect_download() as given:
        visit.press("Export as Markdown")
    text = given.value.path().read_text(encoding="utf-8")
    assert text.startswith("# Tell me about trees.\n\ncedar-play, 20")
    assert "## You\n\nTell me about trees.\n\n## Reply\n\n<details><summary>Reasoning" in text
    assert text.endswith(f"{REPLY}\n")


def test_replies_and_code_are_copied(visit: Visit) -> None:
    page = visit.page
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.send("Tell me about trees.")
    visit.finished()
    visit.press("Copy reply")
    expect(page.locator("#announcer")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == REPLY
    visit.press("Copy this code")
    wait_until(
        lambda: (
            page.evaluate("navigator.clipboard.readText()")
            == "def tree(rings):\n    return rings + 1\n"
        )
    )
