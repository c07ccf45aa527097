"""A browser, the playing server, and a visit to its page."""

from collections.abc import Iterator

import pytest
from playing import CHROMIUM, Play, Visit, build_app, served, visiting
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium; tools/install_chromium.sh installs Debian's")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def play() -> Play:
    return Play()


@pytest.fixture(scope="module")
def address(play: Play) -> Iterator[str]:
    with served(build_app(play)) as url:
        yield url


@pytest.fixture
def visit(browser: Browser, address: str, play: Play) -> Iterator[Visit]:
    play.reset()
    with visiting(browser, address) as each:
        yield each
        assert each.complaints == []
