"""Pages in a real browser: opened, waited for, examined, and kept as pictures when a test fails."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WAIT_MS = 20_000
WIDTHS = {"desktop": (1400, 900), "phone": (390, 844)}
SESSION = re.compile(r"/[0-9a-f]{64}/")
"""What is in an address once a token has opened it."""
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")


@contextmanager
def started_browser() -> Iterator[Browser]:
    """Start the Chromium that is there."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with sync_api.sync_playwright() as driver:
        started: Browser = driver.chromium.launch(executable_path=CHROMIUM, timeout=WAIT_MS)
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(
    browser: Browser,
    url: str,
    pictures: Path,
    *,
    width: str = "desktop",
    scheme: Scheme = "light",
    bypass_csp: bool = False,
    may_be_refused: bool = False,
    wait_ms: float = WAIT_MS,
) -> Iterator[Page]:
    """Open a page; hold at the end that it asked nobody else, and complained of nothing.

    If the test fails meanwhile, a picture of the page is left in the folder `pictures`.
    """
    wide, high = WIDTHS[width]
    context = browser.new_context(
        viewport={"width": wide, "height": high}, color_scheme=scheme, bypass_csp=bypass_csp
    )
    context.set_default_timeout(wait_ms)
    asked: list[str] = []
    said: list[str] = []
    try:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        if "?token=" in url:
            page.wait_for_url(SESSION)
        with pictured(page, pictures / f"{width}-{scheme}.png"):
            yield page
            origin = "/".join(url.split("/")[:3])
            assert not [each for each in asked if not each.startswith((origin, "data:"))]
            if may_be_refused:
                said = [each for each in said if "ERR_CONNECTION_REFUSED" not in each]
            assert not said
    finally:
        context.close()


@contextmanager
def pictured(page: Page, path: Path) -> Iterator[None]:
    """Take a picture of a page if the block fails, and say where it is."""
    try:
        yield
    except Exception as error:
        page.screenshot(path=path, full_page=True)
        error.add_note(f"how the page looked: {path}")
        raise


def says(page: Page, words: str) -> None:
    """Wait until a page says this of its connection."""
    page.wait_for_function(
        "words => document.getElementById('connection').textContent === words", arg=words
    )


def shows(page: Page, part: str, words: str) -> None:
    """Wait until a part of a page has these words."""
    page.wait_for_function(
        "([part, words]) => document.getElementById(`part-${part}`).textContent.includes(words)",
        arg=[part, words],
    )


def fits(page: Page) -> bool:
    """Whether nothing of a page is beyond its sides."""
    return bool(
        page.evaluate(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )
    )


def serious_findings(page: Page) -> list[tuple[str, list[str]]]:
    """Return what axe finds on a page that is serious or critical. The page ignores its policy."""
    pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    page.evaluate(axe)
    return [
        (each["id"], [node["html"][:200] for node in each["nodes"]][:3])
        for each in page.evaluate("axe.run()")["violations"]
        if each["impact"] in {"serious", "critical"}
    ]
