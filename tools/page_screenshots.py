"""Take the pictures of docs/page.md into docs/images/.

The light picture is `cedar serve` with the bundled model. The others are the server that plays the
model in the page's tests, because the bundled model writes no code, tables or tool calls of use.
Needs chromium (tools/install_chromium.sh).
"""

import io
import sys
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "e2e" / "page"))

from playing import CHROMIUM, Play, Visit, build_app, cedar_served, served, visiting  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SYSTEM = (
    "A letter of the year 1790, from one who has travelled through the northern states to a friend "
    "at home, upon the manners of the people, the state of their roads and their commerce, and the "
    "hope of the union. "
) * 3
QUESTIONS = (
    "Write to me of the harbour and of the ships that you have seen.",
    "And what do the people say of the union?",
)


def main() -> None:
    """Write every picture anew."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with cedar_served() as url, visiting(browser, url, color_scheme="light") as visit:
            _save("page-light.png", _talk(visit))
        with served(build_app(Play(pause=0.03))) as url:
            with visiting(browser, url, color_scheme="dark") as visit:
                _save("page-dark.png", _use_tools(visit))
            screen = {"viewport": {"width": 360, "height": 720}, "device_scale_factor": 2}
            with visiting(browser, url, color_scheme="light", **screen) as visit:
                _save("page-narrow.png", *_carry(visit))
        browser.close()


def _talk(visit: Visit) -> bytes:
    page = visit.page
    visit.press("Settings")
    page.get_by_label("System prompt").fill(SYSTEM)
    page.get_by_label("Longest reply").fill("110")
    page.get_by_label("Seed").fill("3")
    visit.press("Done")
    for number, question in enumerate(QUESTIONS, start=1):
        visit.send(question)
        expect(page.locator(".reply")).to_have_count(number)
        expect(page.locator("body.busy")).to_have_count(0, timeout=120_000)
    return _shot(page)


def _use_tools(visit: Visit) -> bytes:
    page = visit.page
    page.get_by_role("switch", name="Reason").check()
    visit.press("Settings")
    visit.press("Insert an example")
    visit.press("Done")
    visit.send("How tall are the cedars of Paris, and what is the weather there?")
    visit.finished(1)
    page.get_by_role("textbox", name="Result").fill('{"degrees": 14, "sky": "clear"}')
    visit.press("Send results")
    visit.finished(2)
    return _shot(page)


def _carry(visit: Visit) -> tuple[bytes, bytes]:
    page = visit.page
    page.get_by_role("switch", name="Reason").check()
    visit.send("Tell me about trees.")
    visit.finished(1)
    chat = _shot(page)
    page.locator("#live-line").click()
    return chat, _shot(page)


def _shot(page: Page) -> bytes:
    page.wait_for_timeout(600)  # for what slides and fades
    return page.screenshot()


def _save(name: str, *shots: bytes) -> None:
    """The shots side by side, framed, with few colours so that the file is small."""
    pictures = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots]
    gap = 24 if len(pictures) > 1 else 0
    width = sum(each.width for each in pictures) + gap * (len(pictures) - 1)
    whole = Image.new("RGB", (width, pictures[0].height), "white")
    left = 0
    for each in pictures:
        ImageDraw.Draw(each).rectangle((0, 0, each.width - 1, each.height - 1), outline="#b9b6ab")
        whole.paste(each, (left, 0))
        left += each.width + gap
    whole.quantize(255, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)
    print(f"{name}: {(IMAGES / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
